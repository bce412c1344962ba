"""What goes wrong under chaos: one random fault after the other, each with its repair."""

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.acceptance.ledger import Ledger
from tests.acceptance.nodes import BeatNode, ProcessNode, WorkerNode
from tests.acceptance.process import is_gone
from tests.support import Proxy
from tests.support.servers import Server

#: How long a worker is stopped by SIGSTOP: shorter than a lease, or so long that its runs are given to others.
SHORT_STOP, LONG_STOP = (0.3, 2.0), (6.0, 9.0)

#: What ends a worker that Celery and kombu could have kept: a process of its pool that dies before it is up, one that dies
#: while the broker is away, and messages that can't be given back to a Redis that is away.
CELERYS_OWN = (
    "Could not start worker processes",
    "file descriptor is None",
    "'NoneType' object has no attribute 'hostname'",
)


@dataclass
class Fault:
    """One fault, for the report and for the checker: from when to when it was there."""

    kind: str
    began: float
    ended: float = float("inf")
    pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Service:
    """The database or the broker: the way to it, and its server where that is chaos' own."""

    name: str
    proxy: Proxy
    server: Server | None


@dataclass
class Faults:
    """Does one fault at a time to each part, and repairs it after a while. All from the main thread."""

    random: random.Random
    workers: Sequence[WorkerNode]
    beats: Sequence[BeatNode]
    database: Service
    broker: Service
    ledger: Ledger
    seen: list[Fault] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    _repairs: list[tuple[float, object, Callable[[], None]]] = field(default_factory=list)

    def step(self) -> None:
        """Do the repairs whose time has come, and start again what ended by itself, as a supervisor does."""
        for due in [repair for repair in self._repairs if repair[0] <= time.monotonic()]:
            self._repairs.remove(due)
            due[2]()
        for node in (*self.workers, *self.beats):
            if node.status == "exited" and not self._is_broken(node):
                self._ended_by_itself(node)

    def strike(self) -> None:
        """One random fault, if the part that it hits is whole."""
        kinds: dict[Callable[[], None], int] = {
            self._kill_child: 6,
            self._kill_worker: 3,
            self._kill_beat: 2,
            self._stop_worker: 2,
            self._stop_beat: 1,
            self._deploy: 3,
            self._cut_broker: 1,
            self._silence_broker: 1,
            self._restart_broker: 2,
            self._cut_database: 1,
            self._silence_database: 1,
            self._restart_database: 2,
        }
        self.random.choices([*kinds], [*kinds.values()])[0]()

    def repair_all(self) -> None:
        """Make everything whole again."""
        while self._repairs:
            self._repairs.pop()[2]()
            time.sleep(0.05)
        for node in (*self.workers, *self.beats):
            if node.status == "exited":
                self._start(node)

    def _ended_by_itself(self, node: ProcessNode) -> None:
        """One that can't reach its database at the start may end, so that its supervisor sees it; a ready one may not."""
        log = node.container.logs_of_this_life()
        kind = "ended at its start"
        if node.container.ready_prompt in log:
            kind = next((f"ended by Celery: {text}" for text in CELERYS_OWN if text in log), "ended by itself")
        if kind == "ended by itself":
            self.unexpected.append(f"{node.name()} {kind}: {log[max(log.rfind('CRITICAL'), 0) :][:5000]}")
        fault = Fault(kind, time.monotonic(), pids=(node.last_pid,))
        self._later(1, node, fault, lambda: self._start(node))

    def _is_broken(self, part: object) -> bool:
        return any(broken is part for _, broken, _ in self._repairs)

    def _whole(self, nodes: Sequence[ProcessNode]) -> ProcessNode | None:
        found = [node for node in nodes if not self._is_broken(node) and node.status == "running"]
        return self.random.choice(found) if found else None

    def _later(self, seconds: float, part: object, fault: Fault, repair: Callable[[], None]) -> None:
        def done() -> None:
            repair()
            fault.ended = time.monotonic()

        self.seen.append(fault)
        self._repairs.append((time.monotonic() + seconds, part, done))

    def _start(self, node: ProcessNode) -> None:
        if node.status == "exited":
            node.bury()
            node.start()

    def _kill_child(self) -> None:
        node = self._whole(self.workers)
        children = node.children() if node else []
        if node is None or not children:
            return
        pid = self.random.choice(children)
        if not is_gone(pid):
            node.kill_pid(pid)
            now = time.monotonic()
            self.seen.append(Fault("child SIGKILL", now, now, (pid,)))

    def _kill_worker(self) -> None:
        self._kill("worker SIGKILL", self._whole(self.workers))

    def _kill_beat(self) -> None:
        self._kill("beat SIGKILL", self._whole(self.beats))

    def _kill(self, kind: str, node: ProcessNode | None) -> None:
        if node is None:
            return
        pids = (node.pid, *node.children())
        node.kill()
        fault = Fault(kind, time.monotonic(), pids=pids)
        self._later(self.random.uniform(0.1, 2), node, fault, lambda: self._start(node))

    def _stop_worker(self) -> None:
        stop = LONG_STOP if self.random.random() < 0.4 else SHORT_STOP
        self._stop("worker SIGSTOP", self._whole(self.workers), self.random.uniform(*stop))

    def _stop_beat(self) -> None:
        self._stop("beat SIGSTOP", self._whole(self.beats), self.random.uniform(0.5, 5))

    def _stop(self, kind: str, node: ProcessNode | None, seconds: float) -> None:
        if node is None:
            return
        pids = (node.pid, *node.children())
        long = seconds >= LONG_STOP[0]
        fault = Fault(f"{kind}{' for long' if long else ''}", time.monotonic(), pids=pids)
        node.pause()
        self._later(seconds, node, fault, node.unpause)

    def _deploy(self) -> None:
        """SIGTERM; SIGKILL of what is still there after a grace period; the next one starts."""
        node = self._whole([*self.workers, *self.beats])
        if node is None:
            return
        fault = Fault("SIGTERM", time.monotonic(), pids=(node.pid, *node.children()))
        node.container.kill(signal.SIGTERM)

        def replace() -> None:
            if node.status == "running":
                fault.kind = "SIGTERM, then SIGKILL"
                node.kill(method="everything")
            self._start(node)

        self._later(self.random.choice([2, 8]), node, fault, replace)

    def _cut_broker(self) -> None:
        self._outage(self.broker, "away", self.broker.proxy.cut, self.random.uniform(0.2, 4))

    def _silence_broker(self) -> None:
        self._outage(self.broker, "silent", self.broker.proxy.stall, self.random.uniform(0.2, 4))

    def _restart_broker(self) -> None:
        self._restart(self.broker, loses=self.random.random() < 0.5)

    def _cut_database(self) -> None:
        self._outage(self.database, "away", self.database.proxy.cut, self.random.uniform(0.2, 6))

    def _silence_database(self) -> None:
        self._outage(self.database, "silent", self.database.proxy.stall, self.random.uniform(0.2, 6))

    def _restart_database(self) -> None:
        self._restart(self.database, loses=False)

    def _outage(self, service: Service, kind: str, begin: Callable[[], None], seconds: float) -> None:
        if self._is_broken(service):
            return
        fault = Fault(f"{service.name} {kind}", time.monotonic())
        begin()
        self._later(seconds, service, fault, service.proxy.restore)

    def _restart(self, service: Service, loses: bool) -> None:
        """The server dies or is ended, keeps what it had or comes back empty."""
        server, dies, seconds = service.server, self.random.random() < 0.5, self.random.uniform(0.1, 3)
        if server is None or self._is_broken(service):
            return
        what = f"{service.name} {'killed' if dies else 'ended'}{', its data lost' if loses else ''}"
        fault = Fault(what, time.monotonic())
        (server.kill if dies else server.stop)()
        if loses:
            server.forget()

        def back() -> None:
            server.start()
            up()

        def up() -> None:
            if server.is_ready():
                fault.ended = time.monotonic()
            else:
                self._repairs.append((time.monotonic() + 0.1, service, up))

        self.seen.append(fault)
        self._repairs.append((time.monotonic() + seconds, service, back))
