"""Open, begin, finish as pure functions: the guards of every link, and what an outcome does (design, section 5)."""

import json

import pytest

from celery_lifecycle import breaker
from celery_lifecycle.model import ALARM, START, InFlight, Why
from celery_lifecycle.transitions import run
from celery_lifecycle.transitions.run import Action, Refusal, Verdict
from tests.support.protocol import (
    AGAIN_LATER,
    CONFIG,
    DONE,
    MORE,
    NOW,
    WORKER,
    busy_state,
    flight,
    job,
    link,
    open_state,
    sent_state,
    state,
)

LEASE = 20_000


# --- open


def opened(given, first=None, due=True):
    return run.open_run(given, first or link(), due, NOW, "t-new")


def test_the_first_link_opens_the_run_and_takes_the_dispatch_off_the_row():
    after, refused = opened(sent_state("d1"), link(sent_ms=NOW - 700))
    assert refused is None
    assert (after.token, after.step, after.dispatch, after.sent_until) == ("t-new", 0, None, None)
    assert after.queue_wait == 700
    assert after.sent_count == 1, "it is forgotten at close, not at open"


def test_no_run_is_opened_beside_an_open_one_even_if_its_lease_is_over():
    """D23: open needs "no run", not "no live lease"."""
    given = open_state("t1", lease=NOW - 40_000)
    assert opened(given) == (given, Refusal.RUN_OPEN)


@pytest.mark.parametrize("switch", [{"paused": "holiday"}, {"disabled": True}])
def test_a_paused_or_disabled_object_opens_no_run_and_its_row_forgets_the_chain(switch):
    after, refused = opened(sent_state("d1", **switch))
    assert refused is Refusal.PAUSED
    assert (after.token, after.dispatch, after.sent_until) == (None, None, None)


def test_a_memory_hook_opens_a_run_of_a_sealed_object():
    after, refused = opened(sent_state("d1", paused="sealed"), link("#hook-3"))
    assert refused is None
    assert after.token == "t-new"


def test_a_stale_chain_with_nothing_due_ends_quietly():
    """D14, D21: neither `on_start` nor `on_alarm` may run for it."""
    given = state(queue=None)
    assert opened(given, due=False) == (given, Refusal.NOTHING_DUE)


def test_a_chain_that_finds_nothing_due_is_forgotten_by_the_row_that_carries_it():
    """D13: by the database's clock nothing is due; the row must not wait for this chain."""
    after, refused = opened(sent_state("d1"), due=False)
    assert refused is Refusal.NOTHING_DUE
    assert after.dispatch is None


def test_a_refused_chain_leaves_a_newer_dispatch_alone():
    given = sent_state("newer")
    assert opened(given, link(dispatch="older"), due=False) == (given, Refusal.NOTHING_DUE)


def test_a_worker_clock_behind_the_senders_makes_no_negative_queue_wait():
    after, _ = opened(sent_state("d1"), link(sent_ms=NOW + 3))
    assert after.queue_wait == 0


# --- begin: token, position, nothing in flight


def test_a_link_whose_token_and_position_are_the_rows_may_begin():
    assert run.may_begin(open_state("t1", step=1), link(position=1, token="t1")) is None


@pytest.mark.parametrize("token", ["t0", None])
def test_a_link_of_another_run_is_refused(token):
    """C06: ownership is the token."""
    assert run.may_begin(open_state("t1"), link(token=token)) is Refusal.RUN_OVER


def test_a_link_is_refused_when_no_run_is_open():
    assert run.may_begin(state(), link(token="t1")) is Refusal.RUN_OVER
    assert run.may_begin(state(), link(token=None)) is Refusal.RUN_OVER


@pytest.mark.parametrize("position", [0, 2])
def test_a_link_out_of_its_turn_is_refused(position):
    """D01: a doubled link 2, or a link 3 that comes too early."""
    assert run.may_begin(open_state("t1", step=1), link(position=position, token="t1")) is Refusal.PASSED


def test_a_link_is_refused_while_another_one_is_in_flight():
    """D01: copy 2 of link 2 goes on to link 3 while copy 1 still runs."""
    given = busy_state("b", step=2, token="t1")
    assert run.may_begin(given, link("c", position=2, token="t1")) is Refusal.BUSY


