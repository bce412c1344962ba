"""Rules of long work: keep-alives, tracked work, and the heartbeat pattern that restarts it from storage."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from celery_lifecycle import Lifecycle, LifecycleObject, LifecycleTask, Reschedule, lifecycle_job, track_alarm_work
from celery_lifecycle.testing import Harness


class World:
    """An import that hands its work off to a task and looks after it."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.called: list[str] = []
        self.does: Any = lambda ctx: None
        self.works: Callable[[], Any] = lambda: None
        world = self

        class Import(LifecycleObject, lifecycle=lifecycle):
            def on_start(self) -> None:
                world.called.append("on_start")

            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                world.called.append("go")
                return world.does(ctx)

            @lifecycle_job
            def look(self, ctx: Any) -> Any:
                """The heartbeat pattern: start what is not running, and come again."""
                if ctx.storage.get("done"):
                    return None
                if not ctx.storage.get("running"):
                    world.called.append("hand off")
                    ctx.storage["running"] = True
                    ctx.track(load.si(self.name))
                return Reschedule(delay=10)

            def on_alarm(self, info: Any) -> None:
                world.called.append("on_alarm")

        @lifecycle.app.task(name="load", shared=False)
        def load(name: str) -> None:
            world.called.append("load")
            try:
                world.works()
                Import(name).storage["done"] = True
            finally:
                Import(name).storage["running"] = False

        @lifecycle.app.task(base=LifecycleTask, name="careful", shared=False)
        def careful() -> None:
            world.called.append("careful")
            world.works()

        self.Import, self.load, self.careful = Import, load, careful


@pytest.fixture
def world(lifecycle: Lifecycle) -> World:
    return World(lifecycle)


def exists(harness: Harness, thing: LifecycleObject) -> bool:
    return harness.lifecycle.store.objects.find(thing.ref) is not None


# --- keep-alives


