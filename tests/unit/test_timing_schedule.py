"""Schedules: first times, intervals, misfires, jitter (cases C14, C15, C27)."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_lifecycle.errors import ScheduleInvalid, TimeInvalid
from celery_lifecycle.timing.instants import from_millis, to_millis
from celery_lifecycle.timing.schedule import (
    Dropped,
    NextDue,
    ScheduleSpec,
    first_due,
    jitter_offset,
    next_due,
    on_wake,
    spec_every,
    spec_for,
)

MINUTE = 60_000
HOUR = 3_600_000
DAY = 24 * HOUR


def at(text: str) -> int:
    """`08:00`, `08:00:05`: that time on 2026-06-01; with a date before it, that date."""
    text = text if "T" in text else f"2026-06-01T{text}"
    return to_millis(datetime.fromisoformat(text).replace(tzinfo=timezone.utc))


def clock(millis: int | None) -> str:
    assert millis is not None
    return from_millis(millis).strftime("%H:%M:%S").removesuffix(":00")


def saved(spec: ScheduleSpec, now: int) -> ScheduleSpec:
    """The spec as the store gives it back."""
    return ScheduleSpec.from_json(json.loads(json.dumps(first_due(spec, now).spec.to_json())))


def following(spec: ScheduleSpec, now: int, **more: int) -> NextDue:
    due = next_due(spec, now, **more)
    assert due is not None
    return due


# -- kinds of when ---------------------------------------------------------------------------------


def test_seconds_and_timedelta_are_a_delay_a_datetime_a_date_a_string_a_cron():
    assert spec_for(60).type == spec_for(timedelta(minutes=1)).type == spec_for(0.5).type == "delayed"
    assert spec_for(datetime(2026, 1, 1, tzinfo=timezone.utc)).type == "scheduled"
    cron = spec_for(" 0  8 * * * ", timezone="Europe/Berlin")
    assert (cron.type, cron.cron, cron.timezone) == ("cron", "0 8 * * *", "Europe/Berlin")
    assert spec_for("0 8 * * *").timezone == "UTC"


def test_a_delay_is_due_after_it_and_never_again():
    due = first_due(spec_for(timedelta(milliseconds=1500)), at("08:00"))
    assert due.due_at == due.scheduled_for == at("08:00") + 1500
    assert next_due(due.spec, at("08:01")) is None


def test_a_past_date_is_due_at_once_and_keeps_its_time():
    due = first_due(spec_for(from_millis(at("07:00"))), at("08:00"))
    assert due.due_at == at("07:00")
    wake = on_wake(due.spec, at("08:00"), due_at=due.due_at)
    assert (wake.run, clock(wake.scheduled_for), wake.is_catch_up) == (True, "07:00", True)


@pytest.mark.parametrize(
    ("when", "error"),
    [
        (datetime(2026, 1, 1), TimeInvalid),
        (-1, TimeInvalid),
        (True, TimeInvalid),
        (float("nan"), TimeInvalid),
        (None, ScheduleInvalid),
        (b"0 8 * * *", ScheduleInvalid),
        ("* * * *", ScheduleInvalid),
    ],
)
def test_anything_else_is_refused(when, error):
    with pytest.raises(error):
        spec_for(when)


@pytest.mark.parametrize(
    "options",
    [
        {"misfire": "sometimes"},
        {"misfire_grace": -1},
        {"misfire_limit": 0},
        {"misfire_limit": 10**6},
        {"misfire_limit": True},
        {"jitter": -1},
        {"jitter": 3600},
        {"jitter": float("inf")},
        {"timezone": "Europe/Nowhere"},
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ScheduleInvalid):
        spec_for("0 * * * *", **options)


def test_a_cron_that_the_clocks_of_its_zone_always_skip_is_refused_when_it_is_saved():
    spec = spec_for("0 */24 * 3 sun#2", timezone="America/Havana")
    with pytest.raises(ScheduleInvalid, match="never matches again"):
        first_due(spec, at("08:00"))


def test_a_spec_survives_storage_and_keys_of_a_newer_version():
    spec = saved(spec_for("0 8 * * *", timezone="Asia/Tokyo", misfire="all", jitter=60), at("08:00"))
    assert ScheduleSpec.from_json({**spec.to_json(), "colour": "red"}) == spec
    assert set(ScheduleSpec.from_json(saved(spec_for(60), 0).to_json()).to_json()) == {
        "type",
        "seconds",
        "nominal",
    }


def test_identity_is_what_an_idempotent_call_compares():
    spec = spec_for("0 8 * * *", timezone="Asia/Tokyo")
    assert saved(spec, at("08:00")).identity == spec.identity
    assert spec_for("0 8 * * *", timezone="Asia/Tokyo", jitter=5, misfire="skip").identity == spec.identity
    others = [spec_for("0 8 * * *"), spec_for("0 9 * * *", timezone="Asia/Tokyo"), spec_for(8), spec_every(8)]
    assert len({other.identity for other in others} | {spec.identity}) == 5
    assert spec_every(8).identity != spec_every(8, fixed_rate=True).identity
    assert spec_every(8).identity != spec_every(9).identity


def test_the_identity_of_a_delay_or_a_date_is_not_its_time_which_is_another_one_at_each_call():
    first, second = (
        spec_for(datetime(2026, 1, 1, tzinfo=timezone.utc)),
        spec_for(datetime(2026, 1, 2, tzinfo=timezone.utc)),
    )
    assert first.identity == second.identity
    assert spec_for(8).identity == spec_for(9).identity != first.identity


# -- intervals -------------------------------------------------------------------------------------


def test_an_interval_first_runs_after_one_interval_and_then_one_after_each_end():
    spec = saved(spec_every(30), at("08:00"))
    assert clock(spec.nominal) == "08:00:30"
    due = following(spec, at("08:00:42"))
    assert (clock(due.due_at), due.passed_intervals) == ("08:01:12", 0)


def test_a_run_that_outlasts_its_interval_reports_how_many_intervals_passed():
    spec = saved(spec_every(30), at("08:00"))
    assert following(spec, at("08:02:05")).passed_intervals == 3
    assert following(spec, at("08:02:05"), started_at=at("08:01:30")).passed_intervals == 1
    grid = saved(spec_every(30, fixed_rate=True), at("08:00"))
    due = following(grid, at("08:02:05"))
    assert (clock(due.due_at), due.passed_intervals) == ("08:02:30", 3)


def test_a_fixed_rate_does_not_drift_over_a_hundred_late_wakes():
    spec = saved(spec_every(30, fixed_rate=True), at("08:00"))
    for n in range(1, 101):
        assert spec.nominal == at("08:00") + n * 30_000
        late = spec.nominal + 7_123 + n * 13
        wake = on_wake(spec, late, due_at=spec.nominal)
        assert wake.run
        assert not wake.is_catch_up
        spec = following(wake.spec, late + 2_000).spec


def test_a_fixed_rate_run_never_overlaps_itself_and_starts_on_the_grid():
    spec = saved(spec_every(10, fixed_rate=True), at("08:00"))
    starts = []
    for _ in range(4):
        assert spec.nominal is not None
        starts.append(clock(spec.nominal))
        spec = following(on_wake(spec, spec.nominal).spec, spec.nominal + 25_000).spec
    assert starts == ["08:00:10", "08:00:40", "08:01:10", "08:01:40"]


def test_fixed_rate_intervals_that_passed_during_a_run_are_caught_up_on_request():
    spec = saved(spec_every(10, fixed_rate=True, misfire="all"), at("08:00"))
    due = following(spec, at("08:00:35"))
    assert (clock(due.due_at), due.passed_intervals, due.dropped) == ("08:00:20", 2, None)


@pytest.mark.parametrize("every", [0, 0.999, -5, float("nan"), True, "30", None])
def test_an_interval_below_a_second_or_without_sense_is_refused(every):
    with pytest.raises((ScheduleInvalid, TimeInvalid)):
        spec_every(every)


# -- misfires --------------------------------------------------------------------------------------


def paused_from_0055(misfire: str) -> ScheduleSpec:
    spec = saved(spec_for("0 * * * *", misfire=misfire), at("00:55"))
    assert clock(spec.nominal) == "01:00"
    return spec


def test_c14_skip_goes_on_with_the_next_hour_after_a_pause():
    wake = on_wake(paused_from_0055("skip"), at("01:55"), due_at=at("01:00"))
    assert not wake.run
    assert clock(wake.due_at) == "02:00"
    assert wake.dropped == Dropped(1, at("01:00"), at("01:00"))
    assert on_wake(wake.spec, at("02:00:00")).run


def test_c14_run_once_catches_up_for_the_missed_hour_and_then_runs_the_next():
    wake = on_wake(paused_from_0055("run_once"), at("01:55"), due_at=at("01:00"))
    assert (wake.run, clock(wake.scheduled_for), wake.is_catch_up, wake.dropped) == (
        True,
        "01:00",
        True,
        None,
    )
    assert wake.must_store
    due = following(wake.spec, at("01:56"))
    assert (clock(due.due_at), due.is_catch_up) == ("02:00", False)
    second = on_wake(due.spec, at("02:00:00"), due_at=due.due_at)
    assert (second.run, clock(second.scheduled_for), second.is_catch_up) == (True, "02:00", False)


def test_several_missed_times_become_one_run_for_the_latest_and_the_others_are_recorded():
    wake = on_wake(paused_from_0055("run_once"), at("04:30"))
    assert (wake.run, clock(wake.scheduled_for), wake.is_catch_up) == (True, "04:00", True)
    assert wake.dropped == Dropped(3, at("01:00"), at("03:00"))
    assert clock(following(wake.spec, at("04:31")).due_at) == "05:00"


def test_an_outage_that_ends_on_time_gives_one_run_that_knows_it_stands_for_more():
    wake = on_wake(paused_from_0055("run_once"), at("03:00:01"))
    assert (clock(wake.scheduled_for), wake.is_catch_up) == ("03:00", True)
    assert wake.dropped == Dropped(2, at("01:00"), at("02:00"))
    skipped = on_wake(paused_from_0055("skip"), at("03:00:01"))
    assert (skipped.run, clock(skipped.scheduled_for), skipped.is_catch_up) == (True, "03:00", False)
    assert skipped.dropped == wake.dropped


def test_all_runs_each_missed_time_in_order_up_to_the_limit():
    spec = saved(spec_for("0 * * * *", misfire="all", misfire_limit=3), at("00:55"))
    now, seen, dropped = at("06:30"), [], []
    for _ in range(4):
        wake = on_wake(spec, now)
        seen.append((wake.run, clock(wake.scheduled_for), wake.is_catch_up))
        dropped.append(wake.dropped)
        if not wake.run:
            break
        now += 1000
        spec = following(wake.spec, now).spec
    assert seen == [
        (True, "04:00", True),
        (True, "05:00", True),
        (True, "06:00", True),
        (False, "07:00", False),
    ]
    assert dropped == [Dropped(3, at("01:00"), at("03:00")), None, None, None]


def test_c15_a_weekly_job_runs_once_a_week_however_often_everything_restarts():
    spec = saved(spec_for("0 8 * * mon"), at("2026-06-01T07:00"))  # a Monday
    runs = []
    for day in range(28):
        now = at("2026-06-01T09:00") + day * DAY  # a restart each day at nine: the job is looked at
        wake = on_wake(spec, now)
        if wake.run:
            runs.append(from_millis(wake.scheduled_for).strftime("%m-%d"))
            spec = following(wake.spec, now + 1000).spec
    assert runs == ["06-01", "06-08", "06-15", "06-22"]


@pytest.mark.parametrize("fixed_rate", [False, True])
def test_c15_a_5_s_job_has_one_catch_up_run_after_two_weeks_of_downtime(fixed_rate):
    spec = saved(spec_every(5, fixed_rate=fixed_rate), at("08:00"))
    back = at("08:00") + 14 * DAY
    wake = on_wake(spec, back)
    assert (wake.run, wake.is_catch_up) == (True, True)
    due = following(wake.spec, back + 100, started_at=back)
    assert due.due_at >= back + 4_900
    assert not on_wake(due.spec, due.due_at).is_catch_up
    if fixed_rate:
        assert wake.dropped == Dropped(14 * DAY // 5000 - 1, at("08:00:05"), back - 5000)


def test_all_after_two_weeks_of_downtime_stays_within_its_limit():
    spec = saved(spec_every(5, fixed_rate=True, misfire="all"), at("08:00"))
    wake = on_wake(spec, at("08:00") + 14 * DAY)
    assert wake.dropped is not None
    assert wake.dropped.count == 241_920 - 100
    assert wake.scheduled_for == at("08:00") + 14 * DAY - 99 * 5000
    assert wake.dropped.last == wake.scheduled_for - 5000


def test_c27_an_hourly_job_whose_run_is_long_runs_once_for_its_hour():
    spec = saved(spec_for("0 * * * *"), at("07:30"))
    wake = on_wake(spec, at("08:00"), due_at=at("08:00"))
    assert (clock(wake.scheduled_for), wake.is_catch_up) == ("08:00", False)
    assert clock(following(wake.spec, at("08:40")).due_at) == "09:00"


def test_a_cron_run_that_outlasts_the_next_times_comes_under_the_misfire_rule():
    def after_a_long_run(misfire: str) -> NextDue:
        spec = saved(spec_for("0 * * * *", misfire=misfire), at("07:30"))
        return following(on_wake(spec, at("08:00")).spec, at("10:30"))

    once = after_a_long_run("run_once")
    assert (clock(once.due_at), once.is_catch_up, once.dropped) == (
        "10:00",
        True,
        Dropped(1, at("09:00"), at("09:00")),
    )
    assert not once.spec.begun
    skip = after_a_long_run("skip")
    assert (clock(skip.due_at), skip.dropped) == ("11:00", Dropped(2, at("09:00"), at("10:00")))
    assert (clock(after_a_long_run("all").due_at)) == "09:00"


def test_a_run_within_the_grace_is_on_time():
    spec = saved(spec_for("0 * * * *", misfire="skip"), at("00:55"))
    assert on_wake(spec, at("01:01:00")).run
    assert not on_wake(spec, at("01:01:01")).run
    patient = saved(spec_for("0 * * * *", misfire="skip", misfire_grace=timedelta(minutes=10)), at("00:55"))
    assert on_wake(patient, at("01:10:00")).run
    assert not on_wake(patient, at("01:10:01")).run


def test_the_default_grace_is_at_most_half_the_way_to_the_next_time():
    spec = saved(spec_every(10, fixed_rate=True, misfire="skip"), at("08:00"))
    assert on_wake(spec, at("08:00:15")).run
    assert clock(on_wake(spec, at("08:00:16")).due_at) == "08:00:20"


def test_a_grace_of_nothing_does_not_make_a_misfire_of_every_run():
    spec = saved(spec_for("0 * * * *", misfire="skip", misfire_grace=0), at("00:55"))
    assert on_wake(spec, at("01:00") + 12).run


def test_skip_lets_a_late_single_date_go_and_the_job_is_over():
    spec = saved(spec_for(60, misfire="skip"), at("08:00"))
    wake = on_wake(spec, at("09:00"))
    assert (wake.run, wake.due_at) == (False, None)
    assert wake.dropped == Dropped(1, at("08:01"), at("08:01"))


def test_skip_counts_an_interval_anew_from_now():
    spec = saved(spec_every(600, misfire="skip"), at("08:00"))
    assert clock(on_wake(spec, at("09:00")).due_at) == "09:10"


def test_what_has_begun_is_run_again_after_a_crash_however_late():
    first = on_wake(saved(spec_for("0 * * * *", misfire="skip"), at("00:55")), at("01:00:01"))
    assert first.must_store
    again = on_wake(ScheduleSpec.from_json(first.spec.to_json()), at("03:30"))
    assert (again.run, clock(again.scheduled_for), again.is_catch_up) == (True, "01:00", False)
    unstored = on_wake(saved(spec_for("0 * * * *", misfire="skip"), at("00:55")), at("03:30"), begun=True)
    assert (unstored.run, clock(unstored.scheduled_for)) == (True, "01:00")


def test_a_job_that_was_moved_on_purpose_is_no_misfire():
    spec = saved(spec_for("0 * * * *", misfire="skip"), at("00:55"))
    wake = on_wake(spec, at("01:30"), due_at=at("01:30"))
    assert (wake.run, clock(wake.scheduled_for), wake.is_catch_up) == (True, "01:00", False)
    assert clock(following(wake.spec, at("01:31")).due_at) == "02:00"
    early = on_wake(spec, at("00:57"), due_at=at("00:57"))
    assert clock(following(early.spec, at("00:58")).due_at) == "02:00"


def test_a_job_that_is_not_due_yet_by_this_clock_waits():
    wake = on_wake(saved(spec_for("0 * * * *"), at("00:55")), at("01:00") - 3)
    assert (wake.run, clock(wake.due_at), wake.dropped) == (False, "01:00", None)


def test_years_of_downtime_are_counted_without_walking_them():
    spec = saved(spec_for("* * * * *", timezone="Europe/Berlin"), at("2022-01-01T00:00"))
    wake = on_wake(spec, at("2026-01-01T00:00"))
    assert wake.dropped is not None
    assert wake.dropped.count == (wake.scheduled_for - wake.dropped.first) // MINUTE


@settings(max_examples=300, deadline=None)
@given(
    misfire=st.sampled_from(["run_once", "skip", "all"]),
    fixed_rate=st.booleans(),
    limit=st.integers(1, 5),
    jitter=st.sampled_from([0, 30, 59]),
    steps=st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 400_000)), max_size=12),
)
def test_every_nominal_time_is_run_or_dropped_or_passed_exactly_once(misfire, fixed_rate, limit, jitter, steps):
    options = {"misfire": misfire, "misfire_limit": limit, "jitter": jitter}
    spec = spec_every(60, fixed_rate=True, **options) if fixed_rate else spec_for("* * * * *", **options)
    now = at("08:00")
    due = first_due(spec, now, key=("k", "n", "id"))
    accounted, expected = 0, due.scheduled_for
    for late, lasts in steps:
        now = max(now, due.due_at) + late
        wake = on_wake(due.spec, now, due_at=due.due_at)
        if wake.dropped is not None:
            assert wake.dropped.first == expected
            accounted += wake.dropped.count
        expected = at("08:01") + accounted * MINUTE
        assert wake.scheduled_for == expected
        if not wake.run:
            assert wake.due_at is not None
            assert wake.due_at > now
            due = NextDue(wake.spec, wake.due_at, wake.scheduled_for)
            continue
        assert wake.scheduled_for + wake.spec.offset_ms <= now
        now += lasts
        accounted += 1
        due = following(wake.spec, now)
        accounted += due.dropped.count if due.dropped else 0
        if misfire != "all":
            accounted += due.passed_intervals
        expected = at("08:01") + accounted * MINUTE
        assert due.scheduled_for == expected
        assert due.due_at - due.scheduled_for == due.spec.offset_ms


# -- jitter ----------------------------------------------------------------------------------------


def test_jitter_is_the_same_each_time_and_added_last():
    spec = spec_for("0 * * * *", jitter=900)
    due = first_due(spec, at("08:30"), key=("cart", "user-42", "digest"))
    offset = jitter_offset("cart", "user-42", "digest", 900_000)
    assert 0 < offset < 900_000
    for hour in range(9, 15):
        assert due.scheduled_for == at(f"{hour:02}:00")
        assert due.due_at == due.scheduled_for + offset
        wake = on_wake(due.spec, due.due_at + 5, due_at=due.due_at)
        assert (wake.run, wake.is_catch_up, wake.scheduled_for) == (True, False, due.scheduled_for)
        due = following(wake.spec, due.due_at + 1000)


def test_jitter_is_stable_across_processes():
    assert jitter_offset("cart", "user-42", "digest", 3_600_000) == 1_404_746


def test_a_hundred_thousand_objects_spread_evenly_over_the_jitter():
    buckets = [0] * 60
    for n in range(100_000):
        buckets[jitter_offset("cart", f"user-{n}", "hourly", HOUR - 1) // MINUTE] += 1
    assert min(buckets) > 1400
    assert max(buckets) < 1950


def test_jitter_moves_an_interval_once_and_a_fixed_rate_for_good():
    key = ("cart", "user-42", "poll")
    offset = jitter_offset(*key, 20_000)
    due = first_due(spec_every(30, jitter=20), at("08:00"), key=key)
    assert due.due_at == at("08:00:30") + offset
    assert following(due.spec, at("08:01")).due_at == at("08:01:30")
    grid = first_due(spec_every(30, jitter=20, fixed_rate=True), at("08:00"), key=key)
    assert following(grid.spec, at("08:00:55")).due_at == at("08:01:00") + offset


@pytest.mark.parametrize(
    ("expression", "longest"),
    [
        ("* * * * *", 60),
        ("*/15 * * * *", 900),
        ("55 23 * * *", 86_400),
        ("0,55 0,23 * * *", 300),
        ("5,55 0,23 1 * *", 3000),
        ("0 8 * * mon", 7 * 86_400),
        ("0 8 1 * *", 28 * 86_400),
        ("0 8 29 2 *", 1461 * 86_400),
    ],
)
def test_jitter_must_be_shorter_than_the_smallest_gap(expression, longest):
    spec_for(expression, jitter=longest - 1)
    with pytest.raises(ScheduleInvalid, match="smallest gap"):
        spec_for(expression, jitter=longest)
    with pytest.raises(ScheduleInvalid, match="smallest gap"):
        spec_every(longest, jitter=longest)
