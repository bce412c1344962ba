"""Rules of the platform: what dies, gets lost or comes twice uses up no attempt and runs nothing beside itself."""

import itertools
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_lifecycle import Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.testing import Harness

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


class World:
    def __init__(self, lifecycle: Lifecycle, harness: Harness) -> None:
        self.called: list[str] = []
        self.times: list[float] = []
        self.contexts: list[Any] = []
        self.start: Callable[[Any], None] = lambda thing: None
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

            @lifecycle_job(recovery_loop=True)
            def recover(self, ctx: Any) -> Any:
                world.called.append(ctx.job.id)
                return world.does(ctx)

            def on_alarm(self, info: Any) -> None:
                world.called.append("on_alarm")

            def on_memory_limit(self, context: Any) -> None:
                world.called.append("on_memory_limit")
                world.contexts.append(context)

        class Plain(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                world.called.append(ctx.job.id)
                world.times.append((harness.now - NOON).total_seconds())
                return world.does(ctx)

        self.Thing, self.Plain = Thing, Plain


@pytest.fixture
def world(lifecycle: Lifecycle, harness: Harness) -> World:
    return World(lifecycle, harness)


# --- nothing is lost, nothing runs twice at a time


def test_a_message_that_gets_lost_costs_one_patience(harness: Harness, world: World) -> None:
    world.Plain("a").jobs.push("go", id="g")
    harness.messages.clear()
    harness.advance(600)
    assert world.times == [30]


def test_each_message_that_gets_lost_is_waited_for_twice_as_long_up_to_five_minutes(
    harness: Harness, world: World
) -> None:
    world.Plain("a").jobs.push("go", id="g")
    for _ in range(6):
        harness.messages.clear()
        before = harness.now
        while not harness.messages:
            harness._now_ms += 1000
            harness.tick()
        world.times.append((harness.now - before).total_seconds())
    assert world.times == [30, 60, 120, 240, 300, 300]


def test_a_doubled_message_runs_nothing_twice(harness: Harness, world: World) -> None:
    """D01: the broker doubles links; a copy ends quietly, and does not go on to the next link."""
    thing = world.Plain("a")
    for job in "123":
        thing.jobs.push("go", id=job, delay=1)
    harness.lifecycle.store.objects.pause(thing.ref, "wait")
    harness.advance(1)
    thing.resume()
    harness.tick()
    while harness.messages:
        harness.messages.append(harness.messages[0])
        harness.deliver()
        harness.deliver()
        if len(harness.ran) > 20:
            break
    assert world.called == ["1", "2", "3"]
    assert {ran.result["outcome"] for ran in harness.ran} == {"complete", "refused"}


def test_a_broker_that_is_down_loses_nothing(harness: Harness, world: World) -> None:
    harness.broker_is_down = True
    thing = world.Plain("a")
    thing.jobs.push("go", id="now")
    thing.jobs.push("go", id="later", delay=10)
    harness.advance(60)
    assert world.called == []
    harness.broker_is_down = False
    harness.advance(2)
    assert world.called == ["now", "later"]


def test_a_one_shot_whose_beat_was_killed_right_after_the_publish_runs_exactly_once(
    harness: Harness, world: World
) -> None:
    """C10: the claim is on record before the message is sent, so the next beat sends no second one meanwhile."""
    world.Plain("a").jobs.push("go", id="g", delay=1)
    harness.advance(0.999)
    harness._now_ms += 1
    harness.tick()
    assert len(harness.messages) == 1
    with Harness(harness.lifecycle.app, database_url=harness.lifecycle.config.database_url, start=harness.now) as other:
        other.run_due()
        assert other.ran == []
    harness.run_due()
    harness.advance(600)
    assert world.called == ["g"]


def test_jobs_keep_their_order_through_failures_and_deaths(harness: Harness, world: World) -> None:
    """C07: job 1 raises once, job 2 dies once; none is lost, 3 never before 2."""
    thing = world.Plain("a")
    for job in "123":
        thing.jobs.push("go", id=job, delay=1)

    def does(ctx: Any) -> None:
        if ctx.job.id == "1" and ctx.attempt == 1:
            raise ValueError("x")
        if ctx.job.id == "2" and ctx.strikes == 0:
            harness.die("crash")

    world.does = does
    harness.advance(1)
    assert world.called[:3] == ["1", "1", "2"]
    harness.advance(300)
    assert sorted(world.called[3:]) == ["2", "3"]
    assert thing.jobs.list() == []


def test_the_late_result_of_a_worker_that_was_taken_for_lost_is_refused(harness: Harness, world: World) -> None:
    """C06: ownership is the token, not the host."""
    thing = world.Plain("a")
    world.does = lambda ctx: harness.stall(600) if ctx.strikes == 0 else None
    thing.jobs.push("go", id="g")
    harness.run_due()
    [ran] = [ran for ran in harness.ran if ran.error is not None]
    assert type(ran.error).__name__ == "Fenced"
    harness.advance(300)
    assert world.called == ["g", "g"]
    assert thing.jobs.list() == []


def test_a_stale_first_chain_that_comes_after_its_run_was_closed_ends_quietly(harness: Harness, world: World) -> None:
    """D14: nothing is due, so `on_start` and `on_alarm` do not run."""
    thing = world.Thing("a")
    thing.jobs.push("go", id="g")
    stale = harness.messages[0]
    harness.messages.clear()
    harness.advance(30)
    assert world.called == ["on_start", "g", "on_alarm"]
    harness.messages.append(stale)
    harness.run_due()
    assert world.called == ["on_start", "g", "on_alarm"]


def test_a_backup_alarm_stands_while_jobs_run_and_revives_a_run_whose_next_link_got_lost(
    harness: Harness, world: World
) -> None:
    thing = world.Thing("a")
    thing.jobs.push("go", id="1", delay=1)
    thing.jobs.push("go", id="2", delay=1)
    harness.lifecycle.store.objects.pause(thing.ref, "wait")
    harness.advance(1)
    thing.resume()
    harness.tick()
    harness.deliver()
    harness.messages.clear()
    harness.advance(29)
    assert world.called == ["on_start", "1"]
    harness.advance(2)
    assert world.called == ["on_start", "1", "2", "on_alarm"]


# --- a platform failure keeps the job and its attempts


@pytest.mark.parametrize("cause", ["oom", "suspected", "crash", "lost"])
def test_a_platform_failure_keeps_the_job_and_its_attempts(harness: Harness, world: World, cause: str) -> None:
    thing = world.Plain("a")
    attempts = []

    def does(ctx: Any) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            raise ValueError("x")
        if ctx.strikes == 0:
            harness.die(cause)

    world.does = does
    thing.jobs.push("go", id="g")
    harness.advance(600)
    assert attempts == [1, 2, 2]
    assert thing.dead_jobs() == []


def test_a_worker_that_is_killed_while_it_drains_puts_its_job_back_without_a_strike(
    harness: Harness, world: World
) -> None:
    """D08: SIGTERM, a job longer than the grace period, SIGKILL; three times."""
    thing = world.Plain("a")
    deploys = iter(range(3))

    def does(ctx: Any) -> None:
        assert (ctx.attempt, ctx.strikes) == (1, 0)
        if next(deploys, None) is not None:
            harness.drain()
            harness.advance(20)
            harness.die("lost")

    world.does = does
    thing.jobs.push("go", id="g")
    harness.advance(600)
    assert world.called == ["g"] * 4
    assert harness.sent("alarm_memory_limit_reset") == []


# --- strikes


def test_a_job_that_kills_its_process_waits_thirty_seconds_times_its_strikes_and_is_sealed_at_three(
    harness: Harness, world: World
) -> None:
    """C01, in its own time: three starts with growing gaps, then sealed."""
    thing = world.Plain("a")
    world.does = lambda ctx: harness.die("crash")
    thing.jobs.push("go", id="g")
    harness.advance(86_400)
    assert world.times == [0, 30, 90]
    dead = harness.assert_dead(thing, "g", reason="sealed")
    assert dead.details["cause"] == "crash"


def test_the_delay_of_a_strike_ends_at_five_minutes(harness: Harness, lifecycle: Lifecycle, world: World) -> None:
    class Stubborn(LifecycleObject, lifecycle=lifecycle):
        max_memory_strikes = 15

        @lifecycle_job
        def go(self, ctx: Any) -> None:
            world.times.append((harness.now - NOON).total_seconds())
            harness.die()

    Stubborn("a").jobs.push("go", id="g")
    harness.advance(86_400)
    gaps = [round(late - early) for early, late in itertools.pairwise(world.times)]
    assert gaps == [30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 300, 300, 300, 300]


def test_a_memory_error_counts_as_a_strike_and_the_process_goes_on(harness: Harness, world: World) -> None:
    """C02: the next job runs at once."""

    def does(ctx: Any) -> None:
        if ctx.job.id == "greedy":
            raise MemoryError

    world.does = does
    greedy, healthy = world.Plain("a"), world.Plain("b")
    greedy.jobs.push("go", id="greedy")
    healthy.jobs.push("go", id="healthy")
    harness.run_due()
    assert world.called == ["greedy", "healthy"]
    assert harness.assert_pending(greedy, "greedy").strikes == 1
    harness.advance(600)
    harness.assert_dead(greedy, "greedy", reason="sealed")


def test_progress_never_resets_the_strikes(harness: Harness, world: World) -> None:
    """C03: a recovery job writes a row of progress, then dies."""
    thing = world.Thing("a")

    def does(ctx: Any) -> None:
        ctx.object.storage["progress"] = ctx.object.storage.get("progress", 0) + 1
        harness.die()

    world.does = does
    thing.jobs.push("recover", id="r")
    harness.advance(3600)
    assert thing.storage["progress"] == 3
    harness.assert_dead(thing, "r", reason="sealed")


def test_a_struck_job_that_is_replaced_still_waits(harness: Harness, world: World) -> None:
    """D11: the delay survives replacement under the same id."""
    thing = world.Plain("a")
    thing.jobs.push("go", id="g")
    harness.kill_next("g")
    harness.run_due()
    thing.jobs.push("go", id="g", delay=0)
    harness.advance(29)
    assert world.called == []
    harness.advance(1)
    assert world.called == ["g"]


def test_hooks_are_called_after_each_strike_with_what_became_of_it(harness: Harness, world: World) -> None:
    thing = world.Thing("a")
    thing.jobs.push("go", id="g")
    harness.kill_next("g", times=3)
    harness.advance(3600)
    assert [(one.strikes, one.sealed, one.limit, one.executing, one.cause) for one in world.contexts] == [
        (1, False, 3, "g", "oom"), (2, False, 3, "g", "oom"), (3, True, 3, "g", "oom"),
    ]  # fmt: skip
    assert world.contexts[0].next_time == NOON + timedelta(seconds=30)
    assert (world.contexts[2].next_time, world.contexts[2].purged) == (None, ("g",))


def test_a_hook_is_tried_once_also_if_it_dies(harness: Harness, world: World, lifecycle: Lifecycle) -> None:
    """D12: the hook dies every time; one try, and its death counts nowhere."""
    tries = []

    class Grim(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def go(self, ctx: Any) -> None: ...

        def on_memory_limit(self, context: Any) -> None:
            tries.append(context.strikes)
            harness.die()

    thing = Grim("a")
    thing.jobs.push("go", id="g")
    harness.kill_next("g")
    harness.advance(3600)
    assert tries == [1]
    assert thing.jobs.list() == []
    assert len(harness.sent("alarm_memory_limit_reset")) == 1


def test_on_start_that_dies_every_time_pauses_the_object_as_sealed_until_it_is_resumed(
    harness: Harness, world: World
) -> None:
    """D12: paused as sealed after three deaths."""
    thing = world.Thing("a")
    world.start = lambda thing: harness.die("crash")
    thing.jobs.push("go", id="g")
    harness.advance(86_400)
    assert world.called.count("on_start") == 3
    assert thing.paused == "sealed"
    assert world.called.count("on_memory_limit") == 3
    harness.assert_pending(thing, "g")
    world.start = lambda thing: None
    thing.resume()
    harness.run_due()
    assert world.called[-3:] == ["on_start", "g", "on_alarm"]


def test_what_on_start_pushes_again_after_it_was_sealed_is_not_brought_back(harness: Harness, world: World) -> None:
    """D12: `on_start` re-creates what was sealed, in each run; only a push from outside lifts the seal."""
    thing = world.Thing("a")
    told = []

    def start(thing: Any) -> None:
        told.append(thing.jobs.push("go", id="loop", delay=0).sealed)

    def does(ctx: Any) -> None:
        if ctx.job.id == "loop":
            harness.die()

    world.start, world.does = start, does
    thing.jobs.push("go", id="first")
    harness.advance(3600)
    assert world.called.count("loop") == 3
    thing.jobs.push("go", id="other")
    harness.advance(60)
    assert told[-1] is True
    assert world.called.count("loop") == 3
    assert thing.jobs.push("go", id="loop").sealed is False
    harness.advance(60)
    assert world.called.count("loop") > 3


def test_every_pending_recovery_job_is_slowed_and_sealed_with_the_one_that_died(harness: Harness, world: World) -> None:
    thing = world.Thing("a")
    thing.jobs.push("recover", id="r1", delay=0)
    thing.jobs.push("recover", id="r2", delay=9999)
    thing.jobs.push("go", id="other", delay=9999)
    harness.kill_next("r1", times=3)
    harness.run_due()
    assert harness.assert_pending(thing, "r2").not_before == harness.now + timedelta(seconds=30)
    assert harness.assert_pending(thing, "other").not_before is None
    harness.advance(600)
    harness.assert_dead(thing, "r1", reason="sealed")
    harness.assert_dead(thing, "r2", reason="sealed")
    harness.assert_pending(thing, "other")


def test_a_loop_that_pushes_a_new_id_of_its_own_task_is_sealed_too(harness: Harness, world: World) -> None:
    """D30: its strikes are those of the line."""
    thing = world.Plain("a")

    def does(ctx: Any) -> None:
        ctx.jobs.push("go", delay=1)
        harness.die()

    world.does = does
    thing.jobs.push("go", id="g")
    harness.advance(3600)
    assert len(world.called) == 3
    assert thing.jobs.list() == []


def test_only_the_clean_end_of_the_struck_job_clears_its_strikes(harness: Harness, world: World) -> None:
    """D29: A dies, B dies, A works, B dies, A dies: nothing is sealed at three."""
    thing = world.Plain("a")
    for job, cause in (("a", "oom"), ("b", "oom"), ("a", None), ("b", "oom"), ("a", "oom"), ("b", None), ("a", None)):
        for pending in thing.jobs.list():
            thing.jobs.reschedule(pending.id, delay=86_400)
        if thing.jobs.get(job) is None:
            thing.jobs.push("go", id=job, delay=300)
        else:
            thing.jobs.reschedule(job, delay=300)
        if cause is not None:
            harness.kill_next(job, cause=cause)
        harness.advance(300)
        assert (thing.jobs.get(job) is None) is (cause is None)
    assert thing.dead_jobs() == []
    assert len(harness.sent("alarm_memory_limit_reset")) == 4


def test_neither_on_start_nor_on_alarm_follow_a_hook_that_runs_alone(harness: Harness, world: World) -> None:
    """Else an `on_start` that dies would be called at once by the hook of its own death, for ever."""
    thing = world.Thing("a")
    thing.jobs.push("go", id="g")
    harness.kill_next("g")
    harness.run_due()
    assert world.called == ["on_start", "on_memory_limit"]


def test_resume_clears_strikes_and_their_delays(harness: Harness, world: World) -> None:
    thing = world.Plain("a")
    thing.jobs.push("go", id="g")
    harness.kill_next("g", times=2)
    harness.advance(30)
    assert harness.assert_pending(thing, "g").strikes == 2
    thing.resume()
    job = harness.assert_pending(thing, "g")
    assert (job.strikes, job.not_before) == (0, None)
    harness.run_due()
    assert world.called == ["g"]
