"""Transitions of an open run: open, begin, enter, finish."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from celery_lifecycle import breaker
from celery_lifecycle.config import Config
from celery_lifecycle.model import ALARM, HOOK_PREFIX, SEALED, START, InFlight, Job, Link, ObjectState, Why
from celery_lifecycle.transitions.chain import ended, patience


class Refusal(str, Enum):
    """Why a link ends quietly. It is the link's result, so that a person who meets it in Flower understands it."""

    NO_OBJECT = "the object is gone"
    NOTHING_DUE = "nothing is due"
    RUN_OPEN = "another run of the object is open"
    RUN_OVER = "its run is over"
    PASSED = "the run is already past it"
    BUSY = "a link of the run is in flight"
    PAUSED = "the object is paused"


@dataclass(frozen=True, slots=True)
class Worker:
    """Who runs a link: one life of a worker, and the process in it."""

    instance: str
    pid: int


def open_run(
    state: ObjectState, link: Link, something_due: bool, now: int, token: str
) -> tuple[ObjectState, Refusal | None]:
    """Open a run for the first link of a chain.

    Guard: not paused (a memory hook may run if paused as sealed), something is due, and no run is open, whatever a lease
    says. A chain that may not open ends quietly, and a row that still carries its dispatch forgets it.
    """
    refusal = None
    hook_of_sealed = state.paused == SEALED and not state.disabled and link.job.startswith(HOOK_PREFIX)
    if state.token is not None:
        refusal = Refusal.RUN_OPEN
    elif (state.paused or state.disabled) and not hook_of_sealed:
        refusal = Refusal.PAUSED
    elif not something_due:
        refusal = Refusal.NOTHING_DUE
    if refusal is None:
        wait = max(0, now - link.sent_ms)
        state = state.but(token=token, step=0, dispatch=None, sent_until=None, queue_wait=wait, in_flight=None)
    elif state.dispatch == link.dispatch:
        state = state.but(dispatch=None, sent_until=None)
    return state, refusal


def may_begin(state: ObjectState, link: Link) -> Refusal | None:
    """The guard of every link: token and position are the row's, and nothing is in flight."""
    if state.token is None or state.token != link.token:
        return Refusal.RUN_OVER
    if state.step != link.position:
        return Refusal.PASSED
    if state.in_flight is not None:
        return Refusal.BUSY
    return None


def is_due(state: ObjectState, job: Job | None, now: int) -> bool:
    """Whether a job may run by the database's clock: a link whose job is gone or not due is passed over."""
    if job is None or job.effective_ms > now:
        return False
    return job.id.startswith(HOOK_PREFIX) or state.not_before is None or state.not_before <= now


def not_understood(job: Job, now: int, grace_ms: int) -> Job | None:
    """A job that this worker can't run as it stands: put back with a doubling delay; None: its grace is over."""
    since = job.unknown_since_ms if job.unknown_since_ms is not None else now
    if now - since >= grace_ms:
        return None
    wait = min(max(1000, now - since), 60_000)
    return unmarked(job._replace(unknown_since_ms=since, due_ms=now + wait))


def started(state: ObjectState, flight: InFlight, worker: Worker, now: int, config: Config) -> ObjectState:
    """The durable "attempt has started": in flight, under a lease."""
    lease = now + config.lease_ms
    return state.but(
        step=state.step + 1,
        in_flight=flight,
        worker=worker.instance,
        worker_pid=worker.pid,
        lease_until=lease,
        wake_at=lease,
        doubt=False,
    )


def waiting(state: ObjectState, now: int, config: Config) -> ObjectState:
    """Nothing in flight, the next link on its way: the lease covers that way."""
    lease = now + patience(state, config)
    return state.but(in_flight=None, lease_until=lease, wake_at=lease, doubt=False)


def passed(state: ObjectState, now: int, config: Config) -> ObjectState:
    """A link that is accepted but has nothing to run: the next one may come."""
    return waiting(state.but(step=state.step + 1), now, config)


def entered(state: ObjectState, flight: InFlight, config: Config, now: int) -> ObjectState:
    """`on_start` has ended well: now the job itself is in flight, and start-up failures are forgotten."""
    lines = breaker.cleared(state.lines, START, START)
    lease = now + config.lease_ms
    return state.but(
        in_flight=flight,
        lines=lines,
        not_before=None,
        not_before_count=0,
        lease_until=lease,
        wake_at=lease,
        doubt=False,
    )


