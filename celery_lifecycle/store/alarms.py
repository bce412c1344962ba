"""The bare alarm after an `on_alarm` that did not end well, and the keep-alive that an `on_alarm` answers."""

from __future__ import annotations

import json

from celery_lifecycle.breaker import protocol_job
from celery_lifecycle.model import ALARM, ALIVE, Job, ObjectState, Why
from celery_lifecycle.store.unit import Locked, with_job, without
from celery_lifecycle.transitions import run
from celery_lifecycle.transitions.derive import Agenda

RETRIES = 6


def again(
    held: Locked, state: ObjectState, agenda: Agenda, alarm: Job | None, now: int, error: str, traceback: str | None = None,
    *, task: str, queue: str, why: Why = Why.FAILED,
) -> tuple[ObjectState, Agenda, Job, bool]:  # fmt: skip
    """Put the bare alarm at 2 s × 2^n, also where jobs had triggered the run; after six retries it is a dead job.

    Returns the alarm too, and whether it is dead.
    """
    failed = (alarm.attempt if alarm else 0) + 1
    version = state.versions + 1
    payload = alarm.payload_json if alarm else json.dumps({"for": None})
    retry = protocol_job(state, ALARM, version, task, queue, payload, now + (2000 << (failed - 1)), attempt=failed)
    if failed > RETRIES:
        held.bury(retry, why, now, error, traceback)
        held.remove_job(ALARM)
        return state, without(agenda, ALARM), retry, True
    if alarm is not None:
        retry = run.unmarked(retry._replace(suspect_on=alarm.suspect_on))
    held.put_job(retry)
    return state.but(versions=version), with_job(agenda, retry), retry, False


def answered(held: Locked, agenda: Agenda, version: int | None) -> Agenda:
    """`on_alarm` has answered a keep-alive whose holder died, unless another one died meanwhile."""
    alive = next((job for job in agenda.jobs if job.id == ALIVE), None)
    if alive is None or alive.version != version:
        return agenda
    held.remove_job(ALIVE)
    return without(agenda, ALIVE)
