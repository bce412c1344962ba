"""Pushes of thousands: objects that are new are inserted together, where the database can; the others one by one."""

from __future__ import annotations

from collections.abc import Sequence

from celery_lifecycle.model import Job, ObjectRef, ObjectState
from celery_lifecycle.store.arrays import array
from celery_lifecycle.store.database import Tx
from celery_lifecycle.store.rows import brief_from, job_params
from celery_lifecycle.store.sql import NEW_JOB_COLUMNS, NEW_OBJECT_COLUMNS
from celery_lifecycle.transitions.derive import Agenda, derive

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
    states = [
        derive(
            ObjectState(0, ref.kind, ref.name, versions=len(jobs[ref])),
            Agenda.of(brief_from(job) for job in jobs[ref]),
            now,
        )
        for ref in refs
    ]
    values = {name: array(getattr(state, name) for state in states) for name in NEW_OBJECT_COLUMNS}
    return {ObjectRef(kind, name): int(key) for key, kind, name in tx.rows(tx.sql.insert_objects, values)}


def _insert_jobs(tx: Tx, rows: Sequence[tuple[int, Job]]) -> None:
    if not rows:
        return
    params = [job_params(object_id, job) for object_id, job in rows]
    tx.run(tx.sql.insert_jobs, {name: array(row[f"j_{name}"] for row in params) for name in NEW_JOB_COLUMNS})
