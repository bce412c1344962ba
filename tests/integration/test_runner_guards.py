"""What happens around a job's body, in the process that runs it."""

from collections.abc import Iterator
from typing import Any

import pytest

from celery_lifecycle import Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.errors import OutOfMemory
from celery_lifecycle.model import Job
from celery_lifecycle.testing import Harness


@pytest.mark.databases("sqlite")
def test_memory_that_runs_out_around_the_body_is_a_strike_like_any_other(
    harness: Harness, lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the payload does not fit: no attempt is used up, nothing is dead, and the process goes on."""
    began: list[str] = []

    class Import(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def go(self, ctx: Any) -> None:
            began.append(ctx.payload)

    too_large: Iterator[bool] = iter([True])
    payload = Job.payload.fget  # type: ignore[attr-defined]

    def read(job: Job) -> Any:
        if next(too_large, False):
            raise MemoryError
        return payload(job)

    monkeypatch.setattr(Job, "payload", property(read))
    thing = Import("a")
    thing.jobs.push("go", id="g", payload="all of it")
    [ran] = harness.run_due()
    assert isinstance(ran.error, OutOfMemory)
    job = harness.assert_pending(thing, "g")
    assert (job.strikes, job.attempt, began) == (1, 0, [])
    [fact] = harness.sent("alarm_memory_limit_reset")
    assert (fact["job"], fact["context"].cause) == ("g", "memory_error")
    harness.advance(30)
    assert began == ["all of it"]
