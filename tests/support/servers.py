"""A database or broker server of one test's own: real processes of it that may be killed, ended and started again.

Where a server's program is on this machine, so that nobody else's server needs to be touched.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pymysql
import redis
from kombu import Connection
from kombu.exceptions import OperationalError

from tests.support import services
from tests.support.waiting import wait_until

LOCAL = "127.0.0.1"


class Server:
    """One server process on a free port, with its data in ``directory``."""

    #: The program, and who runs it where this process is root, as which most servers refuse to run.
    program: ClassVar[str]
    user: ClassVar[str] = ""
    #: Where the program is if it is not on the path.
    folders: ClassVar[Sequence[str]] = ()
    #: What ends it in good order.
    end: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def is_there(cls) -> bool:
        """Whether this machine has the program."""
        return cls._find(cls.program) is not None

    @property
    def url(self) -> str:
        """Where clients reach it."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make the data that an empty server needs before its first start."""

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        return {}

    def look(self) -> None:
        """Connect once as a client does, or raise."""
        raise NotImplementedError

    #: What `look` raises while the server is not up.
    errors: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def start(self) -> None:
        """Start it; `is_ready` tells when it serves."""
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self.directory,
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **self._as_user(),
            )

    def is_ready(self) -> bool:
        """Whether a client can connect now."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise AssertionError(f"{self.program} ended with {code}\n{self.log()[-3000:]}")
        try:
            self.look()
        except self.errors:
            return False
        return True

    def stop(self) -> None:
        """End it as an operator does."""
        self._signal(self.end)

    def kill(self) -> None:
        """End it as a power cut does, but for what the machine's memory holds for its files."""
        self._signal(signal.SIGKILL)

    def forget(self) -> None:
        """Lose all data, of a server that is down."""
        raise NotImplementedError

    def log(self) -> str:
        """What the server has printed."""
        return (self.directory / "server.log").read_text(errors="replace")

    def close(self) -> None:
        """End it for good, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if number == signal.SIGKILL:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)
        self._process.wait(timeout=60)

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, cwd=self.directory, capture_output=True, text=True, check=False, **self._as_user()
        )
        if done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")

    def _as_user(self) -> dict[str, Any]:
        if os.getuid() != 0 or not self.user:
            return {}
        return {"user": self.user, "group": pwd.getpwnam(self.user).pw_gid, "extra_groups": []}

    @classmethod
    def _find(cls, program: str) -> str | None:
        places = [str(place) for folder in cls.folders for place in sorted(Path("/").glob(folder.lstrip("/")))]
        return shutil.which(program, path=os.pathsep.join([*places, os.environ.get("PATH", os.defpath)]))

    @classmethod
    def _path(cls, program: str) -> str:
        path = cls._find(program)
        assert path is not None, f"{program} is not on this machine"
        return path


class PostgreSQL(Server):
    program = "postgres"
    user = "postgres"
    folders = ("/usr/lib/postgresql/*/bin",)
    end = signal.SIGINT  # its "fast" shutdown, which sessions do not hold up
    errors = (psycopg.OperationalError,)

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://lifecycle@{LOCAL}:{self.port}/postgres"

    def prepare(self) -> None:
        options = ["--auth=trust", "--username=lifecycle", "--encoding=UTF8", "--locale=C", "--no-sync"]
        self._run(self._path("initdb"), f"--pgdata={self.directory}/data", *options)

    def command(self) -> Sequence[str]:
        settings = {"unix_socket_directories": self.directory, "listen_addresses": LOCAL, "fsync": "off"}
        given = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [self._path("postgres"), "-D", f"{self.directory}/data", "-p", str(self.port), *given]

    def look(self) -> None:
        psycopg.connect(host=LOCAL, port=self.port, user="lifecycle", dbname="postgres", connect_timeout=3).close()

    def kill(self) -> None:
        """SIGQUIT is the postmaster's own word for it: its backends, each a session of its own, are killed with it."""
        self._signal(signal.SIGQUIT)


