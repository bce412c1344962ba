"""The next alarm, what is due, and when an object's row may go (design, section 5: `next_wake`)."""

import pytest

from celery_lifecycle.model import ALARM, ALIVE, SEALED
from celery_lifecycle.transitions.derive import Agenda, derive, due_links, effective_due, is_forgettable, next_wake
from tests.support.protocol import NOW, QUEUE, agenda, brief, open_state, sent_state, state

LATER = NOW + 60_000


def wake(given, jobs=Agenda()):
    return next_wake(given, jobs, NOW)[1]


def test_an_open_run_wakes_at_the_end_of_its_lease_whatever_the_jobs():
    assert wake(open_state(lease=NOW + 5), agenda(brief("a", NOW - 99))) == NOW + 5
    assert wake(open_state(lease=NOW + 5), agenda()) == NOW + 5


@pytest.mark.parametrize("switch", [{"paused": "holiday"}, {"paused": SEALED}, {"disabled": True}])
def test_the_lease_of_an_open_run_counts_though_the_object_is_paused_or_disabled(switch):
    """D03: a pause during a run must not leave the run without anybody who looks after it."""
    assert wake(open_state(lease=NOW + 5, **switch), agenda("a")) == NOW + 5


@pytest.mark.parametrize("switch", [{"paused": "holiday"}, {"paused": SEALED}, {"disabled": True}])
def test_a_paused_or_disabled_object_does_not_wake(switch):
    assert next_wake(state(**switch), agenda("a"), NOW) == (None, None)


def test_an_object_without_jobs_does_not_wake():
    assert next_wake(state(), agenda(), NOW) == (None, None)


def test_a_chain_on_its_way_wakes_at_the_end_of_its_patience_not_when_its_jobs_are_due():
    assert wake(sent_state(until=NOW + 30_000), agenda(brief("a", NOW - 1))) == NOW + 30_000


def test_an_overdue_alarm_is_not_moved_up_to_now():
    """D17: an object that is pushed again and again keeps its place in the queue."""
    assert wake(state(), agenda(brief("a", NOW - 5_000), brief("b", NOW))) == NOW - 5_000


def test_the_earliest_effective_due_time_is_the_alarm_and_its_job_names_the_queue():
    jobs = agenda(brief("a", LATER, queue="slow"), brief("b", NOW + 10, queue="fast"))
    assert next_wake(state(), jobs, NOW) == ("fast", NOW + 10)


def test_the_not_before_of_the_object_holds_back_all_jobs_but_hooks():
    held = state(not_before=LATER)
    assert effective_due(held, brief("a", NOW)) == LATER
    assert effective_due(held, brief("#hook-1", NOW)) == NOW
    assert effective_due(state(), brief("a", NOW)) == NOW
    assert effective_due(held, brief("a", LATER + 1)) == LATER + 1


def test_once_an_exclusive_job_is_due_the_others_no_longer_count():
    jobs = agenda(brief("plain", NOW - 900), brief("alone", NOW - 100, exclusive=True))
    assert wake(state(), jobs) == NOW - 100


def test_an_exclusive_job_that_is_not_due_yet_holds_nobody_back():
    jobs = agenda(brief("plain", NOW + 5), brief("alone", NOW + 100, exclusive=True))
    assert wake(state(), jobs) == NOW + 5


def test_an_exclusive_job_under_the_objects_not_before_is_not_due():
    jobs = agenda(brief("plain", NOW - 900), brief("alone", NOW - 100, exclusive=True))
    held = state(not_before=NOW + 50)
    assert wake(held, jobs) == NOW + 50


def test_a_hook_wakes_an_object_that_is_paused_as_sealed_and_no_other():
    jobs = agenda("a", brief("#hook-3", NOW + 9))
    assert wake(state(paused=SEALED), jobs) == NOW + 9
    assert wake(state(paused="holiday"), jobs) is None
    assert wake(state(paused=SEALED, disabled=True), jobs) is None


def test_derive_forgets_a_dispatch_that_nothing_waits_for_any_more():
    derived = derive(sent_state(), agenda(), NOW)
    assert (derived.dispatch, derived.sent_until, derived.queue, derived.wake_at) == (None, None, None, None)
    paused = derive(sent_state(paused="holiday"), agenda("a"), NOW)
    assert (paused.dispatch, paused.wake_at) == (None, None)


def test_derive_keeps_the_dispatch_while_a_job_is_left():
    assert derive(sent_state("d1"), agenda(brief("a", LATER)), NOW).dispatch == "d1"


