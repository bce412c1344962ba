"""Turns the times and delays that callers give into integer milliseconds since the epoch, UTC, and back."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from decimal import ROUND_CEILING, Decimal
from typing import TypeAlias

from celery_lifecycle.errors import TimeInvalid

Millis: TypeAlias = int
"""An instant: milliseconds since 1970-01-01T00:00:00Z, never a float."""

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MAX_MILLIS: Millis = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z, the last instant that a `datetime` can show."""

# So that whatever `now` it is added to, in this millennium, the sum is an instant.
MAX_DELAY: Millis = 7000 * 366 * 86_400_000

_MICROSECOND = timedelta(microseconds=1)


def to_millis(when: datetime) -> Millis:
    """Milliseconds since the epoch of an aware datetime, rounded up to the next millisecond.

    Rounded up, because a job must never start before its time. Dates before 1970 give 0 and dates after
    9999 give `MAX_MILLIS`: `datetime.min` and `datetime.max` can stand for "always" and "never" in a query.

    Raises `TimeInvalid` for a naive datetime and for anything that is no datetime.
    """
    if not isinstance(when, datetime):
        raise TimeInvalid(
            f"A time must be an aware datetime, not {type(when).__name__} {when!r}. "
            "Write for instance datetime(2026, 1, 31, 8, 0, tzinfo=timezone.utc)."
        )
    if when.utcoffset() is None:
        raise TimeInvalid(
            f"The datetime {when.isoformat()} is naive: it does not say in which time zone it is meant. "
            "Write when.replace(tzinfo=ZoneInfo('Europe/Berlin')), or datetime.now(timezone.utc) "
            "instead of datetime.now() or datetime.utcnow()."
        )
    micros = (when - EPOCH) // _MICROSECOND
    return min(max(-(-micros // 1000), 0), MAX_MILLIS)


def delay_to_millis(delay: timedelta | int | float) -> Millis:
    """Milliseconds of a delay given as a timedelta or in seconds, rounded up to the next millisecond.

    A float counts as the decimal number that it is written as: 0.1 is 100 ms, although the nearest binary
    fraction lies a little above.

    Raises `TimeInvalid` for what is negative, not finite, longer than 7,000 years, or no delay at all.
    """
    # The sign is looked at before rounding: -0.0001 s would become 0.
    if isinstance(delay, timedelta):
        negative = delay < timedelta(0)
        millis = -(-(delay // _MICROSECOND) // 1000)
    elif isinstance(delay, bool) or not isinstance(delay, (int, float)):
        raise TimeInvalid(
            f"A delay must be a timedelta or seconds (int or float), not {type(delay).__name__} {delay!r}."
        )
    elif isinstance(delay, int):
        negative = delay < 0
        millis = int(delay) * 1000
    elif math.isfinite(delay):
        negative = delay < 0
        millis = int((Decimal(float.__repr__(delay)) * 1000).to_integral_value(ROUND_CEILING))
    else:
        raise TimeInvalid(f"A delay must be a finite number of seconds, not {delay!r}.")
    if negative:
        raise TimeInvalid(f"A delay must not be negative, and {delay!r} is. Use 0 for 'at once'.")
    if millis > MAX_DELAY:
        raise TimeInvalid(
            f"The delay {delay!r} is longer than 7,000 years: it must end before the year 10000. Shorten it, or store no "
            "job at all."
        )
    return millis


def from_millis(millis: Millis) -> datetime:
    """The aware UTC datetime of an instant; exact."""
    return EPOCH + timedelta(milliseconds=millis)


def resolve_when(now: Millis, *, at: datetime | None = None, delay: timedelta | int | float | None = None) -> Millis:
    """The instant that `at=` or `delay=` of a push means; neither means `now`.

    `at`: aware datetime; one in the past is returned as it is, and is due at once. `delay`: timedelta or
    seconds, not negative, counted from `now` (milliseconds since the epoch).

    Raises `TimeInvalid` if both are given, if one is not allowed, or if the sum lies beyond the year 9999.
    """
    if at is not None and delay is not None:
        raise TimeInvalid("Give `at` or `delay`, not both.")
    if at is not None:
        return to_millis(at)
    if delay is None:
        return now
    due = now + delay_to_millis(delay)
    if due > MAX_MILLIS:
        raise TimeInvalid("A delay must end before the year 10000. Shorten it, or store no job at all.")
    return due
