"""What can be done with one logical object, whatever its kind: jobs, schedules, alarm, switches, storage, keep-alives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

from celery_lifecycle import validate
from celery_lifecycle.code import Code
from celery_lifecycle.deployment import Deployment, Target
from celery_lifecycle.errors import NameInvalid, UnknownTask
from celery_lifecycle.holds import KeepAlive
from celery_lifecycle.model import HOST, SCHEDULER, SEALED, DeadJob, ObjectRef
from celery_lifecycle.queue import JobQueue, Resolve, send_due, when
from celery_lifecycle.schedules import Scheduling
from celery_lifecycle.storage import Storage

T = TypeVar("T")


class ObjectHandle(Scheduling):
    """A logical object by its kind and name. Making a handle stores nothing and asks nothing."""

    def __init__(self, deployment: Deployment, ref: ObjectRef) -> None:
        self._deployment = deployment
        self._ref = ref

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._ref}>"

    def __str__(self) -> str:
        return str(self._ref)

    @property
    def name(self) -> str:
        """The object's name within its kind."""
        return self._ref.name

    @property
    def ref(self) -> ObjectRef:
        """Kind and name."""
        return self._ref

    @property
    def jobs(self) -> JobQueue:
        """The object's own jobs (owner `"host"`)."""
        return JobQueue(self._deployment, self._ref, HOST, self._resolve)

    @property
    def storage(self) -> Storage:
        """The object's durable JSON key-value store; outside a run each write is stored at once."""
        return Storage(self._deployment, self._ref)

    def _resolve(self, fn: Any) -> Target:
        if isinstance(fn, str) and "." not in fn and not self._deployment.knows(fn):
            raise UnknownTask(
                f"No class of kind {self._ref.kind!r} is known in this process, so {fn!r} can't be resolved: import the"
                " class, or give the full name of its task."
            )
        return self._deployment.target(fn)

    def _code(self, task: str, **job: Any) -> Code:
        """The code of a link of this object: what its kind brings to every link, and this `job`."""
        limit = self._deployment.config.max_memory_strikes
        return Code(**{"task": task, "ref": self._ref, "handle": self, "resolve": self._resolve, "limit": limit, **job})

    # --- schedules

    def _scheduling(self) -> tuple[Deployment, ObjectRef, str, Resolve]:
        return self._deployment, self._ref, SCHEDULER, self._resolve

    def _callback_of(self, task: str) -> str:
        kind, _, method = task.rpartition(".")
        return method if kind == self._ref.kind else task

    # --- the bare alarm

    @property
    def _alarm_task(self) -> str:
        return f"{self._ref.kind}.on_alarm"

    def set_alarm(self, at: datetime | timedelta | float) -> None:
        """Set the bare alarm, in place of the one that stands: `on_alarm` is called at that time.

        Args:
            at: aware datetime (a past one is due at once), timedelta or seconds from now.

        Raises:
            TimeInvalid: a naive datetime or a negative delay.
            ObjectDisabled: the object's alarms were disabled for good.
        """
        at_ms, delay_ms = when(at, None) if isinstance(at, datetime) else when(None, at)
        queue = self._deployment.queue_of(self._alarm_task, None)
        self._deployment.store.objects.set_alarm(self._ref, self._alarm_task, queue, at_ms, delay_ms)
        if at_ms is None and delay_ms == 0:
            send_due(self._deployment, self._ref, queue)

    def get_alarm(self) -> datetime | None:
        """When the bare alarm is due: None if none is set or while it runs, unless it was set again or waits for a retry."""
        job = self._deployment.store.jobs.get_alarm(self._ref)
        return job.due_at if job is not None else None

    def delete_alarm(self) -> bool:
        """Delete the bare alarm. Returns whether one was set."""
        return self._deployment.store.jobs.cancel(self._ref, "#alarm", HOST) is not None

    # --- switches

    def pause(self, reason: str = "paused") -> None:
        """Stop new runs of this object until `resume`; an open run goes on to its end, jobs can be pushed meanwhile.

        Args:
            reason: why, for those who look later; not `"sealed"`, by which the memory breaker's own pause is known.

        Raises:
            NameInvalid: the reason is not allowed.
        """
        if reason == SEALED:
            raise NameInvalid(f"reason {reason!r}: only the memory breaker seals an object. Give another reason.")
        self._deployment.store.objects.pause(self._ref, validate.name(reason, "reason"))

    def resume(self) -> bool:
        """Let runs begin again; strikes, suspicion, delays and seals of the memory breaker are cleared.

        Returns:
            Whether the object exists.
        """
        return self._deployment.store.objects.resume(self._ref)

    @property
    def paused(self) -> str | None:
        """Why the object is paused (`"sealed"`: by the memory breaker); None if it is not. Asks the database."""
        state = self._deployment.store.objects.find(self._ref)
        return state.paused if state is not None else None

    def disable_alarms(self) -> None:
        """Disable the object's alarms for good: nothing wakes it any more, a push raises `ObjectDisabled`."""
        self._deployment.store.objects.disable(self._ref)

    def rearm_alarm(self) -> None:
        """Derive the object's alarm from its jobs anew. It does not enable what `disable_alarms` disabled."""
        self._deployment.store.jobs.rearm(self._ref)

    def destroy(self) -> bool:
        """Delete the object: jobs, storage, keep-alives, switches and strikes go at once.

        A run that is open goes on; its row goes when it ends, and later links of it end quietly. A later push makes a new
        object. Safe from within a job of the object.

        Returns:
            Whether it existed.
        """
        return self._deployment.store.objects.destroy(self._ref)

    def dead_jobs(self) -> list[DeadJob]:
        """The object's dead jobs, oldest first."""
        return self._deployment.store.dead.list(self._ref, limit=10_000)

    # --- keep-alives

    def keep_alive(self) -> KeepAlive:
        """Keep the object while this process lives: `with cart.keep_alive(): …`; see `KeepAlive`."""
        return KeepAlive(self._deployment, self._ref)

    def keep_alive_while(self, fn: Callable[[], T]) -> T:
        """Call `fn` under a keep-alive and return what it returns."""
        with self.keep_alive():
            return fn()
