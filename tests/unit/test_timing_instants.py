"""Times and delays as integer milliseconds, and the back-off between attempts."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_lifecycle.errors import TimeInvalid
from celery_lifecycle.timing import (
    delay_to_millis,
    doubling,
    from_millis,
    full_jitter,
    resolve_when,
    to_millis,
)
from celery_lifecycle.timing.instants import MAX_MILLIS

UTC = timezone.utc


@given(st.datetimes(min_value=datetime(1970, 1, 1), timezones=st.timezones()))
def test_a_datetime_is_rounded_up_to_the_next_millisecond_and_never_down(when):
    exact = (when.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    millis = to_millis(when)
    if millis not in {0, MAX_MILLIS}:
        assert 0 <= millis * 1000 - exact < 1000


@given(st.integers(0, MAX_MILLIS))
def test_every_millisecond_survives_the_way_through_a_datetime(millis):
    assert to_millis(from_millis(millis)) == millis


def test_the_two_hours_that_a_clock_shows_twice_are_told_apart():
    zone = ZoneInfo("Europe/Berlin")
    first = to_millis(datetime(2026, 10, 25, 2, 30, tzinfo=zone))
    assert to_millis(datetime(2026, 10, 25, 2, 30, tzinfo=zone, fold=1)) - first == 3_600_000


def test_what_lies_outside_the_years_1970_to_9999_is_moved_to_their_ends():
    assert to_millis(datetime.min.replace(tzinfo=UTC)) == 0
    assert to_millis(datetime(1969, 12, 31, 23, tzinfo=UTC)) == 0
    assert to_millis(datetime.max.replace(tzinfo=UTC)) == MAX_MILLIS
    assert to_millis(datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))) == MAX_MILLIS
    assert from_millis(MAX_MILLIS).year == 9999


@pytest.mark.parametrize("when", [datetime(2026, 1, 1), date(2026, 1, 1), 1_790_000_000, "2026-01-01", None])
def test_a_time_that_is_not_aware_is_refused_with_what_to_write_instead(when):
    with pytest.raises(TimeInvalid, match=r"timezone\.utc|ZoneInfo"):
        to_millis(when)


@pytest.mark.parametrize(
    ("delay", "millis"),
    [
        (0, 0),
        (-0.0, 0),
        (60, 60_000),
        (0.1, 100),
        (0.3, 300),
        (1e-9, 1),
        (1.0005, 1001),
        (86_400.001, 86_400_001),
        (timedelta(microseconds=1), 1),
        (timedelta(days=400, milliseconds=7), 400 * 86_400_000 + 7),
    ],
)
def test_a_delay_is_rounded_up_to_the_next_millisecond(delay, millis):
    assert delay_to_millis(delay) == millis


@pytest.mark.parametrize(
    "delay",
    [
        *(-1, -1e-9, timedelta(microseconds=-1), float("nan"), float("inf"), float("-inf"), True, False),
        *(1e300, 10**400, timedelta.max, "60", None, Decimal(1), [1]),
    ],
)
def test_a_delay_without_sense_is_refused(delay):
    with pytest.raises(TimeInvalid):
        delay_to_millis(delay)


@given(st.one_of(st.floats(), st.integers(), st.timedeltas(), st.booleans(), st.text(), st.none()))
def test_a_delay_is_a_number_of_milliseconds_or_an_error_of_ours(delay):
    try:
        millis = delay_to_millis(delay)
    except TimeInvalid:
        return
    assert 0 <= millis <= MAX_MILLIS


def test_when_is_at_or_after_a_delay_or_now():
    now = 1_790_000_000_000
    assert resolve_when(now) == now
    assert resolve_when(now, delay=1.5) == now + 1500
    assert resolve_when(now, delay=timedelta(0)) == now
    assert resolve_when(now, at=datetime(2020, 1, 1, tzinfo=UTC)) == to_millis(datetime(2020, 1, 1, tzinfo=UTC))


def test_when_is_not_both_and_not_beyond_the_year_9999():
    with pytest.raises(TimeInvalid, match="not both"):
        resolve_when(0, at=datetime(2020, 1, 1, tzinfo=UTC), delay=0)
    with pytest.raises(TimeInvalid, match="year 10000"):
        resolve_when(1_790_000_000_000, delay=timedelta(milliseconds=MAX_MILLIS - 1))


def test_full_jitter_doubles_up_to_its_cap_and_is_scaled_by_the_draw():
    assert [full_jitter(n, 0.1, 3, 0.999999) for n in (1, 2, 3, 4, 5, 6)] == [200, 400, 800, 1600, 3000, 3000]
    assert full_jitter(3, 0.1, 3, 0.0) == 0
    assert full_jitter(3, 0.1, 3, 0.5) == 400
    assert full_jitter(10**9, 0.1, 3, 0.5) == 1500


def test_doubling_starts_with_the_first_delay_and_stays_at_the_cap():
    assert [doubling(n, 2000, 60_000) for n in (0, 1, 2, 5, 6, 10**9)] == [
        2000,
        4000,
        8000,
        60_000,
        60_000,
        60_000,
    ]
