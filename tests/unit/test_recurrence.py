"""Where a schedule meets the protocol, as pure functions: what a wake means, what follows, what an idempotent call finds."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from celery_lifecycle.errors import ScheduleInvalid
from celery_lifecycle.model import Job
from celery_lifecycle.timing.spec import ScheduleSpec, jitter_offset, spec_every, spec_for
from celery_lifecycle.transitions import recurrence
from tests.support.protocol import CART, flight, job

MINUTE = 60_000
NOON = int(datetime(2026, 3, 1, 12, tzinfo=timezone.utc).timestamp() * 1000)


def saved(spec: ScheduleSpec, now: int = NOON, **more: Any) -> Job:
    due, schedule = recurrence.planned(spec, CART, "s", now)
    return job("s", due, schedule_json=schedule, **more)


def test_a_job_without_a_schedule_just_runs_for_the_time_it_was_due() -> None:
    waking = recurrence.wake(job("a", NOON), NOON + 90 * MINUTE)
    assert (waking.runs, waking.scheduled_for, waking.is_catch_up, waking.dropped) == (True, NOON, False, {})
    assert recurrence.following(job("a", NOON), NOON) is None


def test_an_occurrence_that_is_on_time_changes_nothing_in_its_row() -> None:
    hourly = saved(spec_for("0 * * * *"))
    waking = recurrence.wake(hourly, hourly.due_ms + 5)
    assert waking.job is hourly
    assert waking.scheduled_for == hourly.due_ms


def test_a_catch_up_is_remembered_in_the_row_so_that_a_second_attempt_knows_it() -> None:
    hourly = saved(spec_for("0 * * * *"))
    first = recurrence.wake(hourly, NOON + 250 * MINUTE)
    assert (first.is_catch_up, first.scheduled_for) == (True, NOON + 240 * MINUTE)
    assert first.dropped == {
        "count": 3,
        "first": "2026-03-01T13:00:00+00:00",
        "last": "2026-03-01T15:00:00+00:00",
    }
    second = recurrence.wake(first.job, NOON + 900 * MINUTE)
    assert (second.job, second.scheduled_for, second.is_catch_up, second.dropped) == (
        first.job, first.scheduled_for, True, {},
    )  # fmt: skip


def test_a_run_that_has_begun_is_not_judged_again_even_if_its_row_does_not_say_so() -> None:
    hourly = saved(spec_for("0 * * * *", misfire="skip"))
    assert recurrence.wake(hourly, NOON + 100 * MINUTE).runs is False
    in_flight = flight(hourly.id, version=hourly.version)
    for begun in (hourly._replace(attempt=1), recurrence.with_begun(hourly, in_flight)):
        assert recurrence.wake(begun, NOON + 100 * MINUTE).runs is True
    assert recurrence.wake(hourly, NOON + 100 * MINUTE, begun=True).scheduled_for == hourly.due_ms


def test_a_job_that_was_moved_is_run_when_it_was_moved_to_and_stands_for_its_own_time() -> None:
    hourly = saved(spec_for("0 * * * *", misfire="skip"))
    moved = hourly._replace(due_ms=NOON + 95 * MINUTE)
    waking = recurrence.wake(moved, NOON + 100 * MINUTE)
    assert (waking.runs, waking.scheduled_for, waking.job.due_ms) == (True, hourly.due_ms, moved.due_ms)


def test_what_is_skipped_moves_on_and_a_date_that_is_skipped_is_over() -> None:
    hourly = saved(spec_for("0 * * * *", misfire="skip"), attempt=0)
    waking = recurrence.wake(hourly, NOON + 100 * MINUTE)
    assert (waking.runs, waking.over, waking.job.due_ms) == (False, False, NOON + 120 * MINUTE)
    date = saved(spec_for(60, misfire="skip"))
    waking = recurrence.wake(date, NOON + 100 * MINUTE)
    assert (waking.runs, waking.over, waking.dropped["count"]) == (False, True, 1)


def test_after_a_run_an_interval_counts_from_its_end_and_a_fixed_rate_keeps_its_grid() -> None:
    plain, grid = saved(spec_every(60)), saved(spec_every(60, fixed_rate=True))
    end = NOON + MINUTE + 150_000
    after = recurrence.following(plain, end, NOON + MINUTE)
    assert after is not None
    assert (after.due, after.passed_intervals) == (end + MINUTE, 2)
    after = recurrence.following(grid, end, NOON + MINUTE)
    assert after is not None
    assert (after.due, after.passed_intervals) == (NOON + 4 * MINUTE, 2)


def test_times_that_a_run_outlasts_are_dropped_for_the_next_one_which_is_a_catch_up() -> None:
    minutely = saved(spec_for("* * * * *"))
    after = recurrence.following(minutely, NOON + MINUTE + 200_000)
    assert after is not None
    assert after.dropped["count"] == 2
    pending = minutely._replace(due_ms=after.due, schedule_json=after.schedule_json)
    waking = recurrence.wake(pending, NOON + MINUTE + 200_010)
    assert (waking.runs, waking.is_catch_up, waking.scheduled_for) == (True, True, NOON + 4 * MINUTE)
    later = recurrence.following(waking.job, NOON + MINUTE + 200_020)
    assert later is not None
    assert (
        recurrence.wake(pending._replace(due_ms=later.due, schedule_json=later.schedule_json), later.due).is_catch_up
        is False
    )


def test_records_of_one_schedule_add_up() -> None:
    before, now = {"count": 3, "first": "a", "last": "b"}, {"count": 2, "first": "c", "last": "d"}
    assert recurrence.dropped_so_far(before, now) == {"count": 5, "first": "a", "last": "d"}


def test_an_idempotent_call_finds_the_same_callback_payload_and_schedule_only() -> None:
    stored = saved(spec_for("0 8 * * *", timezone="Asia/Tokyo"), payload_json='{"a":1}')
    same = (stored.task, '{"a":1}', spec_for("0 8 * * *", timezone="Asia/Tokyo", misfire="skip"))
    assert recurrence.is_same(stored, *same)
    assert not recurrence.is_same(stored, "cart.other", *same[1:])
    assert not recurrence.is_same(stored, same[0], "null", same[2])
    assert not recurrence.is_same(stored, *same[:2], spec_for("0 8 * * *"))
    assert not recurrence.is_same(stored._replace(schedule_json=None), *same)


def test_a_newer_policy_moves_neither_the_nominal_time_nor_the_version() -> None:
    stored = saved(spec_for("0 8 * * *", jitter=600))._replace(attempt=2, strikes=1)
    wanted = saved(spec_for("0 8 * * *", misfire="skip"), NOON + 5, queue="slow", exclusive=True)
    renewed = recurrence.with_policy(stored, wanted)
    spec = recurrence.spec_of(renewed)
    assert spec is not None
    assert (spec.misfire, spec.jitter_ms, renewed.due_ms) == ("skip", 0, spec.nominal)
    assert (renewed.queue, renewed.exclusive) == ("slow", True)
    assert (renewed.version, renewed.attempt, renewed.strikes) == (stored.version, 2, 1)
    moved = stored._replace(due_ms=NOON + 7)
    assert recurrence.with_policy(moved, wanted).due_ms == NOON + 7
    assert recurrence.with_policy(stored, saved(spec_for("0 8 * * *", jitter=600))) == stored


def test_an_interval_that_has_run_does_not_get_a_jitter_added_each_time() -> None:
    stored = saved(spec_every(60, jitter=30))
    after = recurrence.following(stored, NOON + 2 * MINUTE)
    assert after is not None
    running = stored._replace(due_ms=after.due, schedule_json=after.schedule_json)
    assert recurrence.with_policy(running, saved(spec_every(60, jitter=20))).due_ms == running.due_ms


def test_the_dead_job_of_one_run_is_that_run_and_not_its_schedule() -> None:
    cron = saved(spec_for("0 8 * * *"))
    dead = recurrence.occurrence(cron)
    assert json.loads(dead.schedule_json or "") == {"type": "scheduled", "nominal": cron.due_ms}
    assert recurrence.occurrence(saved(spec_for(60))).schedule_json == saved(spec_for(60)).schedule_json
    assert recurrence.occurrence(job("a")) == job("a")


def test_100_000_objects_with_one_cron_spread_evenly_over_its_jitter() -> None:
    due, _ = recurrence.planned(spec_for("0 * * * *", jitter=900), CART, "=digest", NOON)
    assert due == NOON + 60 * MINUTE + jitter_offset(CART.kind, CART.name, "=digest", 900_000)
    minutes = [0] * 15
    for number in range(100_000):
        minutes[jitter_offset("cart", f"user-{number}", "=digest", 900_000) // MINUTE] += 1
    assert sum(minutes) == 100_000
    assert max(minutes) < 1.1 * min(minutes)


def test_a_run_that_outlasts_its_interval_tells_how_many_it_passed() -> None:
    every = saved(spec_every(60))
    after = recurrence.following(every, NOON + 4 * MINUTE, NOON + MINUTE)
    assert after.passed_intervals == 3


def test_a_struck_or_failed_occurrence_is_not_taken_for_a_missed_one() -> None:
    hourly = saved(spec_for("0 * * * *", misfire="skip"))
    late, in_flight = hourly.due_ms + 50 * MINUTE, flight(hourly.id, version=hourly.version)
    assert recurrence.wake(recurrence.with_begun(hourly, in_flight), late).runs
    assert recurrence.wake(hourly._replace(attempt=1), late).runs
    # A strike of an earlier occurrence says nothing of this one; nor does a run that a newer change has replaced.
    assert not recurrence.wake(hourly._replace(strikes=1), late).runs
    assert recurrence.with_begun(hourly, replace(in_flight, version=hourly.version + 1)) == hourly


def test_a_schedule_that_can_not_be_read_here_is_kept_for_a_process_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(spec: ScheduleSpec) -> None:
        raise ScheduleInvalid("no such time zone here")

    hourly = saved(spec_for("0 * * * *"))
    monkeypatch.setattr("celery_lifecycle.timing.spec.ScheduleSpec.parsed", unknown)
    after = recurrence.following(hourly, NOON)
    assert after.due > NOON
    assert after.schedule_json == hourly.schedule_json


def test_a_date_that_has_run_is_over() -> None:
    once = saved(spec_for(60))
    assert recurrence.following(once, NOON + MINUTE + 1, NOON + MINUTE) is None
