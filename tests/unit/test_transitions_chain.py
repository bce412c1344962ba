"""Claim, dispatch, revive, release, close as pure functions (design, section 5: the transition table)."""

from dataclasses import replace

import pytest

from celery_lifecycle.model import ALARM, SEALED, Phase
from celery_lifecycle.transitions import chain
from celery_lifecycle.transitions.derive import Agenda, derive, is_forgettable
from tests.support.protocol import CONFIG, NOW, agenda, brief, busy_state, open_state, sent_state, state

PATIENCE = 30_000
LATER = NOW + 60_000


def claim(given, jobs, now=NOW):
    return chain.claim(derive(given, jobs, now), jobs, now, CONFIG, "new")


def right(claimed, jobs, now=NOW):
    """`wake_at` is what its definition says."""
    return derive(claimed.state, jobs, now) == claimed.state


# --- claim without a run: dispatch


def test_a_due_job_is_sent_as_a_new_chain_and_the_row_says_so_before_the_send():
    jobs = agenda(brief("a", NOW - 5), brief("b", NOW))
    made = claim(state(), jobs)
    assert made.state.dispatch == "new"
    assert (made.state.sent_count, made.state.sent_until) == (1, NOW + PATIENCE)
    assert made.state.wake_at == NOW + PATIENCE
    assert made.state.phase is Phase.SENT
    assert [one.id for one in made.shipment.jobs] == ["a", "b"]
    assert (made.shipment.dispatch, made.shipment.token, made.shipment.first_position) == ("new", None, 0)
    assert made.shipment.all_due
    assert right(made, jobs)


def test_a_chain_whose_patience_is_over_is_sent_again_under_a_new_dispatch():
    """D16: each lost message costs one patience."""
    jobs = agenda("a")
    made = claim(sent_state("old", until=NOW - 1), jobs)
    assert made.state.dispatch == made.shipment.dispatch == "new"
    assert (made.state.sent_count, made.state.sent_until) == (2, NOW + 2 * PATIENCE)


def test_patience_doubles_with_each_sending_up_to_five_minutes():
    counts = [chain.patience(state(sent_count=count), CONFIG) for count in (0, 1, 2, 3, 4, 5, 6, 99)]
    assert counts == [30_000, 30_000, 60_000, 120_000, 240_000, 300_000, 300_000, 300_000]


def test_patience_is_at_least_twice_the_queue_wait_the_object_saw_last():
    """D15, D24: a long queue is not answered with more messages."""
    assert chain.patience(state(sent_count=1, queue_wait=700_000), CONFIG) == 1_400_000
    assert chain.patience(state(sent_count=1, queue_wait=15_000), CONFIG) == 30_000


def test_a_weekend_without_workers_does_not_make_the_next_lost_message_cost_five_days():
    assert chain.patience(state(sent_count=1, queue_wait=60 * 3_600_000), CONFIG) == 3_600_000
    assert chain.patience(state(sent_count=99, queue_wait=60 * 3_600_000), CONFIG) == 3_600_000


def test_a_sent_chain_with_nothing_due_any_more_is_forgotten():
    """D32: it must not be claimed again at each tick."""
    jobs = agenda(brief("a", LATER))
    made = claim(sent_state("old", until=NOW - 1), jobs)
    assert made.shipment is None
    assert (made.state.dispatch, made.state.sent_until, made.state.wake_at) == (None, None, LATER)


def test_a_claim_of_an_object_whose_jobs_are_gone_leaves_no_alarm():
    made = claim(sent_state(until=NOW - 1), Agenda())
    assert (made.shipment, made.state.wake_at, made.state.queue) == (None, None, None)


@pytest.mark.parametrize("switch", [{"paused": "holiday"}, {"disabled": True}, {"not_before": LATER}])
def test_an_object_that_is_held_back_sends_nothing(switch):
    made = chain.dispatch(state(**switch), agenda("a"), NOW, CONFIG, "new")
    assert made.shipment is None
    assert made.state.dispatch is None


def test_a_chain_takes_no_more_than_its_length_and_tells_that_it_is_not_all():
    """D22"""
    jobs = agenda(*(brief(f"{n:03}", NOW - 1) for n in range(51)))
    made = claim(state(), jobs)
    assert len(made.shipment.jobs) == 50
    assert not made.shipment.all_due


def test_the_chain_goes_to_the_queue_of_its_first_job():
    made = claim(state(), agenda(brief("a", NOW - 1, queue="fast"), brief("b", NOW, queue="slow")))
    assert made.state.queue == "fast"


