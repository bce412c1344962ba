"""The rule "newer wins": a change of a job while it runs stands, the run's outcome does not."""

from typing import Any

import pytest

from celery_lifecycle import Lifecycle, LifecycleObject, Reschedule, lifecycle_job
from celery_lifecycle.store import Store
from celery_lifecycle.store.jobs import Draft
from celery_lifecycle.testing import Harness


class World:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self.does: Any = lambda ctx: None
        self.payloads: list[Any] = []
        world = self

        class Work(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                world.payloads.append(ctx.payload)
                return world.does(ctx) if ctx.payload == 1 else None

        self.Work = Work


@pytest.fixture
def world(lifecycle: Lifecycle) -> World:
    return World(lifecycle)


@pytest.fixture
def other_process(harness: Harness) -> Any:
    """The store as another process sees it: connections of its own, the same clock."""
    store = Store(harness.lifecycle.config, clock=lambda: round(harness.now.timestamp() * 1000))
    yield store
    store.close()


@pytest.mark.parametrize("outcome", [None, Reschedule(delay=999)])
def test_a_push_of_its_own_id_from_the_job_itself_wins(harness: Harness, world: World, outcome: Any) -> None:
    work = world.Work("a")

    def does(ctx: Any) -> Any:
        ctx.jobs.push("go", id="g", payload=2, delay=60)
        return outcome

    world.does = does
    work.jobs.push("go", id="g", payload=1)
    harness.run_due()
    job = harness.assert_pending(work, "g")
    assert (job.payload, (job.due_at - harness.now).total_seconds()) == (2, 60)
    assert [fact["job"] for fact in harness.sent("job_discarded")] == ["g"]
    harness.advance(60)
    assert world.payloads == [1, 2]


def test_a_reschedule_of_its_own_id_from_the_job_itself_wins(harness: Harness, world: World) -> None:
    work = world.Work("a")
    world.does = lambda ctx: ctx.jobs.reschedule("g", delay=60) and None
    work.jobs.push("go", id="g", payload=1)
    harness.run_due()
    assert (harness.assert_pending(work, "g").due_at - harness.now).total_seconds() == 60


def test_a_push_from_another_process_while_it_runs_wins(harness: Harness, world: World, other_process: Store) -> None:
    work = world.Work("a")

    def does(ctx: Any) -> Any:
        queue = ctx.job.queue
        other_process.jobs.push(Draft(work.ref, "work.go", queue, "host", "2", id="g", delay_ms=5000))
        return Reschedule(delay=999)

    world.does = does
    work.jobs.push("go", id="g", payload=1)
    harness.run_due()
    assert harness.assert_pending(work, "g").payload == 2
    harness.advance(5)
    assert world.payloads == [1, 2]
    assert work.jobs.list() == []


def test_a_reschedule_from_another_process_while_it_runs_wins(
    harness: Harness, world: World, other_process: Store
) -> None:
    work = world.Work("a")
    moved = iter([True, False])

    def does(ctx: Any) -> Any:
        if next(moved):
            other_process.jobs.reschedule(work.ref, "g", "host", None, 5000)

    world.does = does
    work.jobs.push("go", id="g", payload=1)
    harness.run_due()
    assert (harness.assert_pending(work, "g").due_at - harness.now).total_seconds() == 5
    harness.advance(5)
    assert world.payloads == [1, 1]


@pytest.mark.parametrize("outcome", [None, Reschedule(delay=1)])
def test_a_cancel_while_it_runs_stays_a_cancel(
    harness: Harness, world: World, other_process: Store, outcome: Any
) -> None:
    work = world.Work("a")

    def does(ctx: Any) -> Any:
        assert other_process.jobs.cancel(work.ref, "g", "host") is not None
        return outcome

    world.does = does
    work.jobs.push("go", id="g", payload=1)
    harness.advance(100)
    assert world.payloads == [1]
    assert work.jobs.list() == []


def test_a_cancel_while_it_fails_stays_a_cancel(harness: Harness, world: World) -> None:
    work = world.Work("a")

    def does(ctx: Any) -> None:
        work.jobs.cancel("g")
        raise ValueError("x")

    world.does = does
    work.jobs.push("go", id="g", payload=1)
    harness.advance(100)
    assert work.jobs.list() == []
    assert work.dead_jobs() == []


def test_there_is_one_running_and_one_queued_of_an_id_never_two(harness: Harness, world: World) -> None:
    work = world.Work("a")

    def does(ctx: Any) -> None:
        for number in (2, 3, 4):
            work.jobs.push("go", id="g", payload=number)
            assert [job.payload for job in work.jobs.list()] == [number]
            assert harness.messages == []

    world.does = does
    work.jobs.push("go", id="g", payload=1)
    harness.run_due()
    assert world.payloads == [1, 4]


def test_a_replaced_job_that_was_cancelled_and_pushed_again_while_it_ran_stays(harness: Harness, world: World) -> None:
    work = world.Work("a")

    def does(ctx: Any) -> None:
        work.jobs.cancel("g")
        work.jobs.push("go", id="g", payload=2)

    world.does = does
    work.jobs.push("go", id="g", payload=1)
    harness.run_due()
    assert world.payloads == [1, 2]


def test_a_stable_id_replaces_what_is_pending(harness: Harness, world: World) -> None:
    work = world.Work("a")
    first = work.jobs.push("go", id="g", payload=5, delay=10)
    second = work.jobs.push("go", id="g", payload=6, delay=20)
    assert second.version > first.version
    harness.advance(30)
    assert world.payloads == [6]


def test_without_an_id_each_push_is_a_job_of_its_own(harness: Harness, world: World) -> None:
    work = world.Work("a")
    assert work.jobs.push("go", payload=5).id != work.jobs.push("go", payload=5).id
    harness.run_due()
    assert world.payloads == [5, 5]


def test_an_explicit_id_is_used_again_after_its_job_is_done(harness: Harness, world: World) -> None:
    work = world.Work("a")
    for number in (5, 6):
        work.jobs.push("go", id="g", payload=number)
        harness.run_due()
    assert world.payloads == [5, 6]
