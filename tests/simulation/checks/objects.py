"""Checks of the rows of objects: which verb may change what, how sendings and failed starts are counted, what is forgotten."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from celery_lifecycle.model import ALARM, START, InFlight, ObjectState
from tests.simulation.checks.facts import CLOSERS, STRIKES, Facts
from tests.simulation.world.calls import Call
from tests.simulation.world.database import PREFIX, shared

DESTROY = "Objects.destroy"
BREAKERS = frozenset((*STRIKES, "Holds._lost", "Objects.resume", DESTROY))
RUNS = frozenset((*CLOSERS, *STRIKES, "Runs.enter", "Runs.start_failed", "Claims._claim", DESTROY))
SENDERS = frozenset(
    (*CLOSERS, "Runs.enter", "Claims._claim", "Claims.claim_one", "Claims.claim_several", "Jobs.push_in")
)
HELD_BACK = BREAKERS | {"Runs.start_failed", "Runs.enter", "Runs._finish", "Beats.forget_old"}

MAY_CHANGE: dict[str, frozenset[str]] = {
    "paused": frozenset(("Objects.change", *BREAKERS)),
    "disabled": frozenset(("Objects.change", DESTROY)),
    "stored": frozenset(("Objects.put_values", "Runs._finish", DESTROY)),
    "holds": frozenset(("Holds.hold", "Holds.let_go", "Holds._lost", DESTROY)),
    "lines": BREAKERS | {"Runs._finish", "Runs.enter", "Beats.forget_old", "Runs._begin", "DeadJobs.replay"},
    "not_before": HELD_BACK,
    "not_before_count": HELD_BACK,
    "queue_wait": frozenset(("Runs._begin",)),
    "token": RUNS,
    "step": RUNS,
    "worker": RUNS,
    "worker_pid": RUNS,
    "in_flight": RUNS,
    "sent_count": SENDERS | {"Claims._release", DESTROY},
}
"""Which verbs may change what of an object's row. What is not here is checked where it is computed."""
BY_RESUME = ("paused", "lines", "not_before", "not_before_count", "sealed")
CLEARED = {"Objects.resume": BY_RESUME, DESTROY: (*BY_RESUME, "disabled", "holds", "stored", "dispatch", "sent_count")}
PLACES = {name: ObjectState._fields.index(name) for name in MAY_CHANGE}


