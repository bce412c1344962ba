"""A test harness for your own tests: the real job table, a clock of its own, a broker and a worker inside the test.

    with Harness(lifecycle) as harness:
        Cart("user-42").jobs.push("remind", delay=3600)
        harness.advance(3600)
        harness.assert_ran("remind", times=1)

What is simulated is the broker (a list), the clock, and the death of processes. Everything else is what runs in production:
messages are built, encoded and decoded, links run through Celery's own request and tracer, beat claims what is due.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import Celery
from celery import signals as celery_signals
from celery.exceptions import Ignore, Reject, Retry, WorkerLostError
from celery.utils.imports import symbol_by_name
from celery.worker import state as worker_state
from kombu import Connection, Producer
from kombu.message import Message as KombuMessage

from celery_lifecycle import holds, signals, worker
from celery_lifecycle.beat import LOOK_AT_HOLDS_EVERY, LifecycleScheduler
from celery_lifecycle.dispatch import Sender
from celery_lifecycle.errors import LifecycleError
from celery_lifecycle.life import begin_life, this_life, this_worker
from celery_lifecycle.lifecycle import Lifecycle, lifecycle_of
from celery_lifecycle.link import HEADER
from celery_lifecycle.migrations.schema import migrate
from celery_lifecycle.model import Cause, DeadJob, Job
from celery_lifecycle.runner import Runner
from celery_lifecycle.store import Store
from celery_lifecycle.task import LifecycleTask, classify
from celery_lifecycle.timing.instants import MAX_MILLIS, delay_to_millis, from_millis, to_millis

__all__ = ["Fact", "Harness", "HarnessError", "Message", "Ran"]

HOSTNAME = "harness"
STUCK_STEP_MS = 200
LOOK_EVERY_MS = round(LOOK_AT_HOLDS_EVERY * 1000)
_SWAPPED = ("_config", "_store", "_database_id", "_sender", "_runner", "_runner_pid", "_sent", "_queues")


class HarnessError(LifecycleError, AssertionError):
    """Something that the harness was told to expect did not happen."""


class _Died(BaseException):
    """The process that runs a link is gone: no code of the job may catch it."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause


@dataclass(slots=True)
class Message:
    """A message on its way, as its broker would hold it.

    Attributes:
        queue, task, task_id: where it goes, what it runs.
        job: id of the job, or None for a message that is no link.
        due_ms: before that time it is not delivered (an ordinary task with `eta`).
    """

    queue: str
    task: str
    task_id: str
    job: str | None
    body: Any
    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    due_ms: int = 0


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


@dataclass(slots=True)
class _Kill:
    job: str | None
    cause: Cause
    times: int