def start_failed(state: ObjectState, now: int, config: Config) -> ObjectState:
    """`on_start` did not end well: the jobs stay, the object is held back (doubling), the run is ended."""
    if state.in_flight is not None and state.in_flight.final:
        return ended(state)
    count = state.not_before_count + 1
    wait = min(1000 << min(count - 1, 30), round(config.strike_delay_max * 1000))
    return ended(state).but(not_before=now + wait, not_before_count=count)


class Action(str, Enum):
    """What is to become of a job whose attempt has ended."""

    COMPLETE = "complete"
    RESCHEDULE = "reschedule"
    YIELD = "yield"
    AGAIN = "again"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One frozen decision about an ended attempt, made of what the job returned or raised.

    Attributes:
        at_ms, delay_ms: for RESCHEDULE and AGAIN, when: a time, or a delay from the database's time.
        attempt: for AGAIN, how many attempts have failed so far.
        why, error, traceback: for DEAD.
        next: a recurring job's next occurrence: due time and schedule, instead of removing the job.
        clean: whether this end clears the job's own strikes and its suspicion.
        strikes: of the job when its attempt began: one that came meanwhile (its tracked work died) is not cleared.
        started_ms: when the run of the job began, by the database's clock.
    """

    action: Action
    at_ms: int | None = None
    delay_ms: int = 0
    attempt: int = 0
    why: Why | None = None
    error: str | None = None
    traceback: str | None = None
    next: tuple[int, str] | None = None
    clean: bool = False
    started_ms: int | None = None
    strikes: int | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """What a finish comes to: the new state, the job to write (or to remove), and what was not applied."""

    state: ObjectState
    write: Job | None = None
    remove: Job | None = None
    dead: Job | None = None
    discarded: bool = False


def may_finish(state: ObjectState, link: Link, token: str) -> bool:
    """The guard of a finish: the run is still the one that this link belongs to, and it is this link's turn."""
    return (
        state.token == token
        and state.step == link.position + 1
        and state.in_flight is not None
        and state.in_flight.task_id == link.task_id
    )


def finish(state: ObjectState, job: Job | None, verdict: Verdict, now: int, config: Config) -> Finish:
    """Apply the outcome of the attempt in flight, if the job is still the version that ran: a newer one wins."""
    flight = state.in_flight
    assert flight is not None
    state = waiting(state, now, config)
    if verdict.clean:
        state = state.but(lines=breaker.cleared(state.lines, flight.line, flight.job))
        if flight.job == ALARM:
            state = state.but(not_before=None, not_before_count=0)
    if job is None:
        return Finish(state, discarded=flight.job != ALARM)
    if job.version != flight.version:
        kept = acquitted(job) if verdict.clean else unmarked(job)
        return Finish(state, write=kept if kept != job else None, discarded=flight.version != 0)
    dead = job if verdict.action is Action.DEAD else None
    if verdict.action in (Action.COMPLETE, Action.DEAD) and verdict.next is None:
        return Finish(state, remove=job, dead=dead)
    job = acquitted(job) if verdict.clean else unmarked(job)
    version = state.versions + 1
    state = state.but(versions=version)
    if verdict.next is not None:
        due, schedule = verdict.next
        job = job._replace(schedule_json=schedule, attempt=0)
    else:
        due = now + verdict.delay_ms if verdict.at_ms is None else verdict.at_ms
        job = job._replace(attempt=verdict.attempt if verdict.action is Action.AGAIN else 0)
    return Finish(state, write=job._replace(due_ms=due, version=version, unknown_since_ms=None), dead=dead)


def acquitted(job: Job) -> Job:
    """A clean end of the struck job clears its own strikes and its suspicion; nothing else does."""
    return job._replace(strikes=0, suspect_on=None, not_before_ms=None)


def unmarked(job: Job) -> Job:
    """A suspect that no longer runs: still a suspect, but it holds no worker's place."""
    return job if job.suspect_on is None else job._replace(suspect_on=breaker.waiting_mark(job))
