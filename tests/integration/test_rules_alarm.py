"""Rules of the bare alarm: one time per object at which ``on_alarm`` is called, at least once."""

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_lifecycle import AlarmInfo, Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.errors import ObjectDisabled
from celery_lifecycle.testing import Harness

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


class World:
    def __init__(self, lifecycle: Lifecycle, harness: Harness) -> None:
        self.calls: list[tuple[float, AlarmInfo]] = []
        self.jobs: list[str] = []
        self.does: Any = lambda agent, info: None
        world = self

        class Agent(LifecycleObject, lifecycle=lifecycle):
            def on_alarm(self, info: AlarmInfo) -> None:
                world.calls.append(((harness.now - NOON).total_seconds(), info))
                world.does(self, info)

            @lifecycle_job
            def go(self, ctx: Any) -> None:
                world.jobs.append(ctx.job.id)

        self.Agent = Agent

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.calls]


@pytest.fixture
def world(lifecycle: Lifecycle, harness: Harness) -> World:
    return World(lifecycle, harness)


def fail(agent: Any, info: AlarmInfo) -> None:
    raise ValueError("x")


def test_set_alarm_calls_on_alarm_at_its_time_once(harness: Harness, world: World) -> None:
    world.Agent("a").set_alarm(after(60))
    harness.advance(1000)
    assert world.calls == [(60, AlarmInfo(0, False, after(60)))]


def test_set_alarm_takes_seconds_and_a_timedelta_from_now(harness: Harness, world: World) -> None:
    agent = world.Agent("a")
    agent.set_alarm(5)
    assert agent.get_alarm() == after(5)
    agent.set_alarm(timedelta(minutes=1))
    assert agent.get_alarm() == after(60)


def test_set_alarm_refuses_a_naive_time_and_a_negative_delay(harness: Harness, world: World) -> None:
    for wrong in (datetime(2026, 1, 1), -1):
        with pytest.raises(ValueError):
            world.Agent("a").set_alarm(wrong)


def test_set_alarm_overrides_the_one_that_stands(harness: Harness, world: World) -> None:
    agent = world.Agent("a")
    agent.set_alarm(60)
    agent.set_alarm(30)
    agent.set_alarm(90)
    harness.advance(1000)
    assert world.times == [90]


def test_a_past_time_is_due_at_once(harness: Harness, world: World) -> None:
    world.Agent("a").set_alarm(after(-3600))
    harness.run_due()
    assert world.calls == [(0, AlarmInfo(0, False, after(-3600)))]


def test_get_alarm_is_none_before_it_is_set_and_after_it_ran(harness: Harness, world: World) -> None:
    agent = world.Agent("a")
    assert agent.get_alarm() is None
    agent.set_alarm(60)
    assert agent.get_alarm() == after(60)
    harness.advance(60)
    assert agent.get_alarm() is None


def test_get_alarm_is_none_while_it_runs(harness: Harness, world: World) -> None:
    seen = []
    world.does = lambda agent, info: seen.append(agent.get_alarm())
    world.Agent("a").set_alarm(60)
    harness.advance(60)
    assert seen == [None]


def test_get_alarm_while_it_runs_is_the_one_that_was_set_again(harness: Harness, world: World) -> None:
    seen = []

    def does(agent: Any, info: AlarmInfo) -> None:
        if not seen:
            agent.set_alarm(10)
            seen.append(agent.get_alarm())

    world.does = does
    world.Agent("a").set_alarm(60)
    harness.advance(1000)
    assert seen == [after(70)]
    assert world.times == [60, 70]


def test_get_alarm_with_a_retry_pending_is_the_retrys_time(harness: Harness, world: World) -> None:
    agent = world.Agent("a")
    world.does = fail
    agent.set_alarm(60)
    harness.advance(60)
    assert agent.get_alarm() == after(62)


def test_delete_alarm_deletes_it_and_says_whether_one_was_set(harness: Harness, world: World) -> None:
    agent = world.Agent("a")
    agent.set_alarm(60)
    assert agent.delete_alarm() is True
    assert agent.delete_alarm() is False
    assert agent.get_alarm() is None
    harness.advance(1000)
    assert world.calls == []


def test_delete_alarm_while_it_runs_stops_its_retries(harness: Harness, world: World) -> None:
    def does(agent: Any, info: AlarmInfo) -> None:
        agent.delete_alarm()

    world.does = does
    agent = world.Agent("a")
    agent.set_alarm(60)
    harness.advance(1000)
    assert world.times == [60]
    assert agent.get_alarm() is None


