"""What a schedule is: the frozen description that a job keeps in its row, and the functions that make one."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, get_args

from celery_lifecycle.errors import ScheduleInvalid, TimeInvalid
from celery_lifecycle.timing.cron import Cron, parse_cron
from celery_lifecycle.timing.instants import Millis, delay_to_millis, to_millis

ScheduleType: TypeAlias = Literal["delayed", "scheduled", "cron", "interval"]
Misfire: TypeAlias = Literal["run_once", "skip", "all"]
Delay: TypeAlias = timedelta | int | float

SHORTEST_INTERVAL: Millis = 1000
DEFAULT_MISFIRE_LIMIT = 100
LARGEST_MISFIRE_LIMIT = 1000


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule and where it stands; immutable. Stored with its job as JSON.

    Made by `spec_for` and `spec_every`, which check everything; given its first time by `first_due`.
    """

    type: ScheduleType
    cron: str | None = None
    """The five-field expression of type `cron`."""
    timezone: str | None = None
    """The tz database name of the zone whose clocks a `cron` goes by."""
    seconds: float | None = None
    """The delay of type `delayed`, the interval of type `interval`."""
    fixed_rate: bool = False
    """An interval keeps to the grid `anchor + n * interval`; else it counts from the end of the last run."""
    misfire: Misfire = "run_once"
    """What becomes of nominal times that were missed: one run for the latest, none, or each of them."""
    misfire_grace_ms: Millis | None = None
    """A run later than this is a misfire; it counts as 1 s at least. None: a minute, but with a cron or a
    fixed rate at most half the way to the next nominal time."""
    misfire_limit: int = DEFAULT_MISFIRE_LIMIT
    """With `misfire="all"`: at most so many missed times are run, the latest ones."""
    jitter_ms: Millis = 0
    """The width over which equal schedules of different objects are spread."""
    offset_ms: Millis = 0
    """This schedule's own place in that width: due = nominal + offset."""
    anchor: Millis | None = None
    """When an interval was first saved: the origin of its grid."""
    nominal: Millis | None = None
    """The nominal time that the pending (or running) occurrence stands for; None before `first_due`."""
    begun: bool = False
    """An attempt of this occurrence has started: it is run to its end, however late, and skipped no more."""
    is_catch_up: bool = False
    """The occurrence stands for a time that was missed, or for others that were dropped for it."""

    @property
    def interval_ms(self) -> Millis:
        """The interval (or delay) in milliseconds; 0 for the types that have none."""
        return 0 if self.seconds is None else delay_to_millis(self.seconds)

    @property
    def is_recurring(self) -> bool:
        """It has a next time after a run: a cron or an interval."""
        return self.type in {"cron", "interval"}

    @property
    def identity(self) -> tuple[str, str, Millis, bool]:
        """What makes two schedules the same one for an idempotent call, beside callback, owner and payload.

        Neither the misfire policy nor the jitter are part of it, nor where the schedule stands; of a delay or a date not
        even the time, since a call that is made at every start names another one each time.
        """
        if not self.is_recurring:
            return (self.type, "", 0, False)
        return (
            self.type,
            f"{self.cron or ''} {self.timezone or ''}".strip(),
            self.interval_ms,
            self.fixed_rate,
        )

    def parsed(self) -> Cron:
        """The parsed expression of a `cron` (cached)."""
        return parse_cron(self.cron or "", self.timezone or "UTC")

    def to_json(self) -> dict[str, Any]:
        """A dict for JSON, without the fields that have their default."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> ScheduleSpec:
        """The schedule of a stored dict. Keys that a newer version may have added are passed over."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in stored.items() if key in known})


