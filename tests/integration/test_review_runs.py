"""Ends that are not the usual ones: text no database takes, limits while waiting, copies of promised ids, hooks, destroyed objects."""

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Exchange, Queue
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_lifecycle import Lifecycle, LifecycleObject, ObjectRef, Push, RetryPolicy, lifecycle_job
from celery_lifecycle.errors import NameInvalid, UnknownTask
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


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Nothing is logged: a report that quotes half a surrogate can't be sent from one test process to another."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("unlogged")
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


@pytest.mark.usefixtures("unlogged")
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


# --- what on_start pushes, what ordinary tasks keep


@pytest.mark.parametrize("how", ["push_many", "session", "session of many"])
def test_whatever_on_start_pushes_without_an_id_is_there_once(harness: Harness, world: World, how: str) -> None:
    """C04 by the other ways to push."""
    engine = create_engine(harness.lifecycle.config.url)

    def start(thing: Any) -> None:
        later = {"fn": "go", "delay": 3600, "payload": {"n": 1}}
        if how == "push_many":
            thing.jobs.push_many([Push(**later), Push("go", delay=3600)])
            return
        with Session(engine) as session:
            if how == "session":
                thing.jobs.push(**later, session=session)
            else:
                thing.jobs.push_many([Push(**later), Push("go", delay=3600)], session=session)
            session.commit()

    world.start = start
    thing = world.Thing("a")
    for _ in range(5):
        thing.jobs.push("go", id="now")
        harness.run_due()
    engine.dispose()
    assert len(thing.jobs.list()) == (1 if how == "session" else 2)


def test_an_eta_task_over_its_time_limit_is_not_tried_again(harness: Harness, lifecycle: Lifecycle) -> None:
    """As any failure of it: an ordinary task has one attempt, unless it asks for another."""
    later = plain_task(lifecycle, lambda: None)
    result = later.apply_async(countdown=60)
    assert lifecycle.store.jobs.list(ObjectRef("later", result.id), None)[0].retry.max_attempts == 1
    job = later.push(delay=60)
    assert job.retry.max_attempts == 1
    assert lifecycle.object("any", "a").jobs.push("later", delay=60).retry.max_attempts == 1


def test_an_eta_task_keeps_where_it_was_to_go_and_whether_its_result_is_wanted(
    harness: Harness, lifecycle: Lifecycle
) -> None:
    later = plain_task(lifecycle, lambda: None)
    lifecycle.app.conf.task_queues = [
        Queue("celery"), Queue("slow", Exchange("jobs", type="topic"), routing_key="jobs.slow.#")
    ]  # fmt: skip
    later.apply_async(countdown=60, ignore_result=True)
    later.apply_async(countdown=60, exchange="jobs", routing_key="jobs.slow.now")
    harness._now_ms += 60_000
    harness.tick()
    first, second = harness.messages
    assert first.headers["ignore_result"] is True
    assert second.queue == "jobs.slow.now"


def test_a_task_whose_name_can_be_no_kind_is_refused_before_anything_is_stored(
    harness: Harness, lifecycle: Lifecycle
) -> None:
    @lifecycle.app.task(base=LifecycleTask, name="what ever!", shared=False)
    def odd() -> None: ...

    with pytest.raises(NameInvalid, match="kind 'what ever!'"):
        odd.apply_async(countdown=5)


# --- lines


def test_a_job_that_pushes_new_ids_by_push_many_and_dies_is_sealed(harness: Harness, world: World) -> None:
    """D30 by the other way to push."""

    def dies(ctx: Any) -> None:
        ctx.jobs.push_many([Push("go", id=f"{len(world.called)}a"), Push("go", id=f"{len(world.called)}b")])
        harness.die()

    world.does = dies
    plain = world.Plain("a")
    plain.jobs.push("go", id="root")
    harness.advance(7200)
    assert len(harness.started()) == 3
    assert plain.jobs.list() == []


