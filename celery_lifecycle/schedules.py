"""The schedules of an object as its users see them: after a delay, at a date, by a cron expression, after each interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any, get_args

from celery_lifecycle import validate
from celery_lifecycle.deployment import Deployment, Target, current_run
from celery_lifecycle.errors import ScheduleInvalid
from celery_lifecycle.model import Job, ObjectRef, RetryPolicy
from celery_lifecycle.queue import Push, Resolve, draft_of, same_call_id, sorted_text, store_drafted
from celery_lifecycle.store.jobs import Draft
from celery_lifecycle.timing.instants import from_millis, to_millis
from celery_lifecycle.timing.spec import (
    DEFAULT_MISFIRE_LIMIT,
    Delay,
    Misfire,
    ScheduleSpec,
    ScheduleType,
    spec_every,
    spec_for,
)
from celery_lifecycle.transitions.recurrence import dumped, spec_of


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pending schedule as it stood when it was asked for. Change it by scheduling again, or through `cancel_schedule`.

    Attributes:
        object: whose schedule it is.
        id: unique within the object and the owner of the schedule.
        callback: the method name, or the full task name where it is no method of the object.
        payload: the JSON value given.
        type: `"delayed"`, `"scheduled"`, `"cron"` or `"interval"`.
        time: aware datetime of the next run, jitter included; in the past if it is due and has not ended yet.
        scheduled_for: aware datetime of the nominal time that the next run stands for.
        cron: the expression of a `cron`, else None.
        timezone: the tz database name of the zone whose clocks a `cron` goes by, else None.
        seconds: the interval of an `interval`, else None.
        delay: the seconds of a `delayed`, else None.
        fixed_rate: an `interval` keeps to its grid.
        misfire: what becomes of missed times: `"run_once"`, `"skip"` or `"all"`.
        sealed: True only on what a call from inside a run gets back for a sealed one: it is not pending any more.
    """

    object: ObjectRef
    id: str
    callback: str
    payload: Any
    type: ScheduleType
    time: datetime
    scheduled_for: datetime
    cron: str | None = None
    timezone: str | None = None
    seconds: float | None = None
    delay: float | None = None
    fixed_rate: bool = False
    misfire: Misfire = "run_once"
    sealed: bool = False


