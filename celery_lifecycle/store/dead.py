"""Dead jobs: kept for people to look at, to replay, to purge."""

from __future__ import annotations

import json

from celery_lifecycle import breaker
from celery_lifecycle.config import Config
from celery_lifecycle.errors import ObjectDisabled
from celery_lifecycle.model import ALARM, DeadJob, Job, ObjectRef
from celery_lifecycle.store import lines
from celery_lifecycle.store.database import Database, Tx
from celery_lifecycle.store.rows import dead_of
from celery_lifecycle.store.unit import lock_by_name, lock_or_make, with_job
from celery_lifecycle.transitions import recurrence
from celery_lifecycle.transitions.derive import derive


class DeadJobs:
    """Dead jobs of one database."""

    def __init__(self, database: Database, config: Config) -> None:
        self.database = database
        self.config = config

    def list(self, ref: ObjectRef | None = None, after: int = 0, limit: int = 100) -> list[DeadJob]:
        """Dead jobs (of one object, or of all) in the order in which they died, from behind `after`. Changes nothing."""

        def work(tx: Tx) -> list[DeadJob]:
            params: dict[str, object] = {"after": after, "limit": limit}
            if ref is None:
                return [dead_of(row) for row in tx.rows(tx.sql.list_dead, params)]
            params = {**params, "kind": ref.kind, "name": ref.name}
            return [dead_of(row) for row in tx.rows(tx.sql.dead_of, params)]

        return self.database.look(work)

    def replay(self, key: int) -> Job | None:
        """Push a dead job again, due now, with nothing counted; it lifts a seal. None: no such dead job.

        A pending job that has its id by now stays, and the dead one is replayed under a new id; a bare alarm is set anew.
        A time at which it was to expire is forgotten.

        Raises:
            ObjectDisabled: alarms of the object were disabled for good.
        """

        def work(tx: Tx) -> Job | None:
            row = tx.row(tx.sql.find_dead, {"id": key})
            if row is None:
                return None
            # The object's row first, as everywhere; then whether the dead job is still there.
            held = lock_or_make(tx, dead_of(row).job.object, self.config.chain_length)
            row = tx.row(tx.sql.lock_dead, {"id": key})
            if row is None:
                held.save(held.state, held.agenda()[1])
                return None
            old = dead_of(row).job
            if held.state.disabled:
                raise ObjectDisabled(f"Alarms of {old.object} were disabled for good: nothing of it can be replayed.")
            now, agenda, existing = held.agenda(old.id)
            existing = None if old.id == ALARM else existing
            version = held.state.versions + 1
            job = old._replace(
                id=old.id if existing is None else _replayed_id(old.id, key), version=version, line=old.id,
                due_ms=now, not_before_ms=None, attempt=0, strikes=0, suspect_on=None, unknown_since_ms=None,
                sealed=False, schedule_json=(old if existing is None else recurrence.occurrence(old)).schedule_json,
                options_json=_without_end(old),
            )  # fmt: skip
            held.put_job(job)
            tx.run(tx.sql.delete_dead, {"id": key})
            lines.lift(tx, old)
            state = held.state.but(versions=version, sealed=self._still_sealed(tx, old.object))
            if existing is None:
                state = state.but(lines=breaker.cleared(state.lines, old.line, old.id))
            agenda = with_job(agenda, job)
            held.save(derive(state, agenda, now), agenda)
            return job

        return self.database.run(work)

    def purge(self, key: int) -> bool:
        """Forget a dead job; that of a sealed one lifts its seal. False: no such dead job."""

        def work(tx: Tx) -> bool:
            row = tx.row(tx.sql.find_dead, {"id": key})
            return row is not None and self._forget(tx, dead_of(row))

        return self.database.run(work)

    def purge_old(self, limit: int = 500) -> int:
        """Forget what is older than `lifecycle_dead_job_retention`. Returns how many."""

        def work(tx: Tx) -> int:
            before = tx.now() - round(self.config.dead_job_retention * 1000)
            old = [dead_of(row) for row in tx.rows(tx.sql.old_dead, {"before": before, "limit": limit})]
            in_order = sorted(old, key=lambda one: (one.job.object.kind, one.job.object.name))
            return sum([self._forget(tx, dead) for dead in in_order])

        return self.database.run(work)

    def _forget(self, tx: Tx, dead: DeadJob) -> bool:
        """Forget a dead job; its object's row is locked before the others. False: somebody else was first."""
        held = lock_by_name(tx, dead.job.object, self.config.chain_length) if dead.reason == "sealed" else None
        if tx.run(tx.sql.delete_dead, {"id": dead.key}) == 0:
            return False
        if dead.reason != "sealed":
            return True
        lines.lift(tx, dead.job)
        if held is not None:
            now, agenda, _ = held.agenda()
            state = held.state.but(sealed=self._still_sealed(tx, dead.job.object))
            held.save(derive(state, agenda, now), agenda)
        return True

    def _still_sealed(self, tx: Tx, ref: ObjectRef) -> bool:
        return tx.row(tx.sql.sealed_dead, {"kind": ref.kind, "name": ref.name}) is not None

    def count(self) -> dict[str, int]:
        """How many dead jobs there are of each reason. Changes nothing."""
        return self.database.look(lambda tx: {reason: int(count) for reason, count in tx.rows(tx.sql.count_dead)})


def _replayed_id(job_id: str, key: int) -> str:
    """A new id made of an old one, of at most 200 bytes like any other."""
    suffix = f"-replay-{key}"
    return job_id.encode()[: 200 - len(suffix)].decode(errors="ignore") + suffix


def _without_end(job: Job) -> str | None:
    options = {key: value for key, value in job.options.items() if key != "expires_ms"}
    return json.dumps(options, ensure_ascii=False, separators=(",", ":")) if options else None
