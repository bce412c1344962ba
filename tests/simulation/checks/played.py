"""What the seeds of CI must play between them: every verb, end, fault, step at which a process dies or stalls,
and edge between states.

A profile that silently stops playing something is a hole through which a fault gets in.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from celery_lifecycle.config import Config
from celery_lifecycle.store import Store
from celery_lifecycle.store.ends import End
from tests.simulation.checks.checker import verb_of
from tests.simulation.plans.steps import STEPS
from tests.simulation.world.simulation import Simulation

LEAST = {"verb": 5, "end": 2, "fault": 5, "event": 5, "stops": 1, "edge": 2}
"""How often each is to be played, by kind."""

FAULTS = (
    "conflict", "crash beat", "crash child", "crash client", "crash worker", "delay", "double", "encode", "lose", "refuse",
    "uncertain", "unheard", "unheard child",
)  # fmt: skip
EVENTS = ("away", "broker_away", "cut", "flush", "hold", "kill", "stall", "term")
ENDS = tuple(one.value for one in End)
STEPS_TO_STOP_AT = tuple(sorted({step for steps in STEPS.values() for step in steps}))
INSIDE = {"claims.claim_named": "claims.claim_one"}
"""Verbs whose transaction goes under another name."""
OTHERWHERE = (
    "beats.database_id", "beats.is_home_of", "beats.list", "claims.claim_several", "dead.count", "holds.of",
    "jobs.get", "jobs.get_alarm", "jobs.list", "jobs.list_schedules_of_kind", "objects.find", "objects.find_many",
    "objects.list_values", "objects.disable", "objects.pause", "workers.list",
)  # fmt: skip
"""Verbs that only look, or are part of a caller's transaction, or are another one (`objects.change`)."""
OUTSIDE = ("entries", "watch")
"""Parts of the store that have no say in the alarm protocol."""


def verbs() -> tuple[str, ...]:
    """Every verb of the store that the simulation is to call."""
    store = Store(Config(database_url="sqlite://"))
    found = []
    for place, part in vars(store).items():
        if place in ("config", "database", *OUTSIDE):
            continue
        for name, _ in inspect.getmembers(type(part), inspect.isfunction):
            verb = f"{place}.{name}"
            if not name.startswith("_") and not name.endswith("_in") and verb not in OTHERWHERE:
                found.append(INSIDE.get(verb, verb))
    return tuple(sorted(set(found)))


def wanted(edges: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Everything that is to be played; `edges` are those of the design."""
    return (
        *(f"verb {one}" for one in verbs()),
        *(f"end {one}" for one in ENDS),
        *(f"fault {one}" for one in FAULTS),
        *(f"event {one}" for one in EVENTS),
        *(f"stops {one}" for one in STEPS_TO_STOP_AT),
        *(f"edge {before} {after}" for before, after in edges),
    )


def played(simulation: Simulation) -> Counter[str]:
    """What has happened in a simulation, by the names of `wanted`."""
    found: Counter[str] = Counter()
    for what, count in simulation.played.items():
        kind, _, rest = what.partition(" ")
        if kind == "verb":
            found[f"verb {verb_of(rest)}"] += count
        elif kind in ("crash", "stall"):
            found[f"stops {_step(rest)}"] += count
        elif kind == "step":
            found[f"step {_step(rest)}"] += count
        else:
            found[what] += count
    found.update(f"edge {before} {after}" for before, after, _ in simulation.checker.moves)
    return found


def _step(told: str) -> str:
    role, _, step = told.partition(" ")
    return f"{role} {step.removeprefix('before ').removeprefix('after ')}"


def too_seldom(found: Counter[str], edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """What was played less often than can be relied on; and the steps that are often come to, but at which nobody stops."""
    seldom = {one: found[one] for one in wanted(edges) if found[one] < LEAST[one.partition(" ")[0]]}
    steps = {one.removeprefix("step "): count for one, count in found.items() if one.startswith("step ")}
    unknown = {f"step {one}": count for one, count in steps.items() if count > 100 and one not in STEPS_TO_STOP_AT}
    return {**seldom, **unknown}


class Gathered:
    """Counts of seeds that several processes play, in files of one directory."""

    def __init__(self, directory: Path, parts: int) -> None:
        self.directory = directory / "played"
        self.parts = parts

    def add(self, part: int, found: Counter[str]) -> Counter[str] | None:
        """Put one part down. Returns the sum, to whoever has brought the last part."""
        self.directory.mkdir(exist_ok=True)
        draft = self.directory / f"{part}.draft"
        draft.write_text(json.dumps(found))
        draft.rename(self.directory / f"{part}.json")
        texts = [one.read_text() for one in self.directory.glob("*.json")]
        if len(texts) < self.parts:
            return None
        total: Counter[str] = Counter()
        for text in texts:
            total.update(json.loads(text))
        return total