def schedule_of(job: Job, callback: str) -> Schedule | None:
    """The schedule that a job keeps in its row; None if it has none."""
    spec = spec_of(job)
    if spec is None:
        return None
    return Schedule(
        object=job.object,
        id=job.id,
        callback=callback,
        payload=job.payload,
        type=spec.type,
        time=from_millis(job.effective_ms),
        scheduled_for=from_millis(spec.nominal if spec.nominal is not None else job.due_ms),
        cron=spec.cron,
        timezone=spec.timezone,
        seconds=spec.seconds if spec.type == "interval" else None,
        delay=spec.seconds if spec.type == "delayed" else None,
        fixed_rate=spec.fixed_rate,
        misfire=spec.misfire,
        sealed=job.sealed,
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """What `schedule` and `schedule_every` take alike, beside when and what."""

    retry: RetryPolicy | None = None
    idempotent: bool | None = None
    misfire: Misfire = "run_once"
    misfire_grace: Delay | None = None
    misfire_limit: int = DEFAULT_MISFIRE_LIMIT
    jitter: Delay = 0
    id: str | None = None

    def timed(self) -> dict[str, Any]:
        return {
            "misfire": self.misfire, "misfire_grace": self.misfire_grace, "misfire_limit": self.misfire_limit,
            "jitter": self.jitter,
        }  # fmt: skip


def spec_at(deployment: Deployment, when: Any, timezone: str | tzinfo | None, policy: Policy) -> ScheduleSpec:
    """The spec of `schedule(when, …)`; a cron without a zone goes by the app's."""
    zone = timezone if timezone is not None else deployment.timezone if isinstance(when, str) else None
    return spec_for(when, timezone=_zone_name(zone), **policy.timed())


def spec_repeating(every: Delay, fixed_rate: bool, policy: Policy) -> ScheduleSpec:
    """The spec of `schedule_every(every, …)`."""
    return spec_every(every, fixed_rate=validate.flag(fixed_rate, "fixed_rate"), **policy.timed())


def _zone_name(zone: str | tzinfo | None) -> str | None:
    if zone is None or isinstance(zone, str):
        return zone
    name = getattr(zone, "key", None) or getattr(zone, "zone", None)
    if isinstance(name, str):
        return name
    raise ScheduleInvalid(
        f"timezone={zone!r} has no name in the tz database: give one, like 'Europe/Berlin' or 'UTC'"
        " (without timezone= it is the app's, app.conf.timezone)."
    )


def drafted(
    deployment: Deployment, ref: ObjectRef, owner: str, target: Target, spec: ScheduleSpec, payload: Any, policy: Policy
) -> Draft:  # fmt: skip
    """The draft of a schedule's row, with the id by which an idempotent call finds it again.

    Crons and intervals are idempotent unless they are told otherwise; delays and dates if they are told so, and inside
    `on_start`, which runs often, if they have no id.
    """
    push = Push(target.task, payload=payload, id=policy.id, retry=policy.retry)
    draft = draft_of(deployment, ref, owner, target, push, schedule=spec)
    draft = draft._replace(owner=owner, payload_json=sorted_text(draft.payload_json))
    if not is_idempotent(spec, policy):
        return draft
    if policy.id is not None:
        return draft._replace(keep=True)
    return draft._replace(id=same_call_id(draft), keep=True, alike=True)


def is_idempotent(spec: ScheduleSpec, policy: Policy) -> bool:
    """Whether a call gives back the schedule that it finds, instead of adding one."""
    if policy.idempotent is not None:
        return validate.flag(policy.idempotent, "idempotent")
    run = current_run()
    return spec.is_recurring or (run is not None and run.starting and policy.id is None)


def stored_schedule(deployment: Deployment, draft: Draft, callback: str, session: Any, connection: Any) -> Schedule:
    """Store the draft of a schedule, at once or in the caller's transaction."""
    job = store_drafted(deployment, draft, session, connection)
    stored = schedule_of(job, callback)
    if stored is None:  # what is sealed under this id was no schedule
        assert draft.schedule is not None
        stored = schedule_of(job._replace(schedule_json=dumped(draft.schedule)), callback)
        assert stored is not None
    return stored


def chosen(
    schedules: Iterable[Schedule], id: str | None, type: ScheduleType | None, start: datetime | None, end: datetime | None
) -> list[Schedule]:  # fmt: skip
    """Those that match everything given, ordered by time, then id.

    Raises:
        TimeInvalid: `start` or `end` is no aware datetime.
        ScheduleInvalid: there is no such type.
    """
    if type is not None and type not in get_args(ScheduleType):
        raise ScheduleInvalid(f"type={type!r}: give one of {', '.join(get_args(ScheduleType))}.")
    if id is not None:
        validate.name(id, "id")
    for given in (start, end):
        if given is not None:
            to_millis(given)  # refuses what is no aware datetime
    found = [
        one
        for one in schedules
        if (id is None or one.id == id)
        and (type is None or one.type == type)
        and (start is None or start <= one.time)
        and (end is None or one.time <= end)
    ]
    return sorted(found, key=lambda one: (one.time, one.id))


class Scheduling:
    """What can be scheduled on an object, by its class (owner `"scheduler"`) or by a capability (owner: its id)."""

    def _scheduling(self) -> tuple[Deployment, ObjectRef, str, Resolve]:
        """Where schedules go: deployment, object, owner, and what turns a callback into a target."""
        raise NotImplementedError

    def _callback_of(self, task: str) -> str:
        """The name by which users know a task here."""
        raise NotImplementedError

    def schedule(
        self,
        when: datetime | timedelta | float | str,
        callback: Any,
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
        """Have a job run after a delay, at a date, or by a cron expression.

        Args:
            when: seconds or timedelta → `delayed`; an aware datetime → `scheduled` (a past one is due at once); a string of
                five fields → `cron`.
            callback: a method name, a full task name, a task, or a bound handle, as for `jobs.push`.
            payload: JSON of at most 2 MB, given to the job as `ctx.payload`.
            retry: attempts and delays of each run; default those of the decorator.
            idempotent: give back the pending schedule of the same callback, payload and, of a cron, expression and zone, if
                there is one, instead of adding another; it takes on the policy of this call. Default: for a cron; for a
                delay or date inside `on_start`, if no id is given. Of a delay or date the time is not compared.
            timezone: the zone of the tz database whose clocks a cron goes by. Default `app.conf.timezone`.
            misfire: what becomes of missed times: `"run_once"` (one run for the latest), `"skip"`, or `"all"`.
            misfire_grace: seconds or timedelta: a run later than this is a misfire. Default a minute, or half a cron's gap.
            misfire_limit: with `"all"`, how many missed times are run at most, the latest ones. Default 100.
            jitter: seconds or timedelta over which the same schedule of different objects is spread. Default 0.
            id: replaces the schedule that has it, unless an idempotent call finds it as it is to be. Default: made up.
            session, connection: store it in the caller's own transaction; see `jobs.push`.

        Returns:
            The schedule; with `sealed` set if it is sealed and this call came from inside a run.

        Raises:
            ScheduleInvalid, TimeInvalid: `when` or an option of time is not allowed.
            NameInvalid, PayloadError, PolicyInvalid, UnknownTask, OwnerConflict, ObjectDisabled: as for `jobs.push`.
        """
        policy = Policy(retry, idempotent, misfire, misfire_grace, misfire_limit, jitter, id)
        deployment, ref, owner, resolve = self._scheduling()
        spec = spec_at(deployment, when, timezone, policy)
        draft = drafted(deployment, ref, owner, resolve(callback), spec, payload, policy)
        return stored_schedule(deployment, draft, self._callback_of(draft.task), session, connection)

    def schedule_every(
        self,
        seconds: timedelta | float,
        callback: Any,
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
        """Have a job run again and again: the first time after one interval, then one interval after the end of each run.

        It never overlaps itself, and goes on after errors. The call is idempotent: a schedule of the same interval, callback
        and payload stays as it is; with `id=`, another one of this id is replaced.

        Args:
            seconds: the interval, at least 1 s; or a timedelta.
            fixed_rate: keep to the grid that begins now, however long a run takes; what it outlasts is passed over.
            callback, payload, retry, misfire, misfire_grace, misfire_limit, jitter, id, session, connection: see `schedule`.

        Returns, Raises: as `schedule`.
        """
        policy = Policy(retry, True, misfire, misfire_grace, misfire_limit, jitter, id)
        deployment, ref, owner, resolve = self._scheduling()
        spec = spec_repeating(seconds, fixed_rate, policy)
        draft = drafted(deployment, ref, owner, resolve(callback), spec, payload, policy)
        return stored_schedule(deployment, draft, self._callback_of(draft.task), session, connection)

    def get_schedule(self, id: str) -> Schedule | None:
        """The pending schedule of this id, or None."""
        deployment, ref, owner, _ = self._scheduling()
        job = deployment.store.jobs.get(ref, validate.name(id, "id"), owner)
        return schedule_of(job, self._callback_of(job.task)) if job is not None else None

    def list_schedules(
        self,
        *,
        id: str | None = None,
        type: ScheduleType | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
    ) -> list[Schedule]:
        """The pending schedules that match everything given, ordered by their next time, then id.

        Args:
            id, type: exactly this one.
            start, end: aware datetimes: `start <= time <= end`.
        """
        deployment, ref, owner, _ = self._scheduling()
        pending = (schedule_of(job, self._callback_of(job.task)) for job in deployment.store.jobs.list(ref, owner))
        return chosen((one for one in pending if one is not None), id, type, start, end)

    def cancel_schedule(self, id: str) -> bool:
        """End a schedule. A run of it that is under way goes on, but nothing comes after it.

        Returns:
            Whether there was one.
        """
        if self.get_schedule(id) is None:
            return False
        deployment, ref, owner, _ = self._scheduling()
        return deployment.store.jobs.cancel(ref, id, owner) is not None
