"""Random operations of clients, beats and workers at the real store, against a small model of the protocol in plain Python.

The model knows jobs, runs, outcomes, order, pause, exclusive, versions and strikes; it shares no code with the package. Links
may be delivered late, twice, in any order or never; workers die, are lost, put back, or come back late.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_lifecycle import breaker
from celery_lifecycle import model as package
from celery_lifecycle.model import Link, ObjectRef, Shipment
from celery_lifecycle.store import claims as claims_module
from celery_lifecycle.store import unit
from celery_lifecycle.store.ends import End
from celery_lifecycle.store.jobs import Pusher
from celery_lifecycle.transitions import chain, derive, run
from celery_lifecycle.transitions.run import Action, Verdict, Worker
from tests.support.protocol import NOW, QUEUE, TASK, Clock, Table, links_of

NAMES = ("x", "y")
IDS = ("a", "b", "c", "d")
LENGTH = 2
LIMIT = 3
MANY = 6
SECOND = 1000
VERDICTS = {
    "complete": Verdict(Action.COMPLETE, clean=True),
    "reschedule": Verdict(Action.RESCHEDULE, delay_ms=20 * SECOND, clean=True),
    "yield": Verdict(Action.YIELD),
    "again": Verdict(Action.AGAIN, delay_ms=10 * SECOND, attempt=1),
    "dead": Verdict(Action.DEAD, why=package.Why.FAILED),
}


# --- the model


@dataclass
class ModelJob:
    id: str
    version: int
    due: int
    line: str
    exclusive: bool = False
    recovery: bool = False
    attempt: int = 0
    strikes: int = 0
    not_before: int = 0

    @property
    def when(self) -> int:
        return max(self.due, self.not_before)


@dataclass
class ModelRun:
    token: str
    lease: int
    step: int = 0
    doubt: bool = False
    job: str | None = None
    version: int = 0
    task: str = ""
    line: str = ""
    final: bool = False


@dataclass
class Thing:
    """One object as the design describes it."""

    jobs: dict[str, ModelJob] = field(default_factory=dict)
    versions: int = 0
    paused: bool = False
    sent: str | None = None
    sent_until: int = 0
    sent_count: int = 0
    queue_wait: int = 0
    run: ModelRun | None = None
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    sealed: bool = False
    wake: int | None = None

    def due(self, now: int) -> list[ModelJob]:
        if self.paused:
            return []
        due = sorted((job for job in self.jobs.values() if job.when <= now), key=lambda job: (job.due, job.id))
        return [job for job in due if job.exclusive] or due

    def patience(self) -> int:
        return max(min(30 * SECOND * 2 ** max(self.sent_count - 1, 0), 300 * SECOND), 2 * self.queue_wait)

    def touched(self, now: int) -> None:
        """Derive the alarm."""
        if self.run is not None:
            self.wake = self.run.lease
            return
        if self.paused or not self.jobs:
            self.sent, self.wake = None, None
            return
        if self.sent is not None:
            self.wake = self.sent_until
            return
        exclusive = [job for job in self.jobs.values() if job.exclusive and job.when <= now]
        self.wake = min(job.when for job in exclusive or self.jobs.values())

    def forgettable(self) -> bool:
        return not (self.jobs or self.run or self.paused or self.lines or self.sealed)

    def dispatch(self, now: int) -> list[str] | None:
        """The jobs of the chain that is sent now, if something is due."""
        due = self.due(now)
        if not due:
            self.sent = None
            return None
        self.sent, self.sent_count = "?", self.sent_count + 1
        self.sent_until = now + self.patience()
        return [job.id for job in due[:LENGTH]]

    def close(self, now: int) -> list[str] | None:
        self.run, self.sent_count = None, 0
        return self.dispatch(now)

    def next_version(self) -> int:
        self.versions += 1
        return self.versions

    def strike(self, now: int) -> tuple[set[str], dict[str, int]]:
        """What is sealed, and the delays that the others get (at least)."""
        flight = self.run
        assert flight is not None
        assert flight.job is not None
        struck = self.jobs.get(flight.job)
        before = struck.strikes if struck else 0
        self.lines = {line: known for line, known in self.lines.items() if known["at"] + 3600 * SECOND > now}
        line = self.lines.setdefault(flight.line, {"at": now, "deaths": {}})
        line["deaths"][flight.job] = max(line["deaths"].get(flight.job, 0), before) + 1
        line["at"] = now
        strikes = max(before + 1, sum(line["deaths"].values()))
        if strikes >= LIMIT:
            doomed = {
                job.id for job in self.jobs.values() if job.line == flight.line or job.recovery or job.id == flight.job
            }
            for job_id in doomed:
                del self.jobs[job_id]
            del self.lines[flight.line]
            self.sealed = self.sealed or bool(doomed)
            return doomed, {}
        until = now + min(30 * strikes, 300) * SECOND
        slowed = {}
        for job in self.jobs.values():
            if job.id == flight.job or job.recovery:
                job.not_before = max(job.not_before, until)
                slowed[job.id] = job.not_before
        if struck:
            struck.strikes = before + 1
        return set(), slowed


# --- the machine


@dataclass
class Message:
    """A chain on its way, from its next link on."""

    links: tuple[Link, ...]
    token: str | None


@dataclass
class Flight:
    """A link that runs in some process."""

    message: Message
    link: Link
    begun: Any
    worker: Worker


class StoreAgainstModel(RuleBasedStateMachine):
    table: Table

    def __init__(self) -> None:
        super().__init__()
        with self.table.store.database.transaction() as tx:
            for name in ("objects", "jobs", "storage", "dead_jobs", "heartbeats"):
                tx.run(f"DELETE FROM lifecycle_{name}")
        self.table.clock.ms = NOW
        self.things: dict[str, Thing] = {}
        self.keys: dict[int, str] = {}
        self.messages: list[Message] = []
        self.delivered: list[Message] = []
        self.flights: list[Flight] = []
        self.dead: list[tuple[str, str, str]] = []
        self.workers = 0

    # helpers

    @property
    def now(self) -> int:
        return self.table.clock.ms

    def ref(self, name: str) -> ObjectRef:
        return ObjectRef("cart", name)

    def saved(self, name: str) -> None:
        """The object's row was written with its alarm: gone if it has nothing to remember."""
        thing = self.things.get(name)
        if thing is None:
            return
        thing.touched(self.now)
        if thing.forgettable():
            del self.things[name]

    def shipped(self, name: str, expected: list[str] | None, shipment: Shipment | None) -> None:
        """A chain is sent if and only if the model says so, with the jobs that it says."""
        assert (expected is None) == (shipment is None), f"chain of {name}: {shipment}, not {expected}"
        if shipment is None:
            return
        assert [job.id for job in shipment.jobs] == expected, f"due order of {name}"
        thing = self.things[name]
        if shipment.token is None:
            thing.sent = shipment.dispatch
        self.messages.append(Message(tuple(links_of(shipment)), shipment.token))
        del self.messages[:-8]

    def all_due(self, name: str) -> bool:
        return len(self.things[name].due(self.now)) <= LENGTH

    # clients

    @initialize(ids=st.sampled_from([("a", "b", "c"), ("a", "b"), ()]))
    def begin_with(self, ids: tuple[str, ...]) -> None:
        """Most stories are about chains of several links."""
        for job_id in ids:
            self._push("x", job_id, 0, False, False, job_id == ids[-1], None)

    @rule(
        name=st.sampled_from(NAMES), job_id=st.sampled_from(IDS), delay=st.sampled_from([0, 0, 0, 5, 40]),
        exclusive=st.sampled_from([False, False, False, True]), recovery=st.sampled_from([False, False, False, True]),
        claims=st.booleans(),
    )  # fmt: skip
    def push(self, name: str, job_id: str, delay: int, exclusive: bool, recovery: bool, claims: bool) -> None:
        self._push(name, job_id, delay, exclusive, recovery, claims, None)

    @precondition(lambda self: any(self._inside()))
    @rule(data=st.data(), job_id=st.sampled_from(IDS), delay=st.sampled_from([0, 5]))
    def push_from_inside_a_run(self, data: st.DataObject, job_id: str, delay: int) -> None:
        name = data.draw(st.sampled_from(sorted(self._inside())))
        flight = self.things[name].run
        assert flight is not None
        assert flight.job is not None
        pusher = Pusher(self.ref(name), flight.job, TASK, flight.line)
        self._push(name, job_id, delay, False, False, False, pusher)

    def _inside(self) -> Iterator[str]:
        return (name for name, thing in self.things.items() if thing.run is not None and thing.run.job is not None)

    def _push(
        self, name: str, job_id: str, delay: int, exclusive: bool, recovery: bool, claims: bool, pusher: Pusher | None
    ) -> None:  # fmt: skip
        pushed = self.table.push(
            job_id,
            self.ref(name),
            delay=delay,
            exclusive=exclusive,
            recovery_loop=recovery,
            claims=claims,
            pusher=pusher,
        )
        thing = self.things.get(name)
        sealed = [dead for dead in self.dead if dead[:2] == (name, job_id) and dead[2] == "sealed"]
        if thing is not None and thing.sealed and sealed and pusher is not None:
            assert pushed.job.sealed
            return
        assert not pushed.job.sealed
        thing = self.things.setdefault(name, Thing())
        if thing.sealed:
            self.dead = [(*dead[:2], "lifted") if dead in sealed else dead for dead in self.dead]
            thing.sealed = any(dead[0] == name and dead[2] == "sealed" for dead in self.dead)
        old = thing.jobs.get(job_id)
        thing.jobs[job_id] = ModelJob(
            job_id, thing.next_version(), self.now + delay * SECOND, pusher.line if pusher else job_id, exclusive, recovery,
            strikes=old.strikes if old else 0, not_before=old.not_before if old else 0,
        )  # fmt: skip
        expected = None
        if claims and thing.run is None and thing.sent is None:
            expected = thing.dispatch(self.now)
        self.saved(name)
        self.shipped(name, expected, pushed.shipment)

    @rule(name=st.sampled_from(NAMES), job_id=st.sampled_from(IDS))
    def cancel(self, name: str, job_id: str) -> None:
        gone = self.table.store.jobs.cancel(self.ref(name), job_id, "host")
        thing = self.things.get(name)
        known = thing is not None and job_id in thing.jobs
        assert (gone is not None) == known
        if thing is not None and known:
            del thing.jobs[job_id]
            self.saved(name)

    @rule(name=st.sampled_from(NAMES), job_id=st.sampled_from(IDS), delay=st.sampled_from([0, 15]))
    def reschedule(self, name: str, job_id: str, delay: int) -> None:
        moved = self.table.store.jobs.reschedule(self.ref(name), job_id, "host", None, delay * SECOND)
        thing = self.things.get(name)
        job = thing.jobs.get(job_id) if thing else None
        assert (moved is not None) == (job is not None)
        if thing is not None and job is not None:
            job.due, job.version, job.attempt = self.now + delay * SECOND, thing.next_version(), 0
            self.saved(name)

    @rule(name=st.sampled_from(NAMES), switch=st.sampled_from(["pause", "resume", "resume", "destroy"]))
    def switch(self, name: str, switch: str) -> None:
        {"pause": self._pause, "resume": self._resume, "destroy": self._destroy}[switch](name)

    def _pause(self, name: str) -> None:
        self.table.store.objects.pause(self.ref(name), "holiday")
        self.things.setdefault(name, Thing()).paused = True
        self.saved(name)

    def _resume(self, name: str) -> None:
        known = self.table.store.objects.resume(self.ref(name))
        thing = self.things.get(name)
        assert known == (thing is not None)
        if thing is None:
            return
        if thing.sealed:
            self.dead = [
                (*dead[:2], "lifted") if dead[0] == name and dead[2] == "sealed" else dead for dead in self.dead
            ]
        thing.paused, thing.sealed, thing.lines = False, False, {}
        for job in thing.jobs.values():
            job.strikes, job.not_before = 0, 0
        self.saved(name)

    def _destroy(self, name: str) -> None:
        known = self.table.store.objects.destroy(self.ref(name))
        thing = self.things.get(name)
        assert known == (thing is not None)
        if thing is None:
            return
        if thing.sealed:
            self.dead = [
                (*dead[:2], "lifted") if dead[0] == name and dead[2] == "sealed" else dead for dead in self.dead
            ]
        if thing.run is not None and thing.run.job is not None:
            thing.run.final = True
        else:
            thing.run = None
        self.things[name] = Thing(versions=thing.versions, queue_wait=thing.queue_wait, run=thing.run)
        self.saved(name)

    # time

    @rule(seconds=st.sampled_from([1, 6, 21, 31, 61, 301]))
    def time_goes_by(self, seconds: int) -> None:
        self.table.clock.forward(seconds)

    # beats

    @rule(seconds=st.sampled_from([0, 0, 6, 31]))
    def tick(self, seconds: int) -> None:
        self.table.clock.forward(seconds)
        for phase in (package.Phase.OPEN, package.Phase.SENT, package.Phase.IDLE):
            self._claim(phase)

    def _claim(self, phase: package.Phase) -> None:
        claimed = self.table.store.claims.claim(QUEUE, phase, 100)
        by_name = {chain.ref.name: chain for chain in claimed.shipments}
        lost = set()
        taken = 0
        for name, thing in list(self.things.items()):
            kind = 2 if thing.run is not None else 1 if thing.sent is not None else 0
            if kind != int(phase) or thing.wake is None or thing.wake > self.now:
                continue
            taken += 1
            expected = None
            if thing.run is None:
                expected = thing.dispatch(self.now)
            elif thing.run.lease > self.now:
                pass
            elif thing.run.job is not None:
                lost.add(name)
                continue
            elif thing.due(self.now):
                thing.sent_count += 1
                thing.run.lease = self.now + thing.patience()
                expected = [job.id for job in thing.due(self.now)[:LENGTH]]
            else:
                thing.run, thing.sent_count = None, 0
            self.saved(name)
            self.shipped(name, expected, by_name.pop(name, None))
        assert not by_name
        assert claimed.rows == taken
        assert {self.keys[object_id] for object_id in claimed.lost} == lost
        for object_id in claimed.lost:
            self._rescue(object_id, self.keys[object_id])

    def _rescue(self, object_id: int, name: str) -> None:
        ended = self.table.store.ends.rescue(object_id)
        thing = self.things[name]
        assert thing.run is not None
        if not thing.run.doubt:
            assert ended is None
            thing.run.doubt, thing.run.lease = True, self.now + 5 * SECOND
            self.saved(name)
            return
        assert ended is not None
        self._struck(name, ended, spread=True)

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A chain that could not be sent, as far as its sender knows."""
        message = data.draw(st.sampled_from(self.messages))
        first = message.links[0]
        if first.position != 0 or message.token is not None:
            return
        shipment = Shipment(first.object_id, self.ref("x"), first.dispatch, None, 0, (), True, first.sent_ms)
        released = self.table.store.claims.release([shipment], 200)
        name = self.keys.get(first.object_id)
        thing = self.things.get(name) if name else None
        mine = thing is not None and self._is(first.object_id, name) and thing.sent == first.dispatch
        assert released == int(mine)
        if thing is not None and mine:
            thing.sent_until, thing.sent_count = self.now + 200, max(thing.sent_count - 1, 0)
            self.saved(str(name))

    def _is(self, object_id: int, name: str | None) -> bool:
        """Whether the object that has this name now is the one of this id."""
        return name is not None and max(key for key, known in self.keys.items() if known == name) == object_id

    # workers

    @precondition(lambda self: self.messages)
    @rule()
    def deliver_the_newest(self) -> None:
        self._take()

    def _take(self) -> bool:
        """Deliver the newest message that has not come yet; whether something runs now."""
        message = self.messages.pop()
        self.delivered = [*self.delivered, message][-6:]
        return self._deliver(message)

    @precondition(lambda self: self.messages or self.delivered)
    @rule(data=st.data())
    def deliver_late_or_again(self, data: st.DataObject) -> None:
        self._deliver(data.draw(st.sampled_from(self.messages + self.delivered)))

    @precondition(lambda self: self.messages)
    @rule(outcome=st.sampled_from(sorted(VERDICTS)))
    def run_the_newest(self, outcome: str) -> None:
        if self._take():
            self._finish(self.flights.pop(), outcome)

    @precondition(lambda self: self.messages)
    @rule()
    def the_newest_kills_its_process(self) -> None:
        if self._take():
            self._die(self.flights.pop(), End.DIED)

    def _deliver(self, message: Message) -> bool:
        self.workers += 1
        worker = Worker(f"w{self.workers}", self.workers)
        link = replace(message.links[0], token=message.token)
        begun = self.table.begin(link, worker)
        name = self.keys.get(link.object_id)
        thing = self.things.get(name) if name is not None and self._is(link.object_id, name) else None
        accepted = self._begin(name or "", thing, link, begun)
        if not accepted or thing is None:
            assert begun.refused is not None
            return False
        assert begun.refused is None, f"refused: {begun.refused}"
        assert thing.run is not None
        thing.run.token = begun.token
        job = thing.jobs.get(link.job)
        message = Message(message.links, begun.token)
        if job is None or job.when > self.now:
            assert begun.job is None
            expected = None
            if link.last:
                expected = thing.close(self.now)
            else:
                thing.run.step += 1
                thing.run.lease = self.now + thing.patience()
            self.saved(str(name))
            assert begun.closed == link.last
            self.shipped(str(name), expected, begun.shipment)
            self._goes_on(message, link.last)
            return False
        assert begun.job is not None
        assert (begun.job.id, begun.job.version) == (job.id, job.version)
        flight = thing.run
        flight.step, flight.lease, flight.doubt = flight.step + 1, self.now + 20 * SECOND, False
        flight.job, flight.version, flight.task, flight.line = job.id, job.version, link.task_id, job.line
        self.saved(str(name))
        self.flights.append(Flight(message, replace(link, token=begun.token), begun, worker))
        del self.flights[:-MANY]
        return True

    def _begin(self, name: str, thing: Thing | None, link: Link, begun: Any) -> bool:
        """Whether the link may begin; the run is opened."""
        if thing is None:
            return False
        if link.token is not None:
            held = thing.run
            return held is not None and (held.token, held.step, held.job) == (link.token, link.position, None)
        job = thing.jobs.get(link.job)
        own = job is not None and job.when <= self.now
        if thing.run is not None:
            return False
        if thing.paused or not (own or thing.due(self.now)):
            if thing.sent == link.dispatch:
                thing.sent = None
                self.saved(name)
            return False
        thing.run = ModelRun(begun.token, self.now)
        thing.queue_wait = max(0, self.now - link.sent_ms)
        thing.sent = None
        return True

    def _goes_on(self, message: Message, closed: bool) -> None:
        if not closed and len(message.links) > 1:
            self.messages.append(Message(message.links[1:], message.token))

    def _held(self, flight: Flight) -> tuple[str, Thing | None]:
        """The object whose run this flight is in, if it is still in flight there."""
        name = self.keys.get(flight.link.object_id, "")
        thing = self.things.get(name) if self._is(flight.link.object_id, name) else None
        if thing is None or thing.run is None or thing.run.token != flight.begun.token:
            return name, None
        mine = (thing.run.job, thing.run.task, thing.run.step) == (
            flight.begun.job.id, flight.link.task_id, flight.link.position + 1,
        )  # fmt: skip
        return name, thing if mine else None

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), outcome=st.sampled_from(sorted(VERDICTS)), again=st.booleans())
    def finish(self, data: st.DataObject, outcome: str, again: bool) -> None:
        flight = data.draw(st.sampled_from(self.flights))
        if not again:
            self.flights.remove(flight)
        self._finish(flight, outcome)

    def _finish(self, flight: Flight, outcome: str) -> None:
        verdict = VERDICTS[outcome]
        name, thing = self._held(flight)
        done = self.table.finish(flight.link, flight.begun, verdict)
        assert done.accepted == (thing is not None)
        if thing is None:
            return
        held = thing.run
        assert held is not None
        job = thing.jobs.get(str(held.job))
        if verdict.clean and held.line in thing.lines:
            deaths = thing.lines[held.line]["deaths"]
            deaths.pop(held.job, None)
            if not deaths:
                del thing.lines[held.line]
        if verdict.clean and job is not None:
            job.strikes, job.not_before = 0, 0
        discarded = job is None or job.version != held.version
        assert done.discarded == discarded
        if job is not None and not discarded:
            self._apply(name, thing, job, outcome, verdict)
        closes = flight.link.last or held.final
        held.job, held.doubt = None, False
        held.lease = self.now + thing.patience()
        expected = thing.close(self.now) if closes else None
        self.saved(name)
        assert done.closed == closes
        self.shipped(name, expected, done.shipment)
        self._goes_on(flight.message, closes)

    def _apply(self, name: str, thing: Thing, job: ModelJob, outcome: str, verdict: Verdict) -> None:
        if outcome in ("complete", "dead"):
            del thing.jobs[job.id]
            if outcome == "dead":
                self.dead.append((name, job.id, "failed"))
            return
        job.version = thing.next_version()
        job.due = self.now + verdict.delay_ms
        job.attempt = verdict.attempt

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), how=st.sampled_from([End.DIED, End.DIED, End.PUT_BACK]))
    def child_dies(self, data: st.DataObject, how: End) -> None:
        self._die(data.draw(st.sampled_from(self.flights)), how)

    def _die(self, flight: Flight, how: End) -> None:
        name, thing = self._held(flight)
        ended = self.table.die(flight.link, flight.worker, how)
        assert (ended is not None) == (thing is not None)
        if thing is None or ended is None:
            return
        if how is End.PUT_BACK:
            thing.run = None
            self.saved(name)
            return
        self._struck(name, ended)

    def _struck(self, name: str, ended: Any, spread: bool = False) -> None:
        thing = self.things[name]
        sealed, slowed = thing.strike(self.now)
        assert {job.id for job in ended.dead} == sealed
        assert ended.context.sealed == bool(sealed) or ended.context.strikes >= LIMIT
        self.dead += [(name, job_id, "sealed") for job_id in sorted(sealed)]
        if spread:
            for job_id, at_least in slowed.items():
                found = self.table.job(job_id, self.ref(name)).not_before_ms
                assert found is not None
                assert at_least <= found <= max(at_least, self.now + 300 * SECOND)
                thing.jobs[job_id].not_before = found
        thing.run = None
        self.saved(name)

    # what must hold

    @invariant()
    def the_tables_are_those_of_the_model(self) -> None:
        found = {one.name: one for one in self.table.store.objects.find_many(limit=1000)}
        assert set(found) == set(self.things)
        for name, thing in self.things.items():
            row = found[name]
            self.keys.setdefault(row.id, name)
            jobs = {job.id: job for job in self.table.store.jobs.list(row.ref, None)}
            seen = {
                job_id: (job.version, job.due_ms, job.line, job.attempt, job.strikes, job.not_before_ms or 0)
                for job_id, job in jobs.items()
            }
            assert seen == {
                job.id: (job.version, job.due, job.line, job.attempt, job.strikes, job.not_before)
                for job in thing.jobs.values()
            }, name
            held = thing.run
            assert (row.versions, bool(row.paused), row.sealed) == (thing.versions, thing.paused, thing.sealed)
            assert row.token == (held.token if held else None)
            assert (row.in_flight.job if row.in_flight else None) == (held.job if held else None)
            assert row.dispatch == thing.sent
            lines = {line: known["n"] for line, known in json.loads(row.lines or "{}").items()}
            assert lines == {line: known["deaths"] for line, known in thing.lines.items()}, f"strikes of {name}"
            assert row.step == (held.step if held else 0)
            assert row.wake_at == thing.wake, f"{name} wakes at {row.wake_at}, not {thing.wake}"
        dead = sorted((one.job.object.name, one.job.id, one.reason) for one in self.table.store.dead.list(limit=1000))
        assert dead == sorted(self.dead)

    def teardown(self) -> None:
        self.table.check()


def run_machine(table: Table, examples: int, steps: int, *, shrinks: bool = True, derandomize: bool = False) -> None:
    machine = type("Machine", (StoreAgainstModel,), {"table": table})
    phases = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if shrinks else [])]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, phases=phases, derandomize=derandomize,
            database=None, print_blob=shrinks, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


EXAMPLES = {"sqlite": 80, "postgresql": 30, "mariadb": 30}


def test_random_operations_leave_the_tables_as_the_model_says(database):
    with_table(database.url, lambda table: run_machine(table, EXAMPLES[database.kind], 120))


def with_table(url: str, work: Any) -> None:
    table = Table(url, clock=Clock(), chain_length=LENGTH)
    try:
        work(table)
    finally:
        table.close()


# --- it must be able to fail: with a guard taken out, the model tells

finish, open_run, claim = run.finish, run.open_run, chain.claim


def _whatever_version(state, job, verdict, now, config):
    if job is not None and state.in_flight is not None:
        state = state.but(in_flight=replace(state.in_flight, version=job.version))
    return finish(state, job, verdict, now, config)


def _lease_instead_of_run(state, link, something_due, now, token):
    if state.token is not None and (state.lease_until or 0) <= now:
        state = chain.ended(state)
    return open_run(state, link, something_due, now, token)


def _without_revival(state, agenda, now, config, new_id):
    if state.token is not None and state.in_flight is None and (state.lease_until or 0) <= now:
        state = chain.ended(state)
    return claim(state, agenda, now, config, new_id)


MUTANTS = {
    "a link begins whatever its position": (run, "may_begin", lambda state, link: None),
    "a finish is accepted from anybody": (
        run, "may_finish", lambda state, link, token: state.in_flight is not None and state.token is not None,
    ),
    "an outcome is applied to a newer version": (run, "finish", _whatever_version),
    "a run is opened beside one whose lease is over": (run, "open_run", _lease_instead_of_run),
    "a job runs before its time": (run, "is_due", lambda state, job, now: job is not None),
    "a run is ended instead of revived": (chain, "claim", _without_revival),
    "rows are never forgotten": (unit, "is_forgettable", lambda state, agenda: False),
    "any clean end clears all strikes": (breaker, "cleared", lambda lines, line, job_id: None),
    "the end of a run forgets too little": (
        chain, "ended", lambda state: state.but(token=None, lease_until=None, in_flight=None),
    ),
    "exclusive jobs hold back nobody": (
        claims_module.chain, "due_links",
        lambda state, agenda, now, length: derive.due_links(
            state, derive.Agenda(tuple(job._replace(exclusive=False) for job in agenda.jobs)), now, length
        ),
    ),
}  # fmt: skip


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_finds_a_guard_that_is_taken_out(name, database, monkeypatch):
    module, attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(module, attribute, mutant)

    def finds(table: Table) -> None:
        with pytest.raises(Exception) as caught:
            run_machine(table, 1500, 120, shrinks=False, derandomize=True)
        assert not isinstance(caught.value, (TypeError, AttributeError, NameError)), caught.value

    with_table(database.url, finds)
