"""Lines that go on over several objects: where each job of a task is an object of its own, and pushes the next one.

Such a line's deaths are counted in one row beside those of the objects, which is locked after the object's. When it is
sealed, jobs of it that wait on other objects are taken out as they are about to begin.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from celery_lifecycle.config import Config
from celery_lifecycle.model import Job, ObjectRef
from celery_lifecycle.store.database import Tx
from celery_lifecycle.store.rows import dead_of
from celery_lifecycle.store.unit import lock_or_add_heartbeat


def is_own_object(ref: ObjectRef, task: str, job_id: str) -> bool:
    """Whether a job is the one that its object is for."""
    return (ref.kind, ref.name) == (task, job_id)


def count(tx: Tx, task: str, line: str, job_id: str, before: int, now: int, config: Config) -> int:
    """Count a death of `job_id`, which had `before`; returns how many of the line's deaths were of other jobs."""
    data = _locked(tx, task, line, now, config)
    data["n"][job_id] = max(data["n"].get(job_id, 0), before) + 1
    _write(tx, task, line, data, now + round(config.strike_window * 1000))
    return sum(data["n"].values()) - int(data["n"][job_id])


def clear(tx: Tx, job: Job, now: int, config: Config) -> None:
    """Take back the deaths of a job after its clean end."""
    data = _locked(tx, job.task, job.line, now, config)
    data["n"].pop(job.id, None)
    _write(tx, job.task, job.line, data, now + round(config.strike_window * 1000))


def seal(tx: Tx, task: str, line: str, now: int, config: Config) -> None:
    """Nothing of this line begins any more."""
    data = {"n": {}, "sealed": True}
    _write(tx, task, line, data, now + max(1, round(config.dead_job_retention * 1000)))


def lift(tx: Tx, job: Job) -> None:
    """The seal of a job's line is lifted with that of the job."""
    if is_own_object(job.object, job.task, job.id):
        tx.run(tx.sql.delete_heartbeat, _key(job.task, job.line))


def lift_all(tx: Tx, ref: ObjectRef) -> None:
    """Lift all seals of an object, and those of their lines, wherever these began."""
    params = {"kind": ref.kind, "name": ref.name}
    for row in tx.rows(tx.sql.sealed_dead, params):
        lift(tx, dead_of(row).job)
    tx.run(tx.sql.lift_all_dead, params)


def is_sealed(tx: Tx, job: Job, now: int) -> bool:
    """Whether the line of a job is sealed."""
    row = tx.row(tx.sql.get_heartbeat, _key(job.task, job.line))
    return row is not None and int(row[4]) > now and bool(json.loads(row[5]).get("sealed"))


def _key(task: str, line: str) -> dict[str, str]:
    return {"kind": "line", "key": hashlib.sha256(f"{task}\0{line}".encode()).hexdigest()[:40]}


def _locked(tx: Tx, task: str, line: str, now: int, config: Config) -> dict[str, Any]:
    """What the line's row holds, which is locked until the end of the transaction."""
    key = _key(task, line)
    empty: dict[str, Any] = {"n": {}}
    fresh = {
        "object": None,
        "job": None,
        "expires_at": now + round(config.strike_window * 1000),
        "data": json.dumps(empty),
    }
    row = lock_or_add_heartbeat(tx, {**key, **fresh})
    if int(row[4]) <= now:
        return empty
    return dict(json.loads(row[5]))


def _write(tx: Tx, task: str, line: str, data: dict[str, Any], expires_ms: int) -> None:
    tx.run(tx.sql.update_heartbeat, {**_key(task, line), "expires_at": expires_ms, "data": json.dumps(data)})
