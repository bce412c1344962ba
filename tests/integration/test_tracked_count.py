"""How a heartbeat sees whether the work that it handed off is still unfinished."""

from concurrent.futures import Future
from typing import Any

from celery_lifecycle import Lifecycle, LifecycleObject, Reschedule, lifecycle_job
from celery_lifecycle.testing import Harness


def test_a_job_sees_how_much_of_what_it_handed_off_is_unfinished(harness: Harness, lifecycle: Lifecycle) -> None:
    futures: list[Future[None]] = [Future(), Future()]
    seen: list[tuple[str, int]] = []

    class Import(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def heartbeat(self, ctx: Any) -> Any:
            seen.append((ctx.job.id, ctx.tracked()))
            if len(seen) == 1:
                for future in futures:
                    ctx.track(future)
                seen.append((ctx.job.id, ctx.tracked()))
            return Reschedule(delay=60)

        @lifecycle_job
        def other(self, ctx: Any) -> None:
            seen.append((ctx.job.id, ctx.tracked()))

    Import("a").jobs.push("heartbeat", id="heartbeat")
    harness.run_due()
    Import("a").jobs.push("other", id="other")
    futures[0].set_result(None)
    harness.run_due()
    futures[1].set_result(None)
    harness.advance(60)
    assert seen == [("heartbeat", 0), ("heartbeat", 2), ("other", 0), ("heartbeat", 0)]