def spec_for(
    when: datetime | Delay | str,
    *,
    timezone: str | None = None,
    misfire: Misfire = "run_once",
    misfire_grace: Delay | None = None,
    misfire_limit: int = DEFAULT_MISFIRE_LIMIT,
    jitter: Delay = 0,
) -> ScheduleSpec:
    """The schedule that `schedule(when, …)` means.

    `when`: seconds or a timedelta → `delayed`; an aware datetime → `scheduled` (a past one is due at
    once); a string → `cron`, by the clocks of `timezone` (a name of the tz database, default UTC; it
    means nothing for the other types). `misfire_grace`, `jitter`: seconds or timedelta; a jitter must be
    shorter than the smallest gap between two times of the cron. `misfire_limit`: 1 to 1000.

    Raises `ScheduleInvalid` or `TimeInvalid`.
    """
    if isinstance(when, str):
        cron = parse_cron(when, timezone if timezone is not None else "UTC")
        spec = ScheduleSpec("cron", cron=cron.expression, timezone=cron.timezone)
    elif isinstance(when, datetime):
        spec = ScheduleSpec("scheduled", nominal=to_millis(when))
    elif isinstance(when, (timedelta, int, float)):
        spec = ScheduleSpec("delayed", seconds=delay_to_millis(when) / 1000)
    else:
        raise ScheduleInvalid(
            "Give a delay (seconds or timedelta), an aware datetime or a cron expression, "
            f"not {type(when).__name__} {when!r}."
        )
    return _with_policy(spec, misfire, misfire_grace, misfire_limit, jitter)


def spec_every(
    every: Delay,
    *,
    fixed_rate: bool = False,
    misfire: Misfire = "run_once",
    misfire_grace: Delay | None = None,
    misfire_limit: int = DEFAULT_MISFIRE_LIMIT,
    jitter: Delay = 0,
) -> ScheduleSpec:
    """The schedule that `schedule_every(every, …)` means: first run after one interval, never overlapping.

    `every`: seconds or timedelta, at least 1 s. Without `fixed_rate` the next run is one interval after
    the end of the last, and a jitter moves the first run only (added every time it would stretch the
    interval). With it, runs keep to the grid that begins when the schedule is saved.

    Raises `ScheduleInvalid` or `TimeInvalid`.
    """
    millis = delay_to_millis(every)
    if millis < SHORTEST_INTERVAL:
        raise ScheduleInvalid(f"An interval must be at least 1 second, not {every!r}.")
    spec = ScheduleSpec("interval", seconds=millis / 1000, fixed_rate=bool(fixed_rate))
    return _with_policy(spec, misfire, misfire_grace, misfire_limit, jitter)


def jitter_offset(kind: str, name: str, schedule_id: str, jitter_ms: Millis) -> Millis:
    """The place of one object's schedule in a width of `jitter_ms`: 0 <= offset < jitter_ms (0 if that is 0).

    A hash of kind, name and id: the same in every process and for ever, evenly spread over objects.
    """
    if jitter_ms <= 0:
        return 0
    digest = blake2b("\0".join((kind, name, schedule_id)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % jitter_ms


def _with_policy(spec: ScheduleSpec, misfire: Misfire, grace: Delay | None, limit: int, jitter: Delay) -> ScheduleSpec:
    if misfire not in get_args(Misfire):
        raise ScheduleInvalid(f"misfire must be one of {', '.join(get_args(Misfire))}, not {misfire!r}.")
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= LARGEST_MISFIRE_LIMIT:
        raise ScheduleInvalid(f"misfire_limit must be 1 to {LARGEST_MISFIRE_LIMIT}, not {limit!r}.")
    jitter_ms = _named("jitter", jitter)
    gap = _smallest_gap(spec)
    if jitter_ms and gap is not None and jitter_ms >= gap:
        raise ScheduleInvalid(
            f"A jitter of {jitter_ms / 1000:g} s must be shorter than the smallest gap of the schedule, "
            f"{gap / 1000:g} s, or a run could come after the next one's time."
        )
    grace_ms = None if grace is None else _named("misfire_grace", grace)
    return replace(spec, misfire=misfire, misfire_grace_ms=grace_ms, misfire_limit=limit, jitter_ms=jitter_ms)


def _named(option: str, value: Delay) -> Millis:
    try:
        return delay_to_millis(value)
    except TimeInvalid as error:
        raise ScheduleInvalid(f"{option}: {error}") from error


def _smallest_gap(spec: ScheduleSpec) -> Millis | None:
    if spec.type == "cron":
        return spec.parsed().smallest_gap()
    return spec.interval_ms if spec.type == "interval" else None
