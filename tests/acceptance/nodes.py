"""The nodes of acceptance tests: worker, beat, broker, database, behind the interface of pytest-celery.

Worker and beat are local processes (``process.py``), or containers where a Docker engine answers
(``docker_process.py``). Broker and database are the private ones of the test, on servers that others use
too, so to kill them is to cut the test off from them.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import celery
import psutil
from celery import Celery
from pytest_celery import (
    CeleryBrokerCluster,
    CeleryTestBroker,
    CeleryTestCluster,
    CeleryTestNode,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
)

from tests.acceptance.app import BEAT_READY
from tests.acceptance.docker_process import DockerProcess
from tests.acceptance.ledger import Ledger
from tests.acceptance.process import SIGKILL, LocalProcess, is_gone, signal_number
from tests.support import Proxy, wait_until

APP = "tests.acceptance.app"
LOG_LEVEL = "INFO"

#: Who gets a signal: the main process, its children, or all of them in one blow.
Method = Literal["main", "children", "everything"]

Process = LocalProcess | DockerProcess


class ProcessNode(CeleryTestNode):  # type: ignore[misc]
    """A node that is a process with children."""

    def __init__(self, container: Process, app: Celery, ledger: Ledger | None = None) -> None:
        super().__init__(container, app)
        self._ledger = ledger
        self.last_pid = 0

    @property
    def status(self) -> str:
        """``created``, ``running``, ``paused`` or ``exited``."""
        return str(self.container.status)

    @property
    def pid(self) -> int:
        """The main process, 0 if it has ended."""
        pid = int(self.container.attrs["State"]["Pid"])
        self.last_pid = pid or self.last_pid
        return pid

    def children(self) -> list[int]:
        """The processes that the main process has started, such as those of the pool."""
        if not self.pid:
            return []
        try:
            return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def hostname(self) -> str:
        """The name of the node."""
        return str(self.name())

    def start(self) -> None:
        """Start the process without waiting for it."""
        self.container.start()
        self.last_pid = self.pid

    def ready(self, timeout: float = 30) -> bool:
        """Wait until the node says that it is ready; if it ends instead, fail with its log."""
        return self.container.ready(timeout)

    def wait(self, timeout: float = 30) -> int:
        """Wait for the end of the main process and give its exit code, negative for a signal."""
        return self.container.wait(timeout)

    def kill(self, signal: str | int = "SIGKILL", reload_container: bool = True, *, method: Method = "main") -> None:
        """Send a signal. After SIGKILL those who got it are gone, and the ledger knows it."""
        number = signal_number(signal)
        before = time.monotonic()
        main, children = self.pid, self.children()
        if method == "everything" and number == SIGKILL:
            self.container.kill_everything()
        else:
            for pid in children if method != "main" else ():
                self.container.signal_pid(pid, number)
            if method != "children":
                self.container.kill(signal)
        if number == SIGKILL:
            # Pool processes end with their parent, by themselves.
            self._await_death(children if method == "children" else [main, *children], before)

    def kill_pid(self, pid: int, signal: str | int = "SIGKILL") -> None:
        """Send a signal to one process of this node, such as the one that a run in the ledger names."""
        before = time.monotonic()
        self.container.signal_pid(pid, signal_number(signal))
        if signal_number(signal) == SIGKILL:
            self._await_death([pid], before)

    def terminate(self, timeout: float = 30) -> int:
        """End the node as a deployment does, with SIGTERM, and give its exit code."""
        self.container.kill("SIGTERM")
        return self.wait(timeout)

    def pause(self) -> None:
        """Stop all its processes where they are, as a machine that hangs."""
        self.container.pause()

    def unpause(self) -> None:
        """Let them go on."""
        self.container.unpause()

    def bury(self) -> None:
        """Tell the ledger that the processes of a node that has ended by itself are gone."""
        if self._ledger is not None:
            self._ledger.bury(self.last_pid)

    def restart(self, reload_container: bool = True, force: bool = False) -> None:
        """End the node if it runs (``force``: by SIGKILL), start it again and wait until it is ready."""
        if force and self.status in ("running", "paused"):
            self.kill(method="everything")
        elif self.status == "exited":
            self.bury()
        self.container.restart()
        self.last_pid = self.pid

    def wait_for_log(self, log: str, message: str = "", timeout: float = 30) -> None:
        """Wait for a text in the log of this life of the node."""
        wait_until(
            lambda: log in self.container.logs_of_this_life(),
            timeout,
            lambda: f"{message or self.name()}: log {log!r}\n{self.container.logs_of_this_life()[-3000:]}",
        )

    def assert_log_exists(self, log: str, message: str = "", timeout: float = 30) -> None:
        """The same; a failed wait is an AssertionError here."""
        self.wait_for_log(log, message, timeout)

    def assert_log_does_not_exist(self, log: str, message: str = "", timeout: float = 1) -> None:
        """Fail if the text appears within ``timeout`` seconds."""
        try:
            self.wait_for_log(log, message, timeout)
        except AssertionError:
            return
        raise AssertionError(f"{message or self.name()}: logged {log!r}\n{self.logs()[-3000:]}")

    def _await_death(self, pids: Iterable[int], since: float) -> None:
        wanted = [pid for pid in pids if pid]
        wait_until(lambda: all(map(is_gone, wanted)), 10, f"{self.name()}: the end of {wanted} after SIGKILL")
        if self._ledger is not None:
            self._ledger.gone(wanted, since)


class WorkerNode(ProcessNode, CeleryTestWorker):  # type: ignore[misc]
    """A Celery worker."""

    def __init__(
        self,
        container: Process,
        app: Celery,
        ledger: Ledger | None,
        *,
        hostname: str,
        queue: str,
    ) -> None:
        super().__init__(container, app, ledger)
        self._hostname, self._queue = hostname, queue

    @property
    def version(self) -> str:
        """Celery's version."""
        return str(celery.__version__)

    @property
    def log_level(self) -> str:
        """The level that the worker logs at."""
        return LOG_LEVEL

    @property
    def worker_name(self) -> str:
        """The first part of the host name."""
        return self._hostname.partition("@")[0]

    @property
    def worker_queue(self) -> str:
        """The queue that the worker consumes, or several with commas between."""
        return self._queue

    def hostname(self) -> str:
        """The worker's name towards Celery, for ``app.control`` and events."""
        return self._hostname

    def answers(self, timeout: float = 1) -> bool:
        """Whether it answers Celery's ping."""
        return bool(self.app.control.ping(destination=[self._hostname], timeout=timeout))

    def get_running_processes_info(
        self, columns: list[str] | None = None, filters: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """What psutil knows about the processes of this node."""
        wanted = columns or [
            "pid",
            "name",
            "username",
            "cmdline",
            "cpu_percent",
            "memory_percent",
            "create_time",
        ]
        found = [psutil.Process(pid).as_dict(wanted) for pid in (self.pid, *self.children())]
        return [item for item in found if all(item.get(key) == value for key, value in (filters or {}).items())]


class BeatNode(ProcessNode):
    """A beat process."""


class _Address:
    """What stands for a container in a node that is a server of the machine."""

    def __init__(self, name: str, url: str) -> None:
        self.id = self.name = name
        self.status = "running"
        self.celeryconfig = {"url": url, "host_url": url}

    def ready(self) -> bool:
        return True

    def logs(self) -> str:
        return ""

    def reload(self) -> None:
        """Nothing to bring up to date."""

    def teardown(self) -> None:
        """The fixture that gave the server takes it back."""


class _ServerNode(CeleryTestNode):  # type: ignore[misc]
    """A server that the test can lose: through a proxy if it is marked ``outages``."""

    def __init__(self, kind: str, url: str, proxy: Proxy | None = None) -> None:
        self.proxy = proxy
        self.url = proxy.url if proxy else url
        super().__init__(_Address(kind, self.url))

    def kill(self, signal: str | int = "SIGKILL", reload_container: bool = True) -> None:
        """Cut every process of the test off: connections end, new ones are refused."""
        self._outage().cut()

    def pause(self) -> None:
        """Let no byte pass, but keep the connections, as a network that is gone without a word."""
        self._outage().stall()

    def restart(self, reload_container: bool = True, force: bool = False) -> None:
        """Be there again; before it, cut what is connected, as a restarted server does."""
        self._outage().cut()
        self._outage().restore()

    def _outage(self) -> Proxy:
        if self.proxy is None:
            raise RuntimeError(f"mark the test with pytest.mark.outages to take {self.name()} away from it")
        return self.proxy


class BrokerNode(_ServerNode, CeleryTestBroker):  # type: ignore[misc]
    """The broker."""


class DatabaseNode(_ServerNode):
    """The database of the jobs."""


class LifecycleSetup(CeleryTestSetup):  # type: ignore[misc]
    """Workers, beats, a broker and a database that belong to one application."""

    def __init__(
        self,
        worker_cluster: CeleryWorkerCluster,
        broker_cluster: CeleryBrokerCluster,
        app: Celery,
        beat_cluster: CeleryTestCluster,
        database: DatabaseNode,
    ) -> None:
        super().__init__(worker_cluster, broker_cluster, None, app)
        self.beat_cluster = beat_cluster
        self.database = database
        self.ping = app.tasks["ping"]

    @property
    def beat(self) -> BeatNode:
        """The first beat."""
        return self.beat_cluster[0]

    def __len__(self) -> int:
        return super().__len__() + len(self.beat_cluster) + 1

    def ready(self, ping: bool = False, control: bool = False, docker: bool = True) -> bool:
        """Wait for all nodes; ``ping`` runs a task on each worker, ``control`` asks each."""
        ready = not docker or self.beat_cluster.ready()
        return ready and super().ready(ping=ping, control=control, docker=docker)


class Nodes:
    """Starts the nodes of one test and ends them all."""

    def __init__(
        self,
        process: type[Process],
        *,
        directory: Path,
        environment: Mapping[str, str],
        app: Celery,
        ledger: Ledger,
    ) -> None:
        self._process = process
        self._directory = directory
        self._environment = environment
        self._app = app
        self._ledger = ledger
        self.started: list[ProcessNode] = []

    def worker(
        self,
        name: str = "worker",
        *,
        concurrency: int = 1,
        pool: str = "prefork",
        queues: Sequence[str] = (),
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        app: str = APP,
        wait: bool = True,
    ) -> WorkerNode:
        """Start a worker. Two of one ``name`` have one host name, as a machine and its replacement."""
        hostname = f"{name}@{self._directory.name}"
        queue = ",".join(queues) or str(self._app.conf.task_default_queue)
        command = [
            *self._celery(app),
            "worker",
            f"--hostname={hostname}",
            f"--concurrency={concurrency}",
            f"--pool={pool}",
            f"--queues={queue}",
            f"--loglevel={LOG_LEVEL}",
            # Greeting the other workers takes a second at the start.
            "--without-mingle",
            "--without-gossip",
            *arguments,
        ]
        process = self._make(command, name, environment, "ready.")
        node = WorkerNode(process, self._app, self._ledger, hostname=hostname, queue=queue)
        return self._start(node, wait)

    def beat(
        self,
        name: str = "beat",
        *,
        scheduler: str = "lifecycle",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        app: str = APP,
        ready_prompt: str = BEAT_READY,
        wait: bool = True,
    ) -> BeatNode:
        """Start a beat with the scheduler of that name; another ``app`` needs another ``ready_prompt``."""
        schedule = self._directory / f"{name}-schedule"
        command = [
            *self._celery(app),
            "beat",
            f"--scheduler={scheduler}",
            f"--schedule={schedule}",
            f"--loglevel={LOG_LEVEL}",
            *arguments,
        ]
        process = self._make(command, name, environment, ready_prompt)
        return self._start(BeatNode(process, self._app, self._ledger), wait)

    def teardown(self) -> None:
        """End all nodes at once; no process of theirs is left."""
        for node in self.started:
            node.teardown()

    def _celery(self, app: str) -> list[str]:
        return [self._process.python, "-m", "celery", f"--app={app}"]

    def _make(
        self, command: Sequence[str], name: str, environment: Mapping[str, str] | None, ready_prompt: str
    ) -> Process:
        return self._process(
            command,
            name=name,
            directory=self._directory,
            environment={**self._environment, **(environment or {})},
            ready_prompt=ready_prompt,
        )

    def _start(self, node: Any, wait: bool) -> Any:
        self.started.append(node)
        node.start()
        if wait:
            node.ready()
        return node
