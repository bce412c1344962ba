"""What a running job is given: its object, its payload, its attempt, and what it may do to the run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from celery import current_task

from celery_lifecycle.holds import KeepAlive, track
from celery_lifecycle.model import Job
from celery_lifecycle.queue import JobQueue
from celery_lifecycle.storage import RunStorage


@dataclass(slots=True)
class JobContext:
    """The `ctx` of a lifecycle job.

    Attributes:
        object: the object's handle (an instance of its class, if it has one).
        job: the job as it was when the attempt began, frozen.
        payload: the JSON value given at push.
        attempt: calls of the function in this run, counted from 1.
        strikes: deaths of this job so far (design, section 7).
        scheduled_for: aware datetime that the run stands for: the nominal time of a schedule, else the due time.
        is_catch_up: the run makes up for a time that was missed (misfire rule of its schedule).
        storage: the object's key-value store; writes are stored if and only if the link's finish is accepted.
        jobs: the jobs of the object, or of the capability whose method this is; pushes happen at once, in their own
            transaction.
        task: the Celery request of the link.
        logger: logs with object and job as fields.
    """

    object: Any
    job: Job
    payload: Any
    attempt: int
    strikes: int
    scheduled_for: datetime | None
    is_catch_up: bool
    storage: RunStorage
    jobs: JobQueue
    task: Any
    logger: logging.LoggerAdapter[logging.Logger] = field(repr=False)
    _deployment: Any = field(repr=False, default=None)

    def track(self, work: Any) -> bool:
        """Hand off work that goes on after this job: a Celery signature (it is sent), an `AsyncResult`, or a future.

        While it is alive, `Reschedule` of this job is no clean end; if its process dies, the job gets the strike, and the
        object wakes.

        Returns:
            True: it is tracked. (`track_alarm_work` outside of a run gives False.)
        """
        return track(self._deployment, self.job.object, self.job.id, work)

    def retry(
        self, *, exc: BaseException | None = None, eta: datetime | None = None, countdown: float | None = None,
        max_retries: int | None = None,
    ) -> NoReturn:  # fmt: skip
        """Put the job back with its attempts, as `self.retry` of a Celery task: `raise ctx.retry(countdown=60)`.

        Args:
            exc: what is raised, and kept with the dead job, once the retries are used up.
            eta, countdown: aware datetime, or seconds; default the task's `default_retry_delay`, 180 s.
            max_retries: default the task's own, 3.

        Raises:
            celery.exceptions.Retry: always, unless the retries are used up.
        """
        current_task.retry(exc=exc, eta=eta, countdown=countdown, max_retries=max_retries)
        raise AssertionError("retry() raises")

    def tracked(self) -> int:
        """How much of what this job has handed off by `track`, in this run or an earlier one, is unfinished. Asks the database."""
        holds = self._deployment.store.holds.of(self.job.object)
        return sum(hold.kind == "track" and hold.job == self.job.id for hold in holds)

    def keep_alive(self) -> KeepAlive:
        """Keep the object for longer than this run: a context manager, or `.release()` later. See `LifecycleObject.keep_alive`."""
        return KeepAlive(self._deployment, self.job.object)
