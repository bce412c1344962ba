"""Checks of what keeps an object: keep-alives and handed off work are there for as long as their holder, and no longer."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from celery_lifecycle.model import ALIVE, Cause, InFlight
from tests.simulation.checks.breaker import BreakerChecks
from tests.simulation.checks.facts import Facts, Thing
from tests.simulation.world.database import PREFIX, draining_on_record, shared

HELD = f"SELECT key, kind, object_id, job_id, expires_at, data FROM {PREFIX}heartbeats WHERE kind IN ('alive', 'track')"
VERBS = ("Holds.hold", "Holds.run_by", "Holds.let_go", "Holds._lost", "Objects.destroy")
LOOKS_MS = 10_000


@dataclass(slots=True)
class Held:
    """A hold as it came to be, and what has become of its holder since.

    Attributes:
        holder: the process that renews it; of a task, the child that runs it, or None while it waits.
        died: in which process it has died, by no fault of a deploy.
        ended: it has given back what it held.
    """

    kind: str
    object_id: int
    job: str | None
    holder: Any
    ended: bool = False
    died: bool = False
    struck: bool = False
    row: tuple[Any, ...] = field(default=())


class HoldChecks:
    """Rows of holders, against the holders."""

    def __init__(self, facts: Facts, breaker: BreakerChecks) -> None:
        self.facts = facts
        self.breaker = breaker
        self.held: dict[str, Held] = {}
        self.there: dict[str, tuple[Any, ...]] = {}

    # --- what happens to holders

    def errand_begins(self, child: Any, task_id: str) -> None:
        one = self.held.get(task_id)
        if one is not None:
            one.holder = child
            self.facts.stats["errands"] += 1
            known = task_id not in self.there or json.loads(one.row[5]).get("worker") is not None
            if not known and not self.breaker.blocked_since(child, self.facts.world.now - LOOKS_MS):
                self.facts.fail("who runs handed off work is on record", task_id)

    def errand_ends(self, child: Any, task_id: str, end: str) -> None:
        """It has ended by itself, or is about to take its process with it."""
        one = self.held.get(task_id)
        if one is None or one.holder is not child:
            return
        one.died = end in ("die", "lost", "memory")
        one.ended = not one.died

    def released(self, key: str) -> None:
        self.held[key].ended = True

    def has_work(self, object_id: int, job: str) -> bool:
        """Whether a job has handed off what is on record as unfinished."""
        return any(row[1] == "track" and row[2] == object_id and row[3] == job for row in self.there.values())

    # --- what is on record

    def changed(self, label: str, args: Any, before: Thing | None, after: Thing | None, dead: list[Any]) -> None:
        old = before.jobs.get(ALIVE) if before else None
        new = after.jobs.get(ALIVE) if after else None
        if new is not None and new != old and label not in ("Holds._lost", "Ends._skip"):
            self.facts.fail("an object wakes for a holder that is gone", f"{label} {new.object}")
        if label == "Holds._lost" and before is not None:
            self._check_lost(label, args, before, after, dead)

    def _check_lost(self, label: str, args: Any, before: Thing, after: Thing | None, dead: list[Any]) -> None:
        kind, key, cause, _, expires = args
        one, state = self.held[key], before.state
        self.facts.stats["holders lost"] += 1
        if expires is not None:
            self._check_given_up(one, key, expires)
        if state.kind == "full" and not state.disabled and (after is None or ALIVE not in after.jobs):
            self.facts.fail("an object wakes for a holder that is gone", f"{state.ref}")
        if state.disabled and after is not None and ALIVE in after.jobs.keys() - before.jobs.keys():
            self.facts.fail("a disabled object does not wake", f"{state.ref}")
        struck = (after.state.lines if after else None) != state.lines or any(row[4] == "sealed" for row in dead)
        data = json.loads(one.row[5])
        flight = InFlight.from_json(data["flight"])
        ran_by = data.get("worker")
        counts = cause is not None and flight is not None and kind == "track"
        if cause is Cause.LOST:
            counts = counts and ran_by is not None and not draining_on_record(ran_by)
        if struck and not counts:
            self.facts.fail("only the death of handed off work is a strike", f"{key} of {state.ref}")
        if struck and cause is not Cause.LOST and not one.died and getattr(one.holder, "alive", False):
            self.facts.fail("only the death of handed off work is a strike", f"{key} of {state.ref} lives")
        if counts and not struck:
            self.facts.fail("the death of handed off work is a strike", f"{key} of {state.ref}")
        if struck and flight is not None and after is not None:
            self.facts.stats["strikes of handed off work"] += 1
            self.breaker.culprits[str(state.ref), flight.line, flight.job].add(f"{state.ref}#{flight.line}")
            self.breaker.count_strike(label, before, after, flight, dead)
            if state.in_flight is not None and state.in_flight.marked == flight.job:
                self.breaker.held.pop((state.id, flight.job), None)  # it has begun already

    def _check_given_up(self, one: Held, key: str, expires: int) -> None:
        if self.facts.now - expires < LOOKS_MS:
            self.facts.fail("a holder is given up after two looks", key)
        if one.row[4] != expires:
            self.facts.fail("a holder that was renewed is not given up", key)
        holder = one.holder
        if one.died or holder is None or not holder.alive:
            return
        renews = holder.parent if one.kind == "track" else holder
        lasts = self.facts.config.keep_alive_ms
        if not self.breaker.blocked_since(renews, self.facts.world.now - (self.facts.now - expires) - lasts):
            self.facts.fail("a live holder is not given up", f"{key} of {holder.name}")

    def committed(self, label: str, args: Any) -> None:
        if label not in VERBS and label != "Holds.extend":
            return
        rows = {row[0]: row for row in shared().connection.execute(HELD)}
        for key, row in rows.items():
            if key not in self.held:
                process = self.facts.world.process
                self.held[key] = Held(row[1], row[2], row[3], process if row[1] == "alive" else None)
                self.facts.stats["holds"] += 1
            elif key not in self.there:
                self.facts.fail("what was given back is not held again", f"{label}: {key}")
            self.held[key].row = row
        self.there = rows
        if label == "Holds.extend":
            return
        counts = Counter(row[2] for row in rows.values())
        for key, thing in self.facts.things.items():
            if thing.state.holds != counts[key]:
                told = f"{label} {thing.state.ref}: {thing.state.holds}, not {counts[key]}"
                self.facts.fail("an object knows what holds it", told)
        if counts.keys() - self.facts.things.keys():
            self.facts.fail("an object that is held stays", label)

    def _is_left(self, key: str) -> bool:
        """Whether a hold on record has nobody any more who holds it."""
        one = self.held[key]
        if one.holder is None:  # it waits for a worker; a message that was lost is waited for a day
            return False
        return one.ended or one.died or not one.holder.alive

    def is_quiet(self) -> bool:
        return not any(self._is_left(key) or self._is_running(key) for key in self.there)

    def _is_running(self, key: str) -> bool:
        one = self.held[key]
        return one.kind == "track" and one.holder is not None and not one.ended

    def at_end(self) -> None:
        for key in self.there:
            if self._is_left(key):
                self.facts.fail("a hold is gone with its holder", f"{key} of object {self.held[key].object_id}")
