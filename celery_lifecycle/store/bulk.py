"""Pushes of thousands: objects that are new are inserted together, where the database can; the others one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_lifecycle.model import Job, ObjectRef, ObjectState
from celery_lifecycle.store.arrays import array
from celery_lifecycle.store.database import Tx
from celery_lifecycle.store.rows import brief_from
from celery_lifecycle.store.sql import NEW_JOB_COLUMNS, NEW_OBJECT_COLUMNS
from celery_lifecycle.transitions.derive import Agenda, next_wake

MAX_ROWS = 5000


def push_new(tx: Tx, jobs: dict[ObjectRef, list[Job]], now: int) -> set[ObjectRef]:
    """Insert objects with their jobs where there is no such object yet; returns those that were new.

    They are inserted in (kind, name) order, as all that locks several objects does. `jobs` are as they are to be stored,
    with versions from 1 upwards.
    """
    made: set[ObjectRef] = set()
    refs = sorted(jobs, key=lambda ref: (ref.kind, ref.name))
    for start in range(0, len(refs), MAX_ROWS):
        some = refs[start : start + MAX_ROWS]
        ids = _insert_objects(tx, some, jobs, now)
        made |= set(ids)
        rows = [(ids[ref], job) for ref in some if ref in ids for job in jobs[ref]]
        _insert_jobs(tx, rows)
    return made


def _insert_objects(
    tx: Tx, refs: Sequence[ObjectRef], jobs: dict[ObjectRef, list[Job]], now: int
) -> dict[ObjectRef, int]:
    alarms = [next_wake(ObjectState(0, *ref), Agenda.of([brief_from(job) for job in jobs[ref]]), now) for ref in refs]
    columns: dict[str, list[Any]] = {
        "kind": [ref.kind for ref in refs],
        "name": [ref.name for ref in refs],
        "queue": [queue for queue, _ in alarms],
        "wake_at": [wake_at for _, wake_at in alarms],
        "versions": [len(jobs[ref]) for ref in refs],
    }
    rows = tx.rows(tx.sql.insert_objects, {name: array(columns[name]) for name in NEW_OBJECT_COLUMNS})
    return {ObjectRef(kind, name): key for key, kind, name in rows}


def _insert_jobs(tx: Tx, rows: Sequence[tuple[int, Job]]) -> None:
    if not rows:
        return
    jobs = [job for _, job in rows]
    columns: dict[str, list[Any]] = {
        "object_id": [object_id for object_id, _ in rows],
        "id": [job.id for job in jobs],
        "version": [job.version for job in jobs],
        "line": [job.line for job in jobs],
        "owner": [job.owner for job in jobs],
        "task": [job.task for job in jobs],
        "queue": [job.queue for job in jobs],
        "due_at": [job.due_ms for job in jobs],
        "payload": [job.payload_json for job in jobs],
        "options": [job.options_json for job in jobs],
        "retry": [job.retry_json for job in jobs],
        "schedule": [job.schedule_json for job in jobs],
        "singleflight": [int(job.singleflight) for job in jobs],
        "hung_timeout": [job.hung_timeout_ms for job in jobs],
        "exclusive": [int(job.exclusive) for job in jobs],
        "recovery_loop": [int(job.recovery_loop) for job in jobs],
        "created_at": [job.created_ms for job in jobs],
    }
    tx.run(tx.sql.insert_jobs, {name: array(columns[name]) for name in NEW_JOB_COLUMNS})
