"""Checks of storage: what a run writes is there if and only if its finish was accepted, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

from tests.simulation.checks.facts import Facts, Thing
from tests.simulation.world.database import PREFIX, shared

STORED = (
    f"SELECT o.kind || '/' || o.name, s.key, s.value FROM {PREFIX}storage s LEFT JOIN {PREFIX}objects o"
    " ON o.id = s.object_id"
)
WELL = ("ok", "again", "yield")
"""How a body ends whose writes are kept."""


class StorageChecks:
    """What is stored, against what the bodies and clients have written."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.wanted: dict[str, dict[str, Any]] = {}
        self.putting: dict[Any, tuple[str, dict[str, Any]]] = {}
        """What a client is about to write at once."""
        self.is_used = False

    def changed(self, label: str, args: Any, before: Thing | None, after: Thing | None, dead: list[Any]) -> None:
        if before is not None and label == "Objects.destroy":
            self.wanted.pop(str(before.state.ref), None)
        if before is None or label != "Runs._finish":
            return
        flight = before.state.in_flight
        body = self.facts.body_of(args[1], args[0].task_id)
        if body is None or flight is None or flight.job != body.job:
            return
        if body.end in WELL and not flight.final:
            self._write(body.ref, body.writes)

    def _write(self, ref: str, values: dict[str, Any]) -> None:
        mine = self.wanted.setdefault(ref, {})
        for key, value in values.items():
            self.facts.stats["stored"] += 1
            if value is None:
                mine.pop(key, None)
            else:
                mine[key] = value

    def committed(self, label: str, args: Any) -> None:
        if not self.is_used:
            return
        if label == "Objects.put_values" and self.facts.world.current in self.putting:
            self._write(*self.putting.pop(self.facts.world.current))
        found: dict[str, dict[str, Any]] = {}
        for ref, key, value in shared().connection.execute(STORED):
            found.setdefault(ref, {})[key] = json.loads(value)
        wanted = {ref: values for ref, values in self.wanted.items() if values}
        if found != wanted:
            self.facts.fail("storage is what the last accepted finish left", f"{label}: {found}, not {wanted}")

    def at_end(self) -> None:
        """Nothing is left to be looked at."""
