"""Rules of signals: one per fact, with the documented payload, best effort."""

import logging
from typing import Any

import pytest

from celery_lifecycle import (
    YIELD,
    Lifecycle,
    LifecycleObject,
    MemoryLimitContext,
    ObjectRef,
    Reschedule,
    RetryPolicy,
    lifecycle_job,
    signals,
)
from celery_lifecycle.testing import Harness


class World:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self.does: Any = lambda ctx: None
        self.start: Any = lambda: None
        self.alarm: Any = lambda: None
        world = self

        class Work(LifecycleObject, lifecycle=lifecycle):
            def on_start(self) -> None:
                world.start()

            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                return world.does(ctx)

            def on_alarm(self, info: Any) -> None:
                world.alarm()

        self.Work = Work


@pytest.fixture
def world(lifecycle: Lifecycle) -> World:
    return World(lifecycle)


def raises() -> None:
    raise ValueError("x")


def test_each_fact_has_one_signal_with_its_documented_arguments(harness: Harness, world: World) -> None:
    """Every scene below leads to one fact; what its signal documents is what it sends."""
    documented = {name: getattr(signals, name).providing_args for name in signals.__all__}
    seen: dict[str, set[frozenset[str]]] = {}

    def scene(name: str, **options: Any) -> Any:
        work = world.Work(name)
        work.jobs.push("go", id="g", **options)
        harness.advance(200)
        return work

    world.does = lambda ctx: None
    scene("completed")
    outcomes = iter([Reschedule(delay=5), None])
    world.does = lambda ctx: next(outcomes)
    scene("rescheduled")
    outcomes = iter([YIELD, None])
    scene("yielded")
    world.does = lambda ctx: raises()
    scene("failed")
    world.does = lambda ctx: ctx.jobs.cancel("g") and None
    scene("discarded")
    world.does = lambda ctx: harness.advance(60)
    scene("slow")
    world.does = lambda ctx: None
    world.start = raises
    work = scene("start")
    work.destroy()
    world.start, world.alarm = lambda: None, raises
    work = scene("alarm")
    work.destroy()
    world.alarm = lambda: None
    harness.kill_next("g")
    scene("killed")
    for fact in harness.facts:
        seen.setdefault(fact.name, set()).add(frozenset(fact.values))
    assert set(seen) == {
        "job_started", "job_completed", "job_rescheduled", "job_yielded", "job_retrying", "job_failed", "job_discarded",
        "job_slow_dispatch", "start_failed", "alarm_failed", "alarm_memory_limit_reset",
    }  # fmt: skip
    assert {name: documented[name] for name in seen} == {name: set(next(iter(given))) for name, given in seen.items()}


def test_the_sender_and_the_object_are_the_name_of_the_object(harness: Harness, world: World) -> None:
    senders = []

    def receive(sender: Any, **_: Any) -> None:
        senders.append(sender)

    signals.job_completed.connect(receive)
    world.Work("a").jobs.push("go")
    harness.run_due()
    assert senders == [ObjectRef("work", "a")]
    assert harness.sent("job_completed")[0]["object"] == ObjectRef("work", "a")


def test_a_receiver_that_throws_never_fails_a_job(
    harness: Harness, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("broken receiver")

    for name in signals.__all__:
        getattr(signals, name).connect(broken)
    work = world.Work("a")
    outcomes = iter([Reschedule(delay=1), YIELD, None])
    world.does = lambda ctx: next(outcomes)
    work.jobs.push("go", id="g")
    harness.kill_next("g")
    with caplog.at_level(logging.ERROR, "celery.utils.dispatch.signal"):
        harness.advance(100)
    assert work.jobs.list() == []
    assert work.dead_jobs() == []
    assert "broken receiver" in caplog.text
    del broken


def test_a_signal_of_a_strike_carries_a_frozen_context(harness: Harness, world: World) -> None:
    world.Work("a").jobs.push("go", id="g")
    harness.kill_next("g")
    harness.run_due()
    [fact] = harness.sent("alarm_memory_limit_reset")
    context = fact["context"]
    assert isinstance(context, MemoryLimitContext)
    assert (context.sealed, context.executing, context.strikes, context.limit, context.cause) == (
        False,
        "g",
        1,
        3,
        "oom",
    )
    with pytest.raises(AttributeError):
        context.strikes = 0  # type: ignore[misc]


def test_log_records_carry_object_and_job_as_fields(
    harness: Harness, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def does(ctx: Any) -> None:
        ctx.logger.warning("from the job")
        raise ValueError("x")

    world.does = does
    world.Work("a").jobs.push("go", id="g", retry=RetryPolicy(max_attempts=1))
    with caplog.at_level(logging.INFO):
        harness.run_due()
    told = {
        record.getMessage(): (record.lifecycle_object, record.lifecycle_job)
        for record in caplog.records
        if hasattr(record, "lifecycle_job")
    }
    assert told["from the job"] == ("work/a", "g")
    assert told["work/a#g is a dead job (failed): x"] == ("work/a", "g")


def test_the_facts_of_one_job_come_in_the_order_in_which_they_happened(harness: Harness, world: World) -> None:
    world.does = lambda ctx: raises() if ctx.attempt == 1 else None
    world.Work("a").jobs.push("go", id="g")
    harness.run_due()
    assert [(fact.name, fact.values.get("attempt")) for fact in harness.facts] == [
        ("job_started", 1), ("job_retrying", 1), ("job_started", 2), ("job_completed", 2),
    ]  # fmt: skip
