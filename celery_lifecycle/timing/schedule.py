"""Decides when a schedule is due: the first time, after each run, and what a late wake has to do about it.

How store and worker use it, with `now` always from the database:

- saving a schedule: `first_due(spec, now, key=…)` → the job's due time and its stored spec; - begin of a
scheduled job, and resume of a paused object for each of its overdue ones: `on_wake(spec, now, …)` →
  run it or move it on. A run whose `must_store` is set has its spec written with begin; the dropped times are
  recorded either way;
- the regular end of a scheduled job: `next_due(spec of the run, now)` → its next due time and spec, or
None: over.
  `Reschedule`, `YIELD`, retries and failures of the platform move `due_at` alone and keep the stored spec.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from celery_lifecycle.errors import ScheduleInvalid
from celery_lifecycle.timing.instants import MAX_MILLIS, Millis
from celery_lifecycle.timing.spec import (
    Misfire,
    ScheduleSpec,
    ScheduleType,
    jitter_offset,
    spec_every,
    spec_for,
)

__all__ = [
    "LONGEST_DEFAULT_GRACE",
    "SHORTEST_GRACE",
    "Dropped",
    "Misfire",
    "NextDue",
    "ScheduleSpec",
    "ScheduleType",
    "Wake",
    "first_due",
    "jitter_offset",
    "next_due",
    "on_wake",
    "spec_every",
    "spec_for",
]

LONGEST_DEFAULT_GRACE: Millis = 60_000
"""A run that is late for less has not been missed: a lost message, or a deploy, costs about half a minute."""
SHORTEST_GRACE: Millis = 1000
"""Every run is a few milliseconds late: a grace below this would make a misfire of each."""


@dataclass(frozen=True)
class Dropped:
    """Nominal times that are not run: how many, the first and the last of them; never a list."""

    count: int
    first: Millis
    last: Millis


@dataclass(frozen=True)
class NextDue:
    """The next occurrence of a schedule."""

    spec: ScheduleSpec
    """To be stored with the job."""
    due_at: Millis
    """When to wake: the nominal time plus the schedule's jitter; in the past if it is to be run at once."""
    scheduled_for: Millis
    """The nominal time."""
    is_catch_up: bool = False
    dropped: Dropped | None = None
    """Nominal times that were passed over on the way to it."""
    passed_intervals: int = 0
    """Whole intervals that the run has outlasted; 0 for other types."""


@dataclass(frozen=True)
class Wake:
    """What to do with a scheduled job that somebody looks at because it is due."""

    run: bool
    spec: ScheduleSpec
    """The spec of the run; or, if it is not to be run, the one to be stored."""
    due_at: Millis | None
    """If it is not to be run: the new due time; None if there is no other time, then the job is over."""
    scheduled_for: Millis
    """The nominal time that the run stands for; or that of the new due time."""
    is_catch_up: bool = False
    """The run is later than the grace, or stands for dropped times as well."""
    dropped: Dropped | None = None
    must_store: bool = False
    """Else a second attempt after a crash may be skipped, or stand for another time."""


class _Timeline(Protocol):
    """The nominal times of a schedule, as far as they can be known beforehand."""

    def next_after(self, at: Millis) -> Millis | None: ...
    def prev_at_or_before(self, at: Millis) -> Millis | None: ...
    def count_between(self, after: Millis, until: Millis) -> int: ...


