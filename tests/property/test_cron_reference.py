"""Holds `Cron` against a plain reference: walk the minutes around a change of the clocks, apply the rule.

The reference shares no code with the package. It goes from UTC to wall time only, so it knows nothing of
folds and gaps: it sees that a wall time was jumped over, or had been there before. Meanings come with the
random expressions, not from a parser. Run it by hand for longer: `python
tests/property/test_cron_reference.py --help`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from bisect import bisect_right
from calendar import monthrange
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from celery_lifecycle.timing.cron import Cron, parse_cron

HOUR = 3600
DAY = 24 * HOUR
STEP = 30  # Monrovia was half a minute off until 1972
MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
ZONES = sorted(
    name
    for name in available_timezones()
    if not name.startswith(("localtime", "posix", "right/", "Factory", "SystemV"))
)
ODD_ZONES = [
    "Africa/Casablanca",  # goes back for Ramadan
    "Africa/Monrovia",
    "America/Havana",  # changes at midnight
    "America/Sao_Paulo",
    "Antarctica/Casey",  # shifts of three hours
    "Antarctica/Troll",  # shifts of two hours
    "Asia/Beirut",
    "Asia/Pyongyang",
    "Atlantic/Azores",
    "Australia/Lord_Howe",  # half an hour
    "Europe/Berlin",
    "Europe/Dublin",
    "Europe/London",
    "Pacific/Apia",  # left out 2011-12-30
    "Pacific/Kwajalein",  # left out 1993-08-21
    "America/New_York",
]


# -- random expressions with their meaning -----------------------------------------------------------


@dataclass(frozen=True)
class Expression:
    text: str
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]  # 0 stands for the last
    months: frozenset[int]
    weekdays: frozenset[tuple[int, int]]  # (weekday, 0: each, 1-5: the n-th, -1: the last)
    any_day: bool
    any_weekday: bool
    rhythm: bool

    def has_day(self, wall: datetime) -> bool:
        if wall.month not in self.months:
            return False
        last = monthrange(wall.year, wall.month)[1]
        by_day = wall.day in self.days or (0 in self.days and wall.day == last)
        weekday = wall.isoweekday() % 7
        by_weekday = (
            (weekday, 0) in self.weekdays
            or (weekday, (wall.day + 6) // 7) in self.weekdays
            or ((weekday, -1) in self.weekdays and wall.day + 7 > last)
        )
        if self.any_day or self.any_weekday:
            return (self.any_day or by_day) and (self.any_weekday or by_weekday)
        return by_day or by_weekday

    def has(self, wall: datetime) -> bool:
        return wall.minute in self.minutes and wall.hour in self.hours and self.has_day(wall)


def random_items(
    rng: random.Random, low: int, high: int, near: list[int], names: list[str] | None = None
) -> tuple[str, frozenset[int]]:
    """A list of values, ranges and steps of one field, and what it means."""
    texts, values = [], set()
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        first = rng.choice(near) if near and rng.random() < 0.7 else rng.randint(low, high)
        step = rng.randint(1, high - low + 1)
        shown = names[first - low] if names and rng.random() < 0.5 else str(first)
        form = rng.randrange(6)
        if form <= 2:
            texts.append(shown)
            values.add(first)
        elif form == 3:
            texts.append(f"*/{step}")
            values.update(range(low, high + 1, step))
        elif form == 4:
            texts.append(f"{shown}/{step}")
            values.update(range(first, high + 1, step))
        else:
            last = rng.randint(low, high)
            stepped = rng.random() < 0.5
            texts.append(f"{shown}-{last}" + (f"/{step}" if stepped else ""))
            there = last if last >= first else last + high - low + 1
            values.update(
                (value - low) % (high - low + 1) + low for value in range(first, there + 1, step if stepped else 1)
            )
    return ",".join(texts), frozenset(values)


def random_expression(rng: random.Random, near: datetime) -> Expression:
    """An expression that has something to do with the days and hours around `near`."""
    if rng.random() < 0.25:
        minute_text, minutes = "*", frozenset(range(60))
    else:
        minute_text, minutes = random_items(rng, 0, 59, [0, 15, 29, 30, 31, 59, near.minute])
    if rng.random() < 0.2:
        hour_text, hours = "*", frozenset(range(24))
    else:
        around = [(near.hour + by) % 24 for by in (-3, -2, -1, 0, 0, 1, 2)]
        hour_text, hours = random_items(rng, 0, 23, around)
    day_text, days = "*", frozenset(range(1, 32))
    if any_day := rng.random() < 0.6:
        pass
    elif rng.random() < 0.2:
        day_text, days = "L", frozenset({0})
    else:
        day_text, days = random_items(rng, 1, 31, [(near + by * timedelta(days=1)).day for by in (-1, 0, 0, 1)])
        any_day = any(item in {"*/1", "*"} for item in day_text.split(","))
    month_text, months = "*", frozenset(range(1, 13))
    if rng.random() < 0.3:
        month_text, months = random_items(rng, 1, 12, [near.month], MONTHS)
    weekday_text, weekdays = "*", frozenset((day, 0) for day in range(7))
    if any_weekday := rng.random() < 0.6:
        pass
    elif rng.random() < 0.3:
        day, nth = rng.randrange(7), rng.randint(1, 5)
        shown = WEEKDAYS[day] if rng.random() < 0.5 else str(day or rng.choice([0, 7]))
        weekday_text, weekdays = rng.choice(
            [(f"{shown}#{nth}", frozenset({(day, nth)})), (f"L{day}", frozenset({(day, -1)}))]
        )
    else:
        weekday_text, plain = random_items(rng, 0, 6, [near.isoweekday() % 7], WEEKDAYS)
        weekdays = frozenset((day, 0) for day in plain)
        any_weekday = any(item in {"*/1", "*"} for item in weekday_text.split(","))
    text = " ".join((minute_text, hour_text, day_text, month_text, weekday_text))
    rhythm = "*" in hour_text or "/" in hour_text
    return Expression(text, minutes, hours, days, months, weekdays, any_day, any_weekday, rhythm)


# -- the reference -----------------------------------------------------------------------------------


def wall_time(at: int, zone: ZoneInfo) -> datetime:
    return datetime.fromtimestamp(at, zone).replace(tzinfo=None, fold=0)


@cache
def changes(zone_name: str, until_year: int = 2060) -> tuple[int, ...]:
    """Every instant since 1970 at which the zone's offset from UTC changes."""
    zone = ZoneInfo(zone_name)

    def offset(at: int) -> timedelta | None:
        return datetime.fromtimestamp(at, zone).utcoffset()

    found = []
    end = int(datetime(until_year, 1, 1, tzinfo=timezone.utc).timestamp())
    for day in range(3 * DAY, end, DAY):
        if offset(day) != offset(day + DAY):
            low, high = day, day + DAY
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if offset(middle) == offset(day) else (low, middle)
            found.append(high)
    return tuple(found)


