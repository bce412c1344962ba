"""Lists the next times of a cron expression for people, marking days on which the clocks change."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from celery_lifecycle.timing.cron import Cron, parse_cron
from celery_lifecycle.timing.instants import Millis, from_millis
from celery_lifecycle.timing.zones import Seconds, Zone, instant

_DAY = timedelta(days=1)


@dataclass(frozen=True)
class PreviewRow:
    """One nominal time: in UTC, by the clocks of the zone, and what is special about its day."""

    utc: datetime
    local: datetime
    note: str | None = None
    """Set on days on which the clocks change, in words; None on all others."""


def preview(expression: str, timezone: str, start: Millis, n: int) -> list[PreviewRow]:
    """The first `n` nominal times after `start` (milliseconds since the epoch); fewer if there are no more.

    Raises `ScheduleInvalid` for an expression or a zone that is not allowed.
    """
    cron = parse_cron(expression, timezone)
    rows: list[PreviewRow] = []
    at = start
    while len(rows) < n and (following := cron.next_after(at)) is not None:
        at = following
        utc = from_millis(at)
        rows.append(PreviewRow(utc, utc.astimezone(cron.zone.tzinfo), _note(cron, at // 1000)))
    return rows


def _note(cron: Cron, at: Seconds) -> str | None:
    zone, wall = cron.zone, cron.zone.wall(at)
    change = _change_on(zone, wall.replace(hour=0, minute=0, second=0))
    if change is None:
        return None
    moved = zone.offset(change) - zone.offset(change - 1)
    before = zone.wall(change - 1) + timedelta(seconds=1)
    note = f"clocks go {'forward' if moved > 0 else 'back'} {_span(abs(moved))} at {before:%H:%M}"
    if at == change and not cron.matches(wall):
        return f"{note}: runs right after the gap"
    if zone.wall_offset(wall, 0) > zone.wall_offset(wall, 1):
        first = instant(wall, zone.wall_offset(wall, 0)) == at
        return f"{note}: {'first' if first else 'second'} of the two {wall:%H:%M}"
    return note


def _change_on(zone: Zone, midnight: datetime) -> Seconds | None:
    """The change of the clocks in or at the beginning of a day; None on ordinary days."""
    low = instant(midnight, zone.wall_offset(midnight, 0)) - 1
    high = instant(midnight + _DAY, zone.wall_offset(midnight + _DAY, 1)) - 1
    before = zone.offset(low)
    if zone.offset(high) == before:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if zone.offset(middle) == before:
            low = middle
        else:
            high = middle
    return high


def _span(seconds: Seconds) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02}"