def test_a_keep_alive_keeps_the_object_until_it_is_given_back(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    with thing.keep_alive():
        harness.advance(3600)
        assert exists(harness, thing)
    assert not exists(harness, thing)
    harness.advance(3600)
    assert world.called == []


def test_keep_alives_are_counted(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    first, second = thing.keep_alive(), world.Import("a").keep_alive()
    first.release()
    assert exists(harness, thing)
    second.release()
    assert not exists(harness, thing)


def test_a_keep_alive_is_given_back_once(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    first, second = thing.keep_alive(), thing.keep_alive()
    assert first.release() is True
    assert first.release() is False
    assert exists(harness, thing)
    second.release()


def test_keep_alives_are_in_no_list_of_jobs(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    with thing.keep_alive():
        assert thing.jobs.list() == []


def test_keep_alive_while_returns_what_the_function_returns_and_gives_back_also_if_it_throws(
    harness: Harness, world: World
) -> None:
    thing = world.Import("a")
    assert thing.keep_alive_while(lambda: exists(harness, thing)) is True
    with pytest.raises(ZeroDivisionError):
        thing.keep_alive_while(lambda: 1 // 0)
    assert not exists(harness, thing)


def test_ctx_keep_alive_outlasts_the_run(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    held = []
    world.does = lambda ctx: held.append(ctx.keep_alive())
    thing.jobs.push("go")
    harness.run_due()
    assert exists(harness, thing)
    held[0].release()
    assert not exists(harness, thing)


def test_an_object_whose_keep_alives_holder_died_wakes(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    harness.lose(thing.keep_alive())
    harness.advance(29)
    assert world.called == []
    harness.advance(21)
    assert world.called == ["on_start", "on_alarm"]
    harness.advance(3600)
    assert world.called == ["on_start", "on_alarm"]
    assert not exists(harness, thing)


def test_a_holder_whose_process_died_in_a_run_is_noticed_too(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    deaths = iter([True])

    def does(ctx: Any) -> None:
        if next(deaths, False):
            ctx.keep_alive()
            harness.die()

    world.does = does
    thing.jobs.push("go", id="g")
    harness.advance(600)
    assert "on_alarm" in world.called
    assert not exists(harness, thing)


def test_a_holder_that_lives_is_not_taken_for_dead_after_an_outage(harness: Harness, world: World) -> None:
    """Beat comes back first; it looks twice, and the holder renews in between."""
    thing = world.Import("a")
    held = thing.keep_alive()
    harness.stall(35)
    assert world.called == []
    harness.advance(3600)
    assert world.called == []
    assert held.release() is True
    assert not exists(harness, thing)


def test_a_holder_of_an_object_without_a_class_that_died_wakes_nothing(harness: Harness, lifecycle: Lifecycle) -> None:
    from celery_lifecycle import ObjectHandle, ObjectRef

    handle = ObjectHandle(lifecycle, ObjectRef("nobody", "a"))
    harness.lose(handle.keep_alive())
    harness.advance(3600)
    assert harness.ran == []
    assert lifecycle.store.objects.find(handle.ref) is None


# --- tracking


def test_track_is_true_inside_a_run_and_track_alarm_work_false_outside(harness: Harness, world: World) -> None:
    told = []

    def does(ctx: Any) -> None:
        told.append(ctx.track(world.load.si("a")))
        told.append(track_alarm_work(world.careful.si()))

    world.does = does
    world.Import("a").jobs.push("go")
    harness.run_due()
    assert told == [True, True]
    assert {"load", "careful"} <= set(world.called)
    assert track_alarm_work(world.careful.si()) is False
    assert harness.messages == []


def test_a_tracked_signature_is_sent_and_given_back_at_its_end(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    world.does = lambda ctx: ctx.track(world.careful.si()) and None
    thing.jobs.push("go", id="g", delay=1)
    thing.jobs.push("go", id="h", delay=500)
    harness.advance(1)
    assert "careful" in world.called
    assert harness.lifecycle.store.holds.of(thing.ref) == []


def test_tracked_work_that_fails_is_given_back_without_a_strike(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    world.works = lambda: 1 / 0
    world.does = lambda ctx: ctx.track(world.careful.si()) and Reschedule(delay=600)
    thing.jobs.push("go", id="g")
    harness.run_due()
    assert harness.lifecycle.store.holds.of(thing.ref) == []
    assert harness.assert_pending(thing, "g").strikes == 0


def test_a_tracked_future_is_given_back_when_it_is_done(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    future: Future[None] = Future()
    world.does = lambda ctx: ctx.track(future) and None
    thing.jobs.push("go")
    harness.advance(3600)
    assert len(harness.lifecycle.store.holds.of(thing.ref)) == 1
    future.set_result(None)
    assert not exists(harness, thing)


def test_work_that_can_not_be_tracked_is_an_error_that_says_what_can(harness: Harness, world: World) -> None:
    from celery import chain, group

    errors = []

    def does(ctx: Any) -> None:
        for work in (42, chain(world.careful.si(), world.careful.si()), group(world.careful.si())):
            with pytest.raises(TypeError) as error:
                ctx.track(work)
            errors.append(str(error.value))

    world.does = does
    world.Import("a").jobs.push("go")
    harness.run_due()
    assert len(errors) == 3
    assert "give a Celery signature" in errors[0]
    assert "track each member" in errors[1]


def test_a_signature_that_can_not_be_sent_is_not_tracked(harness: Harness, world: World) -> None:
    thing = world.Import("a")

    def does(ctx: Any) -> None:
        harness.broker_is_down = True
        try:
            with pytest.raises(Exception, match="down"):
                ctx.track(world.careful.si())
        finally:
            harness.broker_is_down = False

    world.does = does
    thing.jobs.push("go", id="g")
    harness.run_due()
    assert not exists(harness, thing)


def test_a_tracked_task_whose_process_dies_strikes_the_job_that_handed_it_off_and_the_object_wakes(
    harness: Harness, world: World
) -> None:
    thing = world.Import("a")
    world.works = lambda: harness.die("oom")
    world.does = lambda ctx: ctx.track(world.careful.si()) and Reschedule(delay=600)
    thing.jobs.push("go", id="g")
    harness.deliver()
    world.called.clear()
    harness.run_due()
    job = harness.assert_pending(thing, "g")
    assert job.strikes == 1
    [fact] = harness.sent("alarm_memory_limit_reset")
    assert (fact["job"], fact["context"].cause, fact["context"].strikes) == ("g", "oom", 1)
    assert world.called == ["careful", "on_alarm"]
    assert harness.lifecycle.store.holds.of(thing.ref) == []


def test_one_death_of_tracked_work_is_one_strike_whoever_sees_it(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    deaths = iter([True])
    world.works = lambda: harness.die("crash") if next(deaths, False) else None
    world.does = lambda ctx: ctx.track(world.careful.si()) and Reschedule(delay=9999)
    thing.jobs.push("go", id="g")
    harness.advance(3600)
    assert len(harness.sent("alarm_memory_limit_reset")) == 1


def test_a_tracked_task_that_meets_a_memory_error_strikes_the_job_and_its_worker_lives(
    harness: Harness, world: World
) -> None:
    thing = world.Import("a")

    def works() -> None:
        raise MemoryError

    world.works = works
    world.does = lambda ctx: ctx.track(world.careful.si()) and Reschedule(delay=9999)
    thing.jobs.push("go", id="g")
    harness.run_due()
    [fact] = harness.sent("alarm_memory_limit_reset")
    assert (fact["job"], fact["context"].cause) == ("g", "memory_error")
    [ran] = [ran for ran in harness.ran if ran.task == "careful"]
    assert type(ran.error).__name__ == "OutOfMemory"


def test_a_memory_error_in_a_plain_lifecycle_task_never_leaves_its_process(harness: Harness, world: World) -> None:
    def works() -> None:
        raise MemoryError

    world.works = works
    world.careful.delay()
    [ran] = harness.run_due()
    assert (ran.state, type(ran.error).__name__) == ("FAILURE", "OutOfMemory")


def test_tracked_work_lost_with_its_whole_worker_strikes_the_job(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    deaths = iter([True])
    world.works = lambda: harness.die("lost") if next(deaths, False) else None
    handed = iter([True])
    world.does = lambda ctx: ctx.track(world.careful.si()) and Reschedule(delay=9999) if next(handed, False) else None
    thing.jobs.push("go", id="g")
    harness.advance(25)
    assert harness.sent("alarm_memory_limit_reset") == []
    harness.advance(30)
    [fact] = harness.sent("alarm_memory_limit_reset")
    assert (fact["job"], fact["context"].cause) == ("g", "lost")
    assert world.called[-2:] == ["on_start", "on_alarm"]


def test_tracked_work_of_a_worker_that_was_draining_is_lost_without_a_strike(harness: Harness, world: World) -> None:
    thing = world.Import("a")

    def works() -> None:
        harness.drain()
        harness.die("lost")

    world.works = works
    world.does = lambda ctx: ctx.track(world.careful.si()) and Reschedule(delay=9999)
    thing.jobs.push("go", id="g")
    harness.advance(60)
    assert harness.sent("alarm_memory_limit_reset") == []
    assert harness.assert_pending(thing, "g").strikes == 0
    assert world.called[-2:] == ["on_start", "on_alarm"]


def test_a_tracked_task_that_waits_for_a_worker_or_for_its_retry_is_not_taken_for_dead(
    harness: Harness, world: World
) -> None:
    thing = world.Import("a")
    tries = iter([True, False])

    def works() -> None:
        if next(tries):
            world.careful.retry(countdown=3600)

    world.works = works
    world.does = lambda ctx: ctx.track(world.careful.si()) and Reschedule(delay=7200)
    thing.jobs.push("go", id="g")
    harness.deliver()
    message = harness.messages.pop(0)
    harness.advance(3600)
    assert len(harness.lifecycle.store.holds.of(thing.ref)) == 1
    harness.messages.append(message)
    harness.advance(60)
    assert len(harness.lifecycle.store.holds.of(thing.ref)) == 1
    assert harness.sent("alarm_memory_limit_reset") == []


def test_a_revoked_tracked_task_is_given_back_and_the_object_wakes(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    world.does = lambda ctx: ctx.track(world.careful.si()) and Reschedule(delay=7200)
    thing.jobs.push("go", id="g")
    harness.deliver()
    [message] = [message for message in harness.messages if message.task == "careful"]
    harness.messages.remove(message)
    harness.run_due()
    harness.messages.append(message)
    harness.revoke(message.task_id)
    harness.run_due()
    assert harness.lifecycle.store.holds.of(thing.ref) == []
    assert world.called[-2:] == ["on_start", "on_alarm"]
    assert "careful" not in world.called


def test_reschedule_while_tracked_work_is_unfinished_is_no_clean_end_and_after_it_is(
    harness: Harness, world: World
) -> None:
    thing = world.Import("a")
    futures: list[Future[None]] = []

    def does(ctx: Any) -> Any:
        if not futures:
            futures.append(Future())
            ctx.track(futures[0])
        return Reschedule(delay=10)

    world.does = does
    thing.jobs.push("go", id="g")
    harness.kill_next("g")
    harness.advance(30)
    assert harness.assert_pending(thing, "g").strikes == 1
    harness.advance(100)
    assert harness.assert_pending(thing, "g").strikes == 1
    futures[0].set_result(None)
    harness.advance(10)
    assert harness.assert_pending(thing, "g").strikes == 0


def test_the_heartbeat_pattern_restarts_lost_work_from_storage_until_it_is_done(harness: Harness, world: World) -> None:
    thing = world.Import("a")
    deaths = iter(["crash", "oom"])

    def works() -> None:
        cause = next(deaths, None)
        if cause is not None:
            thing.storage["running"] = False
            harness.die(cause)

    world.works = works
    thing.jobs.push("look", id="l")
    harness.advance(600)
    assert thing.storage["done"] is True
    assert thing.jobs.list() == []
    assert world.called.count("hand off") == 3


def test_a_heartbeat_job_whose_tracked_work_dies_each_time_is_sealed(harness: Harness, world: World) -> None:
    """D28, second half."""
    thing = world.Import("a")

    def works() -> None:
        thing.storage["running"] = False
        harness.die("oom")

    world.works = works
    thing.jobs.push("look", id="l")
    harness.advance(3600)
    assert world.called.count("load") == 3
    assert [fact["context"].strikes for fact in harness.sent("alarm_memory_limit_reset")] == [1, 2, 3]
    harness.assert_dead(thing, "l", reason="sealed")


def test_the_result_of_a_task_that_was_sent_already_can_be_tracked_through_its_backend(
    lifecycle: Lifecycle, world: World, database_url: str
) -> None:
    lifecycle.app.conf.result_backend = "cache+memory://"
    with Harness(lifecycle, database_url=database_url) as harness:
        thing = world.Import("a")
        results = []

        def does(ctx: Any) -> Any:
            if not results:
                results.append(world.careful.apply_async())
                ctx.track(results[0])
            return Reschedule(delay=3600)

        world.does = does
        thing.jobs.push("go", id="g")
        harness.deliver()
        assert len(lifecycle.store.holds.of(thing.ref)) == 1
        harness.advance(60)
        assert results[0].ready()
        assert lifecycle.store.holds.of(thing.ref) == []


def test_the_result_of_one_task_can_be_tracked_by_several_objects(
    lifecycle: Lifecycle, world: World, database_url: str
) -> None:
    lifecycle.app.conf.result_backend = "cache+memory://"
    with Harness(lifecycle, database_url=database_url) as harness:
        things = [world.Import(name) for name in "ab"]
        result = world.careful.apply_async()
        sent = harness.messages.pop()

        def does(ctx: Any) -> Any:
            ctx.track(result)
            ctx.track(result)
            return Reschedule(delay=3600) if ctx.tracked() == 1 else None

        world.does = does
        for thing in things:
            thing.jobs.push("go", id="g")
            harness.run_due()
        for thing in things:
            [hold] = lifecycle.store.holds.of(thing.ref)
            assert (hold.ref, hold.job) == (thing.ref, "g")
            state = lifecycle.store.objects.find(thing.ref)
            assert state is not None
            assert state.holds == 1
        harness.messages.append(sent)
        harness.advance(60)
        assert result.ready()
        for thing in things:
            assert lifecycle.store.holds.of(thing.ref) == []
            harness.assert_pending(thing, "g")


def test_the_result_of_a_task_can_not_be_tracked_without_a_result_backend(harness: Harness, world: World) -> None:
    thing = world.Import("a")

    def does(ctx: Any) -> None:
        with pytest.raises(TypeError, match="without a result backend only a signature"):
            ctx.track(world.careful.apply_async())

    world.does = does
    thing.jobs.push("go", id="g")
    harness.run_due()
    assert not exists(harness, thing)
