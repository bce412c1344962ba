"""How deaths are counted, how long a loop is slowed, when it is sealed (design, section 7)."""

import json
from datetime import datetime, timezone

import pytest

from celery_lifecycle import breaker
from celery_lifecycle.model import ALARM, SEALED, START, Cause
from celery_lifecycle.transitions import run
from tests.support.protocol import CONFIG, DONE, NOW, busy_state, flight, job

HOUR = 3_600_000
HOOK = "cart.on_memory_limit"


def death(given, flying, related=(), now=NOW, **more):
    return breaker.strike(given, flying, related, now, Cause.OOM, CONFIG, **more)


def written(struck, job_id):
    return next(one for one in struck.write if one.id == job_id)


def deaths_of(*sequence, limit=3):
    """The strikes that a sequence of deaths ("A") and clean ends ("a") of jobs, each its own line, leaves; or who is sealed."""
    given, jobs, now = busy_state("A"), {name: job(name) for name in "ABC"}, NOW
    for name in sequence:
        now += 60_000
        owner, flying = name.upper(), flight(name.upper(), limit=limit)
        given = given.but(in_flight=flying)
        if name.islower():
            done = run.finish(given, jobs[owner], DONE, now, CONFIG)
            given, jobs[owner] = done.state, run.acquitted(jobs[owner])
            continue
        struck = death(given, flying, list(jobs.values()), now)
        given = struck.state
        for one in struck.write:
            jobs[one.id] = one
        if struck.seal:
            return {one.id for one in struck.seal}
    return {name: one.strikes for name, one in jobs.items() if one.strikes}


# --- counting


def test_a_death_counts_on_the_job_and_on_its_line():
    struck = death(busy_state("a"), flight("a"), [job("a")])
    assert written(struck, "a").strikes == 1
    assert json.loads(struck.state.lines) == {"a": {"n": {"a": 1}, "t": NOW, "h": [[NOW, "a", "oom", None]]}}
    assert (struck.context.strikes, struck.context.limit, struck.context.cause) == (1, 3, "oom")


def test_the_third_death_seals():
    assert deaths_of("A", "A") == {"A": 2}
    assert deaths_of("A", "A", "A") == {"A"}


def test_deaths_of_two_jobs_do_not_add_up_and_a_clean_end_takes_back_its_own():
    """D29: A dies, B dies, A works, B dies, A dies (limit 3)."""
    assert deaths_of("A", "B", "a", "B", "A") == {"A": 1, "B": 2}


def test_a_job_that_dies_every_second_time_is_never_sealed_and_the_one_that_always_dies_is():
    """D10"""
    assert deaths_of("B", "A", "B", "a", "A", "a", "B") == {"B"}
    assert deaths_of("A", "a", "A", "a", "A", "a", "A", "a") == {}


def test_clean_runs_of_other_jobs_clear_nothing():
    assert deaths_of("A", "b", "A", "b", "A") == {"A"}


def test_a_line_that_goes_on_under_new_ids_is_sealed():
    """D30: a job pushes a new id of the same task and then dies, for ever; D04: the struck job itself is gone."""
    given = busy_state("a")
    for number, gone in enumerate(("a", "b", "c"), 1):
        heir = job(f"heir-{number}", line="a")
        struck = death(given, flight(gone, line="a"), [heir], NOW + number)
        given = struck.state
        if number < 3:
            assert not struck.seal
            assert struck.context.strikes == number
    assert [one.id for one in struck.seal] == ["heir-3"]
    assert struck.state.lines is None, "a sealed line begins anew"


def test_a_struck_job_that_was_replaced_keeps_the_count_of_its_line():
    """A struck job that is gone leaves its strikes to the line."""
    first = death(busy_state("a"), flight("a"), [])
    second = death(first.state, flight("a"), [job("a", version=2)], NOW + 1)
    assert second.context.strikes == 2


def test_the_strikes_a_job_has_of_its_own_count_though_its_line_was_forgotten():
    struck = death(busy_state("a", lines=None), flight("a"), [job("a", strikes=2)])
    assert [one.id for one in struck.seal] == ["a"]


def test_the_last_five_deaths_of_a_line_are_remembered_with_cause_and_what_was_told():
    lines = None
    for number in range(7):
        lines, _ = breaker.counted(lines, "l", "a", NOW + number, HOUR, 0, "oom", "x" * 1000)
    remembered = breaker.deaths(lines, "l")
    assert [death.at_ms - NOW for death in remembered] == [2, 3, 4, 5, 6]
    assert {(death.job, death.cause, len(death.told)) for death in remembered} == {("a", "oom", 200)}
    assert breaker.deaths(lines, "another") == ()


