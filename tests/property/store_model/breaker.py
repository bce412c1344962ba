"""The memory breaker as the design describes it: strikes, delays, seals, suspects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.property.store_model.model import ALARM, SECOND, START, WAITING, Flight, Job, Thing, begun_again

WINDOW = 3600 * SECOND


@dataclass
class Struck:
    """What a death came to."""

    strikes: int
    sealed: bool
    doomed: tuple[Job, ...] = ()


def delays(strikes: int, spread: bool) -> tuple[int, int]:
    """The shortest and the longest delay of a strike; what died together is spread."""
    return min(30 * strikes, 300) * SECOND, min((90 if spread else 30) * strikes, 300) * SECOND


def strike(
    thing: Thing, flight: Flight, now: int, until: Callable[[int, int], int], *, lost: bool = False, suspect: bool = False
) -> Struck | None:  # fmt: skip
    """Count the death of what was in flight, slow its loop, seal it at the limit; None: it counts nowhere.

    `until` is told the earliest and the latest end of the delay and says which one was drawn.
    """
    struck = thing.jobs.get(flight.job)
    if flight.job.startswith("#hook-"):
        thing.jobs.pop(flight.job, None)
        return None
    thing.lines = {line: known for line, known in thing.lines.items() if known["at"] + WINDOW > now}
    line = thing.lines.setdefault(flight.line, {"deaths": {}})
    before = struck.strikes if struck else 0
    line["deaths"][flight.job] = max(line["deaths"].get(flight.job, 0), before) + 1
    line["at"] = now
    strikes = max(before + 1, sum(line["deaths"].values()))
    sealing = strikes >= flight.limit
    low, high = delays(strikes, lost)
    if flight.job in (START, ALARM):
        _hold_back(thing, flight, now, lambda: until(now + low, now + high), sealing, suspect)
        _hook(thing, flight, now)
        return Struck(strikes, sealing)
    if sealing:
        doomed = [job for job in thing.jobs.values() if job.line == flight.line or job.recovery or job.id == flight.job]
        for job in doomed:
            del thing.jobs[job.id]
        del thing.lines[flight.line]
        thing.sealed = thing.sealed or bool(doomed)
        _hook(thing, flight, now)
        return Struck(strikes, True, tuple(doomed))
    wait = until(now + low, now + high)
    for job in thing.jobs.values():
        if job.id == flight.job or job.recovery:
            job.not_before = max(job.not_before or 0, wait)
    if struck is not None:
        struck.strikes = before + 1
        if suspect or struck.suspect is not None:
            struck.suspect = WAITING
        begun_again(struck, flight)
    _hook(thing, flight, now)
    return Struck(strikes, False)


def _hold_back(
    thing: Thing, flight: Flight, now: int, until: Callable[[], int], sealing: bool, suspect: bool
) -> None:  # fmt: skip
    """`on_start` or `on_alarm` died: the object is held back, and paused as sealed at the limit."""
    carrier = thing.jobs.get(flight.marked)
    if not flight.final:
        thing.not_before = max(thing.not_before or 0, until())
        if sealing:
            thing.paused = "sealed"
        if flight.job == ALARM and carrier is None:
            carrier = thing.own_job(ALARM, flight.task, flight.queue, now)
    if carrier is not None and (suspect or carrier.suspect is not None):
        carrier.suspect = WAITING


def _hook(thing: Thing, flight: Flight, now: int) -> None:
    if flight.hook is not None:
        thing.own_job(f"#hook-{thing.versions + 1}", flight.hook, flight.queue, now)
