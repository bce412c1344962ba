"""What clients do to objects, from outside and from inside of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_lifecycle.errors import DatabaseUnavailable, LifecycleError
from celery_lifecycle.model import RetryPolicy
from celery_lifecycle.queue import Push, draft_of, store_push
from celery_lifecycle.store.database import is_outage
from tests.simulation.checks.dead import GONE
from tests.simulation.world import application
from tests.simulation.world.engine import Process

if TYPE_CHECKING:
    from tests.simulation.world.simulation import Simulation


WITHIN = ("write", "track", "keep", "let_go")
"""What only a running job can do."""


class Clients:
    """Two client processes that do what the plan says."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.alive: dict[int, Process] = {}
        self._numbers = 0

    def _client(self, index: int) -> Process:
        process = self.alive.get(index)
        if process is None or not process.alive:
            self._numbers += 1
            process = Process(self.simulation.world, "client", f"client{index}.{self._numbers}")
            process.lifecycle = self.simulation.lifecycle()
            self.alive[index] = process
        return process

    def do(self, event: dict[str, Any]) -> None:
        process = self._client(event.get("client", 0))
        process.start(lambda: self._do(process, event))

    def _do(self, process: Process, event: dict[str, Any]) -> None:
        world = self.simulation.world
        kind, _, name = event["on"].partition("/")
        told = {key: value for key, value in event.items() if key not in ("at", "do", "on", "client")}
        world.say(f"{event['do']} {event['on']} {told}")
        try:
            self.act(process.lifecycle, process.lifecycle.object(kind, name), event)
        except (LifecycleError, DatabaseUnavailable) as error:
            world.say(f"{event['do']} {event['on']}: {type(error).__name__}")

    def inside(self, ctx: Any, handle: Any, event: dict[str, Any]) -> None:
        """The same from inside a job: on its own object where the event names none."""
        world = self.simulation.world
        process = world.process
        assert process is not None
        world.say(f"from inside: {event}")
        if event["do"] in WITHIN:
            getattr(self, f"_{event['do']}")(ctx, event)
            return
        if "on" in event:
            kind, _, name = event["on"].partition("/")
            handle = process.lifecycle.object(kind, name)
        if handle is None:
            return
        try:
            self.act(process.lifecycle, handle, event)
        except LifecycleError as error:
            world.say(f"{event['do']}: {type(error).__name__}")
            if is_outage(error):  # a job lets it through, as most of them would
                raise

    def act(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        what = event["do"]
        getattr(self, f"_{what}")(lifecycle, handle, event)

    def _id(self, given: Any) -> Any:
        return self.simulation.world.digits("id", 6) if given == "new" else given

    # --- jobs

    def _options(self, event: dict[str, Any]) -> dict[str, Any]:
        options = {name: event[name] for name in ("exclusive", "recovery_loop", "singleflight") if name in event}
        if "retry" in event:
            options["retry"] = RetryPolicy(*event["retry"])
        return options

    def _push(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        payload = {"s": event.get("script", [{}]), "n": event.get("n", 0)}
        if "root" in event:
            payload["root"] = event["root"]
        job_id = self._id(event.get("id"))
        jobs = handle.helper.jobs if event.get("capability") else handle.jobs
        delay = event.get("delay")
        jobs.push(event.get("task", "work"), delay=delay, payload=payload, id=job_id, **self._options(event))

    def _push_many(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        """Several jobs in one transaction: of one object, or of a task whose jobs are objects of their own."""
        pushes = self.simulation.checker.pushes
        before = pushes.commits[self.simulation.world.current]
        wanted = [
            {
                "delay": delay,
                "id": self._id(one),
                "payload": {"s": event["script"], "n": one, "root": event.get("root")},
            }
            for one, delay in event["ids"]
        ]
        if event.get("task") == "own":
            application.own.push_many(wanted)
        else:
            handle.jobs.push_many([Push(event.get("task", "work"), **one) for one in wanted])
        pushes.stored(before)

    def _own(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        payload = {"s": event["script"], "n": event.get("n", 0), "root": event.get("root")}
        application.own.push(delay=event.get("delay"), payload=payload, id=self._id(event["id"]))

    def _orphan(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        """A job of a capability that was there once, and is in no process any more."""
        push = Push("work", delay=event.get("delay"), payload={"s": [{}]}, id=event["id"])
        draft = draft_of(lifecycle, handle.ref, GONE, handle._resolve("work"), push)
        store_push(lifecycle, draft._replace(owner=GONE))

    def _cancel(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        handle.jobs.cancel(event["id"])

    def _reschedule(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        handle.jobs.reschedule(event["id"], delay=event["delay"])

    def _rearm(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        handle.jobs.rearm()

    def _replay(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        dead = lifecycle.store.dead.list(handle.ref)
        if dead:
            lifecycle.store.dead.replay(dead[event.get("nth", 0) % len(dead)].key)

    def _purge(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        dead = lifecycle.store.dead.list(handle.ref)
        if dead and lifecycle.store.dead.purge(dead[0].key) and "anew" in event:
            self._own(lifecycle, handle, event["anew"])

    def _later(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        script = {"s": event["script"], "n": event["id"]}
        options = {name: event[name] for name in ("expires", "time_limit") if name in event}
        application.later.apply_async((script,), countdown=event["delay"], task_id=event["id"], **options)

    def _revoke(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        simulation = self.simulation
        simulation.revoked.add(event["id"])
        lifecycle.store.jobs.revoke(["later"], event["id"])
        if event.get("terminate"):
            for worker in simulation.workers.values():
                for child in list(worker.children):
                    if child.request is not None and child.request.id == event["id"]:
                        child.killed_by = "revoked"  # type: ignore[attr-defined]
                        child.kill()

    # --- schedules and the bare alarm

    def _every(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        payload = {"s": event["script"], "n": event["id"]}
        handle.schedule_every(event["seconds"], "work", payload, id=event["id"])

    def _alarm(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        handle.set_alarm(event["delay"])

    def _delete_alarm(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        handle.delete_alarm()

    # --- switches

    def _pause(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        handle.pause()

    def _resume(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        handle.resume()

    def _destroy(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        handle.destroy()

    def _disable(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        handle.disable_alarms()

    # --- storage and holds

    def _store(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        key, value = event.get("key", "key"), event.get("value", True)
        storage = self.simulation.checker.storage
        storage.is_used = True
        current = self.simulation.world.current
        storage.putting[current] = (str(handle.ref), {key: value})
        try:
            if value is None:
                handle.storage.delete(key)
            else:
                handle.storage[key] = value
        finally:
            storage.putting.pop(current, None)

    def _write(self, ctx: Any, event: dict[str, Any]) -> None:
        """What is to be stored with the end of the run."""
        checker, child = self.simulation.checker, self.simulation.world.process
        checker.storage.is_used = True
        key, value = event["key"], event["value"]
        if value is not None:
            ctx.storage[key] = value
        elif not ctx.storage.delete(key):
            return
        checker.facts.active[child].writes[key] = value

    def _keep_alive(self, lifecycle: Any, handle: Any, event: dict[str, Any]) -> None:
        with handle.keep_alive() as hold:
            self.simulation.world.sleep(event["for"])
            self.simulation.checker.holds.released(hold._key)

    def _keep(self, ctx: Any, event: dict[str, Any]) -> None:
        process: Any = self.simulation.world.process
        process.kept = ctx.keep_alive()

    def _let_go(self, ctx: Any, event: dict[str, Any]) -> None:
        process: Any = self.simulation.world.process
        hold = getattr(process, "kept", None)
        if hold is not None and not hold._ending:
            self.simulation.checker.holds.released(hold._key)
            hold.release()

    def _track(self, ctx: Any, event: dict[str, Any]) -> None:
        ctx.track(application.errand.s(event["script"]))