def test_a_clean_end_takes_the_deaths_of_its_own_job_out_of_the_memory():
    lines, _ = breaker.counted(None, "l", "a", NOW, HOUR, 0, "oom")
    lines, _ = breaker.counted(lines, "l", "b", NOW, HOUR, 0, "crash")
    assert [death.job for death in breaker.deaths(breaker.cleared(lines, "l", "a"), "l")] == ["b"]


def test_a_seal_knows_the_deaths_that_led_to_it():
    state, struck = busy_state("a"), None
    for number in range(3):
        struck = death(state, flight("a"), [job("a", strikes=number)])
        state = busy_state("a", lines=struck.state.lines)
    assert [(one.job, one.cause) for one in struck.deaths] == [("a", "oom")] * 3
    assert struck.context.sealed


def test_lines_are_forgotten_an_hour_after_their_last_death():
    lines, _ = breaker.counted(None, "old", "old", NOW, HOUR, 0)
    still, _ = breaker.counted(lines, "new", "new", NOW + HOUR - 1, HOUR, 0)
    assert set(json.loads(still)) == {"old", "new"}
    gone, count = breaker.counted(lines, "new", "new", NOW + HOUR, HOUR, 0)
    assert (set(json.loads(gone)), count) == ({"new"}, 1)
    assert breaker.fresh_lines(still, NOW + HOUR, HOUR) is not None
    assert set(json.loads(breaker.fresh_lines(still, NOW + HOUR, HOUR))) == {"new"}
    assert breaker.fresh_lines(lines, NOW + HOUR, HOUR) is None


def test_at_most_fifty_lines_are_remembered_and_the_oldest_goes_first():
    lines = None
    for number in range(breaker.MAX_LINES + 1):
        lines, _ = breaker.counted(lines, f"line-{number}", "a", NOW + number, HOUR, 0)
    known = json.loads(lines)
    assert len(known) == breaker.MAX_LINES
    assert "line-0" not in known
    assert f"line-{breaker.MAX_LINES}" in known


def test_clearing_takes_back_one_job_and_leaves_the_rest_of_its_line():
    lines, _ = breaker.counted(None, "l", "a", NOW, HOUR, 0)
    lines, count = breaker.counted(lines, "l", "b", NOW, HOUR, 0)
    assert count == 2
    left = breaker.cleared(lines, "l", "a")
    assert json.loads(left)["l"]["n"] == {"b": 1}
    assert breaker.cleared(left, "l", "b") is None
    assert breaker.cleared(lines, "other", "a") == lines
    assert breaker.cleared(None, "l", "a") is None
    assert breaker.without_line(lines, "l") is None


# --- slowing


def test_the_delay_grows_with_the_strikes_up_to_five_minutes():
    assert [breaker.delay_ms(n, CONFIG) for n in (1, 2, 9, 10, 11, 99)] == [
        30_000,
        60_000,
        270_000,
        300_000,
        300_000,
        300_000,
    ]


@pytest.mark.parametrize("spread", [1.0, 2.5, 3.0])
def test_after_the_loss_of_a_worker_the_delay_is_spread_and_stays_below_its_cap(spread):
    assert breaker.delay_ms(1, CONFIG, spread) == 30_000 * spread
    assert breaker.delay_ms(9, CONFIG, spread) <= 300_000


def test_the_struck_job_and_every_recovery_job_wait_and_nobody_else():
    related = [job("a"), job("r", recovery_loop=True), job("same-line", line="a")]
    struck = death(busy_state("a"), flight("a"), related)
    assert {one.id: one.not_before_ms for one in struck.write} == {"a": NOW + 30_000, "r": NOW + 30_000}
    assert written(struck, "r").strikes == 0
    assert struck.context.next_time == datetime.fromtimestamp((NOW + 30_000) / 1000, timezone.utc)


def test_a_longer_delay_that_stands_is_not_shortened():
    struck = death(busy_state("a"), flight("a"), [job("a", not_before_ms=NOW + 999_999)])
    assert written(struck, "a").not_before_ms == NOW + 999_999


# --- sealing


def test_at_the_limit_the_line_and_the_recovery_jobs_are_taken_out_and_the_rest_is_untouched():
    related = [job("a", strikes=2), job("heir", line="a"), job("r", recovery_loop=True), job("other")]
    struck = death(busy_state("a", versions=9), flight("a", hook=HOOK), related)
    assert {one.id for one in struck.seal} == {"a", "heir", "r"}
    assert (struck.context.sealed, struck.context.next_time, struck.context.executing) == (True, None, "a")
    assert set(struck.context.purged) == {"a", "heir", "r"}
    assert [one.id for one in struck.write] == ["#hook-10"]