def test_a_bare_alarm_that_is_due_is_a_chain_of_its_own():
    made = claim(state(), agenda(brief(ALARM)))
    assert [one.id for one in made.shipment.jobs] == [ALARM]


def test_a_pushers_own_dispatch_never_touches_an_open_run():
    """D03: no second run beside the live one."""
    given = busy_state()
    made = chain.dispatch(given, agenda("b"), NOW, CONFIG, "new")
    assert made.shipment is None
    assert made.state == given


# --- claim with a run


def test_a_claim_of_a_run_whose_lease_is_alive_only_puts_the_alarm_at_the_leases_end():
    given = busy_state(lease=NOW + 9_000).but(wake_at=NOW - 1)
    made = chain.claim(given, agenda("a"), NOW, CONFIG, "new")
    assert (made.shipment, made.lost) == (None, False)
    assert made.state == given.but(wake_at=NOW + 9_000)


def test_a_lease_that_is_over_with_a_link_in_flight_is_a_loss_to_look_into_and_changes_nothing():
    given = busy_state(lease=NOW)
    made = chain.claim(given, agenda("a", "b"), NOW, CONFIG, "new")
    assert made.lost
    assert made.shipment is None
    assert made.state == given


def test_a_run_between_two_links_is_revived_under_its_token_from_its_step():
    """D02, D05: the child died while publishing the next link; no strike, the run goes on."""
    given = open_state(lease=NOW - 1, step=2, sent_count=1)
    made = chain.claim(given, agenda("c", "d"), NOW, CONFIG, "new")
    assert not made.lost
    assert (made.shipment.token, made.shipment.first_position) == ("t1", 2)
    assert [one.id for one in made.shipment.jobs] == ["c", "d"]
    assert made.state.token == "t1"
    assert (made.state.step, made.state.dispatch) == (2, None)


def test_each_revival_is_waited_for_longer():
    """D24: one chain per patience, not one per tick."""
    first = chain.claim(open_state(lease=NOW - 1, sent_count=1), agenda("a"), NOW, CONFIG, "n1")
    assert first.state.lease_until == first.state.wake_at == NOW + 2 * PATIENCE
    again = chain.claim(first.state, agenda("a"), NOW + 2 * PATIENCE, CONFIG, "n2")
    assert again.state.lease_until == NOW + 2 * PATIENCE + 4 * PATIENCE
    quiet = chain.claim(first.state, agenda("a"), NOW + 1, CONFIG, "n3")
    assert quiet.shipment is None


@pytest.mark.parametrize(
    ("switch", "jobs"),
    [
        ({}, agenda(brief("a", LATER))),
        ({}, Agenda()),
        ({"paused": "holiday"}, agenda("a")),
        ({"disabled": True}, agenda("a")),
        ({"not_before": LATER}, agenda("a")),
    ],
    ids=["not due", "no job", "paused", "disabled", "held back"],
)
def test_a_run_with_nothing_left_to_do_is_closed_instead_of_revived(switch, jobs):
    given = open_state(lease=NOW - 1, step=1, sent_count=4, doubt=True, **switch)
    made = chain.claim(given, jobs, NOW, CONFIG, "new")
    assert made.shipment is None
    assert (made.state.token, made.state.lease_until, made.state.step) == (None, None, 0)
    assert made.state.sent_count == 0
    assert right(made, jobs)


def test_a_sealed_object_between_links_is_revived_for_its_hook_only():
    given = open_state(lease=NOW - 1, step=1, paused=SEALED)
    made = chain.claim(given, agenda("a", brief("#hook-4")), NOW, CONFIG, "new")
    assert [one.id for one in made.shipment.jobs] == ["#hook-4"]


# --- release


def shipment_of(made):
    assert made.shipment is not None
    return made.shipment


def test_a_chain_that_could_not_be_sent_is_taken_back_and_counts_as_never_sent():
    """D18"""
    jobs = agenda("a")
    made = claim(state(), jobs)
    back = chain.release(made.state, jobs, shipment_of(made), NOW + 5, 200)
    assert (back.sent_count, back.sent_until, back.wake_at) == (0, NOW + 205, NOW + 205)
    assert back.dispatch == "new"


def test_a_release_that_comes_after_the_chain_was_sent_anew_changes_nothing():
    jobs = agenda("a")
    made = claim(state(), jobs)
    assert chain.release(made.state.but(dispatch="newer"), jobs, shipment_of(made), NOW, 200) is None


