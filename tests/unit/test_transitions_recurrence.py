"""Where schedules meet the protocol: what a wake means, what follows a run, what is told of it."""

from dataclasses import replace

from celery_lifecycle.errors import ScheduleInvalid
from celery_lifecycle.timing.instants import from_millis
from celery_lifecycle.timing.schedule import first_due, spec_every, spec_for
from celery_lifecycle.transitions import recurrence
from tests.support.protocol import NOW, flight, job

MINUTE = 60_000


def scheduled(spec, now=NOW):
    first = first_due(spec, now)
    return job("s", first.due_at, schedule_json=recurrence.dumped(first.spec))


def test_a_job_without_a_schedule_runs_for_the_time_it_was_due_and_nothing_follows():
    plain = job("a", NOW - 5)
    assert recurrence.wake(plain, NOW) == recurrence.Waking(plain, scheduled_for=NOW - 5)
    assert recurrence.following(plain, NOW) is None


def test_an_interval_goes_on_one_interval_after_the_end_of_its_run():
    every = scheduled(spec_every(60))
    assert every.due_ms == NOW + MINUTE
    after = recurrence.following(every, NOW + MINUTE + 7_000, NOW + MINUTE)
    assert after.due == NOW + MINUTE + 7_000 + MINUTE
    assert after.passed_intervals == 0


def test_a_run_that_outlasts_its_interval_tells_how_many_it_passed():
    every = scheduled(spec_every(60))
    after = recurrence.following(every, NOW + 4 * MINUTE, NOW + MINUTE)
    assert after.passed_intervals == 3


def test_a_dropped_occurrence_is_moved_on_and_what_it_dropped_is_told():
    hourly = scheduled(spec_for("0 * * * *", misfire="skip", timezone="UTC"))._replace(attempt=0)
    late = hourly.due_ms + 50 * MINUTE
    waking = recurrence.wake(hourly, late)
    assert not waking.runs
    assert waking.job.due_ms == hourly.due_ms + 60 * MINUTE
    told = from_millis(hourly.due_ms).isoformat()
    assert waking.dropped == {"count": 1, "first": told, "last": told}


def test_a_catch_up_remembers_the_occurrence_it_stands_for():
    hourly = scheduled(spec_for("0 * * * *", timezone="UTC"))
    late = hourly.due_ms + 130 * MINUTE
    waking = recurrence.wake(hourly, late)
    assert (waking.runs, waking.is_catch_up, waking.scheduled_for) == (True, True, hourly.due_ms + 120 * MINUTE)
    assert waking.dropped["count"] == 2
    again = recurrence.wake(waking.job, late + 5 * MINUTE)
    assert (again.runs, again.scheduled_for, again.dropped) == (True, waking.scheduled_for, {})


def test_a_struck_or_failed_occurrence_is_not_taken_for_a_missed_one():
    hourly = scheduled(spec_for("0 * * * *", misfire="skip", timezone="UTC"))
    late, in_flight = hourly.due_ms + 50 * MINUTE, flight(hourly.id, version=hourly.version)
    assert recurrence.wake(recurrence.with_begun(hourly, in_flight), late).runs
    assert recurrence.wake(hourly._replace(attempt=1), late).runs
    # A strike of an earlier occurrence says nothing of this one; nor does a run that a newer change has replaced.
    assert not recurrence.wake(hourly._replace(strikes=1), late).runs
    assert recurrence.with_begun(hourly, replace(in_flight, version=hourly.version + 1)) == hourly


def test_a_schedule_that_can_not_be_read_here_is_kept_for_a_process_that_can(monkeypatch):
    def unknown(spec):
        raise ScheduleInvalid("no such time zone here")

    hourly = scheduled(spec_for("0 * * * *", timezone="UTC"))
    monkeypatch.setattr("celery_lifecycle.timing.spec.ScheduleSpec.parsed", unknown)
    after = recurrence.following(hourly, NOW)
    assert after.due > NOW
    assert after.schedule_json == hourly.schedule_json


def test_a_date_that_has_run_is_over():
    once = scheduled(spec_for(60))
    assert recurrence.following(once, NOW + MINUTE + 1, NOW + MINUTE) is None
