"""Rules of outcomes and errors: what a job returns or raises decides what becomes of it."""

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject

from celery_lifecycle import YIELD, Lifecycle, LifecycleObject, LifecycleTask, Reschedule, RetryPolicy, lifecycle_job
from celery_lifecycle.errors import OutcomeInvalid, PolicyInvalid
from celery_lifecycle.model import ObjectRef
from celery_lifecycle.testing import Harness

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


class World:
    """An object whose job does what the test says."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.does: Any = lambda ctx: None
        self.attempts: list[int] = []
        world = self

        class Work(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                world.attempts.append(ctx.attempt)
                return world.does(ctx)

            @lifecycle_job
            def other(self, ctx: Any) -> None: ...

        self.Work = Work


@pytest.fixture
def world(lifecycle: Lifecycle) -> World:
    return World(lifecycle)


def raises(error: BaseException) -> Any:
    def does(ctx: Any) -> None:
        raise error

    return does


def test_none_completes_the_job(harness: Harness, world: World) -> None:
    work = world.Work("a")
    work.jobs.push("go", id="g")
    [ran] = harness.run_due()
    assert ran.result == {"outcome": "complete", "at": None}
    assert work.jobs.list() == []
    assert work.dead_jobs() == []


def test_reschedule_with_a_delay_runs_it_again_then(harness: Harness, world: World) -> None:
    work = world.Work("a")
    world.does = lambda ctx: Reschedule(delay=timedelta(minutes=5))
    work.jobs.push("go", id="g", payload={"kept": True})
    [ran] = harness.run_due()
    due = NOON + timedelta(minutes=5)
    assert ran.result == {"outcome": "reschedule", "at": due.isoformat()}
    assert harness.assert_pending(work, "g", at=due).payload == {"kept": True}
    harness.advance(300)
    assert world.attempts == [1, 1]


def test_reschedule_at_a_time_runs_it_again_then(harness: Harness, world: World) -> None:
    work = world.Work("a")
    world.does = lambda ctx: Reschedule(at=NOON + timedelta(days=1))
    work.jobs.push("go", id="g")
    harness.run_due()
    harness.assert_pending(work, "g", at=NOON + timedelta(days=1))


def test_yield_gives_others_a_turn_and_runs_again_at_once(harness: Harness, world: World) -> None:
    work = world.Work("a")
    left = iter([YIELD, YIELD, None])

    def does(ctx: Any) -> Any:
        harness.advance(1)
        return next(left)

    world.does = does
    work.jobs.push("go", id="g")
    work.jobs.push("other", id="o")
    harness.run_due()
    assert [fact["job"] for fact in harness.started()] == ["g", "o", "g", "g"]
    assert harness.now == NOON + timedelta(seconds=3)


@pytest.mark.parametrize("value", ["done", 0, False, {}, Reschedule, (None,)])
def test_any_other_value_is_an_error_that_says_what_to_return(harness: Harness, world: World, value: Any) -> None:
    work = world.Work("a")
    world.does = lambda ctx: value
    work.jobs.push("go", id="g")
    [ran] = harness.run_due()
    assert isinstance(ran.error, OutcomeInvalid)
    assert "return None, Reschedule(…) or YIELD" in str(ran.error)
    dead = harness.assert_dead(work, "g", reason="failed")
    assert "OutcomeInvalid" in (dead.error or "")
    assert world.attempts == [1]


@pytest.mark.parametrize(
    "value", [Reschedule(), Reschedule(delay=1, at=NOON), Reschedule(at=datetime(2026, 1, 1)), Reschedule(delay=-1)]
)
def test_a_reschedule_that_is_not_allowed_is_an_error(harness: Harness, world: World, value: Reschedule) -> None:
    work = world.Work("a")
    world.does = lambda ctx: value
    work.jobs.push("go", id="g")
    [ran] = harness.run_due()
    assert ran.state == "FAILURE"
    harness.assert_dead(work, "g", reason="failed")


def test_the_attempt_is_counted_from_one_within_the_run(harness: Harness, world: World) -> None:
    world.does = raises(ValueError("x"))
    world.Work("a").jobs.push("go", id="g")
    harness.run_due()
    assert world.attempts == [1, 2, 3]


def test_retries_are_three_attempts_by_default_with_full_jitter_up_to_the_doubled_delay(
    harness: Harness, world: World
) -> None:
    world.does = raises(ValueError("x"))
    world.Work("a").jobs.push("go", id="g")
    harness.run_due()
    first, second = (fact["delay"] for fact in harness.sent("job_retrying"))
    assert 0 <= first <= 0.2
    assert 0 <= second <= 0.4


def test_a_retry_policy_of_a_push_goes_before_the_decorators(harness: Harness, world: World) -> None:
    world.does = raises(ValueError("x"))
    world.Work("a").jobs.push("go", retry=RetryPolicy(max_attempts=5, base_delay=0))
    harness.run_due()
    assert world.attempts == [1, 2, 3, 4, 5]


def test_options_of_a_retry_policy_are_checked_at_once() -> None:
    for options in ({"max_attempts": 0}, {"max_attempts": True}, {"base_delay": -1}, {"max_delay": float("nan")}):
        with pytest.raises(PolicyInvalid):
            RetryPolicy(**options)


def test_retries_happen_within_the_run_before_the_next_job(harness: Harness, world: World) -> None:
    work = world.Work("a")
    world.does = lambda ctx: 1 / 0 if ctx.attempt == 1 else None
    work.jobs.push("go", id="g")
    work.jobs.push("other", id="o")
    harness.run_due()
    assert [(fact["job"], fact["attempt"]) for fact in harness.started()] == [("g", 1), ("g", 2), ("o", 1)]


def test_a_retry_delay_too_long_to_hold_a_worker_puts_the_job_back_with_its_attempts(
    harness: Harness, world: World
) -> None:
    work = world.Work("a")
    world.does = raises(ValueError("x"))
    policy = RetryPolicy(max_attempts=3, base_delay=100_000, max_delay=100_000)
    work.jobs.push("go", id="g", retry=policy)
    work.jobs.push("other", id="o")
    harness.run_due()
    assert [(fact["job"], fact["attempt"]) for fact in harness.started()] == [("g", 1), ("o", 1)]
    assert harness.assert_pending(work, "g").attempt == 1
    harness.advance(200_000)
    assert world.attempts == [1, 2, 3]
    harness.assert_dead(work, "g", reason="failed")


def test_a_host_job_completes_after_its_last_attempt_and_is_a_dead_job_with_its_traceback(
    harness: Harness, world: World
) -> None:
    work = world.Work("a")
    world.does = raises(ValueError("no stock"))
    work.jobs.push("go", id="g")
    [ran] = harness.run_due()
    assert ran.state == "FAILURE"
    assert isinstance(ran.error, ValueError)
    assert work.jobs.list() == []
    dead = harness.assert_dead(work, "g", reason="failed")
    assert dead.error == "ValueError('no stock')"
    assert "raise error\nValueError: no stock" in (dead.traceback or "")


def test_the_chain_goes_on_after_a_job_that_failed(harness: Harness, world: World) -> None:
    work = world.Work("a")
    world.does = raises(ValueError("x"))
    work.jobs.push("go", id="g", retry=RetryPolicy(max_attempts=1))
    work.jobs.push("other", id="o")
    harness.run_due()
    assert [(ran.job, ran.state) for ran in harness.ran] == [("g", "FAILURE"), ("o", "SUCCESS")]


def test_attempts_are_forgotten_by_push_reschedule_and_every_outcome(harness: Harness, world: World) -> None:
    work = world.Work("a")
    world.does = lambda ctx: 1 / 0 if ctx.attempt < 3 else Reschedule(delay=60)
    work.jobs.push("go", id="g")
    harness.run_due()
    assert harness.assert_pending(work, "g").attempt == 0
    harness.advance(60)
    assert world.attempts == [1, 2, 3, 1, 2, 3]


def test_retry_puts_the_job_back_with_its_attempts_and_its_countdown(harness: Harness, world: World) -> None:
    work = world.Work("a")
    world.does = lambda ctx: ctx.retry(countdown=120) if ctx.attempt < 3 else None
    work.jobs.push("go", id="g", retry=RetryPolicy(max_attempts=1))
    [ran] = harness.run_due()
    assert ran.state == "RETRY"
    job = harness.assert_pending(work, "g", at=NOON + timedelta(seconds=120))
    assert job.attempt == 1
    harness.advance(240)
    assert world.attempts == [1, 2, 3]
    assert work.dead_jobs() == []


def test_retry_gives_up_after_its_max_retries(harness: Harness, world: World) -> None:
    work = world.Work("a")
    world.does = lambda ctx: ctx.retry(countdown=1, max_retries=2)
    work.jobs.push("go", id="g", retry=RetryPolicy(max_attempts=1))
    harness.advance(60)
    assert world.attempts == [1, 2, 3]
    assert "retries are used up" in (harness.assert_dead(work, "g", reason="failed").error or "")


def test_retry_with_an_error_fails_with_it_when_its_retries_are_used_up(harness: Harness, world: World) -> None:
    work = world.Work("a")
    world.does = lambda ctx: ctx.retry(exc=ValueError("no supplier"), countdown=1, max_retries=1)
    work.jobs.push("go", id="g", retry=RetryPolicy(max_attempts=1))
    harness.advance(60)
    assert harness.assert_dead(work, "g", reason="failed").error == "ValueError('no supplier')"


def test_ignore_completes_the_job_without_a_result(harness: Harness, world: World) -> None:
    work = world.Work("a")
    world.does = raises(Ignore())
    work.jobs.push("go", id="g")
    work.jobs.push("other", id="o")
    assert [(ran.job, ran.state) for ran in harness.run_due()] == [("g", "IGNORED"), ("o", "SUCCESS")]
    assert work.jobs.list() == []
    assert work.dead_jobs() == []


def test_reject_makes_the_job_a_dead_job_at_once(harness: Harness, world: World) -> None:
    work = world.Work("a")
    world.does = raises(Reject("no"))
    work.jobs.push("go", id="g")
    work.jobs.push("other", id="o")
    assert [(ran.job, ran.state) for ran in harness.run_due()] == [("g", "REJECTED"), ("o", "SUCCESS")]
    harness.assert_dead(work, "g", reason="rejected")
    assert world.attempts == [1]


def test_an_ordinary_lifecycle_task_may_return_any_value(harness: Harness, lifecycle: Lifecycle) -> None:
    @lifecycle.app.task(base=LifecycleTask, name="add", shared=False)
    def add(a: int, b: int) -> int:
        return a + b

    result = add.apply_async((2, 3), countdown=60)
    harness.advance(60)
    [ran] = harness.ran
    assert (ran.task_id, ran.result) == (result.id, 5)


def test_an_ordinary_lifecycle_task_may_reschedule_itself(harness: Harness, lifecycle: Lifecycle) -> None:
    outcomes = iter([Reschedule(delay=60), YIELD, "ready"])

    @lifecycle.app.task(base=LifecycleTask, name="poll", shared=False)
    def poll() -> Any:
        return next(outcomes)

    poll.apply_async(countdown=1)
    harness.advance(120)
    assert [(ran.state, ran.result) for ran in harness.ran] == [
        ("IGNORED", None),
        ("IGNORED", None),
        ("SUCCESS", "ready"),
    ]


def test_an_ordinary_call_that_reschedules_itself_goes_on_as_a_durable_job(
    harness: Harness, lifecycle: Lifecycle
) -> None:
    outcomes = iter([Reschedule(delay=60), YIELD, Reschedule(delay=0), "ready"])
    told: list[tuple[Any, ...]] = []

    @lifecycle.app.task(base=LifecycleTask, name="poll", shared=False)
    def poll(*args: int, **kwargs: int) -> Any:
        told.append((args, kwargs))
        return next(outcomes)

    @lifecycle.app.task(base=LifecycleTask, name="after", shared=False)
    def after(value: Any) -> Any:
        return value

    result = (poll.s(1, more=2) | after.s()).apply_async()
    harness.run_due()
    assert [(ran.task_id, ran.state) for ran in harness.ran] == [(result.parent.id, "RETRY")]
    assert [job.id for job in lifecycle.store.jobs.list(ObjectRef("poll", result.parent.id), None)] == [
        result.parent.id
    ]
    harness.advance(59)
    assert len(told) == 1
    harness.advance(2)
    assert told == [((1,), {"more": 2})] * 4
    assert [(ran.task, ran.state, ran.result) for ran in harness.ran[-2:]] == [
        ("poll", "SUCCESS", "ready"),
        ("after", "SUCCESS", "ready"),
    ]


def test_an_ordinary_call_that_yields_goes_on_at_once_as_a_durable_job(harness: Harness, lifecycle: Lifecycle) -> None:
    at = harness.now + timedelta(seconds=30)
    outcomes = iter([YIELD, "done", Reschedule(at=at), "later", Reschedule()])

    @lifecycle.app.task(base=LifecycleTask, name="poll", shared=False)
    def poll() -> Any:
        return next(outcomes)

    for wanted in (["RETRY", "SUCCESS"], ["RETRY", "SUCCESS"], ["FAILURE"]):
        before = len(harness.ran)
        poll.delay()
        harness.advance(29)
        harness.advance(2)
        assert [ran.state for ran in harness.ran[before:]] == wanted
    assert isinstance(harness.ran[-1].error, OutcomeInvalid)


def test_an_ordinary_task_that_is_called_as_a_function_gives_its_outcome_to_the_caller(lifecycle: Lifecycle) -> None:
    @lifecycle.app.task(base=LifecycleTask, name="poll", shared=False)
    def poll() -> Any:
        return YIELD

    assert poll() is YIELD
    assert poll.apply().result is YIELD


def test_apply_async_on_a_lifecycle_job_is_an_error_that_names_push(lifecycle: Lifecycle, world: World) -> None:
    with pytest.raises(TypeError, match="push"):
        lifecycle.app.tasks["work.go"].apply_async((1,))


@pytest.mark.parametrize(
    "option", ["rate_limit", "acks_late", "reject_on_worker_lost", "autoretry_for", "bind", "expires"]
)
def test_options_that_a_lifecycle_job_can_not_have_are_refused_at_decoration(option: str) -> None:
    with pytest.raises(PolicyInvalid, match=option):
        lifecycle_job(**{option: True})
