"""A virtual host of RabbitMQ for one test, made in the best way that the server allows."""

import base64
import json
import secrets
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from urllib.parse import quote, urlsplit, urlunsplit

from kombu import Connection
from kombu.exceptions import OperationalError

from tests.support import services

EVERYTHING = {"configure": ".*", "write": ".*", "read": ".*"}
AT_ONCE = 8


@contextmanager
def private_virtual_host() -> Iterator[tuple[str, str]]:
    """The URL of an empty virtual host, and the queue to use there; both are gone at the end."""
    address = services.address("rabbitmq")
    administration, error = _administration(address)
    if administration is None:
        services.unavailable("rabbitmq", error)
    name = administration.create()
    try:
        yield administration.url(name), name if administration.shares_virtual_host else "celery"
    finally:
        administration.delete(name)


class QueueNames:
    """The way that is always there: a queue name of one's own in the virtual host of everybody."""

    shares_virtual_host = True

    def __init__(self, address: str) -> None:
        self.address = address

    def url(self, name: str) -> str:
        """The URL under which the place ``name`` is used."""
        return self.address

    def create(self) -> str:
        """Make a place and give its name; a queue comes into being when it is first used."""
        return _new_name()

    def delete(self, name: str) -> None:
        """Remove the place and all that is in it."""
        with Connection(self.address) as connection:
            channel = connection.channel()
            channel.queue_delete(name)
            channel.exchange_delete(name)


class VirtualHosts(QueueNames):
    shares_virtual_host = False

    def url(self, name: str) -> str:
        return urlunsplit(urlsplit(self.address)._replace(path=f"/{quote(name, safe='')}"))

    @property
    def _user(self) -> str:
        return urlsplit(self.address).username or "guest"


class ManagementApi(VirtualHosts):
    """Virtual hosts made over HTTP, where the management plugin is on."""

    def __init__(self, address: str, management: str) -> None:
        super().__init__(address)
        self.management = management.rstrip("/")

    def answers(self) -> bool:
        """Whether the management plugin is there and takes the user's name and password."""
        try:
            self._call("GET", "/api/whoami")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def create(self) -> str:
        name = _new_name()
        self._call("PUT", f"/api/vhosts/{name}")
        self._call("PUT", f"/api/permissions/{name}/{quote(self._user, safe='')}", EVERYTHING)
        return name

    def delete(self, name: str) -> None:
        self._call("DELETE", f"/api/vhosts/{name}")

    def _call(self, method: str, path: str, body: object = None) -> None:
        parts = urlsplit(self.address)
        credentials = base64.b64encode(f"{self._user}:{parts.password or 'guest'}".encode()).decode()
        request = urllib.request.Request(
            self.management + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Basic {credentials}", "Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=services.CONNECT_TIMEOUT).close()


class Rabbitmqctl(VirtualHosts):
    """Virtual hosts made by the server's own command, as root or as the server's user on the same machine."""

    #: One call costs more than half a second of CPU time, so each makes and deletes several: what is ready, used, on its way.
    ready: list[str] = []
    used: list[str] = []
    deleting: list["subprocess.Popen[bytes]"] = []

    def answers(self) -> bool:
        """Whether the command is there and may be used."""
        local = urlsplit(self.address).hostname in ("127.0.0.1", "localhost")
        if not local or shutil.which("rabbitmqctl") is None:
            return False
        # Listing users takes the same rights as making virtual hosts, and shows that it is the same server.
        command = ["rabbitmqctl", "-q", "list_users"]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        return done.returncode == 0 and self._user.encode() in done.stdout

    def create(self) -> str:
        if not self.ready:
            names = [_new_name() for _ in range(AT_ONCE)]
            definitions = {
                "vhosts": [{"name": name} for name in names],
                "permissions": [{"user": self._user, "vhost": name, **EVERYTHING} for name in names],
            }
            command = ["rabbitmqctl", "-q", "import_definitions"]
            given = json.dumps(definitions).encode()
            subprocess.run(command, input=given, capture_output=True, timeout=60, check=True)
            self.ready += names
        return self.ready.pop()

    def delete(self, name: str) -> None:
        self.used.append(name)
        if len(self.used) >= AT_ONCE:
            self.delete_used()

    @classmethod
    def delete_used(cls) -> None:
        """No test needs to wait for it."""
        names, cls.used = cls.used, []
        if names:
            listed = ", ".join(f'<<"{name}">>' for name in names)
            command = ["rabbitmqctl", "-q", "eval", f'[rabbit_vhost:delete(V, <<"tests">>) || V <- [{listed}]].']
            nowhere = subprocess.DEVNULL
            cls.deleting.append(subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere))


def finish_deletions() -> None:
    """Delete what is left and wait for it; called once, at the end of the test session."""
    Rabbitmqctl.used += Rabbitmqctl.ready
    Rabbitmqctl.ready = []
    Rabbitmqctl.delete_used()
    while Rabbitmqctl.deleting:
        Rabbitmqctl.deleting.pop().wait(timeout=60)


def _new_name() -> str:
    return f"lc_{secrets.token_hex(6)}"


@cache
def _administration(address: str) -> tuple[QueueNames | None, Exception | None]:
    """The best way there is, found once for each test process, or why the server can't be used at all."""
    try:
        with Connection(address, connect_timeout=services.CONNECT_TIMEOUT) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=services.CONNECT_TIMEOUT)
    except (OperationalError, OSError) as error:
        return None, error
    management = ManagementApi(address, services.address("rabbitmq_management"))
    if management.answers():
        return management, None
    command = Rabbitmqctl(address)
    return (command if command.answers() else QueueNames(address)), None
