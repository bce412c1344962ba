"""Between rows and frozen values, in the order of the columns."""

from __future__ import annotations

import json
from typing import Any

from celery_lifecycle.model import Brief, DeadJob, InFlight, Job, ObjectRef, ObjectState
from celery_lifecycle.store.database import Row
from celery_lifecycle.store.sql import JOB_COLUMNS

MAX_TEXT = 100_000


def storable(text: str | None) -> str | None:
    """The text of an error as every database takes it: no NUL, no half of a surrogate pair, and no more than people read."""
    if text is None:
        return None
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}\n[{len(text) - MAX_TEXT} characters left out]\n{text[-MAX_TEXT // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def object_of(row: Row) -> ObjectState:
    values = list(row)
    values[12] = bool(values[12])
    values[14] = InFlight.from_json(values[14])
    values[18] = bool(values[18])
    values[23] = bool(values[23])
    values[24] = bool(values[24])
    return ObjectState(*values)


def object_params(state: ObjectState) -> dict[str, Any]:
    return {
        "id": state.id, "queue": state.queue, "wake_at": state.wake_at, "versions": state.versions,
        "dispatch": state.dispatch, "sent_until": state.sent_until, "sent_count": state.sent_count,
        "queue_wait": state.queue_wait, "token": state.token, "lease_until": state.lease_until,
        "doubt": int(state.doubt), "step": state.step,
        "in_flight": state.in_flight.to_json() if state.in_flight else None,
        "in_flight_task": state.in_flight.task_id if state.in_flight else None,
        "worker": state.worker, "worker_pid": state.worker_pid, "paused": state.paused,
        "disabled": int(state.disabled), "not_before": state.not_before, "not_before_count": state.not_before_count,
        "strike_lines": state.lines, "holds": state.holds, "stored": int(state.stored),
        "sealed": int(state.sealed), "phase": int(state.phase),
    }  # fmt: skip


def job_of(ref: ObjectRef, row: Row) -> Job:
    """A job of its columns, in the order of `JOB_COLUMNS`."""
    values = list(row)
    for index in (12, 14, 15):
        values[index] = bool(values[index])
    return Job(ref, *values)


def brief_of(effective: int, row: Row) -> Brief:
    return Brief(
        id=row[0], version=row[1], task=row[4], queue=row[5], due=effective, exclusive=bool(row[14]),
        options_json=row[9], hung_timeout_ms=row[13], singleflight=bool(row[12]),
        owner=row[3], own_due=row[6],
    )  # fmt: skip


def brief_from(job: Job) -> Brief:
    return Brief(
        job.id, job.version, job.task, job.queue, job.effective_ms, job.exclusive, job.options_json,
        job.hung_timeout_ms, job.singleflight, job.owner, job.due_ms,
    )  # fmt: skip


def job_params(object_id: int, job: Job) -> dict[str, Any]:
    values = (
        job.id, job.version, job.line, job.owner, job.task, job.queue, job.due_ms, job.not_before_ms, job.payload_json,
        job.options_json, job.retry_json, job.schedule_json, int(job.singleflight), job.hung_timeout_ms,
        int(job.exclusive), int(job.recovery_loop), job.attempt, job.strikes, job.suspect_on, job.unknown_since_ms,
        job.created_ms,
    )  # fmt: skip
    params = {f"j_{name}": value for name, value in zip(JOB_COLUMNS, values, strict=True)}
    params["j_object_id"] = object_id
    return params


def dead_of(row: Row) -> DeadJob:
    key, kind, name, _, reason, job, error, traceback, details, died = row
    values = json.loads(job)
    # A newer version, in a rolling deploy, may know more of a job.
    known = {field: value for field, value in values.items() if field in Job._fields and field != "object"}
    restored = Job(ObjectRef(kind, name), **known)
    if reason == "sealed":
        restored = restored._replace(sealed=True)
    return DeadJob(key, reason, restored, error, traceback, json.loads(details), died)


def dead_job_json(job: Job) -> str:
    values = job._asdict()
    del values["object"]
    return json.dumps(values, ensure_ascii=False)
