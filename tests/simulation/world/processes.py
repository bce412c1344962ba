"""The processes of a simulation: children, their worker's parent, and what of Celery stands between them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from celery._state import _task_stack
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker.request import Request

import celery_lifecycle.task
import celery_lifecycle.worker
from celery_lifecycle import Lifecycle
from celery_lifecycle.life import Life
from celery_lifecycle.link import header_in
from celery_lifecycle.model import Why
from celery_lifecycle.runner import Runner
from celery_lifecycle.store import Store
from celery_lifecycle.transitions.run import Worker
from celery_lifecycle.worker import LifecycleRequest, Renewer
from tests.simulation.world import application
from tests.simulation.world.broker import SimSender
from tests.simulation.world.database import draining_on_record, lost_on_record
from tests.simulation.world.engine import Event, Process
from tests.simulation.world.errands import ErrandRequest, is_errand, run_errand

if TYPE_CHECKING:
    from tests.simulation.world.simulation import Simulation

QUEUES: dict[Any, str] = {}
PARENT_PID = 1


class SimLifecycle(Lifecycle):
    """The `Lifecycle` of one simulated process."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(application.app, database_url="sqlite://")
        self.kinds = application.base.kinds
        self.simulation = simulation
        self._config = simulation.config
        self._database_id = "db"
        self._store = Store(simulation.config, clock=simulation.database_clock)
        self._store.database.simulation = simulation  # type: ignore[attr-defined]
        self._sender = SimSender(simulation, application.app)
        self._queues = QUEUES

    @property
    def whereabouts(self) -> dict[str, str]:
        return {}

    @property
    def runner(self) -> Any:
        process: Any = self.simulation.world.process
        return process.runner


class Quiet(Request):
    """What Celery itself does about a failed request is not simulated."""

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
        return None


class SimRequest(LifecycleRequest, Quiet):
    """The parent's side of a link."""

    def __init__(self, headers: dict[str, Any], child: Child) -> None:
        self._app = application.app
        self._request_dict = headers
        self._hostname = child.name
        self._Request__payload = [[], {}, {}]
        self.id = headers["id"]
        self.worker_pid = child.pid
        self.accepted_at = child.world.process_clock.of(child.worker)  # type: ignore[attr-defined]
        self.taken_at = child.world.now


class Child(Process):
    """A process of a worker's pool."""

    def __init__(self, worker: WorkerProcess) -> None:
        number = worker.next_child()
        # Each worker counts its processes in a container of its own: those of another one, or life, have the same numbers.
        super().__init__(worker.world, "child", f"{worker.name}/{number}", worker, pid=PARENT_PID + number)
        self.worker = worker
        self.request: SimRequest | ErrandRequest | None = None
        self.header: dict[str, Any] | None = None
        self.runner = Runner(self.lifecycle, Worker(self.life.instance, self.pid), celery_lifecycle.task.classify)
        self.on_death = lambda: worker.lost(self)


