"""Rules of a run: what happens in which order when an object's alarm fires."""

import itertools
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_lifecycle import Lifecycle, LifecycleObject, LifecycleTask, lifecycle_job
from celery_lifecycle.testing import Harness

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


class World:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self.called: list[str] = []
        self.start: Any = lambda cart: None
        self.does: Any = lambda ctx: None
        world = self

        class Cart(LifecycleObject, lifecycle=lifecycle):
            def on_start(self) -> None:
                world.called.append("on_start")
                world.start(self)

            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                world.called.append(ctx.job.id)
                return world.does(ctx)

            def on_alarm(self, info: Any) -> None:
                world.called.append("on_alarm")

        class Plain(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                world.called.append(ctx.job.id)
                return world.does(ctx)

        self.Cart, self.Plain = Cart, Plain


@pytest.fixture
def world(lifecycle: Lifecycle) -> World:
    return World(lifecycle)


def test_an_object_has_one_alarm_and_it_is_the_earliest_of_its_jobs(harness: Harness, world: World) -> None:
    cart, store = world.Cart("a"), harness.lifecycle.store
    for job, delay in (("late", 500), ("early", 100), ("middle", 300)):
        cart.jobs.push("go", id=job, delay=delay)
    state = store.objects.find(cart.ref)
    assert state is not None
    assert state.wake_at == round((NOON + timedelta(seconds=100)).timestamp() * 1000)
    cart.jobs.cancel("early")
    state = store.objects.find(cart.ref)
    assert state is not None
    assert state.wake_at == round((NOON + timedelta(seconds=300)).timestamp() * 1000)


def test_a_run_is_on_start_then_the_due_jobs_in_due_order_then_on_alarm_once(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    for job, delay in (("c", 30), ("a", 20), ("b", 20), ("later", 90), ("first", 10)):
        cart.jobs.push("go", id=job, delay=delay)
    harness.lifecycle.store.objects.pause(cart.ref, "wait")
    harness.advance(40)
    cart.resume()
    harness.run_due()
    assert world.called == ["on_start", "first", "a", "b", "c", "on_alarm"]
    harness.assert_pending(cart, "later", at=NOON + timedelta(seconds=90))


@pytest.fixture(params=["function", "ordinary task"])
def charge(request: pytest.FixtureRequest, lifecycle: Lifecycle, world: World) -> Any:
    """A task that is no method of the class to whose objects it is pushed."""
    if request.param == "function":

        @lifecycle_job(name="charge", app=lifecycle.app)
        def charge(ctx: Any) -> None:
            world.called.append("charge")

        return charge

    @lifecycle.app.task(base=LifecycleTask, name="charge", shared=False)
    def charge_task() -> None:
        world.called.append("charge")

    return charge_task


def test_a_job_that_is_no_method_runs_as_any_other_of_its_object(harness: Harness, world: World, charge: Any) -> None:
    cart = world.Cart("a")
    cart.jobs.push(charge, id="c", delay=1)
    harness.advance(1)
    assert world.called == ["on_start", "charge", "on_alarm"]
    world.called.clear()
    cart.jobs.push(charge, id="c", delay=1)
    cart.jobs.push("go", id="g", delay=1)
    cart.jobs.push(charge, id="h", delay=1)
    harness.advance(1)
    assert world.called == ["on_start", "charge", "g", "charge", "on_alarm"]


def test_a_job_that_is_no_method_seals_by_the_rules_of_its_object(
    harness: Harness, lifecycle: Lifecycle, world: World, charge: Any
) -> None:
    class Strict(LifecycleObject, lifecycle=lifecycle):
        max_memory_strikes = 1

        def on_memory_limit(self, context: Any) -> None:
            world.called.append(f"{context.executing} sealed: {context.sealed}")

    strict = Strict("a")
    strict.jobs.push(charge, id="c", delay=1)
    harness.kill_next("c", times=3)
    harness.advance(600)
    assert world.called == ["c sealed: True"]
    assert harness.assert_dead(strict, "c", reason="sealed").details["strikes"] == 1


def test_jobs_of_one_object_run_one_at_a_time(harness: Harness, world: World) -> None:
    cart = world.Cart("a")

    def does(ctx: Any) -> None:
        harness.advance(600)  # beat ticks meanwhile
        assert harness.messages == []

    world.does = does
    for job in "abc":
        cart.jobs.push("go", id=job, delay=1)
    harness.advance(1)
    assert world.called == ["on_start", "a", "b", "c", "on_alarm"]


def test_different_objects_are_sent_at_the_same_time(harness: Harness, world: World) -> None:
    for name in "abc":
        world.Plain(name).jobs.push("go")
    assert len(harness.messages) == 3


def test_the_next_alarm_is_set_at_the_end_of_the_run(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go", id="now")
    cart.jobs.push("go", id="later", delay=60)
    harness.advance(59)
    assert "later" not in world.called
    harness.advance(1)
    assert "later" in world.called


def test_jobs_pushed_during_a_run_that_are_due_run_in_the_next_one_at_once(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    world.does = lambda ctx: ctx.jobs.push("go", id="second") and None if ctx.job.id == "first" else None
    cart.jobs.push("go", id="first")
    harness.run_due()
    assert world.called == ["on_start", "first", "on_alarm", "on_start", "second", "on_alarm"]
    assert harness.now == NOON


def test_a_worker_that_closes_a_run_dispatches_what_is_due_without_beat(harness: Harness, world: World) -> None:
    cart = world.Plain("a")
    world.does = lambda ctx: ctx.jobs.push("go", id="second") and None if ctx.job.id == "first" else None
    cart.jobs.push("go", id="first")
    harness.deliver()
    assert [message.job for message in harness.messages] == ["second"]


def test_a_push_that_is_due_is_sent_by_its_own_process_without_beat(harness: Harness, world: World) -> None:
    world.Plain("a").jobs.push("go", id="x")
    assert [message.job for message in harness.messages] == ["x"]


def test_on_start_that_throws_leaves_the_jobs_and_is_tried_again_with_back_off(harness: Harness, world: World) -> None:
    cart = world.Cart("a")

    def start(cart: Any) -> None:
        raise ValueError("no disk")

    world.start = start
    cart.jobs.push("go", id="g")
    times = []
    for _ in range(4):
        before = len(world.called)
        while len(world.called) == before:
            harness.advance(0.5)
        times.append((harness.now - NOON).total_seconds())
        assert world.called == ["on_start"] * (before + 1)
        job = harness.assert_pending(cart, "g")
        assert (job.attempt, job.strikes) == (0, 0)
    assert [late - early for early, late in itertools.pairwise(times)] == pytest.approx([1, 2, 4], abs=0.5)
    assert [str(fact["error"]) for fact in harness.sent("start_failed")] == ["no disk"] * 4
    world.start = lambda cart: None
    harness.advance(60)
    assert world.called == ["on_start"] * 5 + ["g", "on_alarm"]


def test_pushes_without_an_id_inside_on_start_are_idempotent_by_owner_function_and_payload(
    harness: Harness, world: World
) -> None:
    """C04: 200 crashes of the run that follows leave one row, and one run of it."""
    cart = world.Cart("a")
    world.start = lambda cart: cart.jobs.push("go", payload="maintenance", delay=60)
    for number in range(200):
        cart.jobs.push("go", id=f"crash-{number}")
        harness.kill_next(f"crash-{number}", cause="crash")
        harness.deliver()
        assert len([job for job in cart.jobs.list() if job.payload == "maintenance"]) == 1
        cart.jobs.cancel(f"crash-{number}")
    [job] = cart.jobs.list()
    world.called.clear()
    world.start = lambda cart: None
    harness.advance(60)
    assert world.called == ["on_start", job.id, "on_alarm"]


def test_a_push_in_on_start_with_another_payload_is_another_job(harness: Harness, world: World) -> None:
    cart = world.Cart("a")

    def start(cart: Any) -> None:
        for payload in (1, 1, 2):
            cart.jobs.push("go", payload=payload, delay=60)

    world.start = start
    cart.jobs.push("go", id="g")
    harness.run_due()
    assert sorted(job.payload for job in cart.jobs.list()) == [1, 2]


def test_a_push_in_on_start_is_the_same_whatever_the_order_of_its_payloads_keys(
    harness: Harness, world: World, charge: Any
) -> None:
    cart, store = world.Cart("a"), harness.lifecycle.store

    def start(cart: Any) -> None:
        for payload in ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}):
            cart.jobs.push("go", payload=payload, delay=60)
            charge.push(payload=payload, delay=60)

    world.start = start
    cart.jobs.push("go", id="g")
    harness.run_due()
    assert [job.payload for job in cart.jobs.list()] == [{"a": 1, "b": {"c": 2, "d": 3}}]
    assert len([one for one in store.objects.find_many() if one.kind == "charge"]) == 1


@pytest.mark.databases("sqlite")
def test_on_alarm_of_a_thousand_due_jobs_is_called_once_at_the_end(harness: Harness, world: World) -> None:
    """D22: the jobs run in slices of fifty, each slice a run of its own."""
    from celery_lifecycle import Push

    cart = world.Cart("a")
    cart.jobs.push_many([Push("go", id=f"{number:04}") for number in range(1000)])
    harness.run_due()
    jobs = [call for call in world.called if call.isdigit()]
    assert jobs == [f"{number:04}" for number in range(1000)]
    assert world.called.count("on_alarm") == 1
    assert world.called[-1] == "on_alarm"
    assert world.called.count("on_start") == 20


def test_on_alarm_in_a_run_that_jobs_triggered_is_told_of_no_retry(harness: Harness, lifecycle: Lifecycle) -> None:
    from celery_lifecycle import AlarmInfo

    infos = []

    class Told(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def go(self, ctx: Any) -> None: ...

        def on_alarm(self, info: AlarmInfo) -> None:
            infos.append(info)

    Told("a").jobs.push("go")
    harness.run_due()
    assert infos == [AlarmInfo(retry_count=0, is_retry=False, scheduled_for=None)]


def test_a_class_without_on_alarm_has_no_link_for_it(harness: Harness, world: World) -> None:
    world.Plain("a").jobs.push("go", id="g")
    assert [ran.job for ran in harness.run_due()] == ["g"]


def test_an_object_that_has_nothing_left_to_remember_leaves_no_row(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go")
    harness.run_due()
    assert harness.lifecycle.store.objects.find(cart.ref) is None


def test_a_payload_of_two_megabytes_is_taken_and_a_larger_one_is_refused(harness: Harness, world: World) -> None:
    from celery_lifecycle.errors import PayloadError

    cart = world.Cart("a")
    size = 2 * 1024 * 1024 - 2
    payload = cart.jobs.push("go", id="big", payload="x" * size, delay=60).payload
    assert len(payload) == size
    with pytest.raises(PayloadError, match="at most"):
        cart.jobs.push("go", payload="x" * (size + 1))


def test_a_negative_delay_is_refused_and_a_past_time_is_due_at_once(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    with pytest.raises(ValueError, match="negative"):
        cart.jobs.push("go", delay=-1)
    cart.jobs.push("go", id="past", at=NOON - timedelta(days=1))
    harness.run_due()
    assert "past" in world.called


def test_rearm_derives_the_alarm_anew(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go", id="g", delay=10)
    database = harness.lifecycle.store.database
    with database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE lifecycle_objects SET queue = NULL, wake_at = NULL")
    harness.advance(20)
    assert world.called == []
    cart.jobs.rearm()
    harness.run_due()
    assert world.called == ["on_start", "g", "on_alarm"]


def test_get_and_list_show_pending_jobs_in_due_order(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    assert cart.jobs.get("x") is None
    assert cart.jobs.list() == []
    cart.jobs.push("go", id="x", delay=60, payload=[1])
    cart.jobs.push("go", id="y", delay=30)
    cart.set_alarm(5)
    assert [job.id for job in cart.jobs.list()] == ["y", "x"]
    found = cart.jobs.get("x")
    assert found is not None
    assert (found.payload, found.due_at) == ([1], NOON + timedelta(seconds=60))


def test_cancel_takes_a_job_out_and_says_whether_there_was_one(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go", id="x", delay=60)
    assert cart.jobs.cancel("x") is True
    assert cart.jobs.cancel("x") is False
    harness.advance(100)
    assert world.called == []


def test_reschedule_moves_a_job_and_starts_its_attempts_anew(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go", id="x", delay=60)
    assert cart.jobs.reschedule("x", delay=120).due_at == NOON + timedelta(seconds=120)
    harness.advance(119)
    assert world.called == []
    harness.advance(1)
    assert "x" in world.called
    with pytest.raises(LookupError):
        cart.jobs.reschedule("x", delay=1)
