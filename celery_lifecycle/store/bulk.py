"""Pushes of thousands: objects that are new are inserted together, where the database can; the others one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from celery_lifecycle.model import Job, ObjectRef, ObjectState
from celery_lifecycle.store.arrays import array
from celery_lifecycle.store.database import Row, Tx
from celery_lifecycle.store.rows import brief_from
from celery_lifecycle.store.sql import NEW_JOB_COLUMNS, NEW_OBJECT_COLUMNS
from celery_lifecycle.transitions.derive import Agenda, next_wake

MAX_ROWS = 2000

Made = dict[ObjectRef, list[Job]]


def push_new(tx: Tx, refs: Sequence[ObjectRef], make: Callable[[ObjectRef], list[Job]], now: int) -> Made:
    """Insert objects with their jobs where there is no such object yet; returns those that were new.

    Args:
        refs: in (kind, name) order, as all that locks several objects does.
        make: the jobs of an object as they are to be stored, with versions from 1 upwards; none: it is left out.

    While the database inserts some, the next ones are made ready.
    """
    made: Made = {}
    with tx.overlapping():
        before: tuple[Made, Callable[[], list[Row]]] | None = None
        for start in range(0, len(refs), MAX_ROWS):
            jobs = {ref: its for ref in refs[start : start + MAX_ROWS] if (its := make(ref))}
            columns = _object_columns(jobs, now)
            if before is not None:
                made.update(_insert_jobs(tx, *before))
            before = jobs, tx.start(tx.sql.insert_objects, columns)
        if before is not None:
            made.update(_insert_jobs(tx, *before))
    return made


def _object_columns(jobs: Made, now: int) -> dict[str, str]:
    alarms = [next_wake(ObjectState(0, *ref), Agenda.of(map(brief_from, its)), now) for ref, its in jobs.items()]
    columns: dict[str, list[Any]] = {
        "kind": [ref.kind for ref in jobs],
        "name": [ref.name for ref in jobs],
        "queue": [queue for queue, _ in alarms],
        "wake_at": [wake_at for _, wake_at in alarms],
        "versions": [len(its) for its in jobs.values()],
    }
    return {name: array(columns[name]) for name in NEW_OBJECT_COLUMNS}


def _insert_jobs(tx: Tx, made: Made, inserted: Callable[[], list[Row]]) -> Made:
    """Insert the jobs of those objects that were inserted; these."""
    keys = {ObjectRef(kind, name): key for key, kind, name in inserted()}
    rows = [(key, job) for ref, key in keys.items() for job in made[ref]]
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
    if jobs:
        tx.start(tx.sql.insert_jobs, {name: array(columns[name]) for name in NEW_JOB_COLUMNS})
    return {ref: made[ref] for ref in keys}
