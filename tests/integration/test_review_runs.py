"""Ends that are not the usual ones: text no database takes, limits while waiting, copies of promised ids, hooks, destroyed objects."""

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_lifecycle import Lifecycle, LifecycleObject, RetryPolicy, lifecycle_job
from celery_lifecycle.task import LifecycleTask
from celery_lifecycle.testing import Harness

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


class World:
    def __init__(self, lifecycle: Lifecycle, harness: Harness) -> None:
        self.called: list[str] = []
        self.times: list[float] = []
        self.start: Callable[[Any], None] = lambda thing: None
        self.alarm: Callable[[Any], None] = lambda thing: None
        self.does: Any = lambda ctx: None
        world = self

        class Thing(LifecycleObject, lifecycle=lifecycle):
            def on_start(self) -> None:
                world.called.append("on_start")
                world.start(self)

            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                world.called.append(ctx.job.id)
                world.times.append((harness.now - NOON).total_seconds())
                return world.does(ctx)

            def on_alarm(self, info: Any) -> None:
                world.called.append("on_alarm")
                world.times.append((harness.now - NOON).total_seconds())
                world.alarm(self)

        class Plain(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job(retry=RetryPolicy(max_attempts=2, base_delay=2, max_delay=2))
            def go(self, ctx: Any) -> Any:
                world.called.append(ctx.job.id)
                world.times.append((harness.now - NOON).total_seconds())
                return world.does(ctx)

            def on_memory_limit(self, context: Any) -> None:
                world.called.append("on_memory_limit")

        self.Thing, self.Plain = Thing, Plain


@pytest.fixture
def world(lifecycle: Lifecycle, harness: Harness) -> World:
    return World(lifecycle, harness)


# --- text


@pytest.mark.parametrize(
    "text", ["a \x00 byte", "half \ud800 a pair", "x" * 20_000_000], ids=["NUL", "surrogate", "long"]
)
def test_a_job_fails_with_whatever_text_its_error_has(harness: Harness, world: World, text: str) -> None:
    def fail(ctx: Any) -> None:
        raise ValueError(text)

    world.does = fail
    plain = world.Plain("a")
    plain.jobs.push("go", id="g")
    harness.advance(10)
    dead = harness.assert_dead(plain, "g", reason="failed")
    assert dead.traceback is not None
    assert "ValueError" in dead.traceback


@pytest.mark.parametrize("text", ["a \x00 byte", "half \ud800 a pair"], ids=["NUL", "surrogate"])
def test_an_alarm_fails_with_whatever_text_its_error_has(harness: Harness, world: World, text: str) -> None:
    def fail(thing: Any) -> None:
        raise ValueError(text)

    world.alarm = fail
    thing = world.Thing("a")
    thing.set_alarm(0)
    harness.advance(1000)
    assert [dead.reason for dead in thing.dead_jobs()] == ["failed"]
    assert world.called.count("on_alarm") == 7


# --- a soft time limit


def test_a_soft_time_limit_between_two_attempts_puts_the_job_back(harness: Harness, world: World) -> None:
    def fail(ctx: Any) -> None:
        if len(world.called) == 1:
            raise ValueError("once")

    def limited(seconds: float) -> None:
        raise SoftTimeLimitExceeded()

    world.does = fail
    harness.lifecycle.runner.sleep = limited
    plain = world.Plain("a")
    plain.jobs.push("go", id="g")
    harness.advance(10)
    assert world.called == ["g", "g"]
    assert harness.sent("job_started")[1]["attempt"] == 2
    assert plain.jobs.list() == []
    assert harness.sent("alarm_memory_limit_reset") == []


# --- ids that were promised


def plain_task(lifecycle: Lifecycle, does: Callable[[], Any]) -> Any:
    @lifecycle.app.task(base=LifecycleTask, name="later", shared=False)
    def later() -> Any:
        return does()

    return later


def test_a_copy_of_an_eta_tasks_message_stores_no_result(harness: Harness, lifecycle: Lifecycle) -> None:
    later = plain_task(lifecycle, lambda: 42)
    later.apply_async(countdown=5)
    harness.advance_to(harness.now)
    harness._now_ms += 5000
    harness.tick()
    harness.messages.append(harness.messages[0])
    harness.run_due()
    assert [(ran.state, ran.result) for ran in harness.ran] == [("SUCCESS", 42), ("IGNORED", None)]


def test_the_late_result_of_an_eta_task_is_no_failure_of_it(harness: Harness, lifecycle: Lifecycle) -> None:
    runs: list[int] = []

    def does() -> int:
        runs.append(1)
        if len(runs) == 1:
            harness.stall(60)
        return len(runs)

    later = plain_task(lifecycle, does)
    later.apply_async(countdown=5)
    harness.advance(200)
    assert [ran.state for ran in harness.ran] == ["IGNORED", "SUCCESS"]


def test_an_eta_task_that_runs_out_of_memory_below_the_limit_is_to_be_retried(
    harness: Harness, lifecycle: Lifecycle
) -> None:
    runs: list[int] = []

    def does() -> int:
        runs.append(1)
        if len(runs) < 3:
            raise MemoryError
        return 42

    later = plain_task(lifecycle, does)
    later.apply_async(countdown=5)
    harness.advance(600)
    assert [ran.state for ran in harness.ran] == ["RETRY", "RETRY", "SUCCESS"]


def test_an_eta_task_that_runs_out_of_memory_at_the_limit_fails(harness: Harness, lifecycle: Lifecycle) -> None:
    def does() -> int:
        raise MemoryError

    later = plain_task(lifecycle, does)
    later.apply_async(countdown=5)
    harness.advance(600)
    assert [ran.state for ran in harness.ran] == ["RETRY", "RETRY", "FAILURE"]


def test_revoke_leaves_an_eta_task_alone_that_runs(harness: Harness, lifecycle: Lifecycle) -> None:
    later = plain_task(lifecycle, lambda: harness.revoke(result.id))
    result = later.apply_async(countdown=5)
    harness.advance(60)
    assert [ran.state for ran in harness.ran] == ["SUCCESS"]
    assert lifecycle.object("later", result.id).dead_jobs() == []


def test_self_retry_of_an_eta_task_is_durable_and_keeps_its_id(harness: Harness, lifecycle: Lifecycle) -> None:
    @lifecycle.app.task(base=LifecycleTask, name="later", shared=False, bind=True)
    def later(self: Any) -> Any:
        if self.request.retries < 2:
            raise self.retry(countdown=0 if self.request.retries == 1 else 7)
        return self.request.retries

    result = later.apply_async(countdown=5)
    harness.advance(60)
    assert [(ran.state, ran.task_id) for ran in harness.ran] == [
        ("RETRY", result.id), ("RETRY", result.id), ("SUCCESS", result.id)
    ]  # fmt: skip


# --- unknown


def test_a_keep_alive_whose_class_no_worker_knows_does_not_loop(harness: Harness, world: World) -> None:
    thing = world.Thing("a")
    harness.lose(thing.keep_alive())
    harness.lifecycle.app.tasks.pop("thing.on_alarm")
    harness.advance(200)
    assert 0 < len(harness.ran) < 30


# --- destroyed objects


def test_an_alarm_that_destroys_its_object_and_fails_is_not_retried(harness: Harness, world: World) -> None:
    def fail(thing: Any) -> None:
        thing.destroy()
        raise ValueError

    world.alarm = fail
    world.Thing("a").set_alarm(0)
    harness.advance(600)
    assert world.called.count("on_alarm") == 1
    assert harness.lifecycle.store.objects.find_many() == []


def test_a_start_that_destroys_its_object_and_fails_leaves_no_row(harness: Harness, world: World) -> None:
    def fail(thing: Any) -> None:
        thing.destroy()
        raise ValueError

    world.start = fail
    world.Thing("a").jobs.push("go", id="g")
    harness.advance(600)
    assert harness.lifecycle.store.objects.find_many() == []


def test_an_alarm_that_destroys_its_object_and_dies_is_not_called_again(harness: Harness, world: World) -> None:
    def fail(thing: Any) -> None:
        thing.destroy()
        harness.die()

    world.alarm = fail
    world.Thing("a").set_alarm(0)
    harness.advance(7200)
    assert world.called.count("on_alarm") == 1


# --- nothing is remembered for ever


def test_a_delay_that_is_over_keeps_no_row(harness: Harness, world: World) -> None:
    def fail(thing: Any) -> None:
        raise ValueError

    world.start = fail
    thing = world.Thing("a")
    thing.jobs.push("go", id="g")
    harness.run_due()
    thing.jobs.cancel("g")
    harness.advance(60)
    harness.lifecycle.store.beats.forget_old()
    assert harness.lifecycle.store.objects.find_many() == []


def test_an_alarm_that_died_once_and_then_works_leaves_no_row(harness: Harness, world: World) -> None:
    class Bare(LifecycleObject, lifecycle=harness.lifecycle):
        def on_alarm(self, info: Any) -> None:
            world.called.append("on_alarm")
            if len(world.called) == 1:
                harness.die()

    Bare("a").set_alarm(0)
    harness.advance(120)
    assert world.called == ["on_alarm", "on_alarm"]
    assert harness.lifecycle.store.objects.find_many() == []
