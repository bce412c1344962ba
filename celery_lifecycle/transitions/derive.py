"""The one place where an object's next alarm is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from celery_lifecycle.model import ALARM, ALIVE, HOOK_PREFIX, SEALED, Brief, ObjectState

# How many more jobs than a chain takes an agenda holds: one shows that the chain is not all, one is the job that has just
# ended and is taken out, and two (the bare alarm, a keep-alive whose holder died) are never links beside other jobs.
SPARE: Final = 4


class Agenda(NamedTuple):
    """The jobs of one object as far as the protocol must know them, in due order.

    It holds the earliest of all jobs (`SPARE` more than a chain takes), the earliest exclusive ones and the protocol's own:
    enough to tell what is due, what comes next and whether a chain would take everything.
    """

    jobs: tuple[Brief, ...] = ()

    @classmethod
    def of(cls, jobs: Iterable[Brief]) -> Agenda:
        found = tuple(jobs)
        return cls(found if len(found) < 2 else tuple(sorted(found, key=lambda job: (job.due, job.id))))


def effective_due(state: ObjectState, job: Brief) -> int:
    """When a job may run: its own time, held back by its object's `not_before`; a memory hook is not held back."""
    if state.not_before is None or job.id.startswith(HOOK_PREFIX):
        return job.due
    return max(job.due, state.not_before)


def runnable(state: ObjectState, agenda: Agenda) -> tuple[Brief, ...]:
    """The jobs that may wake the object at all: none if it is disabled or paused, but for hooks of a sealed one."""
    if state.disabled:
        return ()
    if state.paused == SEALED:
        return tuple(job for job in agenda.jobs if job.id.startswith(HOOK_PREFIX))
    return () if state.paused else agenda.jobs


def next_wake(state: ObjectState, agenda: Agenda, now: int) -> tuple[str | None, int | None]:
    """The queue and the time of the object's one alarm; (None, None) if nothing is to wake it."""
    if state.token is not None:
        return state.queue, state.lease_until
    jobs = runnable(state, agenda)
    if not jobs:
        return None, None
    if state.dispatch is not None:
        return state.queue or jobs[0].queue, state.sent_until
    exclusive = [job for job in jobs if job.exclusive and effective_due(state, job) <= now]
    first = min(exclusive or jobs, key=lambda job: (effective_due(state, job), job.id))
    return first.queue, effective_due(state, first)


def derive(state: ObjectState, agenda: Agenda, now: int) -> ObjectState:
    """The state with its alarm put right. A dispatch that nothing waits for any more is forgotten."""
    queue, wake_at = next_wake(state, agenda, now)
    if wake_at is None and state.dispatch is not None and state.token is None:
        return state.but(dispatch=None, sent_until=None, queue=None, wake_at=None)
    if (queue, wake_at) == (state.queue, state.wake_at):
        return state
    return state.but(queue=queue, wake_at=wake_at)


def is_forgettable(state: ObjectState, agenda: Agenda) -> bool:
    """Whether the row has nothing to remember, so that the transition that leaves it so removes it."""
    return not (
        agenda.jobs
        or state.token is not None
        or state.paused
        or state.disabled
        or state.lines
        or state.not_before is not None
        or state.holds
        or state.stored
        or state.sealed
    )


def due_links(state: ObjectState, agenda: Agenda, now: int, length: int) -> tuple[tuple[Brief, ...], bool]:
    """The links of a chain sent now, and whether they are all that is due (then `on_alarm` may follow them).

    While an exclusive job is due the chain holds exclusive jobs only. The bare alarm and a keep-alive whose holder died
    are answered by `on_alarm`, so they are a link only where no other job is. Memory hooks alone are no run of the object:
    `on_alarm` and the `on_start` before it do not follow them, or one that dies would be called again by its own hook.
    """
    due = [job for job in runnable(state, agenda) if effective_due(state, job) <= now]
    if len(due) == 1 and due[0].id not in (ALARM, ALIVE):
        return tuple(due), not due[0].id.startswith(HOOK_PREFIX)
    due.sort(key=lambda job: job.place)
    exclusive = [job for job in due if job.exclusive]
    links = [job for job in (exclusive or due) if job.id not in (ALARM, ALIVE)]
    if not links:
        alarm = [job for job in due if job.id == ALARM] or due
        return tuple(job._replace(id=ALARM) for job in alarm[:1]), bool(alarm)
    is_run = any(not job.id.startswith(HOOK_PREFIX) for job in links)
    return tuple(links[:length]), is_run and len(links) <= length