@dataclass(frozen=True)
class _Grid:
    anchor: Millis
    interval: Millis

    def next_after(self, at: Millis) -> Millis:
        return self.anchor + ((at - self.anchor) // self.interval + 1) * self.interval

    def prev_at_or_before(self, at: Millis) -> Millis:
        return self.next_after(at) - self.interval

    def count_between(self, after: Millis, until: Millis) -> int:
        return (until - self.anchor) // self.interval - (after - self.anchor) // self.interval


@dataclass(frozen=True)
class _Once:
    nominal: Millis

    def next_after(self, at: Millis) -> Millis | None:
        return self.nominal if self.nominal > at else None

    def prev_at_or_before(self, at: Millis) -> Millis | None:
        return self.nominal if self.nominal <= at else None

    def count_between(self, after: Millis, until: Millis) -> int:
        return int(after < self.nominal <= until)


def first_due(spec: ScheduleSpec, now: Millis, *, key: tuple[str, str, str] = ("", "", "")) -> NextDue:
    """The first occurrence of a schedule that is saved at `now`.

    `key`: kind and name of the object and id of the schedule, for its place in the jitter. A cron begins
    with the first nominal time after `now`, an interval one interval later, a past date is due at once.

    Raises `ScheduleInvalid` if there is no such time.
    """
    nominal: Millis | None
    if spec.type == "scheduled":
        nominal = _nominal(spec)
    elif spec.type == "cron":
        nominal = spec.parsed().next_after(now)
        if nominal is None:
            raise ScheduleInvalid(
                f"The cron expression {spec.cron!r} never matches again in the time zone {spec.timezone}: "
                "the clocks always skip the time it names. Write a fixed hour, which runs after the gap."
            )
    else:
        nominal = now + spec.interval_ms
    if nominal > MAX_MILLIS:
        raise ScheduleInvalid("The schedule begins after the year 9999. Shorten its delay or interval.")
    anchor = now if spec.type == "interval" else None
    offset = jitter_offset(*key, spec.jitter_ms)
    return _due(replace(spec, anchor=anchor, offset_ms=offset), nominal)


def on_wake(spec: ScheduleSpec, now: Millis, *, due_at: Millis | None = None, begun: bool = False) -> Wake:
    """What is to be done at `now` with a scheduled job whose stored spec is `spec`.

    `due_at`: the job's stored due time; one that differs from what the spec says was moved on purpose
    (`reschedule`, `Reschedule`, `YIELD`), and such a job is run as it is. `begun`: an attempt has been
    made that the spec does not know of (attempts or strikes are not 0).

    Else the misfire rule decides, by nominal times and whatever was the cause. Let "latest" be the last
    nominal time that has come. It is late if it is longer ago than the grace.

    - `run_once`: one run, for the latest; a catch-up if that is late, or if earlier ones are dropped for it.
    - `skip`: the latest is run unless it is late; whatever else was missed is dropped.
    - `all`: each of them is run, oldest first, but at most the `misfire_limit` latest ones.

    Times of a single date or delay, and of an interval without `fixed_rate`, do not add up: at most one
    is missed.
    """
    nominal = _nominal(spec)
    planned = nominal + spec.offset_ms
    if begun or spec.begun or (due_at is not None and due_at != planned):
        return Wake(True, replace(spec, begun=True), planned, nominal, spec.is_catch_up)
    if now < planned:
        return Wake(False, spec, planned, nominal)
    return _settle(spec, now)


def next_due(spec: ScheduleSpec, now: Millis, *, started_at: Millis | None = None) -> NextDue | None:
    """The occurrence after the one that `spec` stands for and whose run ended at `now`; None: there is none.

    The next nominal time follows from the last nominal one, so late wakes never add up. Times that passed
    while the run lasted: those of a cron, and with `misfire="all"` those of a fixed-rate interval, come
    under the misfire rule; other intervals go on with the next one, since they say how often and not
    when. `started_at`: when the run began, for `passed_intervals`; default: when it was due.
    """
    nominal = _nominal(spec)
    fresh = replace(spec, begun=False, is_catch_up=False)
    following: Millis | None
    passed = 0
    if spec.type == "interval" and not spec.fixed_rate:
        begin = started_at if started_at is not None else nominal + spec.offset_ms
        passed = max(now - begin, 0) // spec.interval_ms
        fresh, following = replace(fresh, offset_ms=0), now + spec.interval_ms
    else:
        timeline = _timeline(spec)
        following = timeline.next_after(nominal)
        here = now - spec.offset_ms
        if following is not None and following <= here:
            if isinstance(timeline, _Grid):
                passed = timeline.count_between(nominal, here)
            if spec.type == "cron" or spec.misfire == "all":
                return _overdue(replace(fresh, nominal=following), now, passed)
            following = timeline.next_after(here)
    if following is None or following > MAX_MILLIS:
        return None
    return _due(fresh, following, passed_intervals=passed)


def _overdue(spec: ScheduleSpec, now: Millis, passed: int) -> NextDue | None:
    """An occurrence whose nominal time passed during the run before it."""
    wake = _settle(spec, now)
    if wake.due_at is None:
        return None
    # What it stands for is known now: when it wakes, the times that were dropped for it are no longer seen.
    settled = replace(wake.spec, begun=False)
    return NextDue(settled, wake.due_at, wake.scheduled_for, wake.is_catch_up, wake.dropped, passed)


def _settle(spec: ScheduleSpec, now: Millis) -> Wake:
    """The misfire rule, for an occurrence whose time has come and that has not begun."""
    here = now - spec.offset_ms
    nominal = _nominal(spec)
    timeline = _timeline(spec)
    # A nominal time that new zone data no longer knows still counts.
    latest = max(timeline.prev_at_or_before(here) or nominal, nominal)
    following = timeline.next_after(here)
    if spec.type == "interval" and not spec.fixed_rate:
        following = now + spec.interval_ms
    grace = _grace(spec, latest, following)
    late = here - latest > grace
    missed = timeline.count_between(nominal, latest) if latest > nominal else 0
    if spec.misfire == "skip" and late:
        dropped = Dropped(missed + 1, nominal, latest)
        if following is None or following > MAX_MILLIS:
            return Wake(False, spec, None, nominal, dropped=dropped)
        moved = _due(replace(spec, offset_ms=_offset_after(spec), is_catch_up=False), following)
        return Wake(False, moved.spec, moved.due_at, moved.scheduled_for, dropped=dropped)
    chosen = latest
    if spec.misfire == "all":
        chosen, missed = _first_of_last(timeline, nominal, latest, missed, spec.misfire_limit)
        is_catch_up = here - chosen > grace
    else:
        is_catch_up = spec.misfire == "run_once" and (late or missed > 0)
    is_catch_up = is_catch_up or spec.is_catch_up
    run_spec = replace(spec, nominal=chosen, begun=True, is_catch_up=is_catch_up)
    return Wake(
        run=True,
        spec=run_spec,
        due_at=chosen + spec.offset_ms,
        scheduled_for=chosen,
        is_catch_up=is_catch_up,
        dropped=_dropped(timeline, missed, nominal, chosen),
        must_store=spec.misfire == "skip" or is_catch_up or chosen != nominal,
    )


def _first_of_last(timeline: _Timeline, nominal: Millis, latest: Millis, missed: int, limit: int) -> tuple[Millis, int]:
    """The oldest of the `limit` latest times, and how many come before it."""
    if missed < limit:
        return nominal, 0
    chosen = latest
    for _ in range(limit - 1):
        chosen = timeline.prev_at_or_before(chosen - 1) or chosen
    return chosen, missed + 1 - limit


def _dropped(timeline: _Timeline, count: int, first: Millis, chosen: Millis) -> Dropped | None:
    if count == 0:
        return None
    return Dropped(count, first, max(timeline.prev_at_or_before(chosen - 1) or first, first))


def _grace(spec: ScheduleSpec, latest: Millis, following: Millis | None) -> Millis:
    grace = spec.misfire_grace_ms
    if grace is None:
        grace = LONGEST_DEFAULT_GRACE
        if following is not None and (spec.type == "cron" or spec.fixed_rate):
            grace = min(grace, (following - latest) // 2)
    return max(grace, SHORTEST_GRACE)


def _offset_after(spec: ScheduleSpec) -> Millis:
    return 0 if spec.type == "interval" and not spec.fixed_rate else spec.offset_ms


def _due(spec: ScheduleSpec, nominal: Millis, *, passed_intervals: int = 0) -> NextDue:
    # A jitter is cut where the times end, so that `datetime.max` can stand for "never" with any.
    spec = replace(spec, nominal=nominal, offset_ms=min(spec.offset_ms, MAX_MILLIS - nominal))
    return NextDue(spec, nominal + spec.offset_ms, nominal, passed_intervals=passed_intervals)


def _timeline(spec: ScheduleSpec) -> _Timeline:
    if spec.type == "cron":
        return spec.parsed()
    if spec.type == "interval" and spec.fixed_rate:
        return _Grid(spec.anchor or 0, spec.interval_ms)
    return _Once(_nominal(spec))


def _nominal(spec: ScheduleSpec) -> Millis:
    if spec.nominal is None:
        raise ScheduleInvalid("This schedule has no time yet: call `first_due` before it is stored.")
    return spec.nominal