class WorkerProcess(Process):
    """One life of one worker: its parent process, with a pool of children."""

    def __init__(self, simulation: Simulation, index: int, number: int) -> None:
        super().__init__(simulation.world, "worker", f"worker{index}.{number}", pid=PARENT_PID)
        self.simulation = simulation
        self.index = index
        self.lifecycle = simulation.lifecycle()
        life = Life()
        life.instance = f"{self.name}-{simulation.world.digits('instance', 8)}"
        self.life = life
        self.children: list[Child] = []
        self.free: list[Child] = []
        self._numbers = 0
        for _ in range(simulation.plan.slots):
            self.hire()
        self.renewer: Any = SimRenewer(self)
        self.start(self.renewer.run)
        self.on_death = lambda: simulation.worker_lost(self)

    @property
    def draining_stored(self) -> bool:
        return draining_on_record(self.life.instance)

    def next_child(self) -> int:
        self._numbers += 1
        return self._numbers

    def hire(self) -> None:
        child = Child(self)
        self.children.append(child)
        self.free.append(child)

    def links(self) -> list[tuple[Any, dict[str, Any]]]:
        return [(child.request, child.header) for child in self.children if child.header is not None]  # type: ignore[misc]

    def offer(self) -> None:
        """Take messages for the processes that are free."""
        while self.alive and not self.is_stalled and not self.life.draining and self.free:
            text = self.simulation.broker.take(self.simulation.plan.queues_of(self.index))
            if text is None:
                return
            self._handle(text)

    def _handle(self, text: str) -> None:
        simulation = self.simulation
        headers, body = json.loads(text)
        if is_errand(headers):
            child = self.free.pop(0)
            child.request = ErrandRequest(headers, child)
            child.start(lambda: self._errand(child, headers, body))
        elif headers["id"] in simulation.revoked:
            self.start(lambda: celery_lifecycle.worker._skip(application.app, headers, headers["task"], Why.REVOKED))
        elif headers["task"] not in application.app.tasks or headers["task"] in simulation.unknown_tasks(self):
            name = headers["task"]
            self.start(lambda: celery_lifecycle.worker._skip(application.app, headers, name, Why.UNKNOWN_TASK))
        else:
            child = self.free.pop(0)
            child.header = header_in(headers)
            child.request = SimRequest(headers, child)
            child.start(lambda: self._run(child, headers, body))
            limit = getattr(application.app.tasks[headers["task"]], "time_limit", None)
            limit = (headers.get("timelimit") or [limit])[0] or limit
            if limit:
                request = child.request
                self.world.at(self.world.now + round(limit * 1000), lambda: self._limit(child, request))

    def _run(self, child: Child, headers: dict[str, Any], body: Any) -> None:
        """What Celery's tracer does with a message, as far as the protocol can tell."""
        task = application.app.tasks[headers["task"]]
        context = Context(
            id=headers["id"], task=headers["task"], headers=headers, chain=body[2].get("chain"), called_directly=False,
            root_id=headers.get("root_id"), parent_id=headers.get("parent_id"),
        )  # fmt: skip
        task.request_stack.push(context)
        _task_stack.push(task)
        try:
            task()
            self.simulation.step("carry")
            if context.chain:
                self.simulation.forward(context.chain)
        except (Ignore, Reject, Retry):
            pass
        except Exception as error:
            self.simulation.failed(error)
        finally:
            _task_stack.pop()
            task.request_stack.pop()
        self._done(child)

    def _errand(self, child: Child, headers: dict[str, Any], body: Any) -> None:
        run_errand(self.simulation, headers, body)
        self._done(child)

    def _done(self, child: Child) -> None:
        child.request = child.header = None
        if child.alive:
            self.free.append(child)
            self.world.at(self.world.now, self.offer)
            if self.life.draining and len(self.free) == len(self.children):
                self.world.at(self.world.now + 1, self.kill)

    def _limit(self, child: Child, request: SimRequest) -> None:
        """A hard time limit: the parent records it and kills the process."""

        def stop() -> None:
            if not child.alive or child.request is not request:
                return
            child.killed_by = "limit"  # type: ignore[attr-defined]
            # Celery tells of the limit before it kills.
            request.on_failure(SimpleNamespace(exception=TimeLimitExceeded(20)))
            if child.request is request:
                child.kill()
            child.killed_by = None  # type: ignore[attr-defined]

        if self.alive:
            self.start(stop)

    def lost(self, child: Child) -> None:
        """A child has died: the parent notices soon, and hires another one."""
        if not self.alive:
            return
        self.children.remove(child)
        if child in self.free:
            self.free.remove(child)
        self.simulation.checker.breaker.child_died(child)
        request, self_killed = child.request, getattr(child, "killed_by", None)
        delay = 14 + self.world.draw("notice", 250)
        if request is not None:
            error: Exception = WorkerLostError("Worker exited prematurely: signal 9 (SIGKILL) Job: 0.")
            if self_killed == "revoked":
                error = Terminated(15)
            self.start(lambda: request.on_failure(SimpleNamespace(exception=error)), after=delay)
        self.world.at(self.world.now + delay + 5, self._replace)

    def _replace(self) -> None:
        if self.alive and len(self.children) < self.simulation.plan.slots:
            self.hire()
            self.offer()

    def kill_child(self, pid: int) -> None:
        for child in list(self.children):
            if child.pid == pid:
                child.killed_by = "hung"  # type: ignore[attr-defined]
                child.kill()

    def drain(self) -> None:
        """SIGTERM: finish what runs, take nothing new."""
        self.life.draining = True
        self.renewer.wake.set()
        if len(self.free) == len(self.children):
            self.world.at(self.world.now + 100, self.kill)


class Sleep(Event):
    """Beat's sleep, whose length is its own choice up to a poll interval; the plan's wakes make that shorter."""

    def __init__(self, simulation: Simulation, process: Process) -> None:
        super().__init__(simulation.world, process)
        self._simulation = simulation

    def wait(self, timeout: float) -> bool:
        if timeout > self._simulation.config.poll_interval:
            self._simulation.checker.facts.fail("beat looks once a poll interval", f"it sleeps for {timeout:g} s")
        return super().wait(timeout)


class SimRenewer(Renewer):
    """The real thread's work, in an actor; an idle worker's heartbeat that says nothing new is left out."""

    def __init__(self, process: WorkerProcess) -> None:
        super().__init__(application.app, process.name, kills=True)
        self.process = process
        self.wake = Event(process.world, process)  # type: ignore[assignment]
        self._told: bool | None = None

    def renew(self) -> Any:
        """The thread gets its turn when the process has time for it, and the network is no faster than that."""
        self.process.world.sleep(self.process.world.draw("renewal", 300))
        return super().renew()

    def _beat(self) -> None:
        draining = self.process.life.draining
        if self._told != draining or lost_on_record(self.process.life.instance):
            super()._beat()
            self._told = draining


class Machine:
    """The `os` module as the worker's parent sees it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def getpid(self) -> int:
        process = self._simulation.world.process
        return process.pid if process is not None else 1

    def kill(self, pid: int, signal: int) -> None:
        process = self._simulation.world.process
        assert isinstance(process, WorkerProcess)
        process.kill_child(pid)

    def uname(self) -> Any:
        return SimpleNamespace(nodename="simulated")


class KernelCounter:
    """The kernel's count of processes killed for memory: moved or not, as the seed says."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def has_moved(self) -> bool:
        return self._simulation.world.draw("oom", 2) == 0