def test_a_job_may_run_when_its_time_its_delay_and_its_objects_delay_have_come():
    """D13, D27: by the database's clock."""
    assert run.is_due(state(), job("a", NOW), NOW)
    assert not run.is_due(state(), job("a", NOW + 1), NOW)
    assert not run.is_due(state(), job("a", NOW, not_before_ms=NOW + 1), NOW)
    assert not run.is_due(state(not_before=NOW + 1), job("a", NOW), NOW)
    assert run.is_due(state(not_before=NOW), job("a", NOW, not_before_ms=NOW), NOW)
    assert not run.is_due(state(), None, NOW)


def test_a_hook_is_not_held_back_by_its_object():
    assert run.is_due(state(not_before=NOW + 1), job("#hook-1", NOW), NOW)


def test_the_durable_start_of_an_attempt_names_job_worker_and_process():
    given = open_state("t1", step=1, doubt=True)
    after = run.started(given, flight("b"), WORKER, NOW, CONFIG)
    assert after.step == 2
    assert (after.in_flight, after.worker, after.worker_pid) == (flight("b"), WORKER.instance, WORKER.pid)
    assert after.lease_until == after.wake_at == NOW + LEASE
    assert after.doubt is False


def test_a_link_that_is_passed_over_makes_room_for_the_next_one():
    given = open_state("t1", step=1)
    after = run.passed(given, NOW, CONFIG)
    assert (after.step, after.in_flight, after.token) == (2, None, "t1")
    assert after.lease_until == after.wake_at == NOW + 30_000
    assert run.may_begin(after, link("c", 2, token="t1")) is None


def test_the_way_to_the_next_link_is_covered_by_the_patience_of_the_object():
    """D24"""
    after = run.waiting(busy_state(queue_wait=60_000), NOW, CONFIG)
    assert after.in_flight is None
    assert after.lease_until == after.wake_at == NOW + 120_000


def test_after_on_start_the_job_is_in_flight_and_failed_starts_are_forgotten():
    lines, _ = breaker.counted(None, START, START, NOW, 3_600_000, 0)
    given = busy_state(START, in_flight=flight(START, line=START), lines=lines, not_before=NOW - 1, not_before_count=2)
    given = given.but(doubt=True)
    after = run.entered(given, flight("a"), CONFIG, NOW)
    assert after.in_flight == flight("a")
    assert (after.lines, after.not_before, after.not_before_count) == (None, None, 0)
    assert after.lease_until == after.wake_at == NOW + LEASE
    assert after.doubt is False
    assert after.step == given.step


# --- finish


def test_the_link_in_flight_may_finish():
    assert run.may_finish(busy_state("a", token="t1"), link("a"), "t1")


@pytest.mark.parametrize(
    "other",
    [
        {"token": "t2"},
        {"token": None},
        {"step": 2},
        {"step": 0},
        {"in_flight": None},
        {"in_flight": flight("a", task_id="d0-0")},
    ],
    ids=["another run", "no run", "later step", "earlier step", "nothing in flight", "another task"],
)
def test_a_late_finish_is_refused(other):
    """C06, D05, D07: the run was ended, and perhaps begun again, by somebody else."""
    assert not run.may_finish(busy_state("a", token="t1").but(**other), link("a"), "t1")


def finish(found, verdict, given=None):
    return run.finish(given or busy_state("a", versions=5), found, verdict, NOW, CONFIG)


def test_complete_removes_the_job():
    done = finish(job("a"), DONE)
    assert (done.remove, done.write, done.dead, done.discarded) == (job("a"), None, None, False)
    assert done.state.in_flight is None
    assert done.state.token == "t1"


def test_reschedule_moves_the_job_and_begins_its_attempts_anew():
    done = finish(job("a", attempt=2), AGAIN_LATER)
    assert done.remove is None
    assert (done.write.due_ms, done.write.attempt) == (NOW + 60_000, 0)
    assert done.write.version == done.state.versions == 6
    assert finish(job("a"), Verdict(Action.RESCHEDULE, at_ms=NOW - 5)).write.due_ms == NOW - 5


def test_yield_puts_the_job_behind_those_that_are_due():
    done = finish(job("a", NOW - 900, attempt=1), MORE)
    assert (done.write.due_ms, done.write.attempt, done.write.version) == (NOW, 0, 6)


def test_a_retry_too_far_away_to_hold_a_worker_keeps_its_count():
    done = finish(job("a"), Verdict(Action.AGAIN, delay_ms=90_000, attempt=2))
    assert (done.write.due_ms, done.write.attempt) == (NOW + 90_000, 2)


def test_a_job_that_failed_for_good_is_kept_as_a_dead_job():
    done = finish(job("a"), Verdict(Action.DEAD, why=Why.FAILED))
    assert done.dead == done.remove == job("a")


