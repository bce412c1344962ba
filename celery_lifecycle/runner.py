"""Runs one link: begin → on_start → call → decide → finish. It knows the protocol and the code, not Celery."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from kombu.utils.encoding import safe_repr

from celery_lifecycle import events, memory
from celery_lifecycle.code import Code
from celery_lifecycle.context import JobContext
from celery_lifecycle.deployment import CurrentRun, Deployment, running
from celery_lifecycle.errors import (
    DatabaseUnavailable,
    Fenced,
    OutOfMemory,
    StartFailed,
)
from celery_lifecycle.masking import is_time_limit, masked
from celery_lifecycle.model import (
    ALARM,
    HOOK_PREFIX,
    AlarmInfo,
    Cause,
    Job,
    Link,
    MemoryLimitContext,
    Shipment,
    Why,
    _utc,
)
from celery_lifecycle.outcome import Classify, decide, decide_outside, tell, tell_finished, told_of
from celery_lifecycle.queue import JobQueue
from celery_lifecycle.storage import RunStorage
from celery_lifecycle.store.database import Disconnected, StatementRefused, is_outage
from celery_lifecycle.store.jobs import Pusher
from celery_lifecycle.store.runs import Begun, Calling, Finished
from celery_lifecycle.timing.instants import to_millis
from celery_lifecycle.transitions.run import Action, Verdict, Worker

T = TypeVar("T")
RETRY_DATABASE = 0.5


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a link, for whoever carries the chain on.

    Attributes:
        result: the link's result.
        error: to be raised, so that the task shows what happened.
        goes_on: the rest of the chain is to be published.
        token: of the run; links that have none yet get it.
        again_ms: the job is put back to be tried again then.
        value: the job's own return value, where any value is allowed.
        dead: the job that became a dead job (`why`) instead of being run.
    """

    result: dict[str, Any]
    error: BaseException | None = None
    goes_on: bool = False
    token: str | None = None
    again_ms: int | None = None
    value: Any = None
    completed: bool = False
    dead: Job | None = None
    why: Why | None = None


