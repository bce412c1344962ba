"""The app that the benchmarks' workers and beats run; everything comes from the environment."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_lifecycle import YIELD, Lifecycle, LifecycleObject, lifecycle_job

app = Celery("benchmarks", broker=os.environ["BENCH_BROKER"])
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=16,
    task_default_queue=os.environ.get("BENCH_QUEUE", "bench"),
)
lifecycle = Lifecycle(app, database_url=os.environ["BENCH_DATABASE"], dispatch_window=10_000_000, table_prefix="bench_")


@app.task(name="bare")
def bare() -> None:
    """What any Celery task costs at least."""


@lifecycle_job(name="noop", app=app)
def noop(ctx: Any) -> None:
    """What any lifecycle job costs at least."""


class Looper(LifecycleObject, lifecycle=lifecycle):
    """One object that yields for as long as it is told to."""

    @lifecycle_job
    def turn(self, ctx: Any) -> Any:
        done = ctx.storage.get("turns", 0) + 1
        ctx.storage["turns"] = done
        return YIELD if done < ctx.payload else None
