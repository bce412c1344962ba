"""The application under test with more of Celery's own world in it: priorities, and work that a job hands off."""

import os
from typing import Any

from celery import Celery

from celery_lifecycle import LifecycleObject, Reschedule, lifecycle_job
from tests.acceptance.app import app
from tests.acceptance.jobs import act
from tests.acceptance.ledger import Ledger


def add_world(app: Celery, ledger: Ledger) -> Any:
    """Define the class and its task in ``app``."""

    class World(LifecycleObject, lifecycle=app.lifecycle):
        """An object whose jobs differ in their priority, and whose import watches over a tracked task."""

        @lifecycle_job(priority=0)
        def zero(self, ctx: Any) -> None:
            act(ledger, str(self), ctx.job.id, ctx.payload or {})

        @lifecycle_job(priority=9)
        def nine(self, ctx: Any) -> None:
            act(ledger, str(self), ctx.job.id, ctx.payload or {})

        @lifecycle_job
        def watch(self, ctx: Any) -> Any:
            """The heartbeat pattern: hand the work off if it is not under way, and come again until it is done."""
            with ledger.run(str(self), ctx.job.id, strikes=ctx.strikes):
                if self.storage.get("loaded"):
                    return None
                if not ctx.tracked():
                    ctx.track(load.si(self.name, ctx.payload))
                return Reschedule(delay=0.3)

        def on_alarm(self, info: Any) -> None:
            ledger.append("alarm", object=str(self))

    @app.task(name="load", shared=False)
    def load(name: str, payload: dict[str, Any]) -> None:
        """An ordinary task that does the work of an object."""
        act(ledger, f"load/{name}", "load", payload)
        World(name).storage["loaded"] = True

    return World


add_world(app, Ledger(os.environ.get("LEDGER", os.devnull)))
