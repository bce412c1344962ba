"""Ordinary tasks with ``base=LifecycleTask``: a call that is put off behaves as Celery's own, and is kept by the table."""

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_lifecycle import Lifecycle, LifecycleTask, lifecycle_job
from celery_lifecycle.errors import DatabaseUnavailable
from celery_lifecycle.testing import Harness

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


@pytest.fixture
def lifecycle() -> Lifecycle:
    """An application with a result backend."""
    return Lifecycle(Celery("calls", set_as_current=False, backend="cache+memory://"), backup_alarm=30)


@pytest.fixture
def harness(lifecycle: Lifecycle, database_url: str) -> Iterator[Harness]:
    with Harness(lifecycle, database_url=database_url, start=NOON) as running:
        yield running


def task_of(lifecycle: Lifecycle, body: Callable[..., Any], **options: Any) -> Any:
    """A bound task whose body is given."""
    settings = {"name": "call", "bind": True, "typing": False, **options}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return body(self, *args, **kwargs)

    return lifecycle.app.task(base=LifecycleTask, shared=False, **settings)(run)


def job_of(lifecycle: Lifecycle, result: Any, name: str = "call") -> Any:
    """The pending job of a call, or None."""
    return lifecycle.object(name, result.id).jobs.get(result.id)


# --- retries


def test_a_retry_that_the_database_can_not_take_puts_the_job_back_with_its_attempts(
    harness: Harness, lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    retries = []

    def body(self: Any) -> str:
        retries.append(self.request.retries)
        if self.request.retries < 1:
            raise self.retry(countdown=60)
        return "done"

    result = task_of(lifecycle, body, max_retries=1).apply_async(countdown=5)
    push, outages = lifecycle.store.jobs.push, iter([True, True])

    def blinks(*args: Any) -> Any:
        if next(outages, False):
            raise DatabaseUnavailable("away for a second")
        return push(*args)

    monkeypatch.setattr(lifecycle.store.jobs, "push", blinks)
    harness.advance(5)
    assert result.state == "RETRY"
    harness.advance(100)
    assert retries == [0, 0, 0, 1]
    assert (result.state, result.result) == ("SUCCESS", "done")
    assert lifecycle.object("call", result.id).dead_jobs() == []


def test_a_retry_that_is_not_allowed_is_a_failure_that_says_why(harness: Harness, lifecycle: Lifecycle) -> None:
    result = task_of(lifecycle, lambda self: self.retry(countdown=-5)).apply_async(countdown=5)
    harness.advance(60)
    assert result.state == "FAILURE"
    dead = harness.assert_dead(lifecycle.object("call", result.id), result.id, reason="failed")
    assert "must not be negative" in dead.error


# --- routes


def test_a_task_goes_where_its_decorator_says_however_it_is_put_off(harness: Harness, lifecycle: Lifecycle) -> None:
    app = lifecycle.app
    app.conf.task_queues = [Queue("celery"), Queue("slow"), Queue("topics", Exchange("jobs", type="topic"))]
    slow = task_of(lifecycle, lambda self: None, name="slow", queue=Queue("slow"), priority=7)
    keyed = task_of(lifecycle, lambda self: None, name="keyed", exchange=Exchange("jobs"), routing_key="jobs.now")
    for task in (slow, keyed):
        task.apply_async(countdown=60)
        task.push(delay=60)
        task.schedule(60)
        task.push_many([{"delay": 60}])
        lifecycle.object("thing", task.name).jobs.push(task.name, delay=60)
    harness._now_ms += 60_000
    harness.tick()
    sent = {(one.task, one.queue, one.properties.get("priority")) for one in harness.messages}
    assert sent == {("slow", "slow", 7), ("keyed", "jobs.now", None)}
    assert len(harness.messages) == 10


def test_a_lifecycle_job_goes_where_its_decorator_says(harness: Harness, lifecycle: Lifecycle) -> None:
    @lifecycle_job(name="queued", app=lifecycle.app, queue=Queue("slow"))
    def queued(ctx: Any) -> None: ...

    @lifecycle_job(name="keyed", app=lifecycle.app, exchange="jobs", routing_key="jobs.now")
    def keyed(ctx: Any) -> None: ...

    assert queued.push(delay=1).queue == "slow"
    keyed.push(delay=1)
    harness._now_ms += 1000
    harness.tick()
    assert {(one.task, one.queue) for one in harness.messages} == {("queued", "slow"), ("keyed", "jobs.now")}


def test_the_priority_of_a_route_holds_unless_the_call_has_one(harness: Harness, lifecycle: Lifecycle) -> None:
    lifecycle.app.conf.task_routes = {"call": {"queue": "routed", "priority": 9}}
    task = task_of(lifecycle, lambda self: None)
    task.apply_async(countdown=1)
    task.apply_async(countdown=2, priority=3)
    task.apply_async(countdown=3, priority=0)
    harness._now_ms += 3000
    harness.tick()
    assert [(one.queue, one.properties["priority"]) for one in harness.messages] == [
        ("routed", 9),
        ("routed", 3),
        ("routed", 0),
    ]