def test_a_struck_job_that_was_replaced_from_outside_goes_with_its_old_line():
    struck = death(busy_state("a"), flight("a", line="first", limit=1), [job("a", version=2, line="a")])
    assert [one.id for one in struck.seal] == ["a"]


def test_the_limit_is_that_of_the_code_that_ran():
    assert not death(busy_state("a"), flight("a", limit=2), [job("a")]).seal
    assert death(busy_state("a"), flight("a", limit=1), [job("a")]).seal


# --- hooks


def test_each_strike_makes_a_hook_job_of_its_own_that_tells_the_facts():
    struck = death(busy_state("a", versions=5), flight("a", hook=HOOK), [job("a")])
    hook = written(struck, "#hook-6")
    assert (hook.task, hook.due_ms, hook.version, struck.state.versions) == (HOOK, NOW, 6, 6)
    assert hook.payload == breaker.context_to_json(struck.context)


def test_without_a_hook_no_job_is_made():
    assert [one.id for one in death(busy_state("a"), flight("a"), [job("a")]).write] == ["a"]


def test_the_death_of_a_hook_counts_nowhere_and_calls_no_hook():
    """D12: it is tried once."""
    given = busy_state("#hook-3")
    struck = death(given, flight("#hook-3", hook=HOOK), [job("#hook-3"), job("r", recovery_loop=True)])
    assert struck.state == given
    assert [one.id for one in struck.remove] == ["#hook-3"]
    assert (struck.write, struck.seal, struck.context) == ((), (), None)


# --- the object as a whole


@pytest.mark.parametrize("what", [START, ALARM])
def test_a_death_in_on_start_or_on_alarm_holds_the_object_back(what):
    given = busy_state(what, in_flight=flight(what, line=what))
    struck = death(given, given.in_flight, [job("r", recovery_loop=True)])
    assert struck.state.not_before == NOW + 30_000
    assert struck.state.paused is None
    assert struck.seal == ()
    assert [one.id for one in struck.write] == ([ALARM] if what == ALARM else [])


@pytest.mark.parametrize("what", [START, ALARM])
def test_at_the_limit_the_object_is_paused_as_sealed_and_its_jobs_stay(what):
    """D12"""
    given = busy_state(what, in_flight=flight(what, line=what, hook=HOOK))
    for number in range(3):
        assert given.paused is None
        struck = death(given, given.in_flight, [job("a")], NOW + number)
        given = struck.state.but(in_flight=given.in_flight)
    assert given.paused == SEALED
    assert struck.seal == ()
    assert (struck.context.sealed, struck.context.next_time) == (True, None)
    assert any(one.id.startswith("#hook-") for one in struck.write)


def test_a_death_in_on_alarm_keeps_the_bare_alarm_that_stands():
    given = busy_state(ALARM, in_flight=flight(ALARM, line=ALARM))
    assert death(given, given.in_flight, [job(ALARM, NOW + 5)]).write == ()


def test_a_longer_delay_of_the_object_is_not_shortened():
    given = busy_state(START, in_flight=flight(START, line=START), not_before=NOW + 999_999)
    assert death(given, given.in_flight).state.not_before == NOW + 999_999


# --- suspects


def test_a_job_lost_with_others_becomes_a_suspect_and_stays_one_until_a_clean_end():
    struck = death(busy_state("a"), flight("a"), [job("a")], suspect=True)
    marked = written(struck, "a")
    assert marked.suspect_on == breaker.waiting_mark(marked)
    again = death(struck.state, flight("a"), [marked._replace(suspect_on="w7")], NOW + 1)
    assert written(again, "a").suspect_on == breaker.waiting_mark(marked), "it runs nowhere now"
    assert written(death(busy_state("a"), flight("a"), [job("a")]), "a").suspect_on is None


def test_the_mark_of_a_waiting_suspect_is_its_own():
    marks = {breaker.waiting_mark(job(name)) for name in ("a", "b")}
    other = job("a")._replace(object=job("a").object._replace(name="other"))
    assert len(marks | {breaker.waiting_mark(other)}) == 3
    assert all(len(mark) <= 64 for mark in marks)


def test_a_neighbour_of_a_suspect_is_suspected_without_a_strike():
    """D31"""
    neighbour = breaker.suspected(job("a", strikes=1))
    assert (neighbour.strikes, neighbour.suspect_on) == (1, breaker.waiting_mark(job("a")))
