"""One scenario in a process of its own; its results go into a queue, and None at its end."""

from __future__ import annotations

from typing import Any

from benchmarks.ground import ground
from benchmarks.scenarios import ALL


def run(name: str, database: str, broker: str, scale: float, results: Any) -> None:
    with ground(database, broker) as where:
        for result in ALL[name](where, scale):
            results.put(result)
    results.put(None)
