"""Says in words, and as JSON, what the table knows of an object: for the command line and for Flower."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery_lifecycle.breaker import Death, deaths
from celery_lifecycle.model import ALARM, ALIVE, HOOK_PREFIX, SEALED, START, DeadJob, Job, ObjectState, Phase
from celery_lifecycle.store.watch import Due, Picture
from celery_lifecycle.timing.instants import MAX_MILLIS, from_millis

_OWN = {ALARM: "on_alarm", ALIVE: "on_alarm after a lost keep-alive", START: "on_start"}
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))


def span(ms: int) -> str:
    """A duration in at most two units: `2 d 3 h`, `4 min 5 s`, `1.5 s`, `20 ms`."""
    ms = abs(ms)
    if ms < 1000:
        return f"{ms} ms"
    if ms < 10_000:
        return f"{ms / 1000:.1f} s"
    parts: list[str] = []
    for size, unit in _UNITS:
        if ms >= size or parts:
            count, ms = divmod(ms, size)
            parts.append(f"{count} {unit}" if count else "")
        if len(parts) == 2:
            break
    return " ".join(filter(None, parts))


def iso(ms: int | None) -> str | None:
    """An instant as ISO 8601 in UTC, to the millisecond; None stays None."""
    return None if ms is None else from_millis(min(ms, MAX_MILLIS)).isoformat(timespec="milliseconds")


def clock(ms: int) -> str:
    """An instant for people, in UTC: `2026-01-31 08:00:00Z`."""
    return f"{from_millis(min(ms, MAX_MILLIS)):%Y-%m-%d %H:%M:%S}Z"


def distance(ms: int, now: int) -> str:
    """How far an instant is from now: `in 3 min`, `5 s ago`."""
    return f"in {span(ms - now)}" if ms > now else f"{span(now - ms)} ago"


def when(ms: int | None, now: int) -> str:
    """An instant with its distance from now; `-` for none."""
    return "-" if ms is None else f"{clock(ms)} ({distance(ms, now)})"


def word(state: ObjectState, now: int) -> str:
    """The state of an object in one word."""
    if state.token is not None:
        return "running"
    if state.disabled:
        return "disabled"
    if state.paused is not None:
        return "sealed" if state.paused == SEALED else "paused"
    if state.dispatch is not None:
        return "sent"
    if state.wake_at is None:
        return "idle"
    return "overdue" if state.wake_at <= now else "waiting"


def sentence(picture: Picture) -> str:
    """What the object does now and what it waits for."""
    state, now = picture.state, picture.now
    if state.token is not None:
        return _running(picture)
    if state.disabled:
        return "its alarms were disabled for good: nothing wakes it, a push raises"
    if state.paused == SEALED:
        return "paused as sealed by the memory breaker until somebody resumes it"
    if state.paused is not None:
        return f"paused: {state.paused}"
    if state.dispatch is not None:
        times = "once" if state.sent_count == 1 else f"{state.sent_count} times"
        return f"its chain is on its way to queue {state.queue}, sent {times}, again at {when(state.sent_until, now)}"
    if state.wake_at is None:
        return "no alarm: it has no job"
    if state.wake_at <= now:
        return f"overdue for {span(now - state.wake_at)}: beat has not sent it yet"
    return f"waits for its alarm, in {span(state.wake_at - now)}"


def _running(picture: Picture) -> str:
    state, now = picture.state, picture.now
    flight = state.in_flight
    if flight is None:
        what = f"a run is open between two links, at step {state.step}"
    else:
        what = f"runs {call(flight.job)} (task {flight.task}), link {state.step} of its run"
    lease = state.lease_until or 0
    left = f"its lease ends in {span(lease - now)}" if lease > now else f"its lease is over since {span(now - lease)}"
    doubt = ", beat has taken a first look at a worker that does not answer" if state.doubt else ""
    return f"{what}; {left}{doubt}"


def call(job_id: str) -> str:
    """A job id for people: the protocol's own are named by what they call."""
    if job_id.startswith(HOOK_PREFIX):
        return "on_memory_limit"
    return _OWN.get(job_id, job_id)


def worker(picture: Picture) -> str | None:
    """Which worker has the run that is open."""
    state = picture.state
    if state.worker is None:
        return None
    host = (picture.worker or {}).get("hostname", "unknown host")
    return f"{host}, process {state.worker_pid}, instance {state.worker}"


@dataclass(frozen=True, slots=True)
class LineStrikes:
    """The deaths that a line is still remembered for."""

    line: str
    strikes: int
    jobs: dict[str, int]
    last_ms: int
    deaths: tuple[Death, ...]

    @property
    def cause(self) -> str | None:
        """The cause of the last death."""
        return self.deaths[-1].cause if self.deaths else None

    @property
    def told(self) -> str | None:
        """What the system told of it."""
        return self.deaths[-1].told if self.deaths else None


def strikes(state: ObjectState) -> list[LineStrikes]:
    """The strikes of lines, the last death first."""
    lines: dict[str, dict[str, Any]] = json.loads(state.lines) if state.lines else {}
    found = [
        LineStrikes(line, sum(one["n"].values()), dict(one["n"]), int(one["t"]), deaths(state.lines, line))
        for line, one in lines.items()
    ]
    return sorted(found, key=lambda one: -one.last_ms)


