"""Schedules of a task that belongs to no object class: each is an object of its own, of the task's kind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from typing import Any

from celery.utils import uuid

from celery_lifecycle import validate
from celery_lifecycle.deployment import Target, current_run, routed
from celery_lifecycle.model import SCHEDULER, ObjectRef, RetryPolicy
from celery_lifecycle.schedules import (
    Policy,
    Schedule,
    chosen,
    drafted,
    is_idempotent,
    schedule_of,
    spec_at,
    spec_repeating,
    stored_schedule,
)
from celery_lifecycle.timing.spec import DEFAULT_MISFIRE_LIMIT, Delay, Misfire, ScheduleSpec, ScheduleType

ONE_ATTEMPT = RetryPolicy(max_attempts=1)


class TaskSchedules:
    """The schedules of one task: kind is the task's name, the object's name is the schedule's id."""

    name: str
    app: Any
    lifecycle_target: Target | None
    _get_exec_options: Callable[[], dict[str, Any]]

    @property
    def push_target(self) -> Target:
        """How it is pushed: an ordinary task goes where its calls go, and has one attempt unless the push says more."""
        return self.lifecycle_target or Target(self.name, retry=ONE_ATTEMPT, **routed(self._get_exec_options()))

    def schedule(
        self,
        when: datetime | timedelta | float | str,
        payload: Any = None,
        *,
        retry: RetryPolicy | None = None,
        idempotent: bool | None = None,
        timezone: str | tzinfo | None = None,
        misfire: Misfire = "run_once",
        misfire_grace: Delay | None = None,
        misfire_limit: int = DEFAULT_MISFIRE_LIMIT,
        jitter: Delay = 0,
        id: str | None = None,
        session: Any = None,
        connection: Any = None,
    ) -> Schedule:
        """Have this task run after a delay, at a date, or by a cron expression, as an object of its own.

        An idempotent call finds the schedule that an idempotent call made before, or that has its `id`; from `on_start`,
        delays and dates are those of the object that starts. See `ObjectHandle.schedule` for all else.
        """
        policy = Policy(retry, idempotent, misfire, misfire_grace, misfire_limit, jitter, id)
        return self._schedule(spec_at(self.app.lifecycle, when, timezone, policy), payload, policy, session, connection)

    def schedule_every(
        self,
        seconds: timedelta | float,
        payload: Any = None,
        *,
        fixed_rate: bool = False,
        retry: RetryPolicy | None = None,
        misfire: Misfire = "run_once",
        misfire_grace: Delay | None = None,
        misfire_limit: int = DEFAULT_MISFIRE_LIMIT,
        jitter: Delay = 0,
        id: str | None = None,
        session: Any = None,
        connection: Any = None,
    ) -> Schedule:
        """Have this task run again and again, as an object of its own. See `ObjectHandle.schedule_every`."""
        policy = Policy(retry, True, misfire, misfire_grace, misfire_limit, jitter, id)
        return self._schedule(spec_repeating(seconds, fixed_rate, policy), payload, policy, session, connection)

    def get_schedule(self, id: str) -> Schedule | None:
        """The pending schedule of this id, or None."""
        job = self.app.lifecycle.store.jobs.get(self._ref(id), id, SCHEDULER)
        return schedule_of(job, self.name) if job is not None else None

    def list_schedules(
        self,
        *,
        id: str | None = None,
        type: ScheduleType | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
    ) -> list[Schedule]:
        """The pending schedules of this task, ordered by their next time, then id. See `ObjectHandle.list_schedules`."""
        jobs = self.app.lifecycle.store.jobs.list_schedules_of_kind(self.name, SCHEDULER)
        pending = (schedule_of(job, self.name) for job in jobs if job.task == self.name)
        return chosen((one for one in pending if one is not None), id, type, start, end)

    def cancel_schedule(self, id: str) -> bool:
        """End a schedule of this task. Returns whether there was one."""
        return self.app.lifecycle.store.jobs.cancel(self._ref(id), id, SCHEDULER) is not None

    def _schedule(
        self, spec: ScheduleSpec, payload: Any, policy: Policy, session: Any, connection: Any
    ) -> Schedule:  # fmt: skip
        target = self.push_target
        draft = drafted(
            self.app.lifecycle, ObjectRef(validate.kind(self.name), "?"), SCHEDULER, target, spec, payload, policy
        )
        name = draft.id or uuid()
        run = current_run()
        if (
            policy.id is None
            and is_idempotent(spec, policy)
            and not spec.is_recurring
            and run is not None
            and run.starting
        ):
            name = "=" + hashlib.sha256(f"{run.pusher.ref}\0{name}".encode()).hexdigest()[:32]
        # There is nothing to search on an object of its own.
        draft = draft._replace(ref=self._ref(name), id=name, alike=False)
        return stored_schedule(self.app.lifecycle, draft, self.name, session, connection)

    def _ref(self, id: str) -> ObjectRef:
        return ObjectRef(self.name, validate.name(id, "id"))
