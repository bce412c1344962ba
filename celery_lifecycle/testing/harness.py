"""The harness itself: an application inside a test, on a clock that only the test moves."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from celery import Celery
from celery.app.backends import by_url

from celery_lifecycle import holds, signals
from celery_lifecycle.beat import LOOK_AT_HOLDS_EVERY, LifecycleScheduler
from celery_lifecycle.errors import LifecycleError
from celery_lifecycle.lifecycle import Lifecycle, lifecycle_of
from celery_lifecycle.link import header_in
from celery_lifecycle.migrations.revision import upgrade
from celery_lifecycle.model import Cause, DeadJob, Job
from celery_lifecycle.store import Store
from celery_lifecycle.testing.broker import ListProducer, ListSender, Message
from celery_lifecycle.testing.worker import Died, InProcessWorker
from celery_lifecycle.timing.instants import MAX_MILLIS, delay_to_millis, from_millis, to_millis

STUCK_STEP_MS = 200
LOOK_EVERY_MS = round(LOOK_AT_HOLDS_EVERY * 1000)
_SWAPPED = ("_config", "_store", "_database_id", "_sender", "_runner", "_runner_pid", "_window", "_queues")


class HarnessError(LifecycleError, AssertionError):
    """Something that the harness was told to expect did not happen."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A message that was delivered, and what became of it.

    Attributes:
        object, job: `"cart/user-42"` and the job's id; None for a task that is no link.
        task, task_id: as in Flower.
        at: when it was delivered, by the harness's clock.
        state: `SUCCESS`, `FAILURE`, `RETRY`, `IGNORED`, `REJECTED`, `REVOKED`, `LOST` (its process died) or `UNKNOWN`.
        result: what it returned; for a link its outcome, or why it ended quietly.
        error: what it raised.
    """

    object: str | None
    job: str | None
    task: str
    task_id: str
    at: datetime
    state: str
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """A signal of `celery_lifecycle.signals` that was sent: its name, and its keyword arguments."""

    name: str
    values: dict[str, Any]


class Harness:
    """Runs one application inside a test, on a clock that only the test moves.

    Args:
        lifecycle: the application's `Lifecycle`, or its Celery app.
        database_url: a database of its own for this test; default a new SQLite file, gone at the end. Its tables are made.
        start: the time at which the clock starts, an aware datetime; default the real time.

    Use it as a context manager. Within the block the application stores into the test's database and sends to
    `harness.messages`, and its results stay in memory; nothing reaches a broker or a result backend. `task_always_eager` is
    off within it.

    Attributes:
        messages: what is on its way, in order. Take one out to lose it, repeat one to double it.
        ran: what was delivered, in order.
        facts: the signals that were sent, in order.
    """

    def __init__(
        self, lifecycle: Lifecycle | Celery, *, database_url: str | None = None, start: datetime | None = None
    ) -> None:
        self.lifecycle = lifecycle if isinstance(lifecycle, Lifecycle) else lifecycle_of(lifecycle)
        self.app: Celery = self.lifecycle.app
        self.messages: list[Message] = []
        self.ran: list[Ran] = []
        self.facts: list[Fact] = []
        self._database_url = database_url
        self._now_ms = to_millis(start) if start is not None else time.time_ns() // 1_000_000
        self._exits = contextlib.ExitStack()
        self._producer = ListProducer(self.messages, lambda: self._now_ms)
        self._worker = InProcessWorker(self.lifecycle, lambda: self._now_ms, self.advance)
        self._beat = LifecycleScheduler(self.app, lazy=True)
        self._look_at = self._now_ms
        self._doubts: dict[tuple[str, str], int] = {}

    # --- the block

    def __enter__(self) -> Harness:
        with contextlib.ExitStack() as exits:
            self._install(exits)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._exits.close()

    def _install(self, exits: contextlib.ExitStack) -> None:
        lifecycle, app = self.lifecycle, self.app
        url = self._database_url
        if url is None:
            folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="lifecycle-"))
            url = f"sqlite:///{folder}/test.db"
        config = replace(lifecycle.config, database_url=url)
        store = Store(config, clock=lambda: self._now_ms)
        exits.callback(store.close)
        upgrade(store.database)
        for name in _SWAPPED:
            exits.callback(setattr, lifecycle, name, getattr(lifecycle, name))
        lifecycle._config, lifecycle._store, lifecycle._database_id = config, store, None
        lifecycle._window, lifecycle._queues = None, {}
        lifecycle._sender = ListSender(app, lifecycle.database_id, self._producer)
        exits.callback(setattr, app.conf, "task_always_eager", app.conf.task_always_eager)
        app.conf.task_always_eager = False
        exits.callback(app.__dict__.pop, "producer_or_acquire", None)
        app.producer_or_acquire = lambda producer=None: contextlib.nullcontext(self._producer)
        self._own_results(exits)
        self._beat._lifecycle = lifecycle
        exits.enter_context(holds.renewed_by_hand())
        exits.callback(self._worker.end)
        self._worker.start()
        for name in signals.__all__:
            exits.callback(getattr(signals, name).disconnect, self._listen(name))

    def _own_results(self, exits: contextlib.ExitStack) -> None:
        """Results into memory, if the application stores any; one without a backend must meet here what it meets there."""
        app = self.app
        if str(app.backend_cls or app.conf.result_backend or "disabled").startswith("disabled"):
            return
        exits.callback(self._forget_tracers)
        exits.callback(setattr, app, "_backend_cache", app._backend_cache)
        backend, url = by_url("cache+memory://", app.loader)
        app._backend_cache = backend(app=app, url=url)
        self._forget_tracers()

    def _forget_tracers(self) -> None:
        """Celery's tracer of a task, made when it first runs, keeps the backend of that time."""
        for task in self.app.tasks.values():
            task.__trace__ = None

    def _listen(self, name: str) -> Any:
        def receive(sender: Any = None, signal: Any = None, **values: Any) -> None:
            self.facts.append(Fact(name, values))
            if name == "job_slow_dispatch" and values["fenced"] and self._worker.running:
                self._worker.running[-1].fenced = True

        getattr(signals, name).connect(receive, weak=False)
        return receive

    # --- the clock

    @property
    def now(self) -> datetime:
        """The harness's time, aware."""
        return from_millis(self._now_ms)

    def advance(self, seconds: float | timedelta) -> None:
        """Let time pass: everything that comes due within it runs, in order and at its time.

        Inside a job it means that the job takes so long: its lease and its keep-alives are renewed, beat ticks, a job over
        its `hung_timeout` is reported and a hung singleflight job is stopped; nothing else runs meanwhile.
        """
        self._pass(self._now_ms + delay_to_millis(seconds))

    def advance_to(self, at: datetime) -> None:
        """`advance` to an aware datetime that is not before `now`."""
        if to_millis(at) < self._now_ms:
            raise HarnessError(f"advance_to({at}): it is {self.now} already, and time only goes forward.")
        self._pass(to_millis(at))

    def stall(self, seconds: float | timedelta) -> None:
        """Inside a job: let time pass while this worker is frozen, or cut off from the database. It renews nothing.

        Others go on: beat may take it for lost, end the run and send the job again; a result that comes later is refused.
        """
        self._pass(self._now_ms + delay_to_millis(seconds), lives=False)

    def _pass(self, target: int, lives: bool = True) -> None:
        self._live(lives)
        while self._now_ms < target:
            self._now_ms = min(self._next_ms(), target)
            self._live(lives)

    def _live(self, lives: bool) -> None:
        """What worker, holders and beat do at this time."""
        if lives:
            self._worker.live()
            for hold in holds.live_holds():
                hold.renew()
        if self._worker.running:
            self._tick()
        else:
            self.run_due()

    def _next_ms(self) -> int:
        """The next time at which anything happens by itself."""
        store, config, now = self.lifecycle.store, self.lifecycle.config, self._now_ms
        times = [message.due_ms for message in self.messages]
        for heads in store.claims.heads():
            alarms = [alarm for alarm in (heads.idle, heads.sent, heads.open) if alarm is not None]
            # What is due and was not sent (no room, no broker) is looked at again, as beat does.
            times += [alarm if alarm > now else now + STUCK_STEP_MS for alarm in alarms]
        times += [max(hold.expires_ms + 1, self._look_at) for hold in store.holds.expired(before_ms=MAX_MILLIS)]
        if holds.live_holds():
            times.append(now + config.keep_alive_ms // 3)
        if self._worker.running:
            times.append(now + round(config.renew_every * 1000))
        return min((at for at in times if at > now), default=MAX_MILLIS)

    # --- beat and worker

    def run_due(self, limit: int = 10_000) -> list[Ran]:
        """Run everything that is due now, to its end, with all that becomes due through it. Returns what was delivered.

        Raises:
            HarnessError: more than `limit` messages: probably a job that yields or pushes itself for ever.
        """
        before = len(self.ran)
        self._tick()
        while self.deliver() is not None or self._tick():
            if len(self.ran) - before > limit:
                last = ", ".join(f"{ran.object}#{ran.job}" for ran in self.ran[-3:])
                raise HarnessError(f"More than {limit} messages ran without an end; the last were {last}.")
        return self.ran[before:]

    def tick(self) -> int:
        """One round of beat: what is due is claimed and sent, nothing is delivered. Returns how many messages are on their way."""
        self._tick()
        return len(self.messages)

    def _tick(self) -> bool:
        self._beat._held_until.clear()
        self._beat._dispatch_due()
        if self._now_ms >= self._look_at:
            self._look_at = self._now_ms + LOOK_EVERY_MS
            holds.look(self.lifecycle, self._doubts)
        for telling in self._beat._telling:
            telling.result()
        return any(message.due_ms <= self._now_ms for message in self.messages)

    def deliver(self) -> Ran | None:
        """Deliver the first message that is due and run it to its end; None if there is none."""
        if self._worker.running:
            raise HarnessError("A job runs: its worker takes no other message meanwhile.")
        for index, message in enumerate(self.messages):
            if message.due_ms <= self._now_ms:
                del self.messages[index]
                header, at = header_in(message.headers) or {}, self.now
                state, result, error = self._worker.receive(message)
                name, job = header.get("name"), header.get("job")
                self.ran.append(Ran(name, job, message.task, message.task_id, at, state, result, error))
                return self.ran[-1]
        return None

    # --- faults

    @property
    def broker_is_down(self) -> bool:
        """While True nothing can be sent; set it."""
        return self._producer.is_down

    @broker_is_down.setter
    def broker_is_down(self, is_down: bool) -> None:
        self._producer.is_down = is_down

    def kill_next(self, job: str | None = None, *, cause: str = "oom", times: int = 1) -> None:
        """The next attempts of a job (None: of whatever comes) die with their process as they begin.

        Args:
            cause: `oom` (the kernel killed it for memory), `suspected` (killed, by whom is not known), `crash`, or `lost`: the
                whole worker is gone, and nobody knows before its lease is over.
            times: how many attempts.
        """
        self._worker.kill_next(job, _cause(cause), times)

    def die(self, cause: str = "oom") -> None:
        """Called by code of a job, `on_start` or `on_alarm`: its process dies here. See `kill_next`."""
        raise Died(_cause(cause))

    def drain(self) -> None:
        """The worker gets SIGTERM, as in a deploy: what is killed from now on is put back, and is no strike.

        A new one is there after it is lost: `die("lost")`, `kill_next(cause="lost")`.
        """
        self._worker.drain()

    def lose(self, hold: holds.Hold) -> None:
        """The process that holds a keep-alive dies: it is never renewed again."""
        hold.abandon()

    def revoke(self, task_id: str) -> None:
        """What `app.control.revoke(task_id)` does in a worker."""
        self._worker.revoke(task_id)

    # --- what tests ask

    def sent(self, name: str) -> list[dict[str, Any]]:
        """The keyword arguments of each signal of this name that was sent."""
        return [fact.values for fact in self.facts if fact.name == name]

    def started(self, job: str | None = None, object: Any = None) -> list[dict[str, Any]]:
        """The attempts that began, in order (of a job, of an object): `object`, `job`, `attempt`, `task_id`."""
        return [
            fact
            for fact in self.sent("job_started")
            if job in (None, fact["job"]) and (object is None or str(fact["object"]) == str(object))
        ]

    def assert_ran(self, job: str, *, times: int | None = None, object: Any = None) -> None:
        """That attempts of a job began: at least one, or exactly so many."""
        count = len(self.started(job, object))
        if (count == 0 and times is None) or times not in (None, count):
            began = [fact["job"] for fact in self.sent("job_started")]
            wanted = "at least once" if times is None else f"{times} times"
            raise HarnessError(f"{job!r} began {count} times, not {wanted}. These began: {began}.")

    def assert_pending(self, handle: Any, job: str, *, at: datetime | None = None) -> Job:
        """That an object has a pending job of this id, of whatever owner (due at this time). Returns it."""
        found = self.lifecycle.store.jobs.get(handle.ref, job, None)
        if found is None:
            there = [one.id for one in self.lifecycle.store.jobs.list(handle.ref, None)]
            raise HarnessError(f"{handle} has no pending job {job!r}; it has {there}.")
        if at is not None and found.due_at != at:
            raise HarnessError(f"{handle}#{job} is due at {found.due_at}, not at {at}.")
        return found

    def assert_dead(self, handle: Any, job: str, *, reason: str | None = None) -> DeadJob:
        """That an object has a dead job of this id (the last one for this reason). Returns the last one."""
        dead = [one for one in self.lifecycle.store.dead.list(handle.ref, limit=10_000) if one.job.id == job]
        if not dead or reason not in (None, dead[-1].reason):
            raise HarnessError(f"{handle}#{job} is dead for {[one.reason for one in dead]}, not for {reason!r}.")
        return dead[-1]

    def assert_idle(self) -> None:
        """That no message is on its way."""
        if self.messages:
            raise HarnessError(f"On their way are {[(one.task, one.job) for one in self.messages]}.")


def _cause(name: str) -> Cause:
    known = {cause.value: cause for cause in (Cause.OOM, Cause.SUSPECTED, Cause.CRASH, Cause.LOST)}
    if name not in known:
        raise HarnessError(f"cause={name!r}: give one of {', '.join(known)}.")
    return known[name]
