"""The memory breaker as pure functions: how deaths are counted, how long a loop is slowed, when it is sealed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery_lifecycle.config import Config
from celery_lifecycle.model import (
    ALARM,
    HOOK_PREFIX,
    HOST,
    SEALED,
    START,
    Cause,
    InFlight,
    Job,
    MemoryLimitContext,
    ObjectState,
    _utc,
)

MAX_LINES = 50
MAX_DEATHS = 5
MAX_TOLD = 200


def _load(lines: str | None) -> dict[str, dict[str, Any]]:
    return json.loads(lines) if lines else {}


def _dump(lines: dict[str, dict[str, Any]]) -> str | None:
    return json.dumps(lines, ensure_ascii=False, separators=(",", ":")) if lines else None


def counted(
    lines: str | None,
    line: str,
    job_id: str,
    now: int,
    window_ms: int,
    strikes: int,
    cause: str | None = None,
    told: str | None = None,
) -> tuple[str, int]:
    """Count one more death of `job_id` in its line, which had `strikes` before; returns the lines and the line's count.

    A line keeps its deaths per job id: so the clean end of one job takes back its own and nothing else. Lines are
    forgotten `window_ms` after their last death, and the oldest ones when there are more than fifty. Of the last five
    deaths of a line the cause and what was told of it are kept for people.
    """
    known = {key: value for key, value in _load(lines).items() if value["t"] + window_ms > now}
    entry = known.setdefault(line, {"n": {}, "t": now})
    entry["n"][job_id] = max(entry["n"].get(job_id, 0), strikes) + 1
    entry["t"] = now
    if cause is not None:
        death = [now, job_id, cause, told[:MAX_TOLD] if told else None]
        entry["h"] = [*entry.get("h", ()), death][-MAX_DEATHS:]
    while len(known) > MAX_LINES:
        del known[min(known, key=lambda key: known[key]["t"])]
    return _dump(known) or "", sum(entry["n"].values())


def cleared(lines: str | None, line: str, job_id: str) -> str | None:
    """Take back the deaths of `job_id` after its clean end."""
    if not lines:
        return None
    known = _load(lines)
    entry = known.get(line)
    if entry is None or entry["n"].pop(job_id, None) is None:
        return lines
    entry["h"] = [death for death in entry.get("h", ()) if death[1] != job_id]
    if not entry["n"]:
        del known[line]
    return _dump(known)


@dataclass(frozen=True, slots=True)
class Death:
    """One death that is still remembered: when, of which job, its cause, and what the system told of it."""

    at_ms: int
    job: str
    cause: str
    told: str | None


def deaths(lines: str | None, line: str) -> tuple[Death, ...]:
    """The last deaths of a line, in order."""
    return tuple(Death(*death) for death in _load(lines).get(line, {}).get("h", ()))


def without_line(lines: str | None, line: str) -> str | None:
    """Forget a line altogether: it was sealed, or a person lifted its seal."""
    if not lines:
        return None
    known = _load(lines)
    known.pop(line, None)
    return _dump(known)


def fresh_lines(lines: str | None, now: int, window_ms: int) -> str | None:
    """The lines that are still remembered at `now`."""
    return _dump({key: value for key, value in _load(lines).items() if value["t"] + window_ms > now})


def waiting_mark(job: Job) -> str:
    """What `suspect_on` holds (uniquely) for a suspect that does not run."""
    name = "\0".join((job.object.kind, job.object.name, job.id))
    return "?" + hashlib.sha256(name.encode()).hexdigest()[:40]


def delay_ms(strikes: int, config: Config, spread: float = 1.0) -> int:
    """How long a loop with so many strikes waits; `spread` (1 to 3) keeps what died together from coming back together."""
    return round(min(config.strike_delay * strikes * spread, config.strike_delay_max) * 1000)


@dataclass(frozen=True, slots=True)
class Strike:
    """What a death comes to.

    Attributes:
        state: with the strike counted; its run is not ended here.
        write: jobs to store with new delays, strikes or marks; also the `#hook-…` and `#alarm` jobs that it makes.
        seal: jobs to take out and keep as dead jobs.
        remove: protocol jobs that are simply gone (a hook that died: it is tried once).
        context: what hooks and the event are told; None where the death counts nowhere.
        deaths: the last deaths of the line, this one included.
    """

    state: ObjectState
    write: tuple[Job, ...] = ()
    seal: tuple[Job, ...] = ()
    remove: tuple[Job, ...] = ()
    context: MemoryLimitContext | None = None
    deaths: tuple[Death, ...] = ()


def strike(
    state: ObjectState,
    flight: InFlight,
    related: Sequence[Job],
    now: int,
    cause: Cause,
    config: Config,
    *,
    spread: float = 1.0,
    suspect: bool = False,
    told: str | None = None,
    elsewhere: int = 0,
) -> Strike:
    """Count the death of what was in flight, slow its loop, seal it at the limit.

    Args:
        related: the pending jobs that a strike can touch: the struck one, those of its line, every `recovery_loop` job.
        suspect: the whole worker was lost with several runs in flight, so the struck job is from now on a suspect.
        told: what the system told of the death, kept for people.
        elsewhere: deaths in the same line on other objects.
    """
    struck = next((job for job in related if job.id == flight.job), None)
    if flight.job.startswith(HOOK_PREFIX):
        return Strike(state, remove=(struck,) if struck else ())
    window = round(config.strike_window * 1000)
    before = struck.strikes if struck else 0
    lines, in_line = counted(state.lines, flight.line, flight.job, now, window, before, cause.value, told)
    history = deaths(lines, flight.line)
    state = state.but(lines=lines)
    strikes = max(before + 1, in_line) + elsewhere
    wait_until = now + delay_ms(strikes, config, spread)
    sealing = strikes >= flight.limit
    if flight.job in (START, ALARM):
        carrier = next((job for job in related if job.id == flight.marked), None)
        return _of_object(state, flight, carrier, now, wait_until, strikes, sealing, suspect, cause)
    if sealing:
        doomed = tuple(job for job in related if job.line == flight.line or job.recovery_loop or job is struck)
        state = state.but(lines=without_line(state.lines, flight.line))
        context = MemoryLimitContext(
            True, None, flight.job, tuple(job.id for job in doomed), strikes, flight.limit, cause.value
        )
        state, hooks = _hook(state, flight, context, now)
        return Strike(state, write=hooks, seal=doomed, context=context, deaths=history)
    slowed = []
    for job in related:
        if job is not struck and not job.recovery_loop:
            continue
        job = job._replace(not_before_ms=max(job.not_before_ms or 0, wait_until))
        if job.id == flight.job:
            job = job._replace(strikes=before + 1)
            if suspect or job.suspect_on is not None:
                job = job._replace(suspect_on=waiting_mark(job))
        slowed.append(job)
    context = MemoryLimitContext(False, _utc(wait_until), flight.job, (), strikes, flight.limit, cause.value)
    state, hooks = _hook(state, flight, context, now)
    return Strike(state, write=(*slowed, *hooks), context=context, deaths=history)


def _of_object(
    state: ObjectState,
    flight: InFlight,
    carrier: Job | None,
    now: int,
    wait_until: int,
    strikes: int,
    sealing: bool,
    suspect: bool,
    cause: Cause,
) -> Strike:
    """`on_start` or `on_alarm` died: the object as a whole is held back, and paused as sealed at the limit.

    Of an object that was destroyed meanwhile there is nothing to hold back, and nothing to call again.
    """
    write: tuple[Job, ...] = ()
    if not flight.final:
        state = state.but(not_before=max(state.not_before or 0, wait_until), paused=SEALED if sealing else state.paused)
        if flight.job == ALARM and carrier is None:
            state, carrier = _protocol_job(state, ALARM, flight.task, flight.queue, "null", now)
            write = (carrier,)
    if carrier is not None and (suspect or carrier.suspect_on is not None):
        write = (suspected(carrier),)
    next_time = None if sealing else _utc(wait_until)
    context = MemoryLimitContext(sealing, next_time, flight.job, (), strikes, flight.limit, cause.value)
    state, hooks = _hook(state, flight, context, now)
    return Strike(state, write=(*write, *hooks), context=context)


def _hook(
    state: ObjectState, flight: InFlight, context: MemoryLimitContext, now: int
) -> tuple[ObjectState, tuple[Job, ...]]:
    if flight.hook is None:
        return state, ()
    payload = json.dumps(context_to_json(context), ensure_ascii=False)
    state, job = _protocol_job(state, f"{HOOK_PREFIX}{state.versions + 1}", flight.hook, flight.queue, payload, now)
    return state, (job,)


def _protocol_job(
    state: ObjectState, job_id: str, task: str, queue: str, payload: str, now: int
) -> tuple[ObjectState, Job]:
    version = state.versions + 1
    return state.but(versions=version), protocol_job(state, job_id, version, task, queue, payload, now)


def protocol_job(
    state: ObjectState,
    job_id: str,
    version: int,
    task: str,
    queue: str,
    payload: str,
    due: int,
    attempt: int = 0,
) -> Job:
    """A job of the protocol's own: due at once, of the host, with no policy."""
    return Job(
        object=state.ref, id=job_id, version=version, line=job_id, owner=HOST, task=task, queue=queue, due_ms=due,
        not_before_ms=None, payload_json=payload, options_json=None, retry_json=None, schedule_json=None,
        singleflight=False, hung_timeout_ms=None, exclusive=False, recovery_loop=False, attempt=attempt, strikes=0,
        suspect_on=None, unknown_since_ms=None, created_ms=due,
    )  # fmt: skip


def suspected(job: Job) -> Job:
    """A neighbour of a loss with a suspect aboard: from now on a suspect itself, without a strike."""
    return job._replace(suspect_on=waiting_mark(job))


def context_to_json(context: MemoryLimitContext) -> dict[str, Any]:
    return {
        "sealed": context.sealed,
        "next_time": context.next_time.isoformat() if context.next_time else None,
        "executing": context.executing,
        "purged": list(context.purged),
        "strikes": context.strikes,
        "limit": context.limit,
        "cause": context.cause,
    }
