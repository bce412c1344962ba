"""What the bodies of simulated jobs, hooks and handed off tasks do: what the plan says for each of their calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.exceptions import Retry

from celery_lifecycle import YIELD, Reschedule
from celery_lifecycle.deployment import current_run
from celery_lifecycle.store.database import is_outage
from tests.simulation.world import application
from tests.simulation.world.engine import Killed

if TYPE_CHECKING:
    from tests.simulation.world.simulation import Simulation


class Bodies:
    """The code of the application under simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def body(self, ctx: Any) -> Any:
        return self._play(ctx, ctx.job, ctx.payload, ctx.object)

    def plain(self, task: Any, script: Any) -> Any:
        run = current_run()
        assert run is not None
        return self._play(None, None, script, None)

    def _play(self, ctx: Any, job: Any, payload: Any, handle: Any) -> Any:
        child: Any = self.simulation.world.process
        try:
            act = self.simulation.checker.runs.body_begins(child, ctx, payload)
        except Exception as error:  # which the runner would take for the job's own
            self.simulation.world.broken = self.simulation.world.broken or error
            raise
        try:
            for inner in act.get("first", ()):
                self.simulation.clients.inside(ctx, handle, inner)
            self.simulation.world.sleep(act.get("ms", 5))
            for inner in act.get("then", ()):
                self.simulation.clients.inside(ctx, handle, inner)
            end = act.get("end", "ok")
            if end == "die":
                child.killed_by = None
                self.simulation.world.say("the body kills its process")
                child.kill()
                raise Killed
            if end == "lost":
                self.simulation.world.say("the body kills its whole worker")
                child.parent.kill()
                raise Killed
            if end == "retry":
                (ctx or application.later).retry(countdown=act["delay"])
        except Killed:
            raise
        except Retry:
            self.simulation.checker.runs.body_ends(child, "retry")
            raise
        except BaseException as error:
            self.simulation.checker.runs.body_ends(child, "outage" if is_outage(error) else "error")
            raise
        self.simulation.checker.runs.body_ends(child, end)
        if end == "memory":
            raise MemoryError
        if end == "fail":
            raise application.Failed("simulated")
        if end == "yield":
            return YIELD
        if end == "again":
            return Reschedule(delay=act["delay"])
        return None

    def errand(self, task: Any, act: dict[str, Any]) -> None:
        """Work that a job has handed off."""
        child: Any = self.simulation.world.process
        task_id, holds, end = child.request.id, self.simulation.checker.holds, act["end"]
        holds.errand_begins(child, task_id)
        self.simulation.world.say(f"errand {task_id} begins: {act}")
        self.simulation.world.sleep(act["ms"])
        self.simulation.world.say(f"errand {task_id} ends: {end}")
        holds.errand_ends(child, task_id, end)
        if end in ("die", "lost"):
            (child if end == "die" else child.parent).kill()
            raise Killed
        if end == "memory":
            raise MemoryError
        if end == "fail":
            raise application.Failed("simulated")

    def hook(self, ref: Any, which: str) -> Any:
        return self._hooked(ref, which, self.simulation.plan.hooks.get(f"{ref.name} {which}", ()))

    def alarm(self, ref: Any, info: Any) -> None:
        self.simulation.checker.runs.alarm_begins(self.simulation.world.process, ref, info)
        try:
            self._hooked(ref, "on_alarm", self.simulation.plan.hooks.get(f"{ref.name} on_alarm", ()))
        finally:
            if self.simulation.world.process is not None and self.simulation.world.process.alive:
                self.simulation.checker.runs.alarm_ends(self.simulation.world.process)

    def _hooked(self, ref: Any, which: str, script: Any) -> Any:
        count = self.simulation.checker.runs.hooked(ref, which)
        told = (script[min(count, len(script) - 1)] if script else "ok").split()
        end = told[0]
        self.simulation.world.sleep(int(told[1]) if len(told) > 1 else 2)
        child: Any = self.simulation.world.process
        if "set" in told:
            self.simulation.clients.inside(None, None, {"do": "alarm", "on": str(ref), "delay": 1})
        if end == "die":
            self.simulation.world.say(f"{which} kills its process")
            child.kill()
            raise Killed
        if end == "memory":
            raise MemoryError
        if end == "fail":
            raise application.Failed(f"simulated: {which}")
        if end == "hang":
            self.simulation.world.sleep(60_000)
        return None
