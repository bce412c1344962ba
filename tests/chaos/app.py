"""The application under chaos: the acceptance tests' one, with jobs that never read the ledger, however long it gets."""

import os
import time
from typing import Any

from celery import Celery

from celery_lifecycle import YIELD, LifecycleObject, LifecycleTask, Reschedule, RetryPolicy, lifecycle_job
from tests.acceptance.app import make_app
from tests.acceptance.ledger import Ledger


def add_jobs(app: Celery, ledger: Ledger) -> None:
    """Define what chaos pushes in ``app``."""

    class Subject(LifecycleObject, lifecycle=app.lifecycle):
        """An object whose jobs do what their payload says; what they have done is in the object's storage."""

        @lifecycle_job(retry=RetryPolicy(max_attempts=4, base_delay=0.05, max_delay=0.2))
        def step(self, ctx: Any) -> Any:
            given = ctx.payload
            with ledger.run(str(ctx.object), ctx.job.id, attempt=ctx.attempt, strikes=ctx.strikes):
                time.sleep(given["seconds"])
                if ctx.attempt <= given.get("failures", 0):
                    raise ValueError("asked for by chaos")
            done = ctx.storage.get(ctx.job.id, 0) + 1
            if done < given.get("parts", 1):
                ctx.storage[ctx.job.id] = done
                return Reschedule(delay=given["again"]) if "again" in given else YIELD
            if done > 1:
                del ctx.storage[ctx.job.id]
            return None

    @app.task(name="chaos.plain", base=LifecycleTask, shared=False)
    def plain(job: str, seconds: float) -> str:
        with ledger.run(f"chaos.plain/{job}", job):
            time.sleep(seconds)
        return job


def make_chaos_app(environment: Any) -> Celery:
    """The application by its environment variables."""
    app = make_app(environment)
    add_jobs(app, Ledger(environment.get("LEDGER", os.devnull)))
    return app


app = make_chaos_app(os.environ)