@dataclass(frozen=True)
class Window:
    """Each step of time in `(begin, end]`, with the wall times that it first shows or jumps over."""

    zone_name: str
    begin: int
    end: int
    shown: tuple[tuple[int, datetime], ...]
    first_shown: tuple[tuple[int, tuple[datetime, ...]], ...]


def walk(zone_name: str, begin: int, end: int, step: int = STEP) -> Window:
    zone = ZoneInfo(zone_name)
    shown, first_shown = [], []
    # The latest wall time so far; a change back in the day before must not be forgotten.
    latest = max(wall_time(at, zone) for at in range(begin - 2 * DAY, begin + 1, HOUR // 4))
    for at in range(begin + step, end + 1, step):
        wall = wall_time(at, zone)
        if wall.second == 0:
            shown.append((at, wall))
        if wall > latest:
            minute = latest.replace(second=0) + timedelta(minutes=1)
            new = []
            while minute <= wall:
                new.append(minute)
                minute += timedelta(minutes=1)
            if new:
                first_shown.append((at, tuple(new)))
            latest = wall
    return Window(zone_name, begin, end, tuple(shown), tuple(first_shown))


def reference(expression: Expression, window: Window) -> list[int]:
    """A rhythm runs when a matching time is shown; a fixed time once, as soon as it is there or passed."""
    if expression.rhythm:
        return [at for at, wall in window.shown if expression.has(wall)]
    return [at for at, new in window.first_shown if any(expression.has(wall) for wall in new)]


def complaint(cron: Cron, expression: Expression, window: Window, rng: random.Random) -> str | None:
    """What `cron` does otherwise than the reference in a window; None if nothing."""
    right = reference(expression, window)
    begin, end = window.begin * 1000, window.end * 1000
    found, at = [], begin
    while (following := cron.next_after(at)) is not None and following <= end:
        found.append(following // 1000)
        at = following
    where = f"{expression.text!r} in {window.zone_name}"
    if found != right:
        odd = sorted(set(found) ^ set(right))[:4]
        return f"{where}: {len(found)} runs, right are {len(right)}; they differ at {odd}"
    for _ in range(8):
        moment = rng.randint(begin, end - 1)
        if right and rng.random() < 0.5:
            moment = min(max(rng.choice(right) * 1000 + rng.choice([-1, 0, 1]), begin), end - 1)
        after = bisect_right(right, moment // 1000)
        following = cron.next_after(moment)
        if after < len(right) and following != right[after] * 1000:
            return f"{where}: after {moment} comes {right[after]}, not {following}"
        if after and cron.prev_at_or_before(moment) != right[after - 1] * 1000:
            return f"{where}: before {moment} is {right[after - 1]}, not {cron.prev_at_or_before(moment)}"
        other = rng.randint(moment, end)
        count = bisect_right(right, other // 1000) - after
        if cron.count_between(moment, other) != count:
            return f"{where}: {count} times in ({moment}, {other}], not {cron.count_between(moment, other)}"
    return None


def check_around(zone_name: str, change: int, expressions: int, rng: random.Random) -> int:
    """Compare random expressions around one change of the clocks; how many instants were walked."""
    before, after = 30 * HOUR, 30 * HOUR
    zone = ZoneInfo(zone_name)
    begin = (change - before) // 60 * 60
    window = walk(zone_name, begin, begin + before + after)
    for _ in range(expressions):
        near = wall_time(change - rng.randint(0, HOUR), zone)
        expression = random_expression(rng, near)
        try:
            cron = parse_cron(expression.text, zone_name)
        except ValueError:
            assert not any(expression.has_day(datetime(2024, 1, 1) + timedelta(days=n)) for n in range(366))
            continue
        if (problem := complaint(cron, expression, window, rng)) is not None:
            raise AssertionError(problem)
    return len(window.shown)


def check_stretch(zone_name: str, begin: int, days: int, expressions: int, rng: random.Random) -> int:
    """Compare over a long stretch of time, whatever changes in it."""
    zone = ZoneInfo(zone_name)
    window = walk(zone_name, begin, begin + days * DAY, 60 if begin > 3 * 365 * DAY else STEP)
    for _ in range(expressions):
        expression = random_expression(rng, wall_time(begin + rng.randrange(days) * DAY, zone))
        try:
            cron = parse_cron(expression.text, zone_name)
        except ValueError:
            continue
        if (problem := complaint(cron, expression, window, rng)) is not None:
            raise AssertionError(problem)
    return len(window.shown)


# -- the tests ---------------------------------------------------------------------------------------


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # A smaller random seed is no simpler case: the message of the failure names expression, zone and instant.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(zone=st.sampled_from(ZONES), rng=st.randoms(use_true_random=False))
def test_cron_agrees_with_the_walk_around_any_change_of_any_zone(zone, rng):
    if found := changes(zone):
        check_around(zone, rng.choice(found), 3, rng)


@pytest.mark.parametrize("zone", [name for name in ODD_ZONES if name in ZONES])
def test_cron_agrees_with_the_walk_in_the_zones_with_the_oddest_changes(zone):
    rng = random.Random(zone)
    found = changes(zone)
    for change in rng.sample(found, min(len(found), 6)):
        check_around(zone, change, 4, rng)


def test_cron_agrees_with_the_walk_through_whole_months():
    rng = random.Random(7)
    for zone in ("Europe/Berlin", "Asia/Kathmandu", "America/St_Johns"):
        check_stretch(zone, rng.randrange(3 * 365, 50 * 365) * DAY, 120, 4, rng)


def test_the_reference_can_tell_a_wrong_rule_from_the_right_one():
    rng = random.Random(3)
    change = changes("Europe/Berlin")[60]
    window = walk("Europe/Berlin", change - 30 * HOUR, change + 30 * HOUR)
    text = "15,45 2 * * *"
    right = parse_cron(text, "Europe/Berlin")
    expression = Expression(
        text,
        frozenset({15, 45}),
        frozenset({2}),
        frozenset(range(1, 32)),
        frozenset(range(1, 13)),
        frozenset((day, 0) for day in range(7)),
        any_day=True,
        any_weekday=True,
        rhythm=False,
    )
    assert complaint(right, expression, window, rng) is None
    wrong = replace(right, fields=replace(right.fields, by_elapsed_time=True))
    assert complaint(wrong, expression, window, rng) is not None
    assert complaint(parse_cron(text, "Europe/Moscow"), expression, window, rng) is not None
    assert complaint(parse_cron("15,46 2 * * *", "Europe/Berlin"), expression, window, rng) is not None


# -- by hand -----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare Cron with the reference for as long as you like.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-zone", type=int, default=10, help="changes of the clocks per zone (0: all)")
    parser.add_argument("--expressions", type=int, default=3, help="random expressions per change")
    parser.add_argument("--stretches", type=int, default=0, help="stretches of 400 days without choosing a change")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    began, windows, instants, zones = time.monotonic(), 0, 0, set()
    for zone in ZONES:
        found = changes(zone)
        chosen = found if not options.per_zone else rng.sample(found, min(len(found), options.per_zone))
        for change in chosen:
            instants += check_around(zone, change, options.expressions, rng)
            windows += 1
            zones.add(zone)
    for _ in range(options.stretches):
        zone = rng.choice(ZONES)
        instants += check_stretch(zone, rng.randrange(365, 80 * 365) * DAY, 400, 3, rng)
    sys.stdout.write(
        f"{len(zones)} of {len(ZONES)} zones have changes since 1970; {windows} changes, "
        f"{windows * options.expressions} expressions around them, {options.stretches} stretches with "
        f"{3 * options.stretches} more; {instants} minutes walked; "
        f"{time.monotonic() - began:.0f} s; no difference\n"
    )


if __name__ == "__main__":
    main()