def test_push_many_from_inside_a_run_does_not_bring_a_sealed_job_back(harness: Harness, world: World) -> None:
    def does(ctx: Any) -> None:
        if ctx.job.id == "bad":
            harness.die()
        if ctx.job.id == "good":
            return
        given = ctx.jobs.push_many([Push("go", id="bad"), Push("go", id="good")])
        world.called += [f"{job.id} is sealed" for job in given if job.sealed]

    world.does = does
    plain = world.Plain("a")
    plain.jobs.push("go", id="bad")
    harness.advance(3600)
    plain.jobs.push("go", id="other")
    harness.advance(10)
    harness.assert_dead(plain, "bad", reason="sealed")
    assert "bad is sealed" in world.called
    assert len(harness.started("bad")) == 3


def test_what_on_start_pushes_is_of_no_line_of_the_job_that_was_due(harness: Harness, world: World) -> None:
    def does(ctx: Any) -> None:
        if ctx.job.id == "bad":
            harness.die()

    world.does = does
    world.start = lambda thing: thing.jobs.push("go", id="maintain", delay=86_400)
    thing = world.Thing("a")
    thing.jobs.push("go", id="bad")
    harness.advance(3600)
    harness.assert_dead(thing, "bad", reason="sealed")
    assert [job.id for job in thing.jobs.list()] == ["maintain"]


# --- whose job it is


def test_a_job_of_one_kind_is_not_pushed_to_an_object_of_another(harness: Harness, world: World) -> None:
    other = harness.lifecycle.object("anything", "a")
    for push in (
        lambda: world.Thing("a").jobs.push("plain.go"),
        lambda: other.jobs.push("plain.go"),
        lambda: world.Thing("a").schedule(60, "plain.go"),
        lambda: world.Thing("a").jobs.push(world.Plain("a").go),
        lambda: world.Thing("a").jobs.push(world.Thing("b").go),
    ):
        with pytest.raises(UnknownTask, match=r"belongs to another object|is a job of the kind 'plain'"):
            push()
    assert world.Thing("a").jobs.push(world.Thing("a").go).task == "thing.go"
    assert harness.lifecycle.object("plain", "z").jobs.push("plain.go").task == "plain.go"


# --- what can't be understood


