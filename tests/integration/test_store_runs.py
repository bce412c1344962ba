"""Links on every database: newer versions win, storage with the outcome, expiry, unknown and revoked links, ends, cost."""

import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import pytest

from celery_lifecycle.model import HOOK_PREFIX, START, Cause, Phase, Why
from celery_lifecycle.store.ends import End
from celery_lifecycle.store.jobs import Pusher
from celery_lifecycle.store.runs import Calling
from celery_lifecycle.transitions.run import Action, Refusal, Verdict, Worker
from tests.support.protocol import (
    AGAIN_LATER,
    CART,
    DONE,
    MORE,
    NOW,
    QUEUE,
    TASK,
    WORKER,
    Clock,
    Table,
    links_of,
    table,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def t(database_url: str, clock: Clock) -> Iterator[Table]:
    with table(database_url, clock=clock) as made:
        yield made
        made.check()


def opened(t, *names, **more):
    """A run whose first link is in flight; its links carry the run's token."""
    for name in names or ("a",):
        t.push(name, **more)
    links = links_of(t.shipped())
    begun = t.begin(links[0])
    assert begun.refused is None
    return [replace(link, token=begun.token) for link in links], begun


def begin_again(t):
    links = links_of(t.shipped())
    begun = t.begin(links[0])
    return replace(links[0], token=begun.token), begun


# --- begin


def test_begin_writes_down_who_runs_what_before_it_runs(t):
    [link], begun = opened(t)
    found = t.find()
    assert (found.worker, found.worker_pid, found.step) == (WORKER.instance, WORKER.pid, 1)
    assert (found.in_flight.job, found.in_flight.task_id, found.in_flight.version) == ("a", link.task_id, 1)
    assert (found.lease_until, found.wake_at, found.dispatch) == (NOW + 20_000, NOW + 20_000, None)
    assert found.token == begun.token
    t.check()
    t.finish(link, begun)


def test_a_begin_whose_commit_was_not_heard_of_goes_on_from_there(t):
    t.push("a")
    [link] = links_of(t.shipped())
    first = t.begin(link)
    again = t.store.runs.begin(link, Calling(TASK, 3), WORKER, again=True)
    assert (again.refused, again.token, again.job) == (None, first.token, first.job)
    stranger = t.store.runs.begin(link, Calling(TASK, 3), Worker("w2", 101), again=True)
    assert stranger.refused is Refusal.RUN_OPEN


def test_a_link_whose_job_was_cancelled_is_passed_over_and_the_next_one_runs(t):
    for name in "abc":
        t.push(name)
    one, two, three = links_of(t.shipped())
    begun = t.begin(one)
    t.store.jobs.cancel(CART, "b", "host")
    t.finish(one, begun)
    passed = t.begin(replace(two, token=begun.token))
    assert (passed.job, passed.closed, passed.refused) == (None, False, None)
    t.check()
    assert t.begin(replace(three, token=begun.token)).job.id == "c"


def test_the_last_link_closes_the_run_though_its_job_is_gone(t):
    links, begun = opened(t, "a", "b")
    t.store.jobs.cancel(CART, "b", "host")
    t.finish(links[0], begun)
    assert t.begin(links[1]).closed
    assert not t.exists()


def test_a_first_link_whose_job_is_gone_opens_the_run_for_the_others(t):
    t.push("a")
    t.push("b")
    chain = t.shipped()
    t.store.jobs.cancel(CART, "a", "host")
    assert t.run_chain(chain)[0] == ["b"]
    assert not t.exists()


def test_an_expired_job_is_dead_and_the_others_run(t):
    """D33: a link with `expires` in the past."""
    t.push("a", options_json=f'{{"expires_ms":{NOW}}}')
    t.push("b", options_json=f'{{"expires_ms":{NOW + 1}}}')
    assert t.run_chain(t.shipped())[0] == ["b"]
    [dead] = t.store.dead.list(CART)
    assert (dead.reason, dead.job.id) == (Why.EXPIRED.value, "a")
    assert not t.exists()


# --- finish: a newer version wins


def test_a_job_cancelled_and_pushed_again_while_it_runs_stays(t):
    """D26: versions are never used again, though the object has nothing but its run in between."""
    [link], begun = opened(t)
    t.store.jobs.cancel(CART, "a", "host")
    new = t.push("a", delay=60).job
    assert new.version == 2
    done = t.finish(link, begun)
    assert (done.accepted, done.discarded) == (True, True)
    assert t.job("a") == new


@pytest.mark.parametrize("verdict", [DONE, AGAIN_LATER, MORE, Verdict(Action.DEAD, why=Why.FAILED)])
def test_a_newer_push_wins_over_every_outcome(t, verdict):
    [link], begun = opened(t)
    new = t.push("a", delay=60, payload_json='"new"').job
    done = t.finish(link, begun, verdict)
    assert (done.discarded, done.due_ms) == (True, None)
    assert t.job("a") == new
    assert t.count("dead_jobs") == 0


def test_a_newer_reschedule_wins_over_an_outcome(t):
    [link], begun = opened(t)
    t.store.jobs.reschedule(CART, "a", "host", None, 777)
    assert t.finish(link, begun, AGAIN_LATER).discarded
    assert t.job("a").due_ms == NOW + 777


def test_an_outcome_is_applied_once(t):
    links, begun = opened(t, "a", "z")
    assert t.finish(links[0], begun, MORE).accepted
    after = t.job("a")
    assert not t.finish(links[0], begun, MORE).accepted
    assert t.job("a") == after


def test_the_late_result_of_an_ended_run_is_refused_though_the_job_runs_again(t, clock):
    """C06: a worker with the same host name; ownership is the token."""
    [old], begun = opened(t)
    assert t.die(old, cause=Cause.CRASH) is not None
    clock.forward(30)
    again, _ = begin_again(t)
    before = t.find(), t.job("a")
    assert not t.finish(old, begun, DONE, storage={"k": "1"}).accepted
    assert not t.store.runs.attempted(old, begun.token, begun.job, 1)
    assert not t.store.runs.enter(old, begun.token, begun)
    assert t.store.runs.start_failed(old, begun.token) is None
    assert not t.store.runs.alarm_failed(old, begun.token, QUEUE, TASK, "e", "t").accepted
    assert t.store.ends.struck_inside(old, begun.token, Cause.MEMORY_ERROR, {}) is None
    assert (t.find(), t.job("a")) == before
    assert t.count("storage") == 0
    assert again.token != old.token


def test_storage_is_written_with_the_outcome_also_if_a_newer_version_discards_it(t):
    """D35: in a job that pushes its own id."""
    [link], begun = opened(t)
    t.push("a", delay=60, pusher=Pusher(CART, "a", TASK, "a"))
    assert t.finish(link, begun, DONE, storage={"k": "1", "gone": None}).discarded
    assert t.store.objects.get_value(CART, "k") == "1"
    t.store.jobs.cancel(CART, "a", "host")
    assert t.find().stored


def test_storage_emptied_by_the_last_link_lets_the_row_go(t):
    t.store.objects.put_values(CART, {"k": "1"})
    [link], begun = opened(t)
    t.finish(link, begun, DONE, storage={"k": None})
    assert not t.exists()


def test_failed_attempts_are_counted_in_the_row_while_the_run_goes_on(t):
    [link], begun = opened(t)
    assert t.store.runs.attempted(link, begun.token, begun.job, 2)
    assert t.job("a").attempt == 2
    assert t.job("a").version == 1, "it is still the job that runs"
    t.finish(link, begun, MORE)
    assert t.job("a").attempt == 0


def test_a_platform_failure_keeps_the_attempts(t, clock):
    [link], begun = opened(t)
    t.store.runs.attempted(link, begun.token, begun.job, 2)
    t.die(link)
    assert t.job("a").attempt == 2


# --- ends


@pytest.mark.parametrize(
    "other",
    [
        {"worker": Worker("w2", WORKER.pid)},
        {"worker": Worker(WORKER.instance, 102)},
        {"link": {"task_id": "other-0"}},
        {"link": {"object_id": 10**9}},
    ],
    ids=["another instance", "another process", "another task", "no object"],
)
def test_a_death_is_counted_only_by_task_instance_and_pid(t, other):
    """Section 7: one death is one strike, whoever sees it; a death with nothing in flight changes nothing."""
    [link], _ = opened(t)
    before = t.find()
    assert t.die(replace(link, **other.get("link", {})), other.get("worker", WORKER)) is None
    assert t.find() == before
    assert t.die(link) is not None
    t.check()
    after = t.find()
    assert t.die(link) is None
    assert t.find() == after


def test_a_recovery_job_that_pushes_its_own_id_and_dies_is_sealed_after_three(t, clock):
    """D04: the mark of what is in flight is on the object, not on the job."""
    t.push("a", recovery_loop=True)
    for number in range(1, 4):
        link, _ = begin_again(t)
        t.push("a", recovery_loop=True, pusher=Pusher(CART, "a", TASK, "a"))
        ended = t.die(link)
        assert ended.context.strikes == number
        t.check()
        clock.forward(301)
    assert t.ids() == []
    assert t.claim().rows == 0
    [dead] = t.store.dead.list(CART)
    assert (dead.reason, dead.job.id, dead.job.sealed) == ("sealed", "a", True)


def test_a_job_that_pushes_a_new_id_of_its_task_and_dies_is_sealed_after_three(t, clock):
    """D30: without `recovery_loop`."""
    t.push("n0")
    for number in range(1, 4):
        chain = next(iter(t.claim().shipments))
        link = links_of(chain)[0]
        begun = t.begin(link)
        t.push(f"n{number}", pusher=Pusher(CART, begun.job.id, TASK, begun.job.line))
        t.store.jobs.cancel(CART, begun.job.id, "host")
        ended = t.die(link)
        clock.forward(1)
    assert ended.context.sealed
    assert t.ids() == []


def test_a_job_that_yields_and_dies_in_turn_is_sealed_after_three_deaths(t, clock):
    """D28"""
    t.push("a")
    for _ in range(2):
        link, begun = begin_again(t)
        assert not t.die(link).context.sealed
        clock.forward(300)
        link, begun = begin_again(t)
        t.finish(link, begun, MORE)
        # the closing worker's chain is lost
        clock.forward(30)
    link, _ = begin_again(t)
    assert t.die(link).context.sealed


def test_a_shutdown_puts_the_job_back_without_a_strike_or_an_attempt(t):
    """D08: three times."""
    t.push("a")
    for _ in range(3):
        link, _ = begin_again(t)
        assert t.die(link, end=End.PUT_BACK).put_back
        t.check()
    found = t.job("a")
    assert (found.strikes, found.attempt, found.not_before_ms, found.version) == (0, 0, None, 1)


@pytest.mark.parametrize(("end", "why"), [(End.HUNG, Why.HUNG), (End.TIMED_OUT, Why.TIMED_OUT)])
def test_a_time_limit_and_a_hung_job_use_up_attempts_and_are_no_strikes(t, end, why):
    t.push("a")
    for attempt in (1, 2, 3):
        link, _ = begin_again(t)
        ended = t.die(link, end=end)
        if attempt < 3:
            assert (t.job("a").attempt, t.job("a").strikes, ended.dead) == (attempt, 0, ())
    assert [one.reason for one in t.store.dead.list(CART)] == [why.value]
    assert not t.exists()


def test_a_job_revoked_while_it_runs_is_dead_at_once(t):
    [link], _ = opened(t)
    t.die(link, end=End.REVOKED)
    assert [one.reason for one in t.store.dead.list(CART)] == [Why.REVOKED.value]
    assert not t.exists()


def test_a_memory_error_inside_is_a_strike_and_ends_the_run(t):
    [link], begun = opened(t)
    ended = t.store.ends.struck_inside(link, begun.token, Cause.MEMORY_ERROR, {"peak_rss_kib": 7})
    assert (ended.cause, ended.context.strikes) == (Cause.MEMORY_ERROR, 1)
    assert t.find().phase is Phase.IDLE


# --- links that never come to run


def test_a_link_revoked_while_it_waits_is_dead_and_the_others_run_at_once(t):
    """D33"""
    links, begun = opened(t, "a", "b", "c")
    t.finish(links[0], begun)
    dead, chain = t.store.ends.skip(links[1], Why.REVOKED)
    assert dead.id == "b"
    assert [one.id for one in chain.jobs] == ["c"]
    assert t.run_chain(chain)[0] == ["c"]


def test_an_unknown_task_as_second_of_three_is_put_back_and_the_other_two_run_at_once(t, clock):
    """D33, C08"""
    links, begun = opened(t, "a", "b", "c")
    t.finish(links[0], begun)
    dead, chain = t.store.ends.skip(links[1], Why.UNKNOWN_TASK)
    assert dead is None
    assert t.run_chain(chain)[0] == ["c"]
    assert (t.job("b").due_ms, t.job("b").unknown_since_ms) == (NOW + 1000, NOW)
    waits = []
    while t.ids():
        clock.to(t.job("b").due_ms)
        dead, _ = t.store.ends.skip(links_of(t.shipped())[0], Why.UNKNOWN_TASK)
        t.check()
        waits.append(0 if dead else t.job("b").due_ms - clock.ms)
    assert waits[:4] == [1000, 2000, 4000, 8000]
    assert max(waits) == 60_000
    assert 600_000 <= clock.ms - NOW <= 660_000
    assert [one.reason for one in t.store.dead.list(CART)] == [Why.UNKNOWN_TASK.value]


def test_a_skip_of_a_link_that_nobody_waits_for_changes_nothing(t):
    links, _ = opened(t, "a", "b")
    before = t.find()
    for stale in (links[1], replace(links[0], token=None), replace(links[0], token="t0")):
        assert t.store.ends.skip(stale, Why.UNKNOWN_TASK) == (None, None)
    assert t.find() == before
    assert t.ids() == ["a", "b"]


def test_an_unknown_owner_puts_the_job_back_and_closes_the_run(t):
    [link], begun = opened(t)
    dead, chain, accepted = t.store.ends.unknown(link, begun.token, Why.UNKNOWN_OWNER)
    assert (dead, chain, accepted) == (None, None, True)
    assert t.job("a").due_ms == NOW + 1000
    assert t.find().phase is Phase.IDLE
    assert t.store.ends.unknown(link, begun.token, Why.UNKNOWN_OWNER)[2] is False


# --- on_start


def starting(t):
    links = links_of(t.shipped())
    begun = t.begin(links[0], starts=True)
    return replace(links[0], token=begun.token), begun


def test_while_on_start_runs_it_is_in_flight_and_then_the_job_is(t):
    t.push("a")
    link, begun = starting(t)
    assert t.find().in_flight.job == START
    assert t.store.runs.enter(link, begun.token, begun)
    assert (t.find().in_flight.job, t.find().in_flight.line, t.find().step) == ("a", "a", 1)
    assert t.finish(link, begun).accepted
    assert not t.exists()


def test_an_on_start_that_ends_clears_the_doubt_about_its_worker(t, clock):
    """Beat looked once while `on_start` ran on in an outage; the loss of the job itself takes two looks again."""
    t.push("a")
    link, begun = starting(t)
    clock.forward(20)
    assert [t.store.ends.rescue(one) for one in t.claim(Phase.OPEN).lost] == [None]
    assert t.find().doubt
    assert t.store.runs.enter(link, begun.token, begun)
    t.check()
    assert not t.find().doubt
    clock.forward(20)
    assert [t.store.ends.rescue(one) for one in t.claim(Phase.OPEN).lost] == [None]
    assert t.job("a").strikes == 0


def test_an_on_start_that_throws_keeps_the_jobs_and_backs_off_doubling(t, clock):
    t.push("a")
    waits = []
    for _ in range(4):
        link, begun = starting(t)
        until = t.store.runs.start_failed(link, begun.token)
        t.check()
        waits.append(until - clock.ms)
        assert t.claim().rows == 0
        clock.to(until)
    assert waits == [1000, 2000, 4000, 8000]
    assert t.ids() == ["a"]
    link, begun = starting(t)
    t.store.runs.enter(link, begun.token, begun)
    assert (t.find().not_before, t.find().not_before_count) == (None, 0)


def test_an_on_start_that_dies_three_times_pauses_the_object_and_calls_the_hook(t, clock):
    """D12"""
    t.push("a")
    for _ in range(3):
        links = [link for link in links_of(t.shipped()) if not link.job.startswith(HOOK_PREFIX)]
        t.begin(links[0], starts=True, hook="cart.on_memory_limit")
        t.die(links[0])
        t.check()
        hook = t.shipped()
        assert all(one.id.startswith(HOOK_PREFIX) for one in hook.jobs), "hooks are not held back"
        assert t.run_chain(hook)[0]
        clock.forward(301)
    assert t.find().paused == "sealed"
    assert t.claim().rows == 0
    assert t.ids() == ["a"]


# --- cost (design, section 10)


@pytest.mark.databases("postgresql")
def test_a_single_job_run_costs_the_worker_two_transactions_of_at_most_five_round_trips(database_url):
    """Counted on the wire: one `Sync` (or simple query) of the client is one round trip."""
    with table(database_url, real_time=True) as t:
        t.push("a")
        [link] = links_of(t.shipped())
        begun, opening = traced(t, lambda: t.begin(link))
        done, closing = traced(t, lambda: t.finish(link, begun))
        assert begun.job is not None
        assert done.accepted
        assert done.closed
        assert 3 <= len(opening) <= 5, opening
        assert 3 <= len(closing) <= 5, closing


def traced(t, verb):
    """What a verb returns, and each round trip that it cost the one connection of the pool."""
    with t.store.database.transaction() as tx:
        connection = tx._connection.pgconn
    with tempfile.TemporaryFile("w+b") as log:
        connection.trace(log.fileno())
        try:
            result = verb()
        finally:
            connection.untrace()
        os.lseek(log.fileno(), 0, os.SEEK_SET)
        lines = log.read().decode(errors="replace").splitlines()
    return result, [line for line in lines if re.search(r"\tF\t\d+\t(Sync|Query)", line)]


def test_the_statements_of_a_run_do_not_grow_with_the_objects_jobs(t):
    counts = []
    for jobs in (2, 200):
        for number in range(jobs):
            t.push(f"later-{number:03}", delay=900)
        t.push("a")
        [link] = links_of(t.shipped())
        counts.append([])
        with t.store.database.transaction() as tx:
            begun = t.store.runs._begin(tx, link, Calling(TASK, 3), WORKER, False)
            counts[-1].append(tx.statements)
        with t.store.database.transaction() as tx:
            t.store.runs._finish(tx, link, begun.token, DONE, {}, None)
            counts[-1].append(tx.statements)
    assert counts[0] == counts[1]
    assert max(counts[0]) <= 5


# --- a finish that is repeated because its answer was lost


@pytest.mark.parametrize(
    "verdict", [Verdict(Action.COMPLETE, clean=True), Verdict(Action.YIELD), Verdict(Action.RESCHEDULE, delay_ms=5000)]
)
def test_a_finish_that_was_committed_but_not_heard_of_is_found_out_when_it_is_repeated(t, verdict):
    (link, *_), begun = opened(t)
    assert t.finish(link, begun, verdict).accepted
    before = t.store.objects.find(begun.job.object)
    repeated = t.finish(link, begun, verdict, again=begun.job)
    assert (repeated.accepted, repeated.closed) == (True, True)
    assert t.store.objects.find(begun.job.object) == before
    assert not t.finish(link, begun, verdict).accepted


def test_a_repeated_finish_in_the_middle_of_a_chain_lets_the_chain_go_on(t):
    links, begun = opened(t, "a", "b")
    assert t.finish(links[0], begun).accepted
    repeated = t.finish(links[0], begun, again=begun.job)
    assert (repeated.accepted, repeated.closed) == (True, False)


def test_a_repeated_finish_of_a_run_that_was_struck_meanwhile_is_refused(t):
    (link, *_), begun = opened(t)
    assert t.die(link) is not None
    assert not t.finish(link, begun, again=begun.job).accepted