@dataclass(slots=True)
class Runner:
    """Runs links for one deployment in this process."""

    deployment: Deployment
    worker: Worker
    classify: Classify
    sleep: Callable[[float], None] = lambda seconds: time.sleep(seconds)
    _started: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def run(self, link: Link, code: Code, request: Any = None) -> Report:
        """Run one link to its end. Exceptions that end the process pass through; nothing else is raised."""
        starts = bool(code.starts) and not link.job.startswith(HOOK_PREFIX) and link.token not in self._started
        calling = Calling(code.task, code.limit, code.hook_task, starts)
        with masked():
            begun = self._begin(link, calling)
        if begun.refused is not None:
            return Report({"outcome": "refused", "reason": begun.refused.value, "at": None})
        if begun.dead is not None and begun.why is not None:
            events.died(begun.dead.object, begun.dead.id, begun.why)
        if begun.put_back is not None:
            events.put_back(code.ref, begun.put_back.id, begun.told)
        if begun.waking is not None and begun.waking.dropped:
            events.misfired(code.ref, begun.waking.job.id, begun.waking.dropped)
        if begun.job is None and not begun.alarm:
            return self._passed(begun)
        assert begun.state is not None
        link = replace(link, token=begun.token)
        if starts:
            entered = self._start(link, code, begun)
            if isinstance(entered, Report):
                return entered
            begun = entered
            if begun.job is None and not begun.alarm:
                return self._passed(begun)
        if begun.alarm:
            return self._alarm(link, code, begun)
        assert begun.job is not None
        if link.job.startswith(HOOK_PREFIX):
            return self._hook(link, code, begun, begun.job)
        try:
            return self._job(link, code, begun, begun.job, request)
        except Exception as error:  # a soft time limit, a refusal of the database, our own fault: nobody is dead
            return self._failed_outside(link, code, begun, begun.job, error)

    def _begin(self, link: Link, calling: Calling) -> Begun:
        """Begin; while the database does not answer, try again for as long as a lease lasts.

        A begin that may have been committed is not given up at all: it would be left in flight, and be struck as lost.
        """
        deadline = time.monotonic() + self.deployment.config.lease_ms / 1000
        again = uncertain = False
        while True:
            try:
                return self.deployment.store.runs.begin(link, calling, self.worker, again)
            except DatabaseUnavailable as error:
                uncertain = uncertain or isinstance(error, Disconnected)
                if not uncertain and time.monotonic() > deadline:
                    raise
                if not again:
                    events.database_failed(f"{link.task_id} can't begin; trying again", error)
                again = True
                time.sleep(RETRY_DATABASE)

    def _stored(self, what: str, verb: Callable[[], T], refusable: bool = False) -> T:
        """Call a verb of the store until the database answers: what has run must not be lost to an outage.

        The parent goes on renewing the lease meanwhile. If the run is ended by somebody else all the same, the verb says so.

        Raises:
            StatementRefused: `refusable`, and the database has refused it for as long as a lease lasts.
        """
        said = False
        deadline = time.monotonic() + self.deployment.config.lease_ms / 1000
        while True:
            try:
                return verb()
            except DatabaseUnavailable as error:
                if refusable and isinstance(error, StatementRefused) and time.monotonic() > deadline:
                    raise
                if not said:
                    events.database_failed(f"{what} can't be stored; trying again until the database is back", error)
                said = True
                time.sleep(RETRY_DATABASE)

    def _passed(self, begun: Begun) -> Report:
        self._follow_up(begun.shipment)
        return Report(
            {"outcome": "passed", "at": None},
            goes_on=not begun.closed,
            token=begun.token,
            dead=begun.dead,
            why=begun.why,
        )

    def _follow_up(self, shipment: Shipment | None) -> None:
        if shipment is not None:
            self.deployment.send([shipment])

    # --- on_start

    def _start(self, link: Link, code: Code, begun: Begun) -> Report | Begun:
        ref = code.ref
        error: BaseException | None = None
        with self._inside(begun, code, starting=True):
            try:
                for start in code.starts:
                    start()
            except MemoryError as out:
                error = out
            except Exception as raised:  # whatever a user's hook throws
                error = raised
        if isinstance(error, MemoryError):
            return self._out_of_memory(link, code, error, Cause.MEMORY_ERROR)
        with masked():
            if error is not None:
                next_ms = self._stored(link.task_id, lambda: self.deployment.store.runs.start_failed(link, begun.token))
                if next_ms is not None:
                    events.start_failed(ref, error, next_ms)
                failed = StartFailed(f"on_start of {ref} raised {safe_repr(error)}; its jobs stay.")
                failed.__cause__ = error
                return Report({}, error=failed)
            entered = self._stored(link.task_id, lambda: self.deployment.store.runs.enter(link, begun.token, begun))
            if entered is None:
                return self._fenced(ref, link.job)
        self._started[begun.token] = None
        while len(self._started) > 1000:
            self._started.popitem(last=False)
        return entered

    def _fenced(self, ref: Any, job: str) -> Report:
        events.refused(ref, job, "its run is over")
        return Report({}, error=Fenced(f"The run of {ref}#{job} was ended meanwhile; its late result is refused."))

    @contextlib.contextmanager
    def _inside(self, begun: Begun, code: Code, starting: bool = False) -> Iterator[None]:
        job = begun.job
        pusher = Pusher(code.ref, job.id if job else ALARM, job.task if job else code.task, job.line if job else ALARM)
        if starting:  # what `on_start` pushes does not come from the job that happens to be due
            pusher = replace(pusher, task="")
        with running(CurrentRun(self.deployment, pusher, starting, worker=self.worker.instance)):
            yield

    # --- a job

    def _job(self, link: Link, code: Code, begun: Begun, job: Job, request: Any) -> Report:
        if job.owner not in code.owners:
            return self._unknown_owner(link, begun, job)
        attempt = job.attempt
        while True:
            attempt += 1
            ctx = self._context(code, begun, job, attempt, request)
            events.started(code.ref, job.id, attempt, link.task_id)
            value, error = self._call(code, ctx)
            if isinstance(error, MemoryError):
                cause = Cause.MEMORY_LIMIT if code.memory_limit is not None else Cause.MEMORY_ERROR
                return self._out_of_memory(link, code, error, cause)
            with masked():
                verdict, error = decide(code, ctx, value, error, self.classify, begun.now)
                if is_time_limit(error) or is_outage(error) or not self._holds(verdict):
                    return self._finish(link, code, begun, job, ctx, verdict, value, error)
                if not self._attempted(link, begun.token, job, attempt):
                    return self._fenced(code.ref, job.id)
            assert error is not None
            if not self._waits(code, job, attempt, verdict.delay_ms / 1000, error):
                with masked():
                    return self._finish(link, code, begun, job, ctx, verdict, value, error)
            with masked():  # a run that was given up meanwhile must not start an attempt beside another one
                if not self._attempted(link, begun.token, job, attempt):
                    return self._fenced(code.ref, job.id)

    def _failed_outside(self, link: Link, code: Code, begun: Begun, job: Job, error: Exception) -> Report:
        if isinstance(error, MemoryError):
            return self._out_of_memory(link, code, error, Cause.MEMORY_ERROR)
        with masked():
            if not is_time_limit(error):
                events.unexpected(f"The run of {code.ref}#{job.id} failed around its body", error)
            verdict = decide_outside(code, job, error)
            ctx = self._context(code, begun, job, job.attempt + 1, None)
            return self._finish(link, code, begun, job, ctx, verdict, None, error)

    def _waits(self, code: Code, job: Job, attempt: int, seconds: float, error: BaseException) -> bool:
        """Wait for the next attempt. False: a soft time limit came first, so it is one for another message."""
        try:
            events.retrying(code.ref, job.id, attempt, seconds, error)
            self.sleep(seconds)
        except Exception as limit:
            if is_time_limit(limit):
                return False
            raise
        return True

    def _attempted(self, link: Link, token: str, job: Job, failed: int) -> bool:
        runs = self.deployment.store.runs
        return self._stored(link.task_id, lambda: runs.attempted(link, token, job, failed))

    def _holds(self, verdict: Verdict) -> bool:
        """Whether the next attempt is so near that this process waits for it."""
        if verdict.action is not Action.AGAIN or verdict.at_ms is not None:
            return False
        return verdict.delay_ms <= self.deployment.config.retry_hold * 1000

    def _context(self, code: Code, begun: Begun, job: Job, attempt: int, request: Any) -> JobContext:
        waking = begun.waking
        scheduled = waking.scheduled_for if waking is not None else job.due_ms
        logger = logging.LoggerAdapter(
            logging.getLogger(code.task), {"lifecycle_object": str(code.ref), "lifecycle_job": job.id}
        )
        return JobContext(
            object=code.handle,
            job=job,
            payload=job.payload,
            attempt=attempt,
            strikes=job.strikes,
            scheduled_for=_utc(scheduled) if scheduled is not None else None,
            is_catch_up=bool(waking and waking.is_catch_up),
            storage=RunStorage(self.deployment, code.ref),
            jobs=JobQueue(self.deployment, code.ref, code.owner, code.resolve),
            task=request,
            logger=logger,
            _deployment=self.deployment,
        )

    def _call(self, code: Code, ctx: JobContext) -> tuple[Any, BaseException | None]:
        """The body. Its value or its error; a `MemoryError` leaves with its frames still held."""
        pusher = Pusher(code.ref, ctx.job.id, ctx.job.task, ctx.job.line)
        run = CurrentRun(self.deployment, pusher, attempt=ctx.attempt, worker=self.worker.instance)
        try:
            with running(run), memory.limited(code.memory_limit):
                return code.call(ctx), None
        except Exception as error:  # whatever a user's job throws
            return None, error

    def _finish(
        self, link: Link, code: Code, begun: Begun, job: Job, ctx: JobContext, verdict: Verdict, value: Any,
        error: BaseException | None,
    ) -> Report:  # fmt: skip
        # A failed attempt's writes are dropped; `Ignore` is no failure.
        writes = ctx.storage.pending if error is None or verdict.clean else {}
        runs = self.deployment.store.runs
        tried: list[Job] = []

        def finish() -> Finished:
            again = tried[0] if tried else None
            tried.append(job)
            return runs.finish(link, begun.token, verdict, writes, again)

        # What the database refuses for good is what the job has written. Without it the attempt fails, and the process is free.
        done = self._stored(link.task_id, finish, refusable=bool(writes))
        if not done.accepted:
            return self._fenced(code.ref, job.id)
        tell_finished(code.ref, job, ctx.attempt, verdict, done, error)
        self._follow_up(done.shipment)
        name = {Action.COMPLETE: "complete", Action.DEAD: "complete", Action.AGAIN: "reschedule"}.get(
            verdict.action, verdict.action.value
        )
        at = _utc(done.due_ms).isoformat() if done.due_ms is not None and name == "reschedule" else None
        again = done.due_ms if verdict.action is Action.AGAIN and not done.discarded else None
        return Report(
            {"outcome": name, "at": at},
            error=error,
            goes_on=not done.closed,
            token=begun.token,
            again_ms=again,
            value=value,
            completed=verdict.action in (Action.COMPLETE, Action.DEAD) and not done.discarded,
        )

    def _unknown_owner(self, link: Link, begun: Begun, job: Job) -> Report:
        ends = self.deployment.store.ends
        dead, shipment, accepted = self._stored(
            link.task_id, lambda: ends.unknown(link, begun.token, Why.UNKNOWN_OWNER)
        )
        if accepted:
            events.unknown(job.object, job.task, job.id, dead is not None)
        self._follow_up(shipment)
        return Report({"outcome": "refused", "reason": f"no owner {job.owner!r} is installed", "at": None})

    # --- on_alarm and memory hooks

    def _alarm(self, link: Link, code: Code, begun: Begun) -> Report:
        info = AlarmInfo()
        if begun.job is not None:
            meant = (begun.job.payload or {}).get("for")
            info = AlarmInfo(begun.job.attempt, begun.job.attempt > 0, _at(meant))
        error: BaseException | None = None
        with self._inside(begun, code):
            try:
                if code.alarm is not None:
                    code.alarm(info)
            except MemoryError as out:
                error = out
            except Exception as raised:  # whatever a user's hook throws
                error = raised
        if isinstance(error, MemoryError):
            return self._out_of_memory(link, code, error, Cause.MEMORY_ERROR)
        with masked():
            done = self._stored(link.task_id, lambda: self._alarm_done(link, code, begun, error))
        if not done.accepted:
            return self._fenced(code.ref, ALARM)
        if error is not None and not done.discarded:
            events.alarm_failed(code.ref, error, done.due_ms)
        self._follow_up(done.shipment)
        return Report({"outcome": "complete", "at": None}, error=error, goes_on=not done.closed, token=begun.token)

    def _alarm_done(self, link: Link, code: Code, begun: Begun, error: BaseException | None) -> Finished:
        runs = self.deployment.store.runs
        if error is None:
            return runs.finish(link, begun.token, Verdict(Action.COMPLETE, clean=True))
        told = "".join(traceback.format_exception(error))
        assert begun.state is not None
        queue = begun.state.queue or self.deployment.queue_of(code.task, None)
        return runs.alarm_failed(link, begun.token, queue, code.task, safe_repr(error), told)

    def _hook(self, link: Link, code: Code, begun: Begun, job: Job) -> Report:
        """A memory hook: tried once, whatever becomes of it."""
        context = MemoryLimitContext.from_json(job.payload)
        error: BaseException | None = None
        with self._inside(begun, code):
            for hook in code.memory_hooks:
                try:
                    hook(context)
                except Exception as raised:  # whatever a user's hook throws undoes nothing
                    events.hook_failed(code.ref, "on_memory_limit", raised)
                    error = raised
        if isinstance(error, MemoryError):
            memory.give_back(error)
            error = OutOfMemory(f"on_memory_limit of {code.ref} ran out of memory; it is not tried again.")
        with masked():
            runs = self.deployment.store.runs
            done = self._stored(link.task_id, lambda: runs.finish(link, begun.token, Verdict(Action.COMPLETE)))
        if not done.accepted:
            return self._fenced(code.ref, job.id)
        self._follow_up(done.shipment)
        return Report({"outcome": "complete", "at": None}, error=error, goes_on=not done.closed, token=begun.token)

    # --- the breaker

    def _out_of_memory(self, link: Link, code: Code, error: BaseException, cause: Cause) -> Report:
        """A `MemoryError` never leaves this process: its memory is freed, it is counted, and the process goes on."""
        memory.give_back(error)
        del error
        assert link.token is not None
        token, ends = link.token, self.deployment.store.ends
        details = {"peak_rss_kib": memory.peak_kib(), "memory_limit": code.memory_limit}
        with masked():
            ended = self._stored(link.task_id, lambda: ends.struck_inside(link, token, cause, details))
        if ended is None:
            return self._fenced(code.ref, link.job)
        tell(ended)
        next_time = ended.context.next_time if ended.context is not None else None
        # Whoever waits for a promised id must not be told of a failure: the job runs again under it.
        again = to_millis(next_time) if next_time is not None and link.is_promised else None
        return Report({}, error=OutOfMemory(told_of(ended)), again_ms=again)


def _at(ms: int | None) -> datetime | None:
    return None if ms is None else _utc(ms)
