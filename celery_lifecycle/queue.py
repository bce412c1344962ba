"""The jobs of one object as its owner sees them: push, get, list, cancel, reschedule, rearm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from celery_lifecycle import events, validate
from celery_lifecycle.deployment import Deployment, Target, current_run
from celery_lifecycle.errors import PolicyInvalid, UnknownJob, UnknownTask
from celery_lifecycle.model import Job, ObjectRef, RetryPolicy, Shipment
from celery_lifecycle.sessions import push_in_connection, push_in_session
from celery_lifecycle.store.jobs import Draft
from celery_lifecycle.timing.instants import delay_to_millis, to_millis

Resolve = Callable[[Any], Target]


class Push(NamedTuple):
    """One entry of `push_many`: the arguments of a `push`."""

    fn: Any
    at: datetime | None = None
    delay: float | timedelta | None = None
    payload: Any = None
    id: str | None = None
    retry: RetryPolicy | None = None
    singleflight: bool | None = None
    hung_timeout: float | timedelta | None = None
    exclusive: bool | None = None
    recovery_loop: bool | None = None


def when(at: datetime | None, delay: float | timedelta | None) -> tuple[int | None, int]:
    """A due time as (absolute ms or None, ms from the database's now)."""
    if at is not None and delay is not None:
        raise PolicyInvalid("at= and delay= were both given: give one of them, or neither for `now`.")
    if at is not None:
        return to_millis(at), 0
    return None, delay_to_millis(delay) if delay is not None else 0


def draft_of(deployment: Deployment, ref: ObjectRef, owner: str, target: Target, push: Push, **more: Any) -> Draft:
    """Check the arguments of a push and make the draft of its row. Nothing is stored.

    Raises:
        NameInvalid, TimeInvalid, PayloadError, PolicyInvalid, UnknownTask: what was given is not allowed.
    """
    if target.kind not in (None, ref.kind):
        raise UnknownTask(
            f"{target.task} is a job of the kind {target.kind!r} and can't be pushed to {ref}: push it to an object of its kind."
        )
    at_ms, delay_ms = when(push.at, push.delay)
    hung = validate.seconds(push.hung_timeout, "hung_timeout") or target.hung_timeout_ms
    route = {
        "queue": target.queue,
        "exchange": target.exchange,
        "routing_key": target.routing_key,
        "priority": target.priority,
    }
    options: dict[str, Any] = {key: value for key, value in route.items() if value is not None}
    options.update(more.pop("options", {}))
    job_id = more.pop("id", push.id)
    return Draft(
        ref=ref,
        task=target.task,
        queue=validate.queue(deployment.queue_of(target.task, options.get("queue"))),
        owner=target.owner or owner,
        payload_json=validate.payload(push.payload),
        id=None if job_id is None else validate.name(job_id, "id"),
        at_ms=at_ms,
        delay_ms=delay_ms,
        options_json=validate.options(options),
        retry_json=validate.retry(push.retry if push.retry is not None else target.retry),
        singleflight=_flag(push.singleflight, target.singleflight, "singleflight"),
        hung_timeout_ms=hung,
        exclusive=_flag(push.exclusive, target.exclusive, "exclusive"),
        recovery_loop=_flag(push.recovery_loop, target.recovery_loop, "recovery_loop"),
        **more,
    )


def _flag(given: bool | None, default: bool, what: str) -> bool:
    return default if given is None else validate.flag(given, what)


def sorted_text(payload_json: str) -> str:
    """The text that equal payloads share, whatever the order of their keys."""
    return json.dumps(json.loads(payload_json), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def same_call_id(draft: Draft) -> str:
    """The id that stands for "this owner, this function, this payload"."""
    schedule = json.dumps(draft.schedule.identity) if draft.schedule is not None else ""
    text = "\0".join((draft.owner, draft.task, sorted_text(draft.payload_json), schedule))
    return "=" + hashlib.sha256(text.encode()).hexdigest()[:32]


def _settled(draft: Draft) -> Draft:
    """Inside `on_start`, which runs often, a push without an id is one that is found again."""
    run = current_run()
    if run is None or not run.starting or draft.id is not None:
        return draft
    return draft._replace(id=same_call_id(draft), keep=True)


def store_push(deployment: Deployment, draft: Draft) -> Job:
    """Store a draft in a transaction of its own; what is due at once is sent after the commit, without beat."""
    draft, run = _settled(draft), current_run()
    claims = draft.due_at_once and deployment.has_room(draft.queue)
    pushed = deployment.store.jobs.push(draft, run.pusher if run else None, claims)
    if pushed.shipment is not None:
        deployment.send([pushed.shipment])
    return _told([pushed.job])[0]


def store_drafted(deployment: Deployment, draft: Draft, session: Any = None, connection: Any = None) -> Job:
    """Store a draft: in the transaction of a session or connection if one is given, else in one of its own."""
    if session is None and connection is None:
        return store_push(deployment, draft)
    if session is not None:
        return _told(push_in_session(deployment, session, [_settled(draft)]))[0]
    return store_many(deployment, [draft], None, connection)[0]


def _told(jobs: list[Job]) -> list[Job]:
    for job in jobs:
        if job.sealed:
            events.sealed_stays(job.object, job.id)
    return jobs


class JobQueue:
    """The jobs of one object that belong to one owner; ids of other owners are neither seen nor changed.

    Args:
        owner: `"host"` or a capability's id.
        resolve: what turns a method name, full task name, task or handle into a target.
    """

    def __init__(self, deployment: Deployment, ref: ObjectRef, owner: str, resolve: Resolve) -> None:
        self._deployment = deployment
        self._ref = ref
        self._owner = owner
        self._resolve = resolve

    def push(
        self,
        fn: Any,
        *,
        at: datetime | None = None,
        delay: float | timedelta | None = None,
        payload: Any = None,
        id: str | None = None,
        retry: RetryPolicy | None = None,
        singleflight: bool | None = None,
        hung_timeout: float | timedelta | None = None,
        exclusive: bool | None = None,
        recovery_loop: bool | None = None,
        session: Any = None,
        connection: Any = None,
    ) -> Job:
        """Store a job, in place of the pending one of the same id if there is one.

        A newer push wins over a run of the same id that is under way: the run's outcome is discarded and the new job runs
        after it. A job that is due is sent at once, without waiting for beat.

        Args:
            fn: a method name of the object's class, a full task name, a task, or a bound handle.
            at: aware datetime; a past one is due at once. Default: now.
            delay: seconds or timedelta from the database's time, not negative.
            payload: JSON of at most 2 MB, given back as `ctx.payload`.
            id: stable id, unique within the object; default a random one (inside `on_start`: one that stands for owner,
                function and payload, so that repeated calls leave one job).
            retry: attempts and delays; default those of the decorator, else 3 attempts.
            singleflight: when the job hangs for longer than `hung_timeout` it is fenced off, stopped and run again.
            hung_timeout: seconds after which a run is reported as slow; default `lifecycle_hung_timeout`.
            exclusive: while it is due no other job of the object is sent.
            recovery_loop: it is part of a recovery, so the memory breaker slows and seals it with the others.
            session: a SQLAlchemy session: the job exists if and only if the session's transaction commits.
            connection: a SQLAlchemy connection: likewise, but beat sends it.

        Returns:
            The stored job; `job.sealed` if it is sealed and this call came from inside a run.

        Raises:
            NameInvalid, TimeInvalid, PayloadError, PolicyInvalid, UnknownTask: what was given is not allowed.
            OwnerConflict: the id belongs to another owner.
            ObjectDisabled: the object's alarms were disabled for good.
            DatabaseUnavailable, LockTimeout: nothing was stored. Only where the connection broke at the commit is that not
                known: push again under the same `id`.
        """
        push = Push(fn, at, delay, payload, id, retry, singleflight, hung_timeout, exclusive, recovery_loop)
        draft = draft_of(self._deployment, self._ref, self._owner, self._resolve(fn), push)
        return store_drafted(self._deployment, draft, session, connection)

    def push_many(self, pushes: Sequence[Push], *, session: Any = None, connection: Any = None) -> list[Job]:
        """Store many jobs of this object in one transaction; beat sends them. See `push` for arguments and errors."""
        drafts = [draft_of(self._deployment, self._ref, self._owner, self._resolve(push.fn), push) for push in pushes]
        return store_many(self._deployment, drafts, session, connection)

    def get(self, id: str) -> Job | None:
        """The pending job of this id, or None."""
        return self._deployment.store.jobs.get(self._ref, validate.name(id, "id"), self._owner)

    def list(self) -> list[Job]:
        """The pending jobs in due order; the protocol's own are not among them."""
        return self._deployment.store.jobs.list(self._ref, self._owner)

    def cancel(self, id: str) -> bool:
        """Take a pending job out. A run of it that is under way goes on, but its outcome is discarded.

        Returns:
            Whether there was one.
        """
        return self._deployment.store.jobs.cancel(self._ref, validate.name(id, "id"), self._owner) is not None

    def reschedule(self, id: str, *, at: datetime | None = None, delay: float | timedelta | None = None) -> Job:
        """Move a pending job, with a new version and its attempts at 0. It wins over a run that is under way.

        Raises:
            UnknownJob: there is no pending job of this id.
        """
        at_ms, delay_ms = when(at, delay)
        job = self._deployment.store.jobs.reschedule(self._ref, validate.name(id, "id"), self._owner, at_ms, delay_ms)
        if job is None:
            raise UnknownJob(
                f"{self._ref} has no pending job {id!r} of {self._owner!r}. jobs.list() shows those it has."
            )
        if at_ms is None and delay_ms == 0:
            send_due(self._deployment, self._ref, job.queue)
        return job

    def rearm(self) -> None:
        """Derive the object's alarm from its jobs anew."""
        self._deployment.store.jobs.rearm(self._ref)


def store_many(
    deployment: Deployment, drafts: Sequence[Draft], session: Any = None, connection: Any = None
) -> list[Job]:
    """Store many drafts in one transaction, locking their objects in (kind, name) order."""
    drafts, run = [_settled(draft) for draft in drafts], current_run()
    if session is not None:
        return _told(push_in_session(deployment, session, drafts, sends=False))
    if connection is not None:
        return _told(push_in_connection(deployment, connection, drafts))
    return _told(deployment.store.jobs.push_many(drafts, run.pusher if run else None))


def send_due(deployment: Deployment, ref: ObjectRef, queue: str) -> None:
    """Claim an object whose jobs are due and send its chain at once, if there is room for it."""
    if not deployment.has_room(queue):
        return
    shipment: Shipment | None = deployment.store.claims.claim_named(ref)
    if shipment is not None:
        deployment.send([shipment])