def test_derive_changes_nothing_that_is_right():
    right = sent_state()
    assert derive(right, agenda("a"), NOW) is right


# --- when the row may go


@pytest.mark.parametrize(
    "kept",
    [
        {"token": "t", "lease_until": NOW},
        {"paused": "holiday"},
        {"disabled": True},
        {"lines": "{}"},
        {"not_before": NOW},
        {"holds": 1},
        {"stored": True},
        {"sealed": True},
    ],
    ids=lambda kept: next(iter(kept)),
)
def test_a_row_that_has_something_to_remember_stays(kept):
    assert not is_forgettable(state(**kept), agenda())


def test_a_row_without_jobs_and_memory_goes():
    """D37: pushed and cancelled names leave nothing behind."""
    assert is_forgettable(state(versions=9, queue_wait=5, sent_count=2), agenda())
    assert not is_forgettable(state(), agenda("a"))


# --- the links of a chain


def ids(links):
    return [one.id for one in links[0]]


def test_a_chain_holds_the_due_jobs_in_due_order_and_their_ids_break_ties():
    jobs = agenda(brief("c", NOW - 1), brief("b", NOW - 2), brief("a", NOW - 1), brief("later", NOW + 1))
    assert ids(due_links(state(), jobs, NOW, 50)) == ["b", "a", "c"]


def test_a_job_due_at_this_very_millisecond_is_due():
    assert ids(due_links(state(), agenda(brief("a", NOW)), NOW, 50)) == ["a"]
    assert ids(due_links(state(), agenda(brief("a", NOW + 1)), NOW, 50)) == []


def test_a_chain_that_takes_everything_due_says_so():
    """D22: `on_alarm` follows the last slice only."""
    jobs = agenda(*(brief(f"{n:03}", NOW - 1) for n in range(51)))
    first, all_due = due_links(state(), jobs, NOW, 50)
    assert (len(first), all_due) == (50, False)
    assert due_links(state(), agenda(*jobs.jobs[:50]), NOW, 50)[1] is True


def test_while_an_exclusive_job_is_due_a_chain_holds_exclusive_jobs_only():
    jobs = agenda("a", brief("x", NOW - 1, exclusive=True), brief("y", NOW, exclusive=True), "b")
    assert ids(due_links(state(), jobs, NOW, 50)) == ["x", "y"]
    assert ids(due_links(state(), agenda("a", brief("x", NOW + 1, exclusive=True)), NOW, 50)) == ["a"]


@pytest.mark.parametrize("own", [ALARM, ALIVE])
def test_the_alarm_is_a_link_only_where_no_job_is_due(own):
    assert due_links(state(), agenda("a", brief(own)), NOW, 50)[0] == (brief("a"),)
    links, all_due = due_links(state(), agenda(brief(own)), NOW, 50)
    assert ([one.id for one in links], all_due) == ([ALARM], True)


def test_nothing_due_makes_no_chain():
    assert due_links(state(), agenda(brief("a", NOW + 1)), NOW, 50) == ((), False)


@pytest.mark.parametrize("switch", [{"paused": "holiday"}, {"disabled": True}])
def test_a_paused_object_has_no_links(switch):
    assert ids(due_links(state(**switch), agenda("a"), NOW, 50)) == []


def test_a_sealed_object_has_hooks_as_its_only_links():
    """D12: the hook is called though `on_start` died until the object was paused."""
    sealed = state(paused=SEALED, not_before=LATER)
    assert ids(due_links(sealed, agenda("a", brief("#hook-2")), NOW, 50)) == ["#hook-2"]


def test_the_queue_of_a_sent_chain_is_its_own():
    given = sent_state(queue="sent-to")
    assert next_wake(given, agenda(brief("a", queue="other")), NOW) == ("sent-to", given.sent_until)
    assert derive(state(), agenda(brief("a")), NOW).queue == QUEUE


def test_what_was_put_off_keeps_its_place_among_the_jobs_that_are_due():
    """C07: neither a strike's delay that is over nor the object's own turns the order round."""
    struck = brief("2", NOW - 1, own_due=NOW - 20)
    jobs = agenda(struck, brief("1", NOW - 30), brief("3", NOW - 10))
    assert [job.id for job in due_links(state(), jobs, NOW, 50)[0]] == ["1", "2", "3"]
    jobs = agenda(brief("z", NOW - 30), brief("a", NOW - 20))
    assert [job.id for job in due_links(state(not_before=NOW - 5), jobs, NOW, 50)[0]] == ["z", "a"]
