"""Ordinary tasks with ``base=LifecycleTask``: a call that is put off behaves as Celery's own, and is kept by the table."""

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery

from celery_lifecycle import Lifecycle, LifecycleTask
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
