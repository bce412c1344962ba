"""Finds the times that a cron expression names in a time zone, in the right minute on every day of the year.

The rule for days on which the clocks change is that of Debian's cron. An expression with a fixed hour (no
`*` and no step in its hour field) means a time of day: it runs once for each, right after the gap if the
clocks skip it, the first time if they show it twice. An expression with a wildcard or step there means a
rhythm: it runs whenever the clocks show a matching time, so what a gap swallows is not run, what is shown
twice runs twice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from calendar import monthrange
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from functools import lru_cache
from itertools import pairwise

from celery_lifecycle.errors import ScheduleInvalid
from celery_lifecycle.timing.fields import Fields, read_fields
from celery_lifecycle.timing.instants import MAX_MILLIS, Millis
from celery_lifecycle.timing.zones import Seconds, Zone, instant, load_zone, wall_at

_MINUTE = timedelta(minutes=1)
# The fifth Monday of February, and 29 February across 2100, keep one waiting for 40 years at most. What does
# not come in this time never does: a wildcard hour on a day on which the clocks always skip it.
_HORIZON_YEARS = 100
_LAST_YEAR = 9998
_LAST = MAX_MILLIS - 365 * 86_400_000


@dataclass(frozen=True)
class Cron:
    """A cron expression in a time zone; made by `parse_cron`.

    Times go in and come out as milliseconds since the epoch. A time that it names is called nominal; nominal
    times are whole minutes of the zone's clocks, but for the end of a gap, which need not be one.
    """

    expression: str
    timezone: str
    fields: Fields = field(compare=False, repr=False)
    zone: Zone = field(compare=False, repr=False)

    def next_after(self, at: Millis) -> Millis | None:
        """The first nominal time after an instant; None if there is none before the year 9999."""
        second = min(at, _LAST) // 1000
        found = [self._next(second, fold) for fold in self._folds]
        return min((time * 1000 for time in found if time is not None and time * 1000 > at), default=None)

    def prev_at_or_before(self, at: Millis) -> Millis | None:
        """The last nominal time at or before an instant; None if the hundred years before have none."""
        second = at // 1000
        found = [self._prev(second, fold) for fold in self._folds]
        return max((time * 1000 for time in found if time is not None), default=None)

    def matches(self, wall: datetime) -> bool:
        """Whether the expression names this wall time, whatever the clocks do on its day."""
        in_day = wall.hour in self.fields.hours and wall.minute in self.fields.minutes and wall.second == 0
        return in_day and wall.day in self._days(wall.year, wall.month)

    def count_between(self, after: Millis, until: Millis) -> int:
        """How many nominal times there are with `after < time <= until`.

        Ordinary days are multiplied, not walked, so that years of downtime are counted in milliseconds.
        """
        total, per_day = 0, len(self.fields.minutes) * len(self.fields.hours)
        while (first := self.next_after(after)) is not None and first <= until:
            end = self._end_of_plain_day(first, after)
            if end is not None and end <= until:
                total, after = total + per_day, end - 1
            else:
                total, after = total + 1, first
        return total

    def smallest_gap(self) -> Millis:
        """The shortest time between two nominal times by the wall clock, which a change may shorten."""
        times = [hour * 60 + minute for hour in self.fields.hours for minute in self.fields.minutes]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        overnight = 24 * 60 + times[0] - times[-1]
        if not gaps or overnight < min(gaps):
            gaps.append(overnight + (_fewest_days_between(self.fields) - 1) * 24 * 60)
        return min(gaps) * 60_000

    @property
    def _folds(self) -> tuple[int, ...]:
        return (0, 1) if self.fields.by_elapsed_time else (0,)

    # Of a wall time that the clocks show twice, fold 0 is the first time and fold 1 the second; any other
    # wall time is the same instant under both. Within one fold a later wall time is never an earlier
    # instant. So each fold is searched in the order of the wall clock, and the nearer of two finds is the
    # answer.

    def _next(self, at: Seconds, fold: int) -> Seconds | None:
        wall = self.zone.wall(at)
        if fold:
            wall = wall_at(at, self.zone.wall_offset(wall, 1))
        wall = wall.replace(second=0) + _MINUTE
        last_year = wall.year + _HORIZON_YEARS
        while (found := self._wall_from(wall, last_year)) is not None:
            time = self._instant(found, fold)
            if time is None:
                wall = _whole_minute_from(self.zone.wall(self.zone.gap_end(found)))
                continue
            if time > at:
                return time
            wall = found + _MINUTE
        return None

    def _prev(self, at: Seconds, fold: int) -> Seconds | None:
        wall = wall_at(at, self.zone.wall_offset(self.zone.wall(at), fold)).replace(second=0)
        first_year = wall.year - _HORIZON_YEARS
        while (found := self._wall_back_from(wall, first_year)) is not None:
            time = self._instant(found, fold)
            if time is None:
                wall = self.zone.wall(self.zone.gap_end(found) - 1).replace(second=0)
                continue
            if time <= at:
                return time
            wall = found - _MINUTE
        return None

    def _instant(self, wall: datetime, fold: int) -> Seconds | None:
        """When a matching wall time runs; None for one that a gap swallows."""
        offset = self.zone.wall_offset(wall, 0)
        other = self.zone.wall_offset(wall, 1)
        if offset < other:
            return None if self.fields.by_elapsed_time else self.zone.gap_end(wall)
        return instant(wall, other if fold else offset)

    def _wall_from(self, wall: datetime, last_year: int) -> datetime | None:
        """The first matching wall time at or after one, whether the clocks ever show it or not."""
        minutes, hours = self.fields.minutes, self.fields.hours
        if wall.day in self._days(wall.year, wall.month):
            hour_at = bisect_left(hours, wall.hour)
            if hour_at < len(hours) and hours[hour_at] == wall.hour:
                minute_at = bisect_left(minutes, wall.minute)
                if minute_at < len(minutes):
                    return wall.replace(minute=minutes[minute_at])
                hour_at += 1
            if hour_at < len(hours):
                return wall.replace(hour=hours[hour_at], minute=minutes[0])
        year, month, after = wall.year, wall.month, wall.day
        while year <= min(last_year, _LAST_YEAR):
            days = self._days(year, month)
            if (day_at := bisect_right(days, after)) < len(days):
                return datetime(year, month, days[day_at], hours[0], minutes[0])
            year, month, after = (year, month + 1, 0) if month < 12 else (year + 1, 1, 0)
        return None

    def _wall_back_from(self, wall: datetime, first_year: int) -> datetime | None:
        """The last matching wall time at or before one, whether the clocks ever show it or not."""
        minutes, hours = self.fields.minutes, self.fields.hours
        if wall.day in self._days(wall.year, wall.month):
            hour_at = bisect_right(hours, wall.hour) - 1
            if hour_at >= 0 and hours[hour_at] == wall.hour:
                minute_at = bisect_right(minutes, wall.minute) - 1
                if minute_at >= 0:
                    return wall.replace(minute=minutes[minute_at])
                hour_at -= 1
            if hour_at >= 0:
                return wall.replace(hour=hours[hour_at], minute=minutes[-1])
        year, month, before = wall.year, wall.month, wall.day
        while year >= max(first_year, 1):
            days = self._days(year, month)
            if day_at := bisect_left(days, before):
                return datetime(year, month, days[day_at - 1], hours[-1], minutes[-1])
            year, month, before = (year, month - 1, 32) if month > 1 else (year - 1, 12, 32)
        return None

    def _end_of_plain_day(self, first: Millis, after: Millis) -> Millis | None:
        """The end of the day of `first` if it begins after `after` and no clock changes in it."""
        midnight = self.zone.wall(first // 1000).replace(hour=0, minute=0, second=0)
        offset = self.zone.wall_offset(midnight, 0)
        begin = instant(midnight, offset)
        end = begin + 86_400
        same = self.zone.offset(begin - 1) == self.zone.offset(end) == offset
        return end * 1000 if same and begin * 1000 > after else None

    def _days(self, year: int, month: int) -> list[int]:
        return _days_of_month(self.fields, year, month)


def parse_cron(expression: str, timezone: str = "UTC") -> Cron:
    """The schedule that a five-field cron expression names in a time zone of the tz database.

    Fields: minute 0-59, hour 0-23, day of month 1-31 or L (the last), month 1-12 or jan-dec, day of week
    0-7 or sun-sat (0 and 7 are Sunday), `fri#2` or `5#2` (the second Friday), `L5` or `5L` (the last
    Friday). Each takes `*`, lists, ranges (one that runs backwards wraps around: `22-2`) and steps
    (`*/15`, `8-18/2`, `5/15`: from 5 on). If both day fields are restricted, a day that matches either
    will do. Seconds, years, `@daily`, `?` and `W` are refused.

    Raises `ScheduleInvalid`, naming the field or the zone, also if the expression can never match.
    """
    if not isinstance(expression, str):
        raise ScheduleInvalid(f"A cron expression must be a string, not {type(expression).__name__}.")
    if not isinstance(timezone, str):
        raise ScheduleInvalid(f"A time zone is given by its name, such as 'Europe/Berlin', not as {timezone!r}.")
    return _parse(expression, timezone)


@lru_cache(maxsize=1024)
def _parse(expression: str, timezone: str) -> Cron:
    fields = read_fields(expression)
    return Cron(" ".join(expression.split()), timezone, fields, load_zone(timezone))


def _days_of_month(fields: Fields, year: int, month: int) -> list[int]:
    """The matching days of a month, in order."""
    if month not in fields.months:
        return []
    first, length = monthrange(year, month)  # first: 0 = Monday
    if fields.any_day and fields.any_weekday:
        return list(range(1, length + 1))
    found: set[int] = set()
    if not fields.any_day:
        found.update(day for day in fields.days if day <= length)
        if fields.last_day:
            found.add(length)
    if not fields.any_weekday:
        found.update(day for day in range(1, length + 1) if (first + day) % 7 in fields.weekdays)
        for weekday, nth in fields.nth_weekdays:
            same = range(1 + (weekday - first - 1) % 7, length + 1, 7)
            if nth <= len(same):
                found.add(same[nth - 1])
    return sorted(found)


def _fewest_days_between(fields: Fields) -> int:
    """The fewest days between two matching days: 28 years hold every kind of year and of turn of the year."""
    days = (
        date(year, month, day).toordinal()
        for year in range(2000, 2029)
        for month in range(1, 13)
        for day in _days_of_month(fields, year, month)
    )
    fewest = 28 * 365
    for earlier, later in pairwise(days):
        fewest = min(fewest, later - earlier)
        if fewest == 1:
            break
    return fewest


def _whole_minute_from(wall: datetime) -> datetime:
    return wall if wall.second == 0 else wall.replace(second=0) + _MINUTE