def next_try(state: ObjectState, job: Job) -> int:
    """When a job may run at the earliest."""
    return max(job.effective_ms, state.not_before or 0)


def flags(job: Job) -> list[str]:
    """What is special about a job."""
    told = {
        "exclusive": job.exclusive,
        "recovery loop": job.recovery_loop,
        "singleflight": job.singleflight,
        "suspect": job.suspect_on is not None,
        "schedule": job.schedule_json is not None,
        "unknown task": job.unknown_since_ms is not None,
    }
    return [name for name, is_set in told.items() if is_set]


def is_in_flight(state: ObjectState, job: Job) -> bool:
    flight = state.in_flight
    return flight is not None and (flight.job, flight.version) == (job.id, job.version)


def job_facts(state: ObjectState, job: Job) -> dict[str, Any]:
    """A job as JSON."""
    return {
        "id": job.id, "task": job.task, "queue": job.queue, "owner": job.owner, "line": job.line,
        "version": job.version, "due_at": iso(job.due_ms), "not_before": iso(job.not_before_ms),
        "next_try": iso(next_try(state, job)), "in_flight": is_in_flight(state, job), "payload": job.payload,
        "attempts": job.attempt, "max_attempts": job.retry.max_attempts, "strikes": job.strikes,
        "suspect": job.suspect_on is not None, "exclusive": job.exclusive, "recovery_loop": job.recovery_loop,
        "singleflight": job.singleflight, "schedule": json.loads(job.schedule_json) if job.schedule_json else None,
        "created_at": iso(job.created_ms),
    }  # fmt: skip


def dead_facts(dead: DeadJob) -> dict[str, Any]:
    """A dead job as JSON."""
    job = dead.job
    return {
        "key": dead.key, "object": str(job.object), "job": job.id, "task": job.task, "reason": dead.reason,
        "died_at": iso(dead.died_ms), "error": dead.error, "traceback": dead.traceback, "attempts": job.attempt,
        "strikes": job.strikes, "payload": job.payload, "details": dead.details,
    }  # fmt: skip


def dead_details(dead: DeadJob) -> list[tuple[str, str]]:
    """What is known of a death, as pairs; each death that led to a seal is a line."""
    found = []
    for key, value in dead.details.items():
        if key == "deaths":
            found += [
                (
                    f"death {number}",
                    f"{clock(one['at'])} {call(one['job'])}: {one['cause']} {one['told'] or ''}".strip(),
                )
                for number, one in enumerate(value, 1)
            ]
        else:
            found.append((key, value if isinstance(value, str) else json.dumps(value)))
    return found


def object_facts(state: ObjectState, now: int) -> dict[str, Any]:
    """An object's row as JSON."""
    flight = state.in_flight
    return {
        "object": str(state.ref), "kind": state.kind, "name": state.name, "id": state.id, "state": word(state, now),
        "queue": state.queue, "alarm": iso(state.wake_at), "paused": state.paused, "disabled": state.disabled,
        "sealed": state.sealed or state.paused == SEALED, "not_before": iso(state.not_before),
        "chain": None if state.phase is not Phase.SENT else {
            "dispatch": state.dispatch, "sent_until": iso(state.sent_until), "sent_count": state.sent_count,
        },
        "run": None if state.token is None else {
            "lease_until": iso(state.lease_until), "doubt": state.doubt, "step": state.step, "worker": state.worker,
            "pid": state.worker_pid,
            "in_flight": None if flight is None else {
                "job": flight.job, "task": flight.task, "task_id": flight.task_id, "limit": flight.limit,
            },
        },
        "strikes": [
            {"line": one.line, "strikes": one.strikes, "jobs": one.jobs, "last": iso(one.last_ms), "cause": one.cause,
             "told": one.told}
            for one in strikes(state)
        ],
    }  # fmt: skip


def picture_facts(picture: Picture) -> dict[str, Any]:
    """Everything about an object as JSON."""
    state = picture.state
    host = (picture.worker or {}).get("hostname")
    return {
        **object_facts(state, picture.now),
        "description": sentence(picture), "worker": host, "now": iso(picture.now),
        "jobs": [job_facts(state, job) for job in picture.jobs],
        "storage": [{"key": key, "size": size} for key, size in picture.storage],
        "holds": [
            {"kind": hold.kind, "key": hold.key, "job": hold.job, "expires_at": iso(hold.expires_ms)}
            for hold in picture.holds
        ],
        "dead": [dead_facts(dead) for dead in picture.dead],
    }  # fmt: skip


def due_words(due: Due, now: int) -> str:
    """What is due, since when: `cart/user-42#remind (task cart.remind, queue celery), due …, 11.2 s late`."""
    name = due.object if due.job is None else f"{due.object}#{call(due.job)}"
    task = f"task {due.task}, " if due.task else ""
    late = f", {span(now - due.due_ms)} late" if due.due_ms <= now else ""
    return f"{name} ({task}queue {due.queue}), due {clock(due.due_ms)}{late}"


def seconds(ms: int | None) -> float | None:
    """Milliseconds as seconds, for JSON."""
    return None if ms is None else timedelta(milliseconds=ms).total_seconds()
