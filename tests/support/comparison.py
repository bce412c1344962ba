"""What came of a verb and what it left, without what is random: so that two objects can be compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_lifecycle.errors import ObjectDisabled
from celery_lifecycle.model import HOOK_PREFIX, Job, ObjectRef, Shipment
from celery_lifecycle.store.claims import Claimed
from celery_lifecycle.store.database import Tx
from celery_lifecycle.store.ends import Ended
from celery_lifecycle.store.holds import Lost
from celery_lifecycle.store.jobs import Pushed
from celery_lifecycle.store.rows import dead_of, job_of, object_of
from celery_lifecycle.store.runs import Begun, Finished
from tests.support.protocol import Table
from tests.support.scenes import Scene, Verb


def tried(verb: Verb, t: Table, scene: Scene) -> Any:
    """What a verb says; one that is refused, as a push to a disabled object, says so."""
    try:
        return verb(t, scene)
    except ObjectDisabled as refused:
        return type(refused)


def told(result: Any) -> Any:
    """What a verb said."""
    match result:
        case Pushed():
            return (result.job.id, result.job.version, told(result.shipment))
        case Shipment():
            return ([one.id for one in result.jobs], result.first_position, result.token is None)
        case Claimed():
            return (told(result.shipments), len(result.lost), result.rows)
        case Begun():
            return (result.refused, result.job and result.job.id, result.closed, told(result.shipment))
        case Finished():
            return (result.accepted, result.discarded, result.closed, told(result.shipment))
        case Ended():
            return (result.cause, result.put_back, result.context and result.context.strikes)
        case Lost():
            return (result.kind, result.context and result.context.strikes, len(result.dead))
        case Job():
            return without_number(result.id)
        case list() | tuple():
            return [told(one) for one in result]
        case _:
            return result


def without_number(job_id: str) -> str:
    """What is replayed beside a pending job is called by the number of the dead one, and a hook at random."""
    return HOOK_PREFIX if job_id.startswith(HOOK_PREFIX) else job_id.rstrip("0123456789")


def left(t: Table, scene: Scene) -> Any:
    """What the tables have of the scene's object: its row, jobs (the protocol's own too), dead jobs, holds."""
    return t.store.database.look(_left, scene.ref)


def _left(tx: Tx, ref: ObjectRef) -> Any:
    names = {"kind": ref.kind, "name": ref.name}
    found = tx.row(tx.sql.find_named, names)
    dead = [dead_of(one) for one in tx.rows(tx.sql.dead_of, {**names, "after": 0, "limit": 100})]
    buried = [(one.reason, one.job.id) for one in dead]
    if found is None:
        return None, [], buried, []
    state = object_of(found)
    row = state.but(
        id=0, kind="", name="", queue=None if state.queue is None else "q", dispatch=state.dispatch and "d",
        token=state.token and "t", in_flight=state.in_flight and replace(state.in_flight, task_id="", queue=""),
    )  # fmt: skip
    jobs = [_nameless(job_of(ref, one)) for one in tx.rows(tx.sql.all_jobs_of, {"object": state.id, "limit": 100})]
    # Delays after a loss are spread at random, and so are what follows from them.
    if any(job.not_before_ms for job in jobs):
        row = row.but(wake_at=row.wake_at and 1)
        jobs.sort(key=lambda job: job.id)
    holds = sorted((one[0], one[3] or "", one[4]) for one in tx.rows(tx.sql.heartbeats_of, {"object": state.id}))
    return row, jobs, buried, holds


def _nameless(job: Job) -> Job:
    is_hook = job.id.startswith(HOOK_PREFIX)
    return job._replace(
        id=without_number(job.id), object=ObjectRef("", ""), queue="", not_before_ms=job.not_before_ms and 1,
        suspect_on=None, line="" if is_hook else job.line, payload_json="" if is_hook else job.payload_json,
    )  # fmt: skip
