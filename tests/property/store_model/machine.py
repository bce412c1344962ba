"""The store beside the model: what all rules share, and the comparison of the two after every step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hypothesis.stateful import invariant

from celery_lifecycle.model import InFlight, Link, ObjectRef, ObjectState, Shipment
from celery_lifecycle.model import Job as StoredJob
from celery_lifecycle.store.database import Tx
from celery_lifecycle.store.ends import Ended
from celery_lifecycle.store.rows import dead_of, job_of, object_of
from celery_lifecycle.store.runs import Begun, Calling
from celery_lifecycle.store.sql import JOB_COLUMNS
from celery_lifecycle.transitions.run import Worker
from tests.property.store_model import breaker
from tests.property.store_model.actions import Acting
from tests.property.store_model.breaker import Struck
from tests.property.store_model.model import ALARM, HOOK, WAITING, Chain, Flight, Job, Run, Thing
from tests.property.store_model.world import Dead, World, lines_in
from tests.support.protocol import NOW, Table, links_of

KIND = "cart"
QUEUES = ("celery", "slow")
TASK, OTHER = "cart.remind", "cart.digest"
ALARM_TASK, HOOK_TASK = "cart.on_alarm", "cart.on_memory_limit"
IDS = ("a", "b", "c")
TABLES = ("objects", "jobs", "storage", "dead_jobs", "heartbeats")


@dataclass(frozen=True)
class Traits:
    """What the class of an object has; beat does not know it."""

    starts: bool
    alarm: bool
    hook: bool
    limit: int


# One object has the name of a job: of such the id is that of a promised result.
TRAITS = {
    "x": Traits(True, True, True, 3),
    "y": Traits(False, True, False, 2),
    "a": Traits(False, False, False, 3),
}
NAMES = tuple(TRAITS)


@dataclass(frozen=True)
class Message:
    """A chain on its way, from its next link on; `shipment` while its sender may still fail to send it."""

    links: tuple[Link, ...]
    token: str | None
    name: str
    shipment: Shipment | None = None

    def __repr__(self) -> str:
        return f"<{self.name}: {', '.join(f'{link.position} {link.job}' for link in self.links)}>"


@dataclass
class Playing:
    """A link that runs in some process, or whose process is gone without anybody having said so."""

    message: Message
    link: Link
    begun: Begun
    worker: Worker
    calling: Calling
    starting: bool = False

    def __repr__(self) -> str:
        return f"<{self.message} in {self.worker.instance}/{self.worker.pid}>"

    @property
    def name(self) -> str:
        return self.message.name

    @property
    def is_hook(self) -> bool:
        return self.link.job.startswith(HOOK)


class Beside(Acting):
    """One example: a table, the model of what must be in it, and what is on its way or running."""

    table: Table
    fired: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        with self.table.store.database.transaction() as tx:
            for name in TABLES:
                tx.run(f"DELETE FROM lifecycle_{name}")
        self.table.clock.ms = NOW
        self.world = World(NOW)
        self.messages: list[Message] = []
        self.delivered: list[Message] = []
        self.playing: list[Playing] = []
        self.looked: list[int] = []
        self.started: set[tuple[str, int, str]] = set()
        self.instances = ["w1", "w2"]
        self.lives = 2

    # --- small words

    def hit(self, what: str) -> None:
        """This has happened with effect."""
        self.fired[what] += 1

    def either(self, what: str, accepted: object) -> None:
        self.hit(f"{what}: {'accepted' if accepted else 'refused'}")

    def ref(self, name: str) -> ObjectRef:
        return ObjectRef(KIND, name)

    def forward(self, seconds: float) -> None:
        self.table.clock.forward(seconds)
        self.world.now = self.table.clock.ms

    @property
    def now(self) -> int:
        return self.world.now

    @property
    def things(self) -> dict[str, Thing]:
        return self.world.things

    def made(self, name: str) -> Thing:
        """The object of this name, a new one if there is none; it is there once it is saved."""
        return self.things.get(name) or Thing(name)

    def saved(self, thing: Thing) -> None:
        self.world.saved(thing)

    def write(self, thing: Thing, values: Mapping[str, str | None]) -> None:
        for key, value in values.items():
            if value is None:
                thing.storage.pop(key, None)
            else:
                thing.storage[key] = value

    def purged(self, dead: Dead) -> None:
        """A dead job is forgotten; that of a sealed one lifts its seal."""
        self.world.dead.remove(dead)
        thing = self.things.get(dead.name)
        if dead.reason == "sealed" and thing is not None:
            thing.sealed = bool(self.world.seals(dead.name))
            self.saved(thing)

    def known(self) -> None:
        """Give the objects that are new the ids that the database gave them."""
        for thing in self.things.values():
            if thing.id is None:
                thing.id = self.table.find(self.ref(thing.name)).id

    def by_id(self, object_id: int) -> Thing | None:
        """The object of an id, which is never used again: one of the same name may be a later one."""
        return next((thing for thing in self.things.values() if thing.id == object_id), None)

    def shipped(self, thing: Thing, chain: Chain | None, shipment: Shipment | None) -> None:
        """A chain is sent if and only if the model says so, with the jobs that it says."""
        name = thing.name
        assert (chain is None) == (shipment is None), f"chain of {name}: {shipment}, not {chain}"
        if chain is None or shipment is None:
            return
        sent = tuple(job.id for job in shipment.jobs), shipment.all_due, shipment.first_position, shipment.token
        assert sent == (chain.jobs, chain.all_due, chain.first, chain.token), f"chain of {name}: {sent}, not {chain}"
        if thing.id is None:
            thing.id = shipment.object_id
        assert thing.id == shipment.object_id
        if shipment.token is None:
            thing.sent = shipment.dispatch
        self.hit("a chain is sent")
        links = links_of(shipment)
        if TRAITS[name].alarm and shipment.all_due and links[-1].job != ALARM:
            behind = links[-1].position + 1
            links[-1] = replace(links[-1], last=False)
            links.append(
                replace(links[-1], position=behind, job=ALARM, task_id=f"{shipment.dispatch}-{behind}", last=True)
            )
        self.messages.append(Message(tuple(links), shipment.token, name, shipment))
        del self.messages[:-8]

    def go_on(self, message: Message, token: str, closed: bool) -> None:
        """The rest of the chain is published, unless the run was closed."""
        if not closed and len(message.links) > 1:
            self.messages.append(Message(message.links[1:], token, message.name))

    def held(self, playing: Playing) -> Thing | None:
        """The object in whose run this link is in flight still."""
        thing = self.by_id(playing.link.object_id)
        if thing is None or thing.run is None or thing.run.flight is None:
            return None
        mine = thing.run.token, thing.run.step, thing.run.flight.task_id
        return thing if mine == (playing.begun.token, playing.link.position + 1, playing.link.task_id) else None

    def struck(self, thing: Thing, flight: Flight, ended: Any, cause: str, *, lost: bool = False, **more: Any) -> None:
        """The model counts a death that the store has counted; the delay that was drawn is read from the store."""
        context = ended.context

        def until(low: int, high: int) -> int:
            if low == high:
                return low
            if context.next_time is not None:
                drawn = round(context.next_time.timestamp() * 1000)
            else:
                drawn = self.table.find(self.ref(thing.name)).not_before or 0
                if drawn == thing.not_before:
                    return low
            assert low <= drawn <= high, f"a delay of {drawn - self.now} ms"
            return drawn

        struck = breaker.strike(thing, flight, self.now, until, lost=lost, **more)
        self.told(flight, struck, context, cause, ended)
        self.world.buried(thing, struck)

    def told(self, flight: Flight, struck: Struck | None, context: Any, cause: str, ended: Ended) -> None:
        """What hooks and events are told is what happened."""
        assert (context is None) == (struck is None)
        if struck is None:
            self.hit("a hook dies")
            return
        doomed = sorted(job.id for job in struck.doomed)
        assert (context.sealed, context.strikes, context.limit) == (struck.sealed, struck.strikes, flight.limit)
        assert (context.executing, sorted(context.purged), context.cause) == (flight.job, doomed, cause)
        assert sorted(job.id for job in ended.dead) == doomed
        what = flight.job if flight.job.startswith("#") else "a job"
        self.hit(f"strike of {what}" + (": sealed" if struck.sealed else ""))

    # --- the comparison

    @invariant()
    def the_tables_are_those_of_the_model(self) -> None:
        self.known()
        with self.table.store.database.transaction() as tx:
            self._compare(tx)

    def _compare(self, tx: Tx) -> None:
        states = [object_of(row) for row in tx.rows(tx.sql.list_objects, {"kind": None, "after": 0, "limit": 1000})]
        phases = dict(tx.rows("SELECT id, phase FROM lifecycle_objects"))
        names = {state.id: state.name for state in states}
        assert set(names.values()) == set(self.things)
        values: dict[str, dict[str, str]] = {name: {} for name in self.things}
        key = tx.sql._quoted("key")
        for object_id, name, value in tx.rows(f"SELECT object_id, {key}, value FROM lifecycle_storage"):
            values[names[object_id]][name] = value
        jobs: dict[str, dict[str, Any]] = {name: {} for name in self.things}
        columns = ", ".join(map(tx.sql._quoted, JOB_COLUMNS))
        for row in tx.rows(f"SELECT object_id, {columns} FROM lifecycle_jobs"):
            job = job_of(self.ref(names[row[0]]), row[1:])
            jobs[names[row[0]]][job.id] = seen_job(job)
        for state in states:
            thing = self.things[state.name]
            assert jobs[state.name] == {job.id: told_job(job) for job in thing.jobs.values()}, f"jobs of {state.name}"
            seen, told = seen_object(state, phases[state.id]), told_object(thing)
            assert seen == told, (
                f"{state.name}: {[(name, seen[name], told[name]) for name in told if seen[name] != told[name]]}"
            )
            assert values[state.name] == thing.storage, f"storage of {state.name}"
        self._compare_dead(tx)
        self._compare_heartbeats(tx, names)

    def _compare_dead(self, tx: Tx) -> None:
        rows = {one.key: one for one in map(dead_of, tx.rows(tx.sql.list_dead, {"after": 0, "limit": 1000}))}
        fresh: list[Dead] = [one for one in self.world.dead if one.key is None]
        for key in sorted(rows.keys() - {one.key for one in self.world.dead}):
            row = rows[key]
            mine = next((one for one in fresh if (one.name, one.job.id) == (row.job.object.name, row.job.id)), None)
            assert mine is not None, f"{row.job.id} of {row.job.object} is dead: {row.reason}"
            fresh.remove(mine)
            mine.key = key
        assert not fresh, f"not dead: {fresh}"
        for one in self.world.dead:
            row = rows.pop(one.key or 0)
            assert (row.job.id, row.job.object.name, row.reason, row.died_ms) == (
                one.job.id,
                one.name,
                one.reason,
                one.died,
            )
            assert row.details.get("count", 0) == one.dropped, f"what was dropped of {one.job.id}"
            assert (row.job.version, row.job.strikes) == (one.job.version, one.job.strikes)
        assert not rows

    def _compare_heartbeats(self, tx: Tx, names: dict[int, str]) -> None:
        key = tx.sql._quoted("key")
        rows = tx.rows(f"SELECT kind, {key}, object_id, job_id, expires_at, data FROM lifecycle_heartbeats")
        holds = {(row[0], row[1]): row[2:] for row in rows if row[0] in ("alive", "track")}
        assert set(holds) == set(self.world.holds)
        for which, hold in self.world.holds.items():
            object_id, job, expires, data = holds[which]
            assert (names[object_id], job, expires) == (hold.name, hold.job, hold.expires), which
            told = json.loads(data)
            flight = InFlight.from_json(told["flight"])
            assert (flight.task_id if flight else None) == (hold.flight.task_id if hold.flight else None), which
            assert told.get("worker") == hold.worker
        lost = {row[1]: json.loads(row[5]) for row in rows if row[0] == "lost"}
        assert {one: data["count"] for one, data in lost.items()} == {
            one: known.count for one, known in self.world.lost.items()
        }
        heard = {row[1]: bool(json.loads(row[5]).get("draining")) for row in rows if row[0] == "worker"}
        assert heard == self.world.draining


def seen_job(job: StoredJob) -> dict[str, Any]:
    plan = json.loads(job.schedule_json) if job.schedule_json else None
    return {
        "version": job.version, "line": job.line, "owner": job.owner, "task": job.task, "queue": job.queue,
        "due": job.due_ms, "not_before": job.not_before_ms, "exclusive": job.exclusive,
        "recovery": job.recovery_loop, "attempt": job.attempt, "strikes": job.strikes,
        "suspect": WAITING if (job.suspect_on or "").startswith(WAITING) else job.suspect_on,
        "unknown_since": job.unknown_since_ms, "created": job.created_ms,
        "plan": plan and (plan["nominal"], plan.get("begun", False), plan.get("is_catch_up", False), plan.get("misfire", "run_once")),
    }  # fmt: skip


def told_job(job: Job) -> dict[str, Any]:
    plan = job.plan
    return {
        "version": job.version, "line": job.line, "owner": job.owner, "task": job.task, "queue": job.queue,
        "due": job.due, "not_before": job.not_before, "exclusive": job.exclusive,
        "recovery": job.recovery, "attempt": job.attempt, "strikes": job.strikes, "suspect": job.suspect,
        "unknown_since": job.unknown_since, "created": job.created,
        "plan": plan and (plan.nominal, plan.begun, plan.catch_up, plan.misfire),
    }  # fmt: skip


def seen_object(state: ObjectState, phase: int) -> dict[str, Any]:
    flight = state.in_flight
    return {
        "id": state.id, "phase": phase, "queue": state.queue, "wake_at": state.wake_at, "versions": state.versions,
        "sent": state.dispatch, "sent_until": state.sent_until, "sent_count": state.sent_count,
        "queue_wait": state.queue_wait, "token": state.token, "lease": state.lease_until, "doubt": state.doubt,
        "step": state.step, "paused": state.paused, "disabled": state.disabled, "not_before": state.not_before,
        "failures": state.not_before_count, "lines": lines_in(state.lines), "holds": state.holds,
        "stored": state.stored, "sealed": state.sealed,
        "flight": flight and (
            flight.job, flight.version, flight.task_id, flight.line, flight.owner, flight.task, flight.queue,
            flight.limit, flight.hook, flight.alive, flight.recovery_loop, flight.suspect, flight.final, flight.carrier,
            state.worker, state.worker_pid,
        ),
    }  # fmt: skip


def told_object(thing: Thing) -> dict[str, Any]:
    run = thing.run or Run("", 0)
    flight = run.flight
    return {
        "id": thing.id, "phase": 2 if thing.run else 1 if thing.sent else 0, "queue": thing.queue,
        "wake_at": thing.wake, "versions": thing.versions, "sent": thing.sent, "sent_until": thing.sent_until,
        "sent_count": thing.sent_count, "queue_wait": thing.queue_wait, "token": run.token or None,
        "lease": run.lease or None, "doubt": run.doubt, "step": run.step, "paused": thing.paused,
        "disabled": thing.disabled, "not_before": thing.not_before, "failures": thing.failures,
        "lines": thing.lines, "holds": thing.holds, "stored": bool(thing.storage), "sealed": thing.sealed,
        "flight": flight and (
            flight.job, flight.version, flight.task_id, flight.line, flight.owner, flight.task, flight.queue,
            flight.limit, flight.hook, flight.alive, flight.recovery, flight.suspect, flight.final, flight.carrier,
            flight.worker, flight.pid,
        ),
    }  # fmt: skip
