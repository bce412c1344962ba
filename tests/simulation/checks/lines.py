"""Checks of lines that go on over several objects: each job of a task is an object of its own, and pushes the next one."""

from __future__ import annotations

import json
from typing import Any

from celery_lifecycle.model import ObjectRef
from celery_lifecycle.store.lines import is_own_object
from tests.simulation.checks.breaker import BreakerChecks
from tests.simulation.checks.facts import Facts, Thing


class LineChecks:
    """Which lines are sealed; how often they have died is counted with all other deaths, see `scope_of`."""

    def __init__(self, facts: Facts, breaker: BreakerChecks) -> None:
        self.facts = facts
        self.breaker = breaker

    def changed(self, label: str, args: Any, before: Thing | None, after: Thing | None, dead: list[Any]) -> None:
        state = before.state if before else after.state if after else None
        if state is None or state.kind != "own":
            return
        for one in dead:
            line = json.loads(one[5])["line"]
            if one[4] != "sealed":
                continue
            if label == "Runs._begin" and line not in self.facts.sealed_lines:
                self.facts.fail("nothing is sealed before its limit", f"{one[3]} of line {line}")
            self.facts.stats["sealed with its line" if label == "Runs._begin" else "lines sealed"] += 1
            self.facts.sealed_lines.add(line)
        flight = after.state.in_flight if after else None
        begins = label == "Runs._begin" and flight is not None and (before is None or before.state.in_flight is None)
        if begins and flight is not None and flight.line in self.facts.sealed_lines:
            self.facts.fail("nothing of a sealed line begins", f"{flight.job} of line {flight.line}")

    def lifted(self, ref: ObjectRef, job: dict[str, Any]) -> None:
        """A dead job is replayed: it may die again as often as a new one."""
        breaker, name = self.breaker, str(ref)
        state = next(thing.state for thing in self.facts.things.values() if thing.state.ref == ref)
        breaker.let_go(state.id, job["id"])
        breaker.sealed[name].discard(job["id"])
        breaker.culprits.pop((name, job["line"], job["id"]), None)
        breaker.line_deaths.pop((state.id, job["line"], job["id"]), None)
        payload = json.loads(job["payload_json"])
        breaker.root_deaths.pop((name, payload.get("root") if isinstance(payload, dict) else None), None)
        self.begins_anew(ref, job)

    def begins_anew(self, ref: ObjectRef, job: dict[str, Any]) -> None:
        """A line over several objects is no longer sealed, and nothing of it is counted."""
        if not is_own_object(ref, job["task"], job["id"]):
            return
        self.facts.sealed_lines.discard(job["line"])
        for key in [key for key in self.breaker.line_deaths if key[:2] == (job["task"], job["line"])]:
            del self.breaker.line_deaths[key]

    def committed(self, label: str, args: Any) -> None:
        """Each object is looked at on its own."""

    def at_end(self) -> None:
        """What of a sealed line still waits is taken out when it is due."""
