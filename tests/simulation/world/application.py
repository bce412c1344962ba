"""The application under simulation: a few kinds of objects whose jobs do what their payload's script says."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_lifecycle import Lifecycle, LifecycleObject, RetryPolicy, deployment, lifecycle_job
from celery_lifecycle.objects import Capability
from celery_lifecycle.task import LifecycleTask

app = Celery("simulated", broker="memory://", set_as_current=False)
app.conf.task_always_eager = False
_before = list(deployment._default)
base = Lifecycle(app, database_url="sqlite://")
deployment._default[:] = _before  # other tests of this process have theirs

running: list[Any] = []
"""The simulation that runs now, if any."""


def _body(ctx: Any) -> Any:
    return running[-1].bodies.body(ctx)


class Plain(LifecycleObject, lifecycle=base):
    """Nothing but jobs."""

    @lifecycle_job(retry=RetryPolicy(max_attempts=3, base_delay=1, max_delay=4))
    def work(self, ctx: Any) -> Any:
        return _body(ctx)

    @lifecycle_job(exclusive=True)
    def solo(self, ctx: Any) -> Any:
        return _body(ctx)

    @lifecycle_job(singleflight=True, hung_timeout=10)
    def single(self, ctx: Any) -> Any:
        return _body(ctx)

    @lifecycle_job(recovery_loop=True)
    def loop(self, ctx: Any) -> Any:
        return _body(ctx)

    @lifecycle_job(time_limit=20, retry=RetryPolicy(max_attempts=2))
    def limited(self, ctx: Any) -> Any:
        return _body(ctx)

    @lifecycle_job(queue="side")
    def aside(self, ctx: Any) -> Any:
        return _body(ctx)


class Helper(Capability):
    """A capability with a job and all hooks."""

    @lifecycle_job
    def assist(self, ctx: Any) -> Any:
        return _body(ctx)

    def on_job_error(self, ctx: Any, error: BaseException) -> Any:
        return running[-1].bodies.hook(self.object.ref, "on_job_error")

    def on_memory_limit(self, context: Any) -> None:
        running[-1].bodies.hook(self.object.ref, "on_memory_limit")


class Full(LifecycleObject, lifecycle=base):
    """Every hook there is."""

    helper = Helper()

    def on_start(self) -> None:
        running[-1].bodies.hook(self.ref, "on_start")

    @lifecycle_job(retry=RetryPolicy(max_attempts=2, base_delay=1))
    def work(self, ctx: Any) -> Any:
        return _body(ctx)

    @lifecycle_job(recovery_loop=True)
    def loop(self, ctx: Any) -> Any:
        return _body(ctx)

    @lifecycle_job(time_limit=15, retry=RetryPolicy(max_attempts=2, base_delay=1))
    def brief(self, ctx: Any) -> Any:
        return _body(ctx)

    def on_alarm(self, info: Any) -> None:
        running[-1].bodies.alarm(self.ref, info)


class Side(LifecycleObject, lifecycle=base):
    """Goes to a queue of its own."""

    @lifecycle_job(queue="side")
    def work(self, ctx: Any) -> Any:
        return _body(ctx)


@app.task(base=LifecycleTask, name="later", bind=True)
def later(self: Any, script: Any) -> Any:
    return running[-1].bodies.plain(self, script)


@lifecycle_job(name="own", app=app)
def own(ctx: Any) -> Any:
    """Each job of it is an object of its own."""
    return _body(ctx)


class Called(LifecycleTask):
    """A task that is called: its message goes to the simulated broker."""

    def apply_async(self, args: Any = None, kwargs: Any = None, task_id: Any = None, **options: Any) -> Any:
        headers = {**(options.get("headers") or {}), "id": task_id, "task": self.name}
        running[-1].broker.publish("celery", headers, [list(args or ()), {}, {"chain": None}])


@app.task(base=Called, name="errand", bind=True)
def errand(self: Any, script: Any) -> Any:
    """Work that a job hands off."""
    return running[-1].bodies.errand(self, script)


class Failed(Exception):
    """What a simulated job raises."""


app.finalize()
