"""What anyone may do to an object as a whole: pause, resume, disable, destroy; its storage; its keep-alives."""

from __future__ import annotations

import json
from collections.abc import Callable

from celery_lifecycle.breaker import protocol_job
from celery_lifecycle.config import Config
from celery_lifecycle.errors import ObjectDisabled, ScheduleInvalid
from celery_lifecycle.model import ALARM, Job, ObjectRef, ObjectState, Why
from celery_lifecycle.store import lines
from celery_lifecycle.store.database import Database, Tx
from celery_lifecycle.store.rows import job_of, object_of
from celery_lifecycle.store.unit import Locked, lock_by_name, lock_or_make, with_job
from celery_lifecycle.transitions import chain, recurrence
from celery_lifecycle.transitions.derive import Agenda, derive


class Objects:
    """Objects of one database. Every verb is one short transaction."""

    def __init__(self, database: Database, config: Config) -> None:
        self.database = database
        self.config = config

    def find(self, ref: ObjectRef) -> ObjectState | None:
        """The object's row as it stands, or None. Changes nothing."""

        def work(tx: Tx) -> ObjectState | None:
            row = tx.row(tx.sql.find_named, {"kind": ref.kind, "name": ref.name})
            return object_of(row) if row is not None else None

        return self.database.look(work)

    def find_many(self, kind: str | None = None, after: int = 0, limit: int = 100) -> list[ObjectState]:
        """Objects in the order of their ids, from behind `after`. Changes nothing."""

        def work(tx: Tx) -> list[ObjectState]:
            params = {"kind": kind, "after": after, "limit": limit}
            return [object_of(row) for row in tx.rows(tx.sql.list_objects, params)]

        return self.database.look(work)

    def change(self, ref: ObjectRef, change: Callable[[ObjectState], ObjectState], make: bool = False) -> bool:
        """Apply a pure change of an object's switches and derive its alarm. False if there is no such object."""

        def work(tx: Tx) -> bool:
            held = (
                lock_or_make(tx, ref, self.config.chain_length)
                if make
                else lock_by_name(tx, ref, self.config.chain_length)
            )
            if held is None:
                return False
            now, agenda, _ = held.agenda()
            state = derive(change(held.state), agenda, now)
            held.save(state, agenda)
            return True

        return self.database.run(work)

    def pause(self, ref: ObjectRef, reason: str) -> None:
        """Stop new runs until `resume`; an open run goes on to its end. A sealed object stays sealed."""
        self.change(ref, lambda state: state.but(paused=state.paused or reason), make=True)

    def resume(self, ref: ObjectRef) -> bool:
        """Let runs begin again. What a breaker left is cleared: strikes, suspicion, delays, seals. False if no such object."""

        def work(tx: Tx) -> bool:
            held = lock_by_name(tx, ref, self.config.chain_length)
            if held is None:
                return False
            state = held.state
            for row in tx.rows(tx.sql.every_job_of, {"object": state.id}):  # the protocol's own can be suspects too
                job = job_of(ref, row)
                cleared = job._replace(strikes=0, suspect_on=None, not_before_ms=None)
                held.rewrite_job(job, cleared)
            if state.sealed:
                lines.lift_all(tx, ref)
            state = state.but(lines=None, not_before=None, not_before_count=0, sealed=False)
            state = self._without_missed(held, state.but(paused=None))
            now, agenda, _ = held.agenda()
            held.save(derive(state, agenda, now), agenda)
            return True

        return self.database.run(work)

    def _without_missed(self, held: Locked, state: ObjectState) -> ObjectState:
        """Move on schedules whose missed times are not to be run, so that the object does not wake for nothing."""
        now = held.now()
        params = {"object": state.id, "now": now}
        for row in held.tx.rows(held.tx.sql.overdue_schedules, params):
            job = job_of(held.ref, row)
            try:
                waking = recurrence.wake(job, now)
            except ScheduleInvalid:  # its time zone is unknown here: the worker that is to run it decides
                continue
            if waking.runs or (state.in_flight is not None and state.in_flight.job == job.id):
                continue
            if waking.over:
                held.bury(job, Why.MISFIRED, now, details=waking.dropped)
                held.remove_job(job.id)
                continue
            if waking.dropped:
                held.record_misfire(job, now, waking.dropped)
            state = state.but(versions=state.versions + 1)
            held.write_job(waking.job._replace(version=state.versions, unknown_since_ms=None))
        return state

    def disable(self, ref: ObjectRef) -> None:
        """Disable alarms for good: nothing wakes the object any more, and a push raises."""
        self.change(ref, lambda state: state.but(disabled=True), make=True)

    def destroy(self, ref: ObjectRef) -> bool:
        """Delete jobs, storage, keep-alives, switches and strikes. A link in flight keeps the row; its end removes it."""

        def work(tx: Tx) -> bool:
            held = lock_by_name(tx, ref, self.config.chain_length)
            if held is None:
                return False
            state, params = held.state, {"object": held.state.id}
            tx.run(tx.sql.delete_jobs, params)
            tx.run(tx.sql.delete_values, params)
            tx.run(tx.sql.delete_heartbeats, params)
            if state.sealed:
                lines.lift_all(tx, ref)
            held.save(derive(chain.destroyed(state), Agenda(), held.now()), Agenda())
            return True

        return self.database.run(work)

    # --- the bare alarm

    def set_alarm(self, ref: ObjectRef, task: str, queue: str, at_ms: int | None, delay_ms: int) -> Job:
        """Set the bare alarm, in place of the one that stands.

        Raises:
            ObjectDisabled: alarms of the object were disabled for good.
        """

        def work(tx: Tx) -> Job:
            held = lock_or_make(tx, ref, self.config.chain_length)
            if held.state.disabled:
                raise ObjectDisabled(f"Alarms of {ref} were disabled for good: none can be set.")
            now, agenda, existing = held.agenda(ALARM)
            due = now + delay_ms if at_ms is None else at_ms
            version = held.state.versions + 1
            payload = json.dumps({"for": due})
            job = protocol_job(held.state, ALARM, version, task, queue, payload, due)
            if existing is not None:
                job = job._replace(suspect_on=existing.suspect_on)
            held.put_job(job)
            agenda = with_job(agenda, job)
            held.save(derive(held.state.but(versions=version), agenda, now), agenda)
            return job

        return self.database.run(work)

    # --- storage

    def get_value(self, ref: ObjectRef, key: str) -> str | None:
        def work(tx: Tx) -> str | None:
            row = tx.row(tx.sql.find_named, {"kind": ref.kind, "name": ref.name})
            found = tx.row(tx.sql.get_value, {"object": row[0], "key": key}) if row is not None else None
            return found[0] if found is not None else None

        return self.database.run(work)

    def list_values(self, ref: ObjectRef, prefix: str) -> list[tuple[str, str]]:
        def work(tx: Tx) -> list[tuple[str, str]]:
            row = tx.row(tx.sql.find_named, {"kind": ref.kind, "name": ref.name})
            if row is None:
                return []
            rows = tx.rows(tx.sql.list_values, {"object": row[0], "prefix": prefix})
            return [(key, value) for key, value in rows if key.startswith(prefix)]

        return self.database.run(work)

    def put_values(self, ref: ObjectRef, values: dict[str, str | None]) -> None:
        """Write values (None deletes) at once, in a transaction of their own."""

        def work(tx: Tx) -> None:
            writes = any(value is not None for value in values.values())
            held = (
                lock_or_make(tx, ref, self.config.chain_length)
                if writes
                else lock_by_name(tx, ref, self.config.chain_length)
            )
            if held is None:
                return
            object_id = held.state.id
            for key, value in sorted(values.items()):
                if value is None:
                    tx.run(tx.sql.delete_value, {"object": object_id, "key": key})
                else:
                    tx.run(tx.sql.put_value, {"object": object_id, "key": key, "value": value})
            stored = writes or tx.row(tx.sql.any_value, {"object": object_id}) is not None
            now, agenda, _ = held.agenda()
            held.save(derive(held.state.but(stored=stored), agenda, now), agenda)

        self.database.run(work)