class MariaDB(Server):
    program = "mariadbd"
    user = "mysql"
    folders = ("/usr/sbin", "/usr/libexec")
    errors = (pymysql.err.OperationalError,)

    @property
    def url(self) -> str:
        return f"mysql+pymysql://root@{LOCAL}:{self.port}/lifecycle?charset=utf8mb4"

    def prepare(self) -> None:
        options = [f"--datadir={self.directory}/data", "--auth-root-authentication-method=normal", "--skip-test-db"]
        self._run(self._path("mariadb-install-db"), "--no-defaults", *options)
        (self.directory / "init.sql").write_text("CREATE DATABASE IF NOT EXISTS lifecycle CHARACTER SET utf8mb4;\n")

    def command(self) -> Sequence[str]:
        settings = {
            "datadir": f"{self.directory}/data",
            "socket": f"{self.directory}/socket",
            "pid-file": f"{self.directory}/pid",
            "init-file": f"{self.directory}/init.sql",
            "bind-address": LOCAL,
            "port": self.port,
            # To the machine's memory at each commit, which outlives the process, not to the disk.
            "innodb-flush-log-at-trx-commit": 2,
        }
        return [self._path("mariadbd"), "--no-defaults", *(f"--{name}={value}" for name, value in settings.items())]

    def look(self) -> None:
        pymysql.connect(host=LOCAL, port=self.port, user="root", database="lifecycle", connect_timeout=3).close()


class Redis(Server):
    program = "redis-server"
    errors = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)

    @property
    def url(self) -> str:
        return f"redis://{LOCAL}:{self.port}/0"

    def command(self) -> Sequence[str]:
        settings = {"bind": LOCAL, "port": self.port, "dir": self.directory, "appendonly": "yes", "save": ""}
        given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        return [self._path("redis-server"), *given]

    def look(self) -> None:
        with contextlib.closing(redis.Redis(LOCAL, self.port, socket_timeout=3)) as client:
            client.ping()

    def forget(self) -> None:
        for path in self.directory.glob("appendonly*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class RabbitMQ(Server):
    program = "rabbitmq-server"
    # Not the one on the path: Debian's would run as another user, in another place.
    folders = ("/usr/lib/rabbitmq/bin",)
    errors = (OperationalError, OSError)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{LOCAL}:{self.port}//"

    def command(self) -> Sequence[str]:
        return [self._path("rabbitmq-server")]

    def environment(self) -> Mapping[str, str]:
        here = str(self.directory)
        return {
            "HOME": here,
            "RABBITMQ_NODENAME": f"lifecycle-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": LOCAL,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(_free_port()),
            "RABBITMQ_MNESIA_BASE": f"{here}/data",
            "RABBITMQ_LOG_BASE": f"{here}/log",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": f"{here}/none",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{here}/none",
            "RABBITMQ_CONF_ENV_FILE": f"{here}/none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{here}/plugins",
            "RABBITMQ_PID_FILE": f"{here}/pid",
        }

    def look(self) -> None:
        with Connection(self.url, connect_timeout=3) as connection:
            connection.connect()

    def forget(self) -> None:
        shutil.rmtree(self.directory / "data")


SERVERS: dict[str, type[Server]] = {
    "postgresql": PostgreSQL,
    "mariadb": MariaDB,
    "redis": Redis,
    "rabbitmq": RabbitMQ,
}


@contextmanager
def private_server(kind: str) -> Iterator[Server]:
    """A server of this kind, started and empty; it is gone at the end, with all its data."""
    made = SERVERS[kind]
    if not made.is_there():
        services.unavailable(kind, f"there is no {made.program} on this machine")
    # Not in the test's folder, which the server's own user may not enter, and whose path may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix=f"lc-{kind}-") as name:
        directory = Path(name)
        if os.getuid() == 0 and made.user:
            shutil.chown(directory, made.user, made.user)
        server = made(directory)
        server.prepare()
        server.start()
        try:
            wait_until(server.is_ready, 60, lambda: f"{kind} to serve\n{server.log()[-3000:]}", interval=0.1)
            yield server
        finally:
            server.close()


def _free_port() -> int:
    """Below those that the system gives to clients: one of them would have it while the server is down."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOCAL, random.randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])