class ObjectChecks:
    """Rows as they were before a verb, and as they are after it."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.failed_starts: Counter[int] = Counter()
        self.destroyed: set[str] = set()
        """Runs whose object was destroyed while one of their links was in flight."""

    def check(self, call: Call, old: ObjectState | None, new: ObjectState | None) -> None:
        if old is not None:
            self._check_destroyed(call, old, new)
        if new is None:
            if old is not None:
                self._check_forgotten(call, old)
                del self.failed_starts[old.id]
            return
        if old is None or old == new:
            return
        for name, place in PLACES.items():
            if old[place] != new[place] and call.label not in MAY_CHANGE[name]:
                self.facts.fail("a verb changes only what it is about", f"{call.label} changed {name} of {new.ref}")
        if new.versions < old.versions:
            self.facts.fail("a version is never used twice", f"{call.label} counts versions of {new.ref} back")
        if call.label in CLEARED:
            left = [name for name in CLEARED[call.label] if getattr(new, name)]
            if left:
                self.facts.fail("who starts anew starts with nothing", f"{call.label} {new.ref}: {', '.join(left)}")
        self._check_sendings(call, old, new)
        self._check_started(call, old, new)

    def _check_sendings(self, call: Call, old: ObjectState, new: ObjectState) -> None:
        """Each sending counts, one that is taken back does not, and a run that has closed starts anew."""
        sent = new.dispatch is not None and new.dispatch != old.dispatch
        revived = call.label == "Claims._claim" and new.token is not None and new.lease_until != old.lease_until
        wanted = old.sent_count
        if call.label == "Claims._release":
            wanted = max(wanted - 1, 0)
        elif call.label == DESTROY or self._closes(call, old, new):
            wanted = 0
        wanted += sent or revived
        if new.sent_count != wanted:
            told = f"{call.label} {new.ref}: {new.sent_count}, not {wanted}"
            self.facts.fail("sendings are counted from the last run that was closed", told)

    def _closes(self, call: Call, old: ObjectState, new: ObjectState) -> bool:
        if new.token is not None:
            return False
        if call.label == "Runs._begin":
            return bool(call.result.closed)
        if call.label in ("Ends._skip", "Ends.unknown", "Claims._claim", "Runs.enter"):
            return old.token is not None or call.label == "Ends._skip"
        return call.label in CLOSERS

    def _check_started(self, call: Call, old: ObjectState, new: ObjectState) -> None:
        """An object whose `on_start` fails waits twice as long each time; one whose `on_start` ends well forgets all that."""
        key, flight = new.id, old.in_flight
        if call.label == "Runs.start_failed" and flight is not None and not flight.final:
            self.failed_starts[key] += 1
            most = self.facts.config.strike_delay_max * 1000
            wait = min(1000 * 2 ** (self.failed_starts[key] - 1), most)
            if new.not_before != self.facts.now + wait:
                told = f"{new.ref}: failure {self.failed_starts[key]}, {new.not_before} at {self.facts.now}"
                self.facts.fail("an object whose on_start fails waits twice as long", told)
        elif call.label == "Ends._end" and new.not_before_count == old.not_before_count + 1:
            self.failed_starts[key] += 1
        elif not new.not_before_count:
            self.failed_starts[key] = 0
        if call.label != "Runs.enter" or flight is None or flight.final or new.in_flight is None:
            return
        left = json.loads(new.lines).get(START, {}).get("n", {}) if new.lines else {}
        if START in left or new.not_before is not None or new.not_before_count:
            self.facts.fail("an on_start that ends well forgets earlier failures", f"{new.ref}: {new.lines}")

    def _check_destroyed(self, call: Call, old: ObjectState, new: ObjectState | None) -> None:
        """The run of an object that was destroyed ends with the link that was in flight then."""
        if old.token in self.destroyed and new is not None and new.token == old.token:
            was, flight = old.in_flight, new.in_flight
            if flight is None or was is None or flight.task_id != was.task_id:
                self.facts.fail("a destroyed object's run ends with its link", f"{call.label} {new.ref}")
        if call.label == DESTROY and old.in_flight is not None and old.token is not None:
            self.destroyed.add(old.token)

    # --- what is forgotten

    def _check_forgotten(self, call: Call, old: ObjectState) -> None:
        """A row goes only if there is nothing to remember; what the verb itself takes back is looked up where it lies."""
        left = [name for name in ("paused", "disabled", "holds") if getattr(old, name)]
        if call.label == DESTROY:
            left = []
        elif call.label == "Objects.resume":
            left = [name for name in left if name != "paused"]
        elif call.label in ("Holds.let_go", "Holds._lost") and old.holds <= 1:
            left = [name for name in left if name != "holds"]
        if self._keeps_lines(call, old):
            left.append("lines")
        if self._keeps_delay(call, old):
            left.append("not_before")
        execute = shared().connection.execute
        if execute(f"SELECT 1 FROM {PREFIX}storage WHERE object_id = ?", (old.id,)).fetchone():
            left.append("storage")
        if execute(f"SELECT 1 FROM {PREFIX}heartbeats WHERE object_id = ?", (old.id,)).fetchone():
            left.append("holds")
        sealed = f"SELECT 1 FROM {PREFIX}dead_jobs WHERE kind = ? AND name = ? AND reason = 'sealed'"
        if execute(sealed, (old.kind, old.name)).fetchone():
            left.append("sealed")
        if left:
            self.facts.fail("a row with something to remember stays", f"{call.label} {old.ref}: {', '.join(left)}")

    def _keeps_lines(self, call: Call, old: ObjectState) -> bool:
        if call.label in (DESTROY, "Objects.resume") or not old.lines:
            return False
        lines: dict[str, Any] = json.loads(old.lines)
        if call.label == "Beats.forget_old":
            window = self.facts.config.strike_window * 1000
            return any(line["t"] + window > self.facts.now for line in lines.values())
        flight = old.in_flight
        if flight is None or call.label not in ("Runs._finish", "Runs.enter", *STRIKES):
            return True
        return self._others(lines, flight)

    def _others(self, lines: dict[str, Any], flight: InFlight) -> bool:
        """Deaths of others than what is in flight, whose end takes back its own; a line that is sealed is forgotten."""
        return lines.keys() != {flight.line} or lines[flight.line]["n"].keys() != {flight.job}

    def _keeps_delay(self, call: Call, old: ObjectState) -> bool:
        if old.not_before is None or call.label in (DESTROY, "Objects.resume"):
            return False
        if call.label == "Beats.forget_old":
            return old.not_before > self.facts.now
        flight = old.in_flight
        return not (call.label == "Runs._finish" and flight is not None and flight.job == ALARM)
