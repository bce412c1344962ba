"""Rules of policies: singleflight, exclusive, slow jobs, backlogs, tasks and owners that nobody knows."""

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_lifecycle import Capability, Lifecycle, LifecycleObject, Push, RetryPolicy, lifecycle_job
from celery_lifecycle.testing import Harness

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


class World:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self.called: list[str] = []
        self.does: Any = lambda ctx: None
        world = self

        class Cart(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                world.called.append(ctx.job.id)
                return world.does(ctx)

            @lifecycle_job(singleflight=True, hung_timeout=60)
            def single(self, ctx: Any) -> Any:
                world.called.append(ctx.job.id)
                return world.does(ctx)

            @lifecycle_job(exclusive=True)
            def alone(self, ctx: Any) -> Any:
                world.called.append(ctx.job.id)
                return world.does(ctx)

            def on_alarm(self, info: Any) -> None:
                world.called.append("on_alarm")

        self.Cart = Cart


@pytest.fixture
def world(lifecycle: Lifecycle) -> World:
    return World(lifecycle)


# --- slow and hung


def test_a_job_that_runs_longer_than_its_hung_timeout_is_reported_as_slow_once_and_goes_on(
    harness: Harness, world: World
) -> None:
    cart = world.Cart("a")
    world.does = lambda ctx: harness.advance(300)
    cart.jobs.push("go", id="g")
    harness.run_due()
    [fact] = harness.sent("job_slow_dispatch")
    assert (fact["object"], fact["job"], fact["fenced"]) == (cart.ref, "g", False)
    assert 30 <= fact["seconds"] <= 36
    assert [ran.state for ran in harness.ran] == ["SUCCESS", "SUCCESS"]


def test_a_clock_of_the_machine_that_is_set_makes_no_job_hung(
    harness: Harness, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of an hour, as after a virtual machine's sleep: the time that a job has run goes by a clock that nobody sets."""
    cart = world.Cart("a")

    def does(ctx: Any) -> None:
        monkeypatch.setattr(time, "time", lambda: time.monotonic() + 2e9)
        try:
            harness.advance(20)
        finally:
            monkeypatch.undo()

    world.does = does
    cart.jobs.push("single", id="s")
    harness.run_due()
    assert harness.sent("job_slow_dispatch") == []
    assert world.called == ["s", "on_alarm"]


def test_hung_timeout_of_a_push_goes_before_the_setting(harness: Harness, world: World) -> None:
    world.does = lambda ctx: harness.advance(100)
    world.Cart("a").jobs.push("go", id="patient", hung_timeout=200)
    world.Cart("b").jobs.push("go", id="impatient", hung_timeout=10)
    harness.run_due()
    assert [(fact["job"], round(fact["seconds"])) for fact in harness.sent("job_slow_dispatch")] == [("impatient", 10)]


def test_a_hung_singleflight_job_is_fenced_off_stopped_and_run_again(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    hangs = iter([True, False])
    ended = []

    def does(ctx: Any) -> None:
        if next(hangs):
            harness.advance(600)
            ended.append("it was not stopped")

    world.does = does
    cart.jobs.push("single", id="s")
    harness.advance(0)
    assert world.called == ["s", "s", "on_alarm"]
    assert ended == []
    [fact] = harness.sent("job_slow_dispatch")
    assert fact["fenced"] is True
    assert 60 <= (harness.now - NOON).total_seconds() <= 65
    assert harness.sent("alarm_memory_limit_reset") == []


def test_fencing_off_uses_up_an_attempt_and_the_last_one_makes_a_dead_job(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    attempts = []

    def does(ctx: Any) -> None:
        attempts.append(ctx.attempt)
        harness.advance(600)

    world.does = does
    cart.jobs.push("single", id="s", retry=RetryPolicy(max_attempts=2))
    harness.advance(3600)
    assert attempts == [1, 2]
    harness.assert_dead(cart, "s", reason="hung")


def test_the_late_result_of_a_job_that_was_fenced_off_is_refused(
    harness: Harness, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process could not be stopped: what it returns in the end changes nothing."""
    cart = world.Cart("a")

    def does(ctx: Any) -> None:
        if len(world.called) == 1:
            try:
                harness.advance(600)
            except BaseException:
                ctx.storage["late"] = True

    world.does = does
    cart.jobs.push("single", id="s")
    harness.run_due()
    assert "late" not in cart.storage
    assert type(harness.ran[0].error).__name__ == "Fenced"
    assert world.called == ["s", "s", "on_alarm"]


# --- exclusive


def test_while_an_exclusive_job_is_due_no_other_job_of_the_object_is_sent(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go", id="1", delay=10)
    cart.jobs.push("alone", id="x", delay=20)
    cart.jobs.push("go", id="2", delay=20)
    harness.lifecycle.store.objects.pause(cart.ref, "wait")
    harness.advance(20)
    cart.resume()
    harness.tick()
    [message] = harness.messages
    assert message.job == "x"
    harness.run_due()
    assert world.called[0] == "x"
    assert [call for call in world.called if call != "on_alarm"] == ["x", "1", "2"]


def test_an_exclusive_job_that_is_not_due_yet_holds_nothing_back(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("alone", id="x", delay=60)
    cart.jobs.push("go", id="1")
    harness.run_due()
    assert world.called == ["1", "on_alarm"]


def test_an_exclusive_job_that_waits_for_its_retry_lets_others_run(harness: Harness, world: World) -> None:
    from celery_lifecycle import Reschedule

    cart = world.Cart("a")
    outcomes = iter([Reschedule(delay=60), None])
    world.does = lambda ctx: next(outcomes) if ctx.job.id == "x" else None
    cart.jobs.push("alone", id="x", delay=1)
    cart.jobs.push("go", id="1", delay=1)
    harness.advance(1)
    assert [call for call in world.called if call != "on_alarm"] == ["x", "1"]
    harness.advance(60)
    assert [call for call in world.called if call != "on_alarm"] == ["x", "1", "x"]


def test_several_exclusive_jobs_run_in_due_order_before_the_others(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    harness.lifecycle.store.objects.pause(cart.ref, "wait")
    for job, fn, delay in (("1", "go", 1), ("y", "alone", 3), ("x", "alone", 2), ("2", "go", 2)):
        cart.jobs.push(fn, id=job, delay=delay)
    harness.advance(5)
    cart.resume()
    harness.run_due()
    assert [call for call in world.called if call != "on_alarm"] == ["x", "y", "1", "2"]


# --- backlog


@pytest.mark.parametrize(("due", "warned"), [(9, []), (10, [10]), (12, [12])])
def test_ten_due_jobs_of_one_owner_in_one_run_are_reported(
    harness: Harness, world: World, due: int, warned: list[int]
) -> None:
    cart = world.Cart("a")
    cart.jobs.push_many([Push("go") for _ in range(due)])
    harness.run_due()
    assert [fact["count"] for fact in harness.sent("job_backlog_warning")] == warned
    assert [fact["owner"] for fact in harness.sent("job_backlog_warning")] == ["host"] * len(warned)


def test_a_backlog_is_counted_per_owner(harness: Harness, lifecycle: Lifecycle) -> None:
    class Part(Capability):
        @lifecycle_job
        def go(self, ctx: Any) -> None: ...

    class Whole(LifecycleObject, lifecycle=lifecycle):
        part = Part()

        @lifecycle_job
        def go(self, ctx: Any) -> None: ...

    whole = Whole("a")
    whole.jobs.push_many([Push("go") for _ in range(9)])
    whole.part.jobs.push_many([Push("go") for _ in range(9)])
    harness.run_due()
    assert harness.sent("job_backlog_warning") == []


# --- unknown tasks and owners


def forget(lifecycle: Lifecycle, *tasks: str) -> dict[str, Any]:
    """What this worker does not know (yet)."""
    return {task: lifecycle.app.tasks.pop(task) for task in tasks}


def test_a_job_of_an_unknown_task_is_put_back_and_the_others_run_in_the_same_alarm_run(
    harness: Harness, world: World, lifecycle: Lifecycle
) -> None:
    """C08, and D33: an unknown task as second of three links; the other two run at once."""
    cart = world.Cart("a")
    cart.jobs.push("go", id="1", delay=1)
    cart.jobs.push("cart.gone", id="2", delay=1)
    cart.jobs.push("go", id="3", delay=1)
    harness.advance(1)
    assert [call for call in world.called if call != "on_alarm"] == ["1", "3"]
    assert (harness.now - NOON).total_seconds() == 1
    job = harness.assert_pending(cart, "2")
    assert job.due_at > harness.now
    assert (job.attempt, job.strikes) == (0, 0)


def test_a_job_of_an_unknown_task_is_a_dead_job_after_the_grace_of_a_rolling_deploy(
    harness: Harness, world: World
) -> None:
    cart = world.Cart("a")
    cart.jobs.push("cart.gone", id="2")
    harness.advance(599)
    harness.assert_pending(cart, "2")
    tries = len(harness.ran)
    assert 5 <= tries <= 25
    harness.advance(120)
    assert cart.jobs.list() == []
    assert "cart.gone" in (harness.assert_dead(cart, "2", reason="unknown task").error or "")


def test_a_job_of_a_task_that_a_deploy_brings_within_the_grace_runs(
    harness: Harness, world: World, lifecycle: Lifecycle
) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go", id="g", delay=1)
    known = forget(lifecycle, "cart.go")
    harness.advance(300)
    assert world.called == []
    lifecycle.app.tasks.update(known)
    harness.advance(120)
    assert world.called == ["g", "on_alarm"]
    assert cart.dead_jobs() == []


def test_a_job_of_an_owner_that_is_no_longer_installed_is_put_back_then_a_dead_job(
    harness: Harness, lifecycle: Lifecycle, world: World
) -> None:
    from celery_lifecycle.store.jobs import Draft

    cart = world.Cart("a")
    harness.lifecycle.store.jobs.push(
        Draft(cart.ref, "cart.go", "celery", "loyalty", "null", id="points", delay_ms=1000)
    )
    cart.jobs.push("go", id="mine", delay=1)
    harness.advance(1)
    assert world.called == ["mine"]
    harness.assert_pending(cart, "points")
    harness.advance(900)
    harness.assert_dead(cart, "points", reason="unknown owner")
    assert "points" not in world.called


def test_only_lifecycle_tasks_are_run_whatever_a_row_says(harness: Harness, world: World, lifecycle: Lifecycle) -> None:
    from celery_lifecycle.errors import UnknownTask
    from celery_lifecycle.store.jobs import Draft

    evil = []

    @lifecycle.app.task(name="plain.task", shared=False)
    def plain() -> None:
        evil.append(1)

    cart = world.Cart("a")
    with pytest.raises(UnknownTask, match="not a lifecycle task"):
        cart.jobs.push("plain.task")
    harness.lifecycle.store.jobs.push(Draft(cart.ref, "plain.task", "celery", "host", "null", id="x"))
    harness.advance(900)
    assert evil == []
    harness.assert_dead(cart, "x", reason="unknown task")


def test_a_link_whose_message_was_revoked_is_a_dead_job_and_the_others_run_at_once(
    harness: Harness, world: World
) -> None:
    """D33: a link revoked while it waits."""
    cart = world.Cart("a")
    for job in "123":
        cart.jobs.push("go", id=job, delay=1)
    harness.lifecycle.store.objects.pause(cart.ref, "wait")
    harness.advance(1)
    cart.resume()
    harness.tick()
    harness.revoke(harness.messages[0].task_id)
    harness.run_due()
    assert world.called == ["2", "3", "on_alarm"]
    harness.assert_dead(cart, "1", reason="revoked")


def test_revoking_the_id_that_apply_async_gave_takes_the_pending_job_out(
    harness: Harness, lifecycle: Lifecycle
) -> None:
    from celery_lifecycle import LifecycleTask, ObjectHandle, ObjectRef

    called = []

    @lifecycle.app.task(base=LifecycleTask, name="later", shared=False)
    def later() -> None:
        called.append(1)

    result = later.apply_async(countdown=60)
    harness.revoke(result.id)
    harness.advance(120)
    assert called == []
    handle = ObjectHandle(lifecycle, ObjectRef("later", result.id))
    harness.assert_dead(handle, result.id, reason="revoked")


def test_a_call_that_has_expired_when_it_is_its_turn_is_a_dead_job(harness: Harness, lifecycle: Lifecycle) -> None:
    """D33: a link with ``expires`` in the past."""
    from celery_lifecycle import LifecycleTask, ObjectHandle, ObjectRef

    called = []

    @lifecycle.app.task(base=LifecycleTask, name="later", shared=False)
    def later() -> None:
        called.append(1)

    result = later.apply_async(countdown=60, expires=90)
    handle = ObjectHandle(lifecycle, ObjectRef("later", result.id))
    handle.pause()
    harness.advance(100)
    handle.resume()
    harness.run_due()
    assert called == []
    harness.assert_dead(handle, result.id, reason="expired")


def test_a_push_by_method_name_to_an_unknown_kind_says_import_the_class(harness: Harness, lifecycle: Lifecycle) -> None:
    from celery_lifecycle.errors import UnknownTask

    with pytest.raises(UnknownTask, match="import the"):
        lifecycle.object("basket", "a").jobs.push("remind")


def test_a_push_of_a_method_that_the_class_does_not_have_names_those_it_has(harness: Harness, world: World) -> None:
    from celery_lifecycle.errors import UnknownTask

    with pytest.raises(UnknownTask, match="alone, go, single"):
        world.Cart("a").jobs.push("og")


def test_the_time_of_a_hung_timeout_is_checked_at_push(harness: Harness, world: World) -> None:
    from celery_lifecycle.errors import PolicyInvalid

    for wrong in (0, -1, "60"):
        with pytest.raises(PolicyInvalid, match="hung_timeout"):
            world.Cart("a").jobs.push("go", hung_timeout=wrong)  # type: ignore[arg-type]
    assert world.Cart("a").jobs.push("go", hung_timeout=timedelta(minutes=1)).hung_timeout_ms == 60_000
