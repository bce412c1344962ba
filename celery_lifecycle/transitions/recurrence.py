"""Where a schedule meets the protocol: what a wake means for a scheduled job, and what comes after its run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from celery_lifecycle.errors import ScheduleInvalid
from celery_lifecycle.model import InFlight, Job, ObjectRef
from celery_lifecycle.timing.instants import MAX_MILLIS, from_millis, to_millis
from celery_lifecycle.timing.schedule import Dropped, ScheduleSpec, first_due, next_due, on_wake

UNREADABLE_MS = 60_000
"""When a schedule whose time zone is unknown here is looked at again."""


@dataclass(frozen=True, slots=True)
class Waking:
    """What to do with a job whose link has come.

    Attributes:
        job: as it is to run; differs from the stored one where the occurrence must be remembered.
        runs: False: its occurrence is dropped by its misfire rule; `job` then has its next time, or `over` is set.
        dropped: what is recorded of the occurrences that are not run; empty if there are none.
    """

    job: Job
    runs: bool = True
    over: bool = False
    scheduled_for: int | None = None
    is_catch_up: bool = False
    dropped: dict[str, Any] = field(default_factory=dict)


def spec_of(job: Job) -> ScheduleSpec | None:
    return ScheduleSpec.from_json(json.loads(job.schedule_json)) if job.schedule_json else None


def dumped(spec: ScheduleSpec) -> str:
    return json.dumps(spec.to_json(), ensure_ascii=False, separators=(",", ":"))


def wake(job: Job, now: int, begun: bool = False) -> Waking:
    """Apply the misfire rule of a scheduled job; any other job just runs, for the time it was due.

    `begun`: this very run has begun before, so it is neither skipped nor does it stand for another time.
    """
    spec = spec_of(job)
    if spec is None:
        return Waking(job, scheduled_for=job.due_ms)
    # One that was put back, for no worker knew its task, was not moved on purpose.
    due = job.due_ms if job.unknown_since_ms is None else None
    met = on_wake(spec, now, due_at=due, begun=begun or job.attempt > 0)
    dropped = _told(met.dropped)
    if met.run:
        stored = job._replace(schedule_json=dumped(met.spec)) if met.must_store else job
        # A moved due time would look like one that was moved on purpose.
        if met.must_store and met.due_at is not None and job.due_ms == spec_due(spec):
            stored = stored._replace(due_ms=met.due_at)
        return Waking(stored, True, False, met.scheduled_for, met.is_catch_up, dropped)
    if met.due_at is None:
        return Waking(job, False, True, met.scheduled_for, False, dropped)
    moved = job._replace(due_ms=met.due_at, schedule_json=dumped(met.spec), attempt=0)
    return Waking(moved, False, False, met.scheduled_for, False, dropped)


def with_begun(job: Job, flight: InFlight) -> Job:
    """A job whose run is ended with it in flight: the occurrence has begun, so it is run again, and for the same time."""
    spec = spec_of(job)
    if spec is None or (job.id, job.version) != (flight.job, flight.version):
        return job
    return job._replace(schedule_json=dumped(replace(spec, begun=True)))


def planned(spec: ScheduleSpec, ref: ObjectRef, job_id: str, now: int) -> tuple[int, str]:
    """The due time of a schedule that is saved now, and what is stored of it."""
    first = first_due(spec, now, key=(ref.kind, ref.name, job_id))
    return first.due_at, dumped(first.spec)


def is_same(job: Job, task: str, payload_json: str, wanted: ScheduleSpec) -> bool:
    """Whether a pending job of the caller's is the schedule that an idempotent call asks for."""
    spec = spec_of(job)
    return (
        spec is not None and (job.task, job.payload_json) == (task, payload_json) and spec.identity == wanted.identity
    )


def with_policy(job: Job, wanted: Job) -> Job:
    """A pending schedule with the policy of an idempotent call that found it, as `wanted` has it.

    It stands where it stood: the same version, the same nominal time. Any other job stays as it is.
    """
    spec, new = spec_of(job), spec_of(wanted)
    if spec is None or new is None:
        return job
    due = job.due_ms
    changed = replace(
        spec, misfire=new.misfire, misfire_grace_ms=new.misfire_grace_ms, misfire_limit=new.misfire_limit,
        jitter_ms=new.jitter_ms,
    )  # fmt: skip
    moves = spec.type != "interval" or spec.fixed_rate
    if moves and new.jitter_ms != spec.jitter_ms:
        changed = replace(changed, offset_ms=min(new.offset_ms, MAX_MILLIS - (spec.nominal or 0)))
        due += changed.offset_ms - spec.offset_ms if due == spec_due(spec) else 0
    if changed != spec:
        job = job._replace(due_ms=due, schedule_json=dumped(changed))
    return job._replace(
        queue=wanted.queue, options_json=wanted.options_json, retry_json=wanted.retry_json,
        singleflight=wanted.singleflight, hung_timeout_ms=wanted.hung_timeout_ms, exclusive=wanted.exclusive,
        recovery_loop=wanted.recovery_loop,
    )  # fmt: skip


def occurrence(job: Job, dropped: dict[str, Any] | None = None) -> Job:
    """The one run that a recurring job stood for, for the dead jobs: replayed, it is run once for its nominal time.

    `dropped`: it is to stand for the first of the times that were dropped.
    """
    spec = spec_of(job)
    if spec is None or not spec.is_recurring:
        return job
    nominal = to_millis(datetime.fromisoformat(dropped["first"])) if dropped else spec.nominal
    return job._replace(schedule_json=dumped(ScheduleSpec("scheduled", nominal=nominal)))


def spec_due(spec: ScheduleSpec) -> int | None:
    return None if spec.nominal is None else spec.nominal + spec.offset_ms


@dataclass(frozen=True, slots=True)
class Following:
    """The occurrence after the one that has run."""

    due: int
    schedule_json: str
    passed_intervals: int = 0
    dropped: dict[str, Any] = field(default_factory=dict)


def following(job: Job, now: int, started_ms: int | None = None) -> Following | None:
    """What comes after a run of a scheduled job that ended at `now`; None: nothing, the job is done."""
    spec = spec_of(job)
    if spec is None:
        return None
    try:
        after = next_due(spec, now, started_at=started_ms)
    except ScheduleInvalid:  # the next time is found by a process that knows the time zone
        return Following(now + UNREADABLE_MS, job.schedule_json or "")
    if after is None:
        return None
    return Following(after.due_at, dumped(after.spec), after.passed_intervals, _told(after.dropped))


def _told(dropped: Dropped | None) -> dict[str, Any]:
    if dropped is None:
        return {}
    first, last = (from_millis(at).isoformat() for at in (dropped.first, dropped.last))
    return {"count": dropped.count, "first": first, "last": last}


def dropped_so_far(before: dict[str, Any], dropped: dict[str, Any]) -> dict[str, Any]:
    """What a schedule has dropped, with what it drops now: one record per schedule, however long it goes on."""
    return {**dropped, "count": before["count"] + dropped["count"], "first": before["first"]}
