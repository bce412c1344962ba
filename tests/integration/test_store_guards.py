"""Guards that seldom matter, each in the one situation in which it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from celery_lifecycle import Capability, Lifecycle, LifecycleObject, Reschedule, RetryPolicy, lifecycle_job
from celery_lifecycle.errors import DatabaseUnavailable
from celery_lifecycle.model import ALARM, MemoryLimitContext, Phase, Why
from celery_lifecycle.store.ends import End
from celery_lifecycle.store.unit import lock_by_name
from celery_lifecycle.testing import Harness
from celery_lifecycle.timing.spec import spec_every
from tests.support.protocol import CART, NOW, TASK, WORKER, Clock, Table, links_of
from tests.support.protocol import table as made_table

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def t(database_url: str, clock: Clock) -> Iterator[Table]:
    with made_table(database_url, clock=clock, lock_timeout=1) as made:
        yield made


def opened(t: Table, *jobs: str) -> tuple[list[Any], Any]:
    for number, name in enumerate(jobs):
        t.push(name, delay=number / 1000)
    t.clock.forward(1)
    links = links_of(t.shipped())
    begun = t.begin(links[0])
    return [replace(one, token=begun.token) for one in links], begun


def test_an_unknown_owner_of_one_link_does_not_end_the_next_one(t: Table) -> None:
    links, begun = opened(t, "a", "b")
    t.finish(links[0], begun)
    t.begin(links[1])
    before = t.find()
    assert t.store.ends.unknown(links[0], begun.token, Why.UNKNOWN_OWNER)[2] is False
    assert t.find() == before


def test_storage_that_a_job_writes_as_its_object_is_destroyed_is_not_left_behind(t: Table) -> None:
    [only], begun = opened(t, "a")
    t.store.objects.destroy(CART)
    assert t.finish(only, begun, storage={"key": '"value"'}).accepted
    assert not t.exists()
    assert t.count("storage") == 0


def test_a_suspect_that_is_marked_with_its_own_worker_already_boards_it_again(t: Table) -> None:
    t.push("a")
    with t.store.database.transaction() as tx:
        tx.run(f"UPDATE {t.config.table_prefix}jobs SET suspect_on = '{WORKER.instance}'")
    [only] = links_of(t.shipped())
    assert t.begin(only).job is not None


def test_a_suspect_that_on_start_moves_gives_its_place_free(t: Table) -> None:
    t.push("a")
    with t.store.database.transaction() as tx:
        tx.run(f"UPDATE {t.config.table_prefix}jobs SET suspect_on = '?'")
    [only] = links_of(t.shipped())
    begun = t.begin(only, starts=True)
    assert t.job("a").suspect_on == WORKER.instance
    t.store.jobs.reschedule(CART, "a", None, None, 60_000)
    passed = t.store.runs.enter(replace(only, token=begun.token), begun.token, begun)
    assert passed is not None
    assert passed.job is None
    assert str(t.job("a").suspect_on).startswith("?")


def suspected(t: Table, job_id: str) -> None:
    with t.store.database.transaction() as tx:
        tx.run(f"UPDATE {t.config.table_prefix}jobs SET suspect_on = '?' WHERE id = '{job_id}'")


@pytest.mark.parametrize("end", [End.HUNG, End.TIMED_OUT, End.REVOKED])
def test_a_suspect_that_is_moved_while_it_runs_gives_its_place_free_however_it_ends(t: Table, end: End) -> None:
    t.push("a")
    suspected(t, "a")
    [only] = links_of(t.shipped())
    t.begin(only)
    assert t.job("a").suspect_on == WORKER.instance
    t.store.jobs.reschedule(CART, "a", None, None, 86_400_000)
    assert t.die(only, end=end) is not None
    assert str(t.job("a").suspect_on).startswith("?")


@pytest.mark.parametrize("end", [End.HUNG, None])
def test_a_suspected_alarm_that_is_set_again_while_it_runs_gives_its_place_free(t: Table, end: End | None) -> None:
    t.store.objects.set_alarm(CART, TASK, "celery", None, 0)
    suspected(t, ALARM)
    [only] = links_of(t.shipped())
    begun = t.begin(only)
    t.store.objects.set_alarm(CART, TASK, "celery", None, 86_400_000)
    if end is not None:
        assert t.die(only, end=end) is not None
    else:
        assert t.store.runs.alarm_failed(only, begun.token, "celery", TASK, "no", "").discarded
    assert str(t.job(ALARM).suspect_on).startswith("?")


def test_resume_clears_the_suspicion_of_the_bare_alarm_too(t: Table) -> None:
    t.store.objects.set_alarm(CART, TASK, "celery", None, 60_000)
    suspected(t, ALARM)
    t.store.objects.pause(CART, "holiday")
    assert t.store.objects.resume(CART)
    assert t.job(ALARM).suspect_on is None


def test_resume_clears_the_suspicion_of_a_memory_hook_too(t: Table) -> None:
    t.push("a")
    [only] = links_of(t.shipped())
    t.begin(only, hook="cart.on_memory_limit")
    assert t.die(only) is not None
    suspected(t, "#hook-2")  # as one that ran beside a suspect when their worker was lost
    assert t.store.objects.resume(CART)
    assert t.job("#hook-2").suspect_on is None


def test_a_schedule_that_resume_moves_on_has_the_whole_grace_of_an_unknown_task_again(t: Table, clock: Clock) -> None:
    t.push("a", schedule=spec_every(60, misfire="skip"))
    clock.forward(61)
    [only] = links_of(t.shipped())
    t.store.ends.skip(only, Why.UNKNOWN_TASK)
    assert t.job("a").unknown_since_ms == clock.ms
    t.store.objects.pause(CART, "holiday")
    clock.forward(3600)
    assert t.store.objects.resume(CART)
    assert t.job("a").due_ms == clock.ms + 60_000
    assert t.job("a").unknown_since_ms is None


def test_an_on_start_that_ends_well_clears_the_doubt_about_its_worker(t: Table, clock: Clock) -> None:
    t.push("a")
    [only] = links_of(t.shipped())
    begun = t.begin(only, starts=True)
    clock.forward(20)
    [lost] = t.claim(Phase.OPEN).lost
    assert t.store.ends.rescue(lost) is None
    assert t.find().doubt
    assert t.store.runs.enter(replace(only, token=begun.token), begun.token, begun) is not None
    clock.forward(20)
    t.claim(Phase.OPEN)
    assert t.store.ends.rescue(lost) is None, "the job has not been looked at twice"
    assert t.find().in_flight is not None


def test_what_a_newer_version_has_added_to_a_policy_or_to_the_call_of_a_hook_is_passed_over() -> None:
    assert RetryPolicy.from_json("[5, 1, 2, 9]") == RetryPolicy(5, 1, 2)
    told = {
        "sealed": True,
        "next_time": None,
        "executing": "a",
        "purged": ["b"],
        "strikes": 3,
        "limit": 3,
        "cause": "oom",
    }
    assert MemoryLimitContext.from_json({**told, "more": 1}).purged == ("b",)


def test_a_chain_for_an_alarm_that_was_taken_back_runs_nothing(t: Table) -> None:
    t.push("later", delay=10)
    t.store.objects.set_alarm(CART, TASK, "celery", None, 0)
    [only] = links_of(t.shipped())
    t.store.jobs.cancel(CART, ALARM, None)
    t.clock.forward(10)
    begun = t.begin(replace(only, job=ALARM))
    assert (begun.refused, begun.opened, begun.alarm, begun.job) == (None, True, False, None)
    assert t.ids() == ["later"]


@pytest.mark.databases("postgresql", "mariadb")
def test_a_row_that_a_caller_holds_keeps_no_other_chain_from_being_released(t: Table, database_url: str) -> None:
    other = CART._replace(name="other")
    t.push("a")
    t.push("a", other)
    chains = t.claim().shipments
    assert len(chains) == 2
    with made_table(database_url, clock=t.clock, migrates=False) as holder, holder.store.database.transaction() as tx:
        assert lock_by_name(tx, CART, 50) is not None
        assert t.store.claims.release(list(chains), 100) == 1
        tx.rows("SELECT 1")
    assert t.find(other).sent_until == NOW + 100


def test_a_copy_that_no_worker_knows_does_not_take_back_the_chain_that_was_sent_after_it(
    t: Table, clock: Clock
) -> None:
    t.push("a")
    [first] = links_of(t.shipped())
    clock.forward(31)
    [again] = t.claim(Phase.SENT).shipments
    assert t.store.ends.skip(first, Why.UNKNOWN_TASK) == (None, None)
    assert t.find().dispatch == again.dispatch


# --- outcomes


def test_an_outage_uses_up_no_attempt_of_a_job_that_has_only_one(harness: Harness, lifecycle: Lifecycle) -> None:
    called: list[int] = []

    class Cart(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job(retry=ONCE)
        def go(self, ctx: Any) -> None:
            called.append(ctx.attempt)
            if len(called) < 4:
                raise DatabaseUnavailable("away")

    Cart("a").jobs.push("go", id="g")
    harness.advance(30)
    assert called == [1, 1, 1, 1]
    assert Cart("a").dead_jobs() == []


def test_an_end_that_on_job_error_decides_is_no_clean_end(harness: Harness, lifecycle: Lifecycle) -> None:
    """The strikes of a job that fails after it has died stay: an `on_job_error` must not hide a loop."""
    fails = True

    class Poll(Capability):
        @lifecycle_job(retry=ONCE)
        def go(self, ctx: Any) -> None:
            if fails:
                raise ValueError("no network")

        def on_job_error(self, ctx: Any, error: BaseException) -> Any:
            return Reschedule(delay=1)

    class Cart(LifecycleObject, lifecycle=lifecycle):
        poll = Poll("poll")

    cart = Cart("a")
    cart.poll.jobs.push("go", id="g")
    harness.kill_next("g")
    harness.run_due()
    assert harness.assert_pending(cart, "g").strikes == 1
    harness.advance(60)
    assert harness.assert_pending(cart, "g").strikes == 1
    fails = False
    harness.advance(5)
    assert lifecycle.store.objects.find(cart.ref) is None