class Harness:
    """Runs one application inside a test, on a clock that only the test moves.

    Args:
        lifecycle: the application's `Lifecycle`, or its Celery app.
        database_url: a database of its own for this test; default a new SQLite file, gone at the end. Its tables are made.
        start: the time at which the clock starts, an aware datetime; default the real time.

    Use it as a context manager. Within the block the application stores into the test's database and sends to
    `harness.messages`; nothing reaches a broker. `task_always_eager` is off within it.

    Attributes:
        messages: what is on its way, in order. Take one out to lose it, repeat one to double it.
        ran: what was delivered, in order.
        facts: the signals that were sent, in order.
        broker_is_down: while True nothing can be sent.
    """

    def __init__(
        self, lifecycle: Lifecycle | Celery, *, database_url: str | None = None, start: datetime | None = None
    ) -> None:
        self.lifecycle = lifecycle if isinstance(lifecycle, Lifecycle) else lifecycle_of(lifecycle)
        self.app: Celery = self.lifecycle.app
        self.messages: list[Message] = []
        self.ran: list[Ran] = []
        self.facts: list[Fact] = []
        self.broker_is_down = False
        self._database_url = database_url
        self._now_ms = to_millis(start) if start is not None else time.time_ns() // 1_000_000
        self._exits = contextlib.ExitStack()
        self._kills: list[_Kill] = []
        self._running: list[_Running] = []
        self._held_by_child: list[holds.Hold] = []
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
        lifecycle = self.lifecycle
        url = self._database_url
        if url is None:
            url = f"sqlite:///{exits.enter_context(tempfile.TemporaryDirectory(prefix='lifecycle-'))}/test.db"
        config = replace(lifecycle.config, database_url=url)
        store = Store(config, clock=lambda: self._now_ms)
        exits.callback(store.close)
        migrate(store.database)
        for name in _SWAPPED:
            exits.callback(setattr, lifecycle, name, getattr(lifecycle, name))
        lifecycle._config, lifecycle._store, lifecycle._database_id = config, store, None
        lifecycle._sent, lifecycle._queues = {}, {}
        eager = self.app.conf.task_always_eager
        exits.callback(setattr, self.app.conf, "task_always_eager", eager)
        self.app.conf.task_always_eager = False
        self._producer = _Producer(self)
        lifecycle._sender = _Sender(self.app, lifecycle.database_id, self._producer)
        self.app.producer_or_acquire = lambda producer=None: contextlib.nullcontext(self._producer)
        exits.callback(self.app.__dict__.pop, "producer_or_acquire", None)
        self._beat = LifecycleScheduler(self.app, lazy=True)
        self._beat._lifecycle = lifecycle
        self._renewer = worker.Renewer(self.app, HOSTNAME, kills=False)
        exits.callback(worker._renewers.remove, self._renewer)
        exits.enter_context(holds.renewed_by_hand())
        exits.callback(self._end_worker)
        self._start_worker()
        for name in signals.__all__:
            exits.callback(getattr(signals, name).disconnect, self._listen(name))

    def _listen(self, name: str) -> Any:
        def receive(sender: Any = None, signal: Any = None, **values: Any) -> None:
            self.facts.append(Fact(name, values))
            if name == "job_slow_dispatch" and values["fenced"] and self._running:
                self._running[-1].fenced = True

        getattr(signals, name).connect(receive, weak=False)
        return receive

    def _start_worker(self) -> None:
        begin_life()
        self.lifecycle._runner = _Runner(self)
        self.lifecycle._runner_pid = os.getpid()

    def _end_worker(self) -> None:
        for running in self._running:
            worker_state.requests.pop(running.request.id, None)
        begin_life()

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

    def _pass(self, target: int) -> None:
        self._live()
        while self._now_ms < target:
            following = self._next_ms()
            step = following if following > self._now_ms else self._now_ms + STUCK_STEP_MS
            self._now_ms = min(step, target)
            self._live()

    def _live(self) -> None:
        """What worker, beat and holders do at this time."""
        if self._running:
            self._running[-1].grow_older(self._now_ms)
            self._renewer._round()
            if self._running[-1].fenced:
                raise _Died(Cause.CRASH)
        for hold in holds.live_holds():
            hold.renew()
        if self._running:
            self._tick()
        else:
            self.run_due()

    def _next_ms(self) -> int:
        """The next time at which anything happens by itself."""
        claims = self.lifecycle.store.claims
        times = [message.due_ms for message in self.messages]
        for queue in claims.queues():
            heads = claims.heads(queue)
            times += [alarm for alarm in (heads.idle, heads.sent, heads.open) if alarm is not None]
        expiring = self.lifecycle.store.holds.expired(before_ms=MAX_MILLIS)
        times += [max(hold.expires_ms + 1, self._look_at) for hold in expiring]
        if holds.live_holds():
            times.append(self._now_ms + self.lifecycle.config.keep_alive_ms // 3)
        if self._running:
            times.append(self._now_ms + round(self.lifecycle.config.renew_every * 1000))
        return min((at for at in times if at > self._now_ms), default=self._now_ms + 86_400_000)

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

    run_until_idle = run_due

    def tick(self) -> int:
        """One round of beat: what is due is claimed and sent, nothing is delivered. Returns how many messages are on their way."""
        self._tick()
        return len(self.messages)

    def _tick(self) -> bool:
        self._beat._held_until.clear()
        if not self.broker_is_down:
            self._beat._dispatch_due()
        if self._now_ms >= self._look_at:
            self._look_at = self._now_ms + LOOK_EVERY_MS
            holds.look(self.lifecycle, self._doubts)
        return any(message.due_ms <= self._now_ms for message in self.messages)

    def deliver(self) -> Ran | None:
        """Deliver the first message that is due and run it to its end; None if there is none."""
        if self._running:
            raise HarnessError("A job runs: its worker takes no other message meanwhile.")
        for index, message in enumerate(self.messages):
            if message.due_ms <= self._now_ms:
                del self.messages[index]
                ran = self._deliver(message)
                self.ran.append(ran)
                return ran
        return None

    def _deliver(self, message: Message) -> Ran:
        header = message.headers.get(HEADER) or {}
        at = self.now
        state, result, error = self._receive(message)
        return Ran(
            header.get("name"), header.get("job"), message.task, message.task_id, at, state, result, error
        )  # fmt: skip

    def _receive(self, message: Message) -> tuple[str, Any, BaseException | None]:
        """What a consumer does with a message."""
        received = _Received(
            body=message.body, content_type=message.content_type, content_encoding=message.content_encoding,
            headers=message.headers, properties=message.properties, delivery_info={"routing_key": message.queue},
            accept={message.content_type},
        )  # fmt: skip
        consumer = SimpleNamespace(app=self.app, connection_errors=())
        task = self.app.tasks.get(message.task)
        if task is None:
            celery_signals.task_unknown.send(
                sender=consumer, message=received, exc=KeyError(message.task), name=message.task, id=message.task_id
            )
            return "UNKNOWN", None, None
        if not isinstance(task, LifecycleTask) and HEADER in message.headers:
            worker._guarded(consumer, message.task, None)(received)
            return "UNKNOWN", None, None
        request = symbol_by_name(task.Request)(received, app=self.app, hostname=HOSTNAME, task=task)
        worker_state.task_reserved(request)
        try:
            if request.revoked():
                return "REVOKED", None, None
            request.on_accepted(os.getpid(), time.monotonic())
            return self._execute(request)
        finally:
            worker_state.task_ready(request)

    def _execute(self, request: Any) -> tuple[str, Any, BaseException | None]:
        """What a process of the pool does with a message, and its parent with the end."""
        running = _Running(request, self._now_ms)
        self._running.append(running)
        known = set(map(id, holds.live_holds()))
        try:
            result = request.execute()
        except _Died as died:
            return "LOST", None, self._bury(request, died.cause)
        finally:
            self._running.remove(running)
            self._held_by_child += [hold for hold in holds.live_holds() if id(hold) not in known]
        if not isinstance(result, ExceptionInfo):
            return "SUCCESS", result, None
        error = result.exception
        error = error.exc if isinstance(error, ExceptionWithTraceback) else error
        request.on_failure(result, return_ok=True)
        states = {Retry: "RETRY", Ignore: "IGNORED", Reject: "REJECTED"}
        return next((state for kind, state in states.items() if isinstance(error, kind)), "FAILURE"), None, error

    def _bury(self, request: Any, cause: Cause) -> BaseException:
        """A process died: what it held is renewed no more, and its parent says so, unless it died too."""
        for hold in self._held_by_child:
            hold.abandon()
        self._held_by_child.clear()
        if cause is Cause.LOST:
            error = WorkerLostError("The whole worker was lost.")
            self._start_worker()
            return error
        told = "exitcode 1" if cause is Cause.CRASH else "signal 9 (SIGKILL)"
        this_life().counter = _Counter(moved=cause is Cause.OOM)  # type: ignore[assignment]
        try:
            raise WorkerLostError(f"Worker exited prematurely: {told} Job: 0.")
        except WorkerLostError as error:
            request.on_failure(ExceptionInfo())
            return error

    # --- faults

    def kill_next(self, job: str | None = None, *, cause: str = "oom", times: int = 1) -> None:
        """The next attempts of a job (None: of whatever comes) die with their process as they begin.

        Args:
            cause: `oom` (the kernel killed it for memory), `suspected` (killed, by whom is not known), `crash`, or `lost`: the
                whole worker is gone, and nobody knows before its lease is over.
            times: how many attempts.
        """
        self._kills.append(_Kill(job, _cause(cause), times))

    def die(self, cause: str = "oom") -> None:
        """Called by code of a job, `on_start` or `on_alarm`: its process dies here. See `kill_next`."""
        raise _Died(_cause(cause))

    def lose(self, hold: holds.Hold) -> None:
        """The process that holds a keep-alive (or the future that it tracks) dies: it is never renewed again."""
        hold.abandon()

    def revoke(self, task_id: str) -> None:
        """What `app.control.revoke(task_id)` does in a worker."""
        worker._revoking(SimpleNamespace(app=self.app), task_id)

    def _meets_its_death(self, job: str) -> None:
        for kill in self._kills:
            if kill.times > 0 and kill.job in (None, job):
                kill.times -= 1
                raise _Died(kill.cause)

    # --- what tests ask

    def of(self, name: str) -> list[dict[str, Any]]:
        """The keyword arguments of each signal of this name that was sent."""
        return [fact.values for fact in self.facts if fact.name == name]

    def started(self, job: str | None = None, object: Any = None) -> list[dict[str, Any]]:
        """The attempts that began, in order (of a job, of an object): `object`, `job`, `attempt`, `task_id`."""
        return [
            fact
            for fact in self.of("job_started")
            if job in (None, fact["job"]) and (object is None or str(fact["object"]) == str(object))
        ]

    def assert_ran(self, job: str, *, times: int | None = None, object: Any = None) -> None:
        """That attempts of a job began: at least one, or exactly so many."""
        count = len(self.started(job, object))
        if (count == 0 and times is None) or times not in (None, count):
            raise HarnessError(
                f"{job!r} began {count} times, expected were {'some' if times is None else times}. These began: "
                f"{[fact['job'] for fact in self.of('job_started')]}."
            )

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
        """That an object has a dead job of this id (for this reason). Returns the last one."""
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


@dataclass(slots=True)
class _Running:
    """A link that runs, with its age by the harness's clock."""

    request: Any
    since_ms: int
    fenced: bool = False

    def grow_older(self, now_ms: int) -> None:
        self.request.time_start = time.time() - (now_ms - self.since_ms) / 1000


@dataclass(slots=True)
class _Counter:
    """Stands for the kernel's count of processes killed for memory."""

    moved: bool

    def has_moved(self) -> bool:
        return self.moved


class _Runner(Runner):
    """The runner, in a process that can be killed and that sleeps by the harness's clock."""

    def __init__(self, harness: Harness) -> None:
        super().__init__(harness.lifecycle, this_worker(), classify, sleep=harness.advance)
        self._harness = harness

    def _call(self, code: Any, ctx: Any) -> tuple[Any, BaseException | None]:
        self._harness._meets_its_death(ctx.job.id)
        return super()._call(code, ctx)


class _Received(KombuMessage):
    """A message without a channel: there is nobody to acknowledge it to."""

    def ack(self, multiple: bool = False) -> None: ...

    def reject(self, requeue: bool = False) -> None: ...


class _Sender(Sender):
    """The sender of chains, over the harness's producer."""

    def __init__(self, app: Celery, database_id: str, producer: _Producer) -> None:
        super().__init__(app, database_id)
        self._of_harness = producer

    def _ready_producer(self) -> Producer:
        return self._of_harness

    def reset(self) -> None: ...

    close = reset


class _Producer(Producer):
    """Encodes messages as kombu does, and puts them into the harness's list."""

    def __init__(self, harness: Harness) -> None:
        connection = Connection("memory://")
        super().__init__(connection.channel(), auto_declare=False)
        self._harness = harness

    @contextlib.contextmanager
    def batch(self, max_size: int = 100) -> Iterator[None]:
        yield

    def publish(
        self, body: Any, routing_key: str | None = None, *, headers: dict[str, Any] | None = None,
        serializer: str | None = None, content_type: str | None = None, content_encoding: str | None = None,
        compression: str | None = None, exchange: Any = None, declare: Any = None,
        retry: bool = False, retry_policy: Any = None, delivery_mode: Any = None, timeout: Any = None,
        confirm_timeout: Any = None, **properties: Any,
    ) -> None:  # fmt: skip
        harness = self._harness
        if harness.broker_is_down:
            raise self.connection.connection_errors[0]("The harness's broker is down.")
        headers = dict(headers or {})
        encoded, content_type, encoding = self._prepare(
            body, serializer or "json", content_type, content_encoding, compression, headers
        )
        eta, due = headers.pop("eta", None), 0
        if eta is not None:  # it was made by the real clock
            due = harness._now_ms + round(
                (datetime.fromisoformat(eta) - datetime.now(timezone.utc)).total_seconds() * 1000
            )
        header = headers.get(HEADER) or {}
        harness.messages.append(
            Message(
                routing_key or "", headers["task"], headers["id"], header.get("job"), encoded, content_type, encoding,
                headers, properties, due,
            )
        )  # fmt: skip
