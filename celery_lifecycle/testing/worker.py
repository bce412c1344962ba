"""The worker of a test: Celery's own requests and tracer, in this process, which can be killed without dying."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import Celery, signals
from celery.exceptions import Ignore, Reject, Retry, WorkerLostError
from celery.utils.imports import symbol_by_name
from celery.worker import state as worker_state

from celery_lifecycle import holds, worker
from celery_lifecycle.life import begin_life, this_life, this_worker
from celery_lifecycle.lifecycle import Lifecycle
from celery_lifecycle.link import header_in
from celery_lifecycle.model import Cause
from celery_lifecycle.runner import Runner
from celery_lifecycle.task import LifecycleTask, classify
from celery_lifecycle.testing.broker import Message

HOSTNAME = "harness"
_STATES = {Retry: "RETRY", Ignore: "IGNORED", Reject: "REJECTED"}

End = tuple[str, Any, "BaseException | None"]


class Died(BaseException):
    """The process that runs a link is gone: no code of the job may catch it."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause


@dataclass(slots=True)
class _Kill:
    job: str | None
    cause: Cause
    times: int


@dataclass(slots=True)
class Running:
    """A message that runs, with its age by the clock of the test."""

    request: Any
    since_ms: int
    fenced: bool = False


class InProcessWorker:
    """Receives messages one at a time.

    Args:
        lifecycle: whose runner it provides.
        now_ms: the time of the test.
        sleep: what a job's process does between two attempts.
    """

    def __init__(self, lifecycle: Lifecycle, now_ms: Callable[[], int], sleep: Callable[[float], None]) -> None:
        self.app: Celery = lifecycle.app
        self.running: list[Running] = []
        self._lifecycle = lifecycle
        self._now_ms = now_ms
        self._sleep = sleep
        self._kills: list[_Kill] = []
        self._held_by_child: list[holds.Hold] = []
        self._renewer: Any = None

    def start(self) -> None:
        """Begin a new life: another worker instance."""
        begin_life()
        if self._renewer is None:
            self._renewer = worker.Renewer(self.app, HOSTNAME, kills=False)
        self._lifecycle._runner = _Runner(self._lifecycle, self._sleep, self._meets_its_death)
        self._lifecycle._runner_pid = os.getpid()

    def end(self) -> None:
        """Leave nothing behind in this process."""
        worker._renewers.remove(self._renewer)
        begin_life()

    def live(self) -> None:
        """What the worker's parent does from time to time.

        Raises:
            Died: the running job was hung, and was stopped.
        """
        for running in self.running:
            running.request.accepted_at = time.monotonic() - (self._now_ms() - running.since_ms) / 1000
        self._renewer._round()
        if self.running and self.running[-1].fenced:
            raise Died(Cause.CRASH)

    def drain(self) -> None:
        """Shut down, warmly: the heartbeat says so."""
        this_life().draining = True
        self._renewer._round()

    def kill_next(self, job: str | None, cause: Cause, times: int) -> None:
        self._kills.append(_Kill(job, cause, times))

    def _meets_its_death(self, job: str) -> None:
        for kill in self._kills:
            if kill.times > 0 and kill.job in (None, job):
                kill.times -= 1
                raise Died(kill.cause)

    def receive(self, message: Message) -> End:
        """What a consumer does with a message: its state, its result, its error."""
        received = message.received()
        consumer = _Consumer(self.app)
        task = self.app.tasks.get(message.task)
        if task is None:
            signals.task_unknown.send(
                sender=consumer, message=received, exc=KeyError(message.task), name=message.task, id=message.task_id
            )
            return "UNKNOWN", None, None
        if not isinstance(task, LifecycleTask) and header_in(message.headers) is not None:
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

    def _execute(self, request: Any) -> End:
        """What a process of the pool does with a message, and its parent with the end."""
        running = Running(request, self._now_ms())
        self.running.append(running)
        known = set(map(id, holds.live_holds()))
        try:
            result = request.execute()
        except Died as died:
            result = died
        finally:
            self.running.remove(running)
            self._held_by_child += [hold for hold in holds.live_holds() if id(hold) not in known]
        if isinstance(result, Died):
            return "LOST", None, self._bury(request, result.cause)
        if not isinstance(result, ExceptionInfo):
            return "SUCCESS", result, None
        error = result.exception
        error = error.exc if isinstance(error, ExceptionWithTraceback) else error
        request.on_failure(result, return_ok=True)
        return next((state for kind, state in _STATES.items() if isinstance(error, kind)), "FAILURE"), None, error

    def _bury(self, request: Any, cause: Cause) -> BaseException:
        """A process died: what it held is renewed no more, and its parent says so, unless it died too."""
        for hold in self._held_by_child:
            hold.abandon()
        self._held_by_child.clear()
        if cause is Cause.LOST:
            self.start()
            return WorkerLostError("The whole worker was lost.")
        told = "exitcode 1" if cause is Cause.CRASH else "signal 9 (SIGKILL)"
        this_life().counter = _Counter(moved=cause is Cause.OOM)  # type: ignore[assignment]
        try:
            raise WorkerLostError(f"Worker exited prematurely: {told} Job: 0.")
        except WorkerLostError as error:
            request.on_failure(ExceptionInfo())
            return error

    def revoke(self, task_id: str) -> None:
        """What the remote control command does."""
        worker._revoking(SimpleNamespace(app=self.app), task_id)


@dataclass(slots=True, eq=False)
class _Consumer:
    """What receivers of the consumer's signals may ask of it."""

    app: Celery
    connection_errors: tuple[type[Exception], ...] = ()


@dataclass(slots=True)
class _Counter:
    """Stands for the kernel's count of processes killed for memory."""

    moved: bool

    def has_moved(self) -> bool:
        return self.moved


class _Runner(Runner):
    """The runner, in a process that can be killed and that sleeps by the clock of the test."""

    def __init__(self, lifecycle: Lifecycle, sleep: Callable[[float], None], begins: Callable[[str], None]) -> None:
        super().__init__(lifecycle, this_worker(), classify, sleep=sleep)
        self._begins = begins

    def _call(self, code: Any, ctx: Any) -> tuple[Any, BaseException | None]:
        self._begins(ctx.job.id)
        return super()._call(code, ctx)