def test_a_release_that_comes_after_the_run_was_opened_changes_nothing():
    made = claim(state(), agenda("a"))
    assert chain.release(busy_state(), agenda("a"), shipment_of(made), NOW, 200) is None


def test_a_release_of_an_object_whose_jobs_are_gone_meanwhile_leaves_no_alarm():
    """D32: release while the job is cancelled."""
    made = claim(state(), agenda("a"))
    back = chain.release(made.state, Agenda(), shipment_of(made), NOW, 200)
    assert (back.dispatch, back.wake_at) == (None, None)


def test_a_release_keeps_a_push_that_came_meanwhile():
    """D32"""
    made = claim(state(), agenda("a"))
    back = chain.release(made.state, agenda("a", "b"), shipment_of(made), NOW, 200)
    assert back.wake_at == NOW + 200


def test_a_revived_chain_that_could_not_be_sent_gives_the_lease_back():
    given = open_state(lease=NOW - 1, step=2, sent_count=1)
    made = chain.claim(given, agenda("c"), NOW, CONFIG, "new")
    back = chain.release(made.state, agenda("c"), shipment_of(made), NOW, 300)
    assert (back.lease_until, back.wake_at, back.sent_count, back.token) == (NOW + 300, NOW + 300, 1, "t1")


@pytest.mark.parametrize("past", [{"token": "t2"}, {"step": 3}, {"in_flight": busy_state().in_flight}])
def test_a_release_of_a_revival_that_arrived_after_all_changes_nothing(past):
    given = open_state(lease=NOW - 1, step=2, sent_count=1)
    made = chain.claim(given, agenda("c"), NOW, CONFIG, "new")
    assert chain.release(made.state.but(**past), agenda("c"), shipment_of(made), NOW, 300) is None


def test_a_release_never_counts_below_nothing():
    back = chain.release(sent_state("new", sent_count=0), agenda("a"), shipment_of(claim(state(), agenda("a"))), NOW, 1)
    assert back.sent_count == 0


# --- the end of a run


def test_ending_a_run_forgets_all_that_belongs_to_it_and_nothing_else():
    given = busy_state(doubt=True, sent_count=3, queue_wait=9, lines="{}", not_before=5, versions=12, paused="p")
    end = chain.ended(given)
    assert (end.token, end.lease_until, end.doubt, end.step, end.in_flight) == (None, None, False, 0, None)
    assert (end.worker, end.worker_pid) == (None, None)
    kept = ("sent_count", "queue_wait", "lines", "not_before", "versions", "paused", "id")
    assert [getattr(end, name) for name in kept] == [getattr(given, name) for name in kept]


def test_a_destroyed_object_forgets_all_but_the_link_in_flight_which_is_then_the_last():
    """D36"""
    given = busy_state(paused="p", disabled=True, not_before=5, not_before_count=1, lines="{}", holds=2, stored=True)
    gone = chain.destroyed(given.but(sealed=True, versions=9))
    assert gone.in_flight == replace(given.in_flight, final=True)
    assert (gone.token, gone.step, gone.versions) == (given.token, given.step, 9)
    assert is_forgettable(chain.ended(gone), Agenda())


def test_a_destroyed_objects_run_ends_at_once_between_two_links():
    gone = chain.destroyed(open_state("t1", step=2))
    assert (gone.token, gone.step) == (None, 0)
    sent = chain.destroyed(sent_state("d1"))
    assert (sent.dispatch, sent.sent_until, sent.sent_count) == (None, None, 0)


def test_closing_a_run_forgets_how_often_it_was_sent():
    made = chain.close(busy_state(sent_count=5), agenda(brief("b", LATER)), NOW, CONFIG, "new")
    assert (made.state.sent_count, made.state.wake_at, made.shipment) == (0, LATER, None)


def test_the_closing_worker_dispatches_what_is_due_already_without_beat():
    """D22: the next slice."""
    made = chain.close(busy_state(sent_count=5), agenda("b"), NOW, CONFIG, "new")
    assert made.shipment is not None
    assert (made.state.dispatch, made.state.sent_count, made.state.sent_until) == ("new", 1, NOW + PATIENCE)


def test_a_paused_object_is_closed_and_sends_nothing():
    made = chain.close(busy_state(paused="holiday"), agenda("b"), NOW, CONFIG, "new")
    assert (made.shipment, made.state.token, made.state.wake_at) == (None, None, None)