def test_a_recurring_job_goes_on_after_a_failure_and_the_failure_is_kept():
    done = finish(job("a", attempt=2), Verdict(Action.DEAD, why=Why.FAILED, next=(NOW + 30_000, "{}")))
    assert done.dead == job("a", attempt=2)
    assert done.remove is None
    assert (done.write.due_ms, done.write.schedule_json, done.write.attempt) == (NOW + 30_000, "{}", 0)


@pytest.mark.parametrize("verdict", [DONE, AGAIN_LATER, MORE, Verdict(Action.DEAD, why=Why.FAILED)])
def test_a_newer_push_or_reschedule_wins_and_the_outcome_is_discarded(verdict):
    """D26 and design section 5, finish: by the job's version."""
    newer = job("a", NOW + 9_000, version=4, attempt=0)
    done = finish(newer, verdict)
    assert done.discarded
    assert (done.write, done.remove, done.dead) == (None, None, None)


def test_the_outcome_of_a_cancelled_job_is_discarded():
    done = finish(None, AGAIN_LATER)
    assert (done.discarded, done.write, done.remove) == (True, None, None)


def test_on_alarm_of_a_run_that_jobs_triggered_leaves_an_alarm_set_meanwhile_alone():
    given = busy_state(ALARM, in_flight=flight(ALARM, version=0), versions=5)
    done = finish(job(ALARM, NOW + 5, version=5), DONE, given)
    assert (done.discarded, done.write, done.remove) == (False, None, None)
    assert not finish(None, DONE, given).discarded


def test_an_outcome_ends_the_doubt_about_an_unknown_task():
    assert finish(job("a", unknown_since_ms=NOW - 1), MORE).write.unknown_since_ms is None


# --- what clears strikes: a clean end of the struck job, nothing else (section 7, rule 6)


def struck():
    lines, _ = breaker.counted(None, "a", "a", NOW, 3_600_000, 0)
    return busy_state("a", lines=lines, versions=5), job("a", strikes=2, suspect_on="w1", not_before_ms=NOW)


@pytest.mark.parametrize("verdict", [AGAIN_LATER, Verdict(Action.COMPLETE, clean=True, next=(NOW + 5, "{}"))])
def test_a_clean_end_clears_strikes_suspicion_and_delay(verdict):
    given, found = struck()
    done = finish(found, verdict, given)
    assert (done.write.strikes, done.write.suspect_on, done.write.not_before_ms) == (0, None, None)
    assert done.state.lines is None


@pytest.mark.parametrize(
    "verdict",
    [
        MORE,
        Verdict(Action.AGAIN, attempt=1),
        Verdict(Action.RESCHEDULE, delay_ms=1),
        Verdict(Action.DEAD, why=Why.FAILED, next=(NOW + 5, "{}")),
    ],
    ids=["yield", "quick failure", "reschedule with tracked work", "failed for good, recurring"],
)
def test_no_other_end_clears_anything(verdict):
    """D28, C03: a job that yields and dies, or reschedules while its tracked work dies, is sealed all the same."""
    given, found = struck()
    done = finish(found, verdict, given)
    assert (done.write.strikes, done.write.not_before_ms) == (2, NOW)
    assert done.write.suspect_on == breaker.waiting_mark(found)
    assert done.state.lines == given.lines


def test_the_clean_end_of_one_job_leaves_the_strikes_of_another_in_its_line():
    lines, _ = breaker.counted(None, "a", "other", NOW, 3_600_000, 0)
    done = finish(job("a"), DONE, busy_state("a", lines=lines))
    assert done.state.lines == lines


def test_a_clean_end_clears_the_strikes_of_a_job_that_was_replaced_meanwhile():
    given, found = struck()
    newer = found._replace(version=4)
    done = finish(newer, DONE, given)
    assert done.discarded
    assert (done.write.strikes, done.write.version, done.write.due_ms) == (0, 4, newer.due_ms)


def test_a_suspect_that_no_longer_runs_gives_its_workers_place_back():
    found = job("a", version=4, suspect_on="w1")
    done = finish(found, MORE)
    assert done.write.suspect_on == breaker.waiting_mark(found)
    assert run.unmarked(job("b")) == job("b")


def test_what_a_newer_version_has_added_to_a_link_in_flight_is_passed_over():
    given = flight("a")
    newer = json.dumps([*json.loads(given.to_json()), "of a newer version"])
    assert InFlight.from_json(newer) == InFlight.from_json(given.to_json()) == given
