"""A plan: everything that a seed decides beforehand, as data that can be printed, shortened and played again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from celery_lifecycle.config import Config


@dataclass(slots=True)
class Plan:
    """What is to happen.

    Attributes:
        events: what clients do and what fails at a time, each `{"at": ms, "do": …}`.
        faults: what fails at its n-th occasion: `[kind, n, extra]`.
        hooks: what `on_start`, `on_alarm` and the memory hooks of an object do, call by call: how they end, how long (ms)
            they take, and `set` where they set the bare alarm.
        horizon: when faults stop (ms). How long everything may take from there is said by `checks.lateness`.
        restart: after how long a dead process comes back. poll: how often (ms) beat looks.
        bound: how late (ms) a run may begin in this plan; 0: no promise.
        unknown: tasks that a worker does not know until a time: `[task, worker, until]`.
        spoilt: objects whose message can't be made (`encode`), or that no broker takes (`refuse`): `[object, how, until]`.
        served: queues that must be empty by the horizon, whatever happens to others.
    """

    seed: int
    profile: str
    settings: dict[str, Any] = field(default_factory=dict)
    beats: int = 1
    workers: int = 1
    slots: int = 2
    horizon: int = 120_000
    restart: int = 2000
    poll: int = 200
    events: list[dict[str, Any]] = field(default_factory=list)
    faults: list[list[Any]] = field(default_factory=list)
    hooks: dict[str, list[str]] = field(default_factory=dict)
    queues: list[list[str]] = field(default_factory=list)
    unknown: list[Any] = field(default_factory=list)
    spoilt: list[Any] = field(default_factory=list)
    bound: int = 0
    served: list[str] = field(default_factory=list)

    def config(self) -> Config:
        return Config(database_url="sqlite://", poll_interval=60, **self.settings)

    def queues_of(self, worker: int) -> list[str]:
        return self.queues[worker] if worker < len(self.queues) else ["celery", "side"]

    def unknown_of(self, worker: int, now: int) -> frozenset[str]:
        """Tasks that a worker does not know yet: a rolling deploy."""
        return frozenset(task for task, index, until in self.unknown if index == worker and now < until)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls(**json.loads(text))


class Faults:
    """What fails at its n-th occasion."""

    def __init__(self, plan: Plan, played: Counter[str]) -> None:
        self._at: dict[str, dict[int, Any]] = {}
        for kind, number, extra in plan.faults:
            self._at.setdefault(kind, {})[number] = extra
        self._seen: Counter[str] = Counter()
        self._stopped = False
        self._played = played

    def hits(self, kind: str) -> Any:
        """None, or what is to be known of the fault that strikes this occasion."""
        here = self._at.get(kind)
        if here is None or self._stopped:
            return None
        number = self._seen[kind]
        self._seen[kind] += 1
        found = here.get(number)
        if found is not None:
            self._played[f"fault {kind}"] += 1
        return found

    def stop(self) -> None:
        self._stopped = True
