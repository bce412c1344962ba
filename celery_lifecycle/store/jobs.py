"""What anyone may do to the jobs of an object: push, cancel, reschedule, look, rearm."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from celery_lifecycle.config import Config
from celery_lifecycle.errors import ObjectDisabled, OwnerConflict
from celery_lifecycle.model import ALARM, Job, ObjectRef, Shipment, Why
from celery_lifecycle.store import bulk, lines
from celery_lifecycle.store.database import Database, Tx
from celery_lifecycle.store.rows import dead_of, job_of, object_of
from celery_lifecycle.store.unit import Locked, lock_by_name, lock_or_make, new_token, with_job, without
from celery_lifecycle.timing.spec import ScheduleSpec
from celery_lifecycle.transitions import chain, recurrence
from celery_lifecycle.transitions.derive import Agenda, derive


class Draft(NamedTuple):
    """A job as a caller wants it, before it has a row.

    Attributes:
        id: None for a new random one.
        at_ms, delay_ms: when; a delay counts from the database's time.
        schedule: when, instead of the two.
        keep: an existing job of this id stays as it is (idempotent), instead of being replaced; of a schedule only one
            that is the same schedule, and it takes on the policy of this one.
        alike: with `keep` and a schedule, the same schedule under any other id will do as well.
    """

    ref: ObjectRef
    task: str
    queue: str
    owner: str
    payload_json: str
    id: str | None = None
    at_ms: int | None = None
    delay_ms: int = 0
    options_json: str | None = None
    retry_json: str | None = None
    schedule: ScheduleSpec | None = None
    singleflight: bool = False
    hung_timeout_ms: int | None = None
    exclusive: bool = False
    recovery_loop: bool = False
    keep: bool = False
    alike: bool = False

    @property
    def due_at_once(self) -> bool:
        """Whether it is due when it is stored, so that its pusher may send it."""
        return self.at_ms is None and self.delay_ms == 0 and (self.schedule is None or self.schedule.type == "delayed")


@dataclass(frozen=True, slots=True)
class Pusher:
    """The running job that pushes, if a push comes from inside a run."""

    ref: ObjectRef
    job: str
    task: str
    line: str


@dataclass(frozen=True, slots=True)
class Pushed:
    """A stored job, and the chain to send at once if it is due and the pusher claimed it."""

    job: Job
    shipment: Shipment | None = None


class Jobs:
    """The job queue of every object in one database. Every verb is one short transaction, or part of the caller's."""

    def __init__(self, database: Database, config: Config) -> None:
        self.database = database
        self.config = config

    def push(self, draft: Draft, pusher: Pusher | None = None, claims: bool = False) -> Pushed:
        """Store a job: a new one, or in place of the one that has its id and owner, with a new version.

        `claims`: if it is due and its object has neither a run nor a chain on its way, claim it in the same transaction.
        The strikes, the delay they brought and the suspicion of a replaced job stay; its attempts do not.

        Raises:
            OwnerConflict: the id belongs to another owner.
            ObjectDisabled: alarms of the object were disabled for good.
        """
        return self.database.run(self.push_in, draft, pusher, claims)

    def push_in(self, tx: Tx, draft: Draft, pusher: Pusher | None = None, claims: bool = False) -> Pushed:
        """`push` as part of a transaction that is under way."""
        held = lock_or_make(tx, draft.ref, self.config.chain_length)
        job_id = draft.id or uuid.uuid4().hex
        existing: Job | None
        if held.fresh:
            now, agenda, existing = held.now(), Agenda(), None
        else:
            now, agenda, existing = held.agenda(job_id)
        state = held.state
        if state.disabled:
            raise ObjectDisabled(f"Alarms of {draft.ref} were disabled for good: nothing can be pushed to it.")
        if existing is not None and existing.owner != draft.owner:
            raise OwnerConflict(
                f"Job {job_id!r} of {draft.ref} belongs to {existing.owner!r}, not to {draft.owner!r}. Choose another id."
            )
        kept = self._kept(held, draft, existing) if draft.keep else None
        if kept is not None:
            renewed = kept
            if draft.schedule is not None:
                wanted = self._made(draft, kept.id, kept.version, kept, pusher, now)
                renewed = recurrence.with_policy(kept, wanted)
            if renewed != kept:
                held.put_job(renewed)
                agenda = with_job(agenda, renewed)
            derived = derive(state, agenda, now)
            if derived != state:
                held.save(derived, agenda)
            return Pushed(renewed)
        if state.sealed:
            sealed = self._sealed(held, draft, pusher)
            if sealed is not None:
                return Pushed(sealed)
            state = held.state
        job = self._made(draft, job_id, state.versions + 1, existing, pusher, now)
        agenda = with_job(agenda, job)
        state = state.but(versions=job.version)
        shipment = None
        if claims and state.token is None and state.dispatch is None:
            claim = chain.dispatch(state, agenda, now, self.config, new_token())
            state, shipment = claim.state, claim.shipment
        else:
            state = derive(state, agenda, now)
        held.save_with_job(state, agenda, tx.sql.put_job, job)
        return Pushed(job, shipment)

    def _made(
        self, draft: Draft, job_id: str, version: int, existing: Job | None, pusher: Pusher | None, now: int
    ) -> Job:
        follows = pusher is not None and pusher.task == draft.task
        if follows and pusher is not None and pusher.ref != draft.ref:
            both = (pusher.ref, pusher.job), (draft.ref, job_id)
            follows = all(lines.is_own_object(ref, draft.task, its_job) for ref, its_job in both)
        due = now + draft.delay_ms if draft.at_ms is None else draft.at_ms
        schedule = None
        if draft.schedule is not None:
            due, schedule = recurrence.planned(draft.schedule, draft.ref, job_id, now)
        return Job(
            object=draft.ref, id=job_id, version=version, line=pusher.line if follows and pusher else job_id,
            owner=draft.owner, task=draft.task, queue=draft.queue,
            due_ms=due, not_before_ms=existing.not_before_ms if existing else None, payload_json=draft.payload_json,
            options_json=draft.options_json, retry_json=draft.retry_json, schedule_json=schedule,
            singleflight=draft.singleflight, hung_timeout_ms=draft.hung_timeout_ms, exclusive=draft.exclusive,
            recovery_loop=draft.recovery_loop, attempt=0, strikes=existing.strikes if existing else 0,
            suspect_on=existing.suspect_on if existing else None, unknown_since_ms=None, created_ms=now,
        )  # fmt: skip

    def _kept(self, held: Locked, draft: Draft, existing: Job | None) -> Job | None:
        """The job that an idempotent call stands for."""
        if draft.schedule is None or held.fresh:
            return existing
        if existing is not None and recurrence.is_same(existing, draft.task, draft.payload_json, draft.schedule):
            return existing
        if not draft.alike:
            return None
        params = {"object": held.state.id, "owner": draft.owner, "task": draft.task}
        others = (job_of(held.ref, row) for row in held.tx.rows(held.tx.sql.schedules_like, params))
        same = [job for job in others if recurrence.is_same(job, draft.task, draft.payload_json, draft.schedule)]
        return min(same, key=lambda job: (job.created_ms, job.id), default=None)

    def _sealed(self, held: Locked, draft: Draft, pusher: Pusher | None) -> Job | None:
        """From inside a run a sealed job stays away; a push from outside lifts its seal."""
        tx, ref = held.tx, draft.ref
        sealed = [dead_of(row) for row in tx.rows(tx.sql.sealed_dead, {"kind": ref.kind, "name": ref.name})]
        same = [
            dead
            for dead in sealed
            if (draft.id is not None and dead.job.id == draft.id)
            or (
                (draft.id is None or draft.keep)
                and (dead.job.owner, dead.job.task, dead.job.payload_json)
                == (draft.owner, draft.task, draft.payload_json)
            )
        ]
        if same and pusher is not None:
            return same[-1].job
        for dead in same:
            tx.run(tx.sql.lift_dead, {"id": dead.key})
            lines.lift(tx, dead.job)
        if len(same) == len(sealed):
            held.state = held.state.but(sealed=False)
        return None

    def push_many(self, drafts: Sequence[Draft], pusher: Pusher | None = None) -> list[Job]:
        """Store many jobs in one transaction, locking their objects in (kind, name) order; what is due is left to beat."""
        return self.database.run(self.push_many_in, drafts, pusher)

    def push_many_in(self, tx: Tx, drafts: Sequence[Draft], pusher: Pusher | None = None) -> list[Job]:
        """`push_many` as part of a transaction that is under way."""
        pushed = self._push_new(tx, drafts, pusher) if tx.sql.takes_arrays else {}
        rest = [index for index in range(len(drafts)) if index not in pushed] if len(pushed) < len(drafts) else []
        for index in sorted(rest, key=lambda index: drafts[index].ref):
            pushed[index] = self.push_in(tx, drafts[index], pusher).job
        return [pushed[index] for index in range(len(drafts))]

    def _push_new(self, tx: Tx, drafts: Sequence[Draft], pusher: Pusher | None) -> dict[int, Job]:
        """Store the drafts whose objects do not exist yet; the jobs by the drafts' positions."""
        now = tx.now()
        places: dict[ObjectRef, list[int]] = {}
        for place, draft in enumerate(drafts):
            places.setdefault(draft.ref, []).append(place)

        def make(ref: ObjectRef) -> list[Job]:
            """The jobs of a new object; none if some have one id: these replace each other, which is for the other way."""
            wanted = [(drafts[place], drafts[place].id or uuid.uuid4().hex) for place in places[ref]]
            if len(wanted) > 1 and len({job_id for _, job_id in wanted}) < len(wanted):
                return []
            return [self._made(draft, job_id, nth, None, pusher, now) for nth, (draft, job_id) in enumerate(wanted, 1)]

        made = bulk.push_new(tx, sorted(places), make, now)
        return {place: job for ref, jobs in made.items() for place, job in zip(places[ref], jobs, strict=True)}

    def get(self, ref: ObjectRef, job_id: str, owner: str | None) -> Job | None:
        """One pending job, if it exists and belongs to `owner` (None: whoever). Changes nothing."""

        def work(tx: Tx) -> Job | None:
            row = tx.row(tx.sql.find_named, {"kind": ref.kind, "name": ref.name})
            if row is None:
                return None
            found = tx.row(tx.sql.job, {"object": row[0], "job": job_id})
            job = job_of(ref, found) if found is not None else None
            return job if job is not None and owner in (None, job.owner) else None

        return self.database.look(work)

    def list(self, ref: ObjectRef, owner: str | None) -> list[Job]:
        """The pending jobs of an owner (None: of all) in due order, without the protocol's own. Changes nothing."""

        def work(tx: Tx) -> list[Job]:
            row = tx.row(tx.sql.find_named, {"kind": ref.kind, "name": ref.name})
            if row is None:
                return []
            jobs = [job_of(ref, found) for found in tx.rows(tx.sql.jobs_of, {"object": row[0]})]
            mine = [job for job in jobs if owner in (None, job.owner)]
            return sorted(mine, key=lambda job: (job.effective_ms, job.id))

        return self.database.look(work)

    def list_schedules_of_kind(self, kind: str, owner: str) -> Sequence[Job]:
        """The pending schedules of an owner on all objects of a kind, in due order. Changes nothing."""

        def work(tx: Tx) -> list[Job]:
            rows = tx.rows(tx.sql.schedules_of_kind, {"kind": kind, "owner": owner})
            jobs = [job_of(ObjectRef(kind, row[0]), row[1:]) for row in rows]
            return sorted(jobs, key=lambda job: (job.effective_ms, job.id))

        return self.database.look(work)

    def cancel(self, ref: ObjectRef, job_id: str, owner: str | None, why: Why | None = None) -> Job | None:
        """Take a pending job out; None if there was none of this owner. `why` keeps it as a dead job."""
        return self.database.run(self.cancel_in, ref, job_id, owner, why)

    def cancel_in(self, tx: Tx, ref: ObjectRef, job_id: str, owner: str | None, why: Why | None = None) -> Job | None:
        held = lock_by_name(tx, ref, self.config.chain_length)
        if held is None:
            return None
        now, agenda, job = held.agenda(job_id)
        if job is None or owner not in (None, job.owner):
            return None
        held.remove_job(job_id)
        if why is not None:
            held.bury(job, why, now)
        agenda = without(agenda, job_id)
        held.save(derive(held.state, agenda, now), agenda)
        return job

    def revoke(self, kinds: Sequence[str], task_id: str, running: bool = True) -> Job | None:
        """Take out the job born of an `apply_async` that promised this task id; it is kept as a dead job.

        `running`: also one that runs, whose outcome is then discarded.
        """

        def work(tx: Tx) -> Job | None:
            for kind in sorted(kinds):
                ref = ObjectRef(kind, task_id)
                held = None if running else lock_by_name(tx, ref, self.config.chain_length)
                if held is not None and held.state.in_flight is not None:
                    continue
                job = self.cancel_in(tx, ref, task_id, None, Why.REVOKED)
                if job is not None:
                    return job
            return None

        return self.database.run(work)

    def reschedule(
        self, ref: ObjectRef, job_id: str, owner: str | None, at_ms: int | None, delay_ms: int
    ) -> Job | None:
        """Move a pending job, with a new version and its attempts at 0; None if there was none of this owner."""
        return self.database.run(self.reschedule_in, ref, job_id, owner, at_ms, delay_ms)

    def reschedule_in(
        self, tx: Tx, ref: ObjectRef, job_id: str, owner: str | None, at_ms: int | None, delay_ms: int
    ) -> Job | None:
        held = lock_by_name(tx, ref, self.config.chain_length)
        if held is None:
            return None
        now, agenda, job = held.agenda(job_id)
        if job is None or owner not in (None, job.owner):
            return None
        version = held.state.versions + 1
        job = job._replace(
            version=version, due_ms=now + delay_ms if at_ms is None else at_ms, attempt=0,
            unknown_since_ms=None,
        )  # fmt: skip
        agenda = with_job(agenda, job)
        state = derive(held.state.but(versions=version), agenda, now)
        held.save_with_job(state, agenda, tx.sql.update_job, job)
        return job

    def rearm(self, ref: ObjectRef) -> None:
        """Derive the object's alarm from its jobs anew, whatever the row says."""

        def work(tx: Tx) -> None:
            held = lock_by_name(tx, ref, self.config.chain_length)
            if held is None:
                return
            now, agenda, _ = held.agenda()
            held.save(derive(held.state, agenda, now), agenda)

        self.database.run(work)

    def get_alarm(self, ref: ObjectRef) -> Job | None:
        """The bare alarm as it stands: None while it runs, unless it was set again. Changes nothing."""

        def work(tx: Tx) -> Job | None:
            held = tx.row(tx.sql.find_named, {"kind": ref.kind, "name": ref.name})
            if held is None:
                return None
            found = tx.row(tx.sql.job, {"object": held[0], "job": ALARM})
            if found is None:
                return None
            job = job_of(ref, found)
            state = object_of(held)
            running = state.in_flight is not None and state.in_flight.job == ALARM
            return None if running and state.in_flight and state.in_flight.version == job.version else job

        return self.database.look(work)
