"""One simulation: beats, workers, clients, database and broker, all made of the package's own code and one plan."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import celery.canvas

import celery_lifecycle.beat
import celery_lifecycle.dispatch
import celery_lifecycle.events
import celery_lifecycle.holds
import celery_lifecycle.life
import celery_lifecycle.lifecycle
import celery_lifecycle.memory
import celery_lifecycle.outcome
import celery_lifecycle.queue
import celery_lifecycle.runner
import celery_lifecycle.store
import celery_lifecycle.store.ends
import celery_lifecycle.store.holds
import celery_lifecycle.store.jobs
import celery_lifecycle.store.unit
import celery_lifecycle.task
import celery_lifecycle.tracked
import celery_lifecycle.window
import celery_lifecycle.worker
from celery_lifecycle import deployment
from celery_lifecycle.beat import LifecycleScheduler
from celery_lifecycle.config import Config
from celery_lifecycle.errors import LifecycleError
from celery_lifecycle.store.database import Conflict
from tests.simulation.checks.checker import Checker
from tests.simulation.plans.plan import Faults, Plan
from tests.simulation.world import application
from tests.simulation.world.bodies import Bodies
from tests.simulation.world.broker import Broker
from tests.simulation.world.calls import Call
from tests.simulation.world.clients import Clients
from tests.simulation.world.database import SimDatabase, away, shared
from tests.simulation.world.engine import EPOCH, Clock, Killed, Process, World
from tests.simulation.world.errands import Requests, Threads, holder_of
from tests.simulation.world.processes import KernelCounter, Machine, SimLifecycle, Sleep, WorkerProcess

ROUTES: dict[Any, Any] = {}
NEVER = 1 << 50
QUIET = logging.getLogger("celery_lifecycle")


class Simulation:
    """Plays one plan. `run` raises the `Violation` that it finds, or what the code under test raised."""

    def __init__(self, plan: Plan, trace: bool = False) -> None:
        self.plan = plan
        self.world = World(plan.seed, trace)
        self.config: Config = plan.config()
        self.played: Counter[str] = Counter()
        """How often each thing that can happen has happened."""
        self.faults = Faults(plan, self.played)
        self.routes = ROUTES
        self.broker = Broker(self)
        self.checker = Checker(self)
        self.clients = Clients(self)
        self.bodies = Bodies(self)
        self.beats: dict[int, Process] = {}
        self.schedulers: list[Any] = []
        self.workers: dict[int, WorkerProcess] = {}
        self.away_until = 0
        self.away_since = 0
        self.holds: dict[int, int] = {}
        self.revoked: set[str] = set()
        self.healing = False
        self._lives = 0
        self.world.process_clock = Clock(self.world)  # type: ignore[attr-defined]
        self.world.on_switch = self._switched

    # --- making and ending

    def database_clock(self) -> int:
        return EPOCH + self.world.now

    def lifecycle(self) -> SimLifecycle:
        return SimLifecycle(self)

    def _switched(self, process: Process | None) -> None:
        if process is None:
            return
        if process.lifecycle is not None:
            application.app.lifecycle = process.lifecycle
        if process.life is not None:
            celery_lifecycle.life._life = process.life
        celery_lifecycle.holds._renewer = holder_of(process)

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """Everything that would ask the real world for the time, for chance or for a process asks the simulated one."""
        world = self.world
        clock, machine = world.process_clock, Machine(self)  # type: ignore[attr-defined]
        random = SimpleNamespace(
            random=lambda: world.chance("random"),
            uniform=lambda low, high: low + (high - low) * world.chance("uniform"),
        )
        secrets = SimpleNamespace(token_hex=lambda count: world.digits("token", count * 2))
        uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=world.digits("uuid", 32)))
        p = celery_lifecycle
        patches = [
            (p.beat, "time", clock), (p.beat, "os", machine), (p.beat, "uuid", uuid),
            (p.window, "time", clock), (p.dispatch, "time", clock), (p.life, "OomCounter", lambda: KernelCounter(self)),
            (p.runner, "time", clock), (p.outcome, "random", random),
            (p.worker, "time", clock), (p.worker, "os", machine), (p.worker, "_renewers", []),
            (p.worker, "running_links", self._running_links), (p.life, "_life", None),
            (p.holds, "threading", Threads(self)), (p.holds, "_renewer", None), (p.holds, "uuid", uuid),
            (p.tracked, "worker_state", Requests(self)), (p.store.holds, "random", random),
            (p.store.ends, "random", random), (p.store.unit, "secrets", secrets), (p.store.jobs, "uuid", uuid),
            (p.store, "Database", SimDatabase),
            (p.task, "forward_chain", lambda app, chain, root, parent: self.forward(list(chain))),
            (p.task, "uuid", lambda: world.digits("task", 32)), (celery.canvas, "uuid", lambda: world.digits("task", 32)),
            (p.events, "unexpected", self._unexpected), (p.memory, "gc", SimpleNamespace(collect=lambda: 0)),
        ]  # fmt: skip
        with contextlib.ExitStack() as stack:
            for module, name, value in patches:
                stack.enter_context(mock.patch.object(module, name, value))
            before = application.app.lifecycle, QUIET.disabled, list(deployment._default)
            QUIET.disabled = True
            application.running.append(self)
            shared().empty()
            try:
                yield
            finally:
                self.world.end()
                application.running.pop()
                application.app.lifecycle, QUIET.disabled, deployment._default[:] = before

    def _unexpected(self, what: str, error: BaseException) -> None:
        """What the code under test takes for a bug is one."""
        if isinstance(error, Exception):
            self.world.broken = self.world.broken or error

    def _running_links(self) -> list[tuple[Any, dict[str, Any]]]:
        process = self.world.process
        assert isinstance(process, WorkerProcess)
        return process.links()

    # --- the play

    def run(self) -> Simulation:
        with self._installed():
            for index in range(self.plan.beats):
                self._start_beat(index)
            for index in range(self.plan.workers):
                self._start_worker(index)
            for event in self.plan.events:
                self.world.at(event["at"], lambda event=event: self._happen(event))
            self.world.run(self.plan.horizon)
            self.checker.at_horizon()
            self._heal()
            self.world.run(NEVER, done=self.checker.is_over)
            self.checker.at_end()
        return self

    def _heal(self) -> None:
        """From now on nothing fails any more."""
        self.world.say("--- nothing fails from here on")
        self.healing = True
        self.faults.stop()
        self.checker.lateness.heal()
        self.holds = {key: min(until, self.world.now) for key, until in self.holds.items()}
        self.plan = replace(self.plan, queues=[])
        now = self.world.now
        self.away_until, self.broker.away_until = min(self.away_until, now), min(self.broker.away_until, now)
        for process in list(self.world.processes):
            process.stalled_until, process.cut_until = min(process.stalled_until, now), min(process.cut_until, now)
            for actor in process.actors:
                if actor.is_late:  # what it has waited for is over
                    self.world.at(now, actor)
        for index in range(max(1, self.plan.beats)):
            if index not in self.beats or not self.beats[index].alive:
                self._start_beat(index)
        for index in range(max(1, self.plan.workers)):
            if index not in self.workers or not self.workers[index].alive or self.workers[index].life.draining:
                self._start_worker(index)
        self.offer()

    def _happen(self, event: dict[str, Any]) -> None:
        what = event["do"]
        self.played[f"event {what}"] += 1
        act = getattr(self, f"_do_{what}", None)
        if act is not None:
            act(event)
        else:
            self.clients.do(event)

    # --- faults that have a time

    def _do_away(self, event: dict[str, Any]) -> None:
        self.world.say(f"the database goes away for {event['for'] / 1000:g} s")
        self.away_until = max(self.away_until, self.world.now + event["for"])

    def _do_broker_away(self, event: dict[str, Any]) -> None:
        self.world.say(f"the broker goes away for {event['for'] / 1000:g} s")
        self.broker.away_until = max(self.broker.away_until, self.world.now + event["for"])
        self.broker.back_at = self.broker.away_until

    def _do_flush(self, event: dict[str, Any]) -> None:
        self.world.say("the broker forgets its messages")
        self.broker.flush()

    def _victim(self, event: dict[str, Any]) -> Process | None:
        role, index = event["who"], event.get("index", 0)
        if role == "beat":
            return self.beats.get(index)
        if role == "client":
            return self.clients.alive.get(index)
        worker = self.workers.get(index)
        if role == "worker" or worker is None:
            return worker
        busy = [child for child in worker.children if child.request is not None]
        return busy[event.get("nth", 0) % len(busy)] if busy else None

    def _do_kill(self, event: dict[str, Any]) -> None:
        victim = self._victim(event)
        if victim is not None and victim.alive:
            victim.kill()

    def _do_stall(self, event: dict[str, Any]) -> None:
        victim = self._victim(event)
        if victim is None or not victim.alive:
            return
        self._stall(victim, event["for"], event.get("all", True))

    def _stall(self, victim: Process, ms: int, with_children: bool = True) -> None:
        self.world.say(f"{victim.name} stalls for {ms / 1000:g} s")
        until = self.world.now + ms
        victim.stalled_until = max(victim.stalled_until, until)
        if with_children:
            for child in getattr(victim, "children", []):
                child.stalled_until = max(child.stalled_until, until)
        if isinstance(victim, WorkerProcess):
            self.world.at(until + 1, victim.offer)

    def _do_cut(self, event: dict[str, Any]) -> None:
        """One process can't reach the database."""
        victim = self._victim(event)
        if victim is not None:
            self.world.say(f"{victim.name} is cut off from the database for {event['for'] / 1000:g} s")
            for process in (victim, *getattr(victim, "children", ())):
                process.cut_until = max(process.cut_until, self.world.now + event["for"])

    def _do_hold(self, event: dict[str, Any]) -> None:
        """A caller has pushed in a transaction of his own, and leaves it open."""
        for key, thing in self.checker.facts.things.items():
            if str(thing.state.ref) == event["on"]:
                self.world.say(f"a caller's transaction holds {event['on']} for {event['for'] / 1000:g} s")
                self.holds[key] = max(self.holds.get(key, 0), self.world.now + event["for"])

    def held_rows(self) -> frozenset[int]:
        return frozenset(key for key, until in self.holds.items() if until > self.world.now)

    def _do_term(self, event: dict[str, Any]) -> None:
        worker = self.workers.get(event.get("index", 0))
        if worker is None or not worker.alive:
            return
        self.world.say(f"{worker.name}: SIGTERM")
        worker.drain()
        self.world.at(self.world.now + event["grace"], worker.kill)

    # --- processes

    def _start_beat(self, index: int) -> None:
        self._lives += 1
        process = Process(self.world, "beat", f"beat{index}.{self._lives}")
        process.lifecycle = self.lifecycle()
        self.beats[index] = process

        def body() -> None:
            scheduler: Any = LifecycleScheduler(application.app, lazy=True)
            scheduler._lifecycle = process.lifecycle
            scheduler._entries = SimpleNamespace(run=lambda stopping: 3600.0)
            scheduler._stopping = Sleep(self, process)
            scheduler.process = process
            self.schedulers.append(scheduler)
            while True:
                scheduler.tick()

        process.start(body)
        process.on_death = lambda: self.world.at(self.world.now + self.plan.restart, lambda: self._restart_beat(index))

    def _restart_beat(self, index: int) -> None:
        if not self.beats[index].alive:
            self.schedulers = [one for one in self.schedulers if one.process.alive]
            self._start_beat(index)

    def _start_worker(self, index: int) -> None:
        self._lives += 1
        self.workers[index] = WorkerProcess(self, index, self._lives)
        self.world.say(f"{self.workers[index].name} starts")
        self.world.at(self.world.now, self.workers[index].offer)

    def worker_lost(self, worker: WorkerProcess) -> None:
        self.checker.breaker.worker_died(worker)

        def restart() -> None:
            if self.workers[worker.index] is worker:
                self._start_worker(worker.index)

        self.world.at(self.world.now + self.plan.restart, restart)

    def spoils(self, how: str, ref: str) -> bool:
        """Whether the message of an object can't be sent now, by no fault of the broker."""
        spoilt = not self.healing and any(
            (one, why) == (ref, how) and self.world.now < until for one, why, until in self.plan.spoilt
        )
        if spoilt:
            self.world.say(f"the message of {ref} can't be sent ({how})")
            self.played[f"fault {how}"] += 1
        return spoilt

    def unknown_tasks(self, worker: WorkerProcess) -> frozenset[str]:
        if self.healing:
            return frozenset()
        return self.plan.unknown_of(worker.index, self.world.now)

    def offer(self) -> None:
        for worker in self.workers.values():
            worker.offer()

    # --- steps

    def step(self, what: str) -> None:
        """A point between two steps of a process, where others come in and where the process may die."""
        process = self.world.process
        if process is None:
            return
        self.world.sleep(self.world.draw("step", 3))
        self._crash(process, what)

    def _crash(self, process: Process, what: str) -> None:
        if not process.alive:
            raise Killed
        at, kind = f"{process.role} {what}", f"crash {process.role}"
        self.played[f"step {at}"] += 1
        if self.faults.hits(kind) is not None or self.faults.hits(f"{kind} at {what}") is not None:
            self.world.say(f"crash at {what}")
            self.played[f"crash {at}"] += 1
            process.kill()
            raise Killed
        late = self.faults.hits(f"stall {process.role} at {what}")
        if late is not None:
            self.played[f"stall {at}"] += 1
            self._stall(process.parent or process, late)
            self.world.sleep(0)

    def is_away(self, process: Process) -> bool:
        return max(self.away_until, process.cut_until) > self.world.now

    def before_transaction(self, label: str) -> None:
        self.step(f"before {label}")
        process = self.world.process
        if process is not None and self.is_away(process):
            raise away()

    def committed(self, call: Call) -> None:
        if self.checker.committed(call):
            for scheduler in self.schedulers:
                wait = 20 + self.world.draw("poll", self.plan.poll)
                scheduler._stopping.wake(wait)
                if self.config.dispatch_window < 1000:  # which is counted again a second later
                    self.world.at(self.world.now + wait + 1100, scheduler._stopping.wake)

    def lost_answer(self) -> Any:
        """None, or how long the process is cut off whose commit is not answered."""
        process = self.world.process
        mine = self.faults.hits(f"unheard {process.role}") if process is not None else None
        anybodys = self.faults.hits("unheard")
        return anybodys if mine is None else mine

    def unheard(self, label: str, cut: int) -> None:
        """The connection breaks at the commit, and for a while no other one is to be had."""
        self.world.say(f"{label}: committed, but the answer is lost")
        process = self.world.process
        if process is not None and cut:
            process.cut_until = max(process.cut_until, self.world.now + cut)

    def after_transaction(self, call: Call) -> None:
        self.played[f"verb {call.label}"] += 1
        if call.label == "Ends._end" and call.result is not None:
            self.played[f"end {call.args[2].value}"] += 1
        self.checker.returned(call.label, call.args, call.result)
        process = self.world.process
        if process is not None:
            self._crash(process, f"after {call.label}")

    def forward(self, chain: list[dict[str, Any]]) -> None:
        """Publish the next link with the rest of its chain, as Celery does."""
        link = chain.pop()
        options = link["options"]
        process = self.world.process
        assert process is not None
        queue = options.get("queue") or process.lifecycle.queue_of(link["task"], None)
        headers = {**options["headers"], "id": options["task_id"], "task": link["task"]}
        self.broker.publish(queue, headers, [[], {}, {"chain": chain or None}])

    def failed(self, error: Exception) -> None:
        real_conflict = isinstance(error, Conflict) and "simulated" not in str(error)
        if isinstance(error, (LifecycleError, OSError, application.Failed)) and not real_conflict:
            self.world.say(f"link ends with {error!r:.100}")
            return
        raise error