class Mute(Exception):
    """An error that can't be told."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


class MuteValue:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


def mute(ctx: Any) -> None:
    raise Mute


UNTOLD: dict[str, Callable[[Any], Any]] = {
    "retry at a naive time": lambda ctx: ctx.retry(eta=datetime(2026, 1, 1, 13)),
    "retry in no time": lambda ctx: ctx.retry(countdown=float("inf")),
    "retry in a text": lambda ctx: ctx.retry(countdown="5"),
    "an error without a text": mute,
    "a value without a text": lambda ctx: MuteValue(),
}


@pytest.mark.parametrize("body", UNTOLD.values(), ids=UNTOLD.keys())
def test_an_outcome_that_can_not_be_understood_is_a_failure_of_its_job_and_no_death(
    harness: Harness, world: World, body: Any
) -> None:
    world.does = body
    plain = world.Plain("a")
    plain.jobs.push("go", id="g")
    plain.jobs.push("go", id="next", delay=0.001)
    harness.advance(15)
    assert harness.assert_dead(plain, "g", reason="failed").error
    assert harness.assert_dead(plain, "next", reason="failed").error
    assert harness.sent("alarm_memory_limit_reset") == []
    assert not plain.jobs.list()


def test_a_retry_in_the_past_is_one_now(harness: Harness, world: World) -> None:
    world.does = lambda ctx: ctx.retry(countdown=-5) if ctx.attempt == 1 else None
    world.Plain("a").jobs.push("go", id="g")
    harness.advance(3)
    assert world.called == ["g", "g"]


def test_an_alarm_whose_error_has_no_text_is_retried(harness: Harness, world: World) -> None:
    world.alarm = mute
    thing = world.Thing("a")
    thing.set_alarm(0)
    harness.advance(1000)
    assert [dead.reason for dead in thing.dead_jobs()] == ["failed"]
    assert harness.sent("alarm_memory_limit_reset") == []


def test_a_soft_time_limit_around_a_body_is_a_failed_attempt(
    harness: Harness, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [SoftTimeLimitExceeded()]

    def limited(*given: Any) -> None:
        if limits:
            raise limits.pop()

    monkeypatch.setattr("celery_lifecycle.events.started", limited)
    plain = world.Plain("a")
    plain.jobs.push("go", id="g")
    harness.advance(10)
    assert world.called == ["g"]
    assert plain.jobs.list() == []
    assert harness.sent("alarm_memory_limit_reset") == []


def test_a_class_that_can_not_be_made_fails_its_jobs_and_its_alarm(harness: Harness, lifecycle: Lifecycle) -> None:
    fails = False

    class Broken(LifecycleObject, lifecycle=lifecycle):
        def __init__(self, name: str, **given: Any) -> None:
            super().__init__(name, **given)
            if fails:
                raise ValueError("not today")

        @lifecycle_job
        def go(self, ctx: Any) -> None: ...

        def on_alarm(self, info: Any) -> None: ...

    bad = Broken("a")
    bad.jobs.push("go", id="g")
    fails = True
    harness.advance(1000)
    assert "not today" in str(harness.assert_dead(bad, "g", reason="failed").error)
    # The job, and the alarm that follows a run.
    assert [dead.reason for dead in bad.dead_jobs()] == ["failed", "failed"]
    assert len(harness.ran) < 20
    assert lifecycle.store.objects.find(bad.ref) is None


# --- what on_start takes out of the run


@pytest.mark.parametrize("what", ["cancel", "reschedule", "replace", "again", "destroy"])
def test_what_on_start_takes_out_moves_or_replaces_is_not_run_as_it_was(
    harness: Harness, world: World, what: str
) -> None:
    payloads: list[Any] = []

    def change(thing: Any) -> None:
        match what:
            case "cancel":
                assert thing.jobs.cancel("g")
            case "reschedule":
                thing.jobs.reschedule("g", delay=50)
            case "replace":
                thing.jobs.push("go", id="g", payload="new", delay=50)
            case "again":
                thing.jobs.push("go", id="g", payload="new")
            case "destroy":
                thing.destroy()
        world.start = lambda thing: None

    world.start = change
    world.does = lambda ctx: payloads.append(ctx.payload)
    thing = world.Thing("a")
    thing.jobs.push("go", id="g", payload="old")
    if what != "destroy":
        thing.jobs.push("go", id="h", payload="beside", delay=0.001)
    harness.advance(10)
    assert payloads == {"destroy": [], "again": ["new", "beside"]}.get(what, ["beside"])
    harness.advance(60)
    assert payloads[1:] == {"reschedule": ["old"], "replace": ["new"], "again": ["beside"]}.get(what, [])
    assert harness.lifecycle.store.objects.find_many() == []


# --- a job's own threads


def test_a_loop_that_pushes_from_a_thread_of_its_job_is_sealed(harness: Harness, world: World) -> None:
    def again(ctx: Any) -> None:
        pushed = threading.Thread(target=lambda: ctx.jobs.push("go", id=f"n{len(world.called)}", delay=1))
        pushed.start()
        pushed.join()
        harness.die()

    world.does = again
    plain = world.Plain("a")
    plain.jobs.push("go", id="n0")
    harness.advance(600)
    assert sum(name.startswith("n") for name in world.called) == 3
    assert {dead.reason for dead in plain.dead_jobs()} == {"sealed"}


# --- seals of lines that began on another object


@pytest.mark.parametrize("how", ["resume", "destroy"])
def test_resume_and_destroy_lift_the_seal_of_a_line_that_began_elsewhere(
    harness: Harness, lifecycle: Lifecycle, how: str
) -> None:
    ran: list[str] = []

    @lifecycle.app.task(base=LifecycleTask, name="loop", shared=False)
    def loop(number: int) -> None:
        ran.append(f"n{number}")
        if number < 3:
            loop.push(payload=[number + 1], id=f"n{number + 1}")
            harness.die()

    loop.push(payload=[0], id="n0")
    harness.advance(600)
    sealed = [dead.job.object for dead in lifecycle.store.dead.list() if dead.reason == "sealed"]
    assert sealed
    ran.clear()
    thing = lifecycle.object(sealed[0].kind, sealed[0].name)
    thing.resume() if how == "resume" else thing.destroy()
    loop.push(payload=[7], id="n1")
    harness.advance(600)
    assert ran