def test_an_alarm_that_fails_is_retried_from_two_seconds_doubling_up_to_six_times(
    harness: Harness, world: World
) -> None:
    agent = world.Agent("a")
    world.does = fail
    agent.set_alarm(60)
    harness.advance(100_000)
    assert world.times == [60, 62, 66, 74, 90, 122, 186]
    assert [(info.retry_count, info.is_retry) for _, info in world.calls] == [
        (0, False), (1, True), (2, True), (3, True), (4, True), (5, True), (6, True),
    ]  # fmt: skip
    assert {info.scheduled_for for _, info in world.calls} == {after(60)}
    assert agent.get_alarm() is None
    [dead] = agent.dead_jobs()
    assert (dead.job.id, dead.reason, dead.error) == ("#alarm", "failed", "ValueError('x')")
    assert len(harness.sent("alarm_failed")) == 7
    assert harness.sent("alarm_failed")[-1]["next_at"] is None


def test_an_alarm_that_recovers_is_not_retried_any_more(harness: Harness, world: World) -> None:
    def does(agent: Any, info: AlarmInfo) -> None:
        if info.retry_count < 2:
            raise ValueError("x")

    world.does = does
    world.Agent("a").set_alarm(60)
    harness.advance(100_000)
    assert world.times == [60, 62, 66]
    world.does = lambda agent, info: None
    world.Agent("a").set_alarm(1)
    harness.advance(1)
    assert world.calls[-1][1].retry_count == 0


def test_a_newer_set_alarm_takes_the_place_of_a_retry(harness: Harness, world: World) -> None:
    agent = world.Agent("a")

    def does(agent: Any, info: AlarmInfo) -> None:
        if len(world.calls) == 1:
            agent.set_alarm(500)
            raise ValueError("x")

    world.does = does
    agent.set_alarm(60)
    harness.advance(100_000)
    assert world.times == [60, 560]
    assert world.calls[-1][1] == AlarmInfo(0, False, after(560))


def test_set_alarm_while_a_retry_is_pending_takes_its_place(harness: Harness, world: World) -> None:
    agent = world.Agent("a")
    world.does = fail
    agent.set_alarm(60)
    harness.advance(60)
    world.does = lambda agent, info: None
    agent.set_alarm(500)
    harness.advance(100_000)
    assert world.times == [60, 560]
    assert world.calls[-1][1].retry_count == 0


def test_an_alarm_runs_at_least_once_whatever_dies_or_gets_lost(harness: Harness, world: World) -> None:
    agent = world.Agent("a")
    deaths = iter(["crash", "lost"])

    def does(agent: Any, info: AlarmInfo) -> None:
        cause = next(deaths, None)
        if cause is not None:
            harness.die(cause)

    world.does = does
    agent.set_alarm(60)
    harness.advance(59)
    harness.messages.clear()
    harness.advance(1000)
    assert len(world.calls) == 3
    assert agent.get_alarm() is None


def test_a_message_of_an_alarm_that_gets_lost_is_sent_again(harness: Harness, world: World) -> None:
    agent = world.Agent("a")
    agent.set_alarm(0)
    harness.messages.clear()
    harness.advance(29)
    assert world.calls == []
    harness.advance(1)
    assert world.times == [30]


def test_an_alarm_runs_one_at_a_time_per_object(harness: Harness, world: World) -> None:
    agent = world.Agent("a")

    def does(agent: Any, info: AlarmInfo) -> None:
        if len(world.calls) == 1:
            agent.set_alarm(0)
            harness.advance(300)
            assert harness.messages == []

    world.does = does
    agent.set_alarm(60)
    harness.advance(1000)
    assert world.times == [60, 360]


def test_only_the_most_recent_set_alarm_counts_whoever_calls_it(harness: Harness, world: World) -> None:
    for seconds in (10, 500, 20, 300):
        world.Agent("a").set_alarm(seconds)
    assert world.Agent("a").get_alarm() == after(300)
    harness.advance(1000)
    assert world.times == [300]


def test_a_class_may_use_the_bare_alarm_and_jobs_together(harness: Harness, world: World) -> None:
    agent = world.Agent("a")
    agent.set_alarm(60)
    agent.jobs.push("go", id="before", delay=30)
    agent.jobs.push("go", id="with", delay=60)
    harness.advance(30)
    assert world.jobs == ["before"]
    assert world.calls == [(30, AlarmInfo(0, False, None))]
    assert agent.get_alarm() == after(60)
    harness.advance(30)
    assert world.jobs == ["before", "with"]
    assert world.calls[1:] == [(60, AlarmInfo(0, False, after(60)))]


def test_the_bare_alarm_is_in_no_list_of_jobs(harness: Harness, world: World) -> None:
    agent = world.Agent("a")
    agent.set_alarm(60)
    assert agent.jobs.list() == []


def test_set_alarm_of_an_object_that_was_disabled_raises(harness: Harness, world: World) -> None:
    agent = world.Agent("a")
    agent.disable_alarms()
    with pytest.raises(ObjectDisabled):
        agent.set_alarm(60)


def test_an_alarm_of_a_plain_handle_reaches_the_class(harness: Harness, world: World, lifecycle: Lifecycle) -> None:
    from celery_lifecycle import ObjectHandle, ObjectRef

    ObjectHandle(lifecycle, ObjectRef("agent", "a")).set_alarm(60)
    harness.advance(60)
    assert world.times == [60]
