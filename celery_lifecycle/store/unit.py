"""The unit of work on one object: lock its row, read, decide by a pure function, write."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_lifecycle.errors import LifecycleError, LockTimeout
from celery_lifecycle.model import Job, ObjectRef, ObjectState, Why
from celery_lifecycle.store.database import Row, Tx
from celery_lifecycle.store.rows import (
    brief_from,
    brief_of,
    dead_job_json,
    job_of,
    job_params,
    object_of,
    object_params,
    storable,
)
from celery_lifecycle.transitions import recurrence
from celery_lifecycle.transitions.derive import SPARE, Agenda, is_forgettable


def new_token() -> str:
    """96 random bits, as 24 hexadecimal digits."""
    return secrets.token_hex(12)


class LostUpdate(LifecycleError):
    """A row that this transaction had locked was not there to be written. This is a bug: please report it."""


@dataclass(slots=True)
class Locked:
    """An object whose row this transaction holds.

    `agenda` and the named job are read with the time, in one statement after the lock was granted.
    """

    tx: Tx
    state: ObjectState
    length: int
    fresh: bool = False

    @property
    def ref(self) -> ObjectRef:
        return self.state.ref

    def now(self) -> int:
        return self.tx.now()

    def job(self, job_id: str) -> tuple[int, Job | None]:
        """The time, and one job."""
        row = self.tx.row(self.tx.sql.job_now, {"object": self.state.id, "job": job_id})
        assert row is not None
        return self.tx.now_of(row[0]), job_of(self.ref, row[1:]) if row[1] is not None else None

    def agenda(self, job_id: str = "") -> tuple[int, Agenda, Job | None]:
        """The time, what the protocol must know of the object's jobs, and one job as a whole."""
        if self.tx.foreign and self.tx.sql.dialect == "mysql":
            return self._locked_agenda(job_id)
        params = {"object": self.state.id, "length": self.length + SPARE, "job": job_id}
        rows = self.tx.rows(self.tx.sql.agenda, params)
        return (*agenda_of(self.tx, rows), self._named(rows, job_id))

    def _locked_agenda(self, job_id: str) -> tuple[int, Agenda, Job | None]:
        """Inside a caller's transaction MySQL shows an old snapshot to all but locking reads.

        They lock the gap behind the last job too, in which others insert; so there is none where there can be no job.
        """
        if self.state.versions == 0:
            return self.now(), Agenda(), None
        rows = self.tx.rows(self.tx.sql.locked_agenda, {"object": self.state.id})
        now = self.tx.now_of(rows[0][0]) if rows else self.now()
        return now, Agenda.of(brief_of(row[2], row[3:]) for row in rows), self._named(rows, job_id)

    def _named(self, rows: Sequence[Row], job_id: str) -> Job | None:
        return next((job_of(self.ref, row[3:]) for row in rows if row[3] == job_id), None) if job_id else None

    def save(self, state: ObjectState, agenda: Agenda | None) -> None:
        """Write the object's row; remove it if it has nothing to remember. `agenda` is how its jobs are *after* this."""
        if agenda is not None and is_forgettable(state, agenda):
            done = self.tx.run(self.tx.sql.delete_object, {"id": state.id})
        else:
            done = self.tx.run(self.tx.sql.update_object, object_params(state))
        self._looked_at(done)

    def save_with_job(self, state: ObjectState, agenda: Agenda | None, statement: str, job: Job) -> None:
        """Write one job and the object's row, together where the database can."""
        params = {**job_params(state.id, job), **object_params(state)}
        forgettable = agenda is not None and is_forgettable(state, agenda)
        second = self.tx.sql.delete_object if forgettable else self.tx.sql.update_object
        self._looked_at(self.tx.run_together(statement, second, params))

    def _looked_at(self, done: int) -> None:
        if done != 1:
            raise LostUpdate(f"The row of {self.ref} was not there to be written (object id {self.state.id}).")

    def write_job(self, job: Job) -> None:
        self.tx.run(self.tx.sql.update_job, job_params(self.state.id, job))

    def rewrite_job(self, before: Job, after: Job) -> None:
        """Write what has become of a job, if anything has."""
        if after != before:
            self.write_job(after)

    def put_job(self, job: Job) -> None:
        self.tx.run(self.tx.sql.put_job, job_params(self.state.id, job))

    def remove_job(self, job_id: str) -> int:
        return self.tx.run(self.tx.sql.delete_job, {"j_object_id": self.state.id, "j_id": job_id})

    def bury(
        self,
        job: Job,
        why: Why,
        now: int,
        error: str | None = None,
        traceback: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        """Keep a dead job for people to look at."""
        self.tx.run(
            self.tx.sql.add_dead,
            {
                "kind": self.state.kind,
                "name": self.state.name,
                "job_id": job.id,
                "reason": why.value,
                "job": dead_job_json(job),
                "error": storable(error),
                "traceback": storable(traceback),
                "details": json.dumps(details or {}, default=str),
                "died_at": now,
            },
        )

    def record_misfire(self, job: Job, now: int, dropped: dict[str, Any]) -> None:
        """Keep what the misfire rule of a pending schedule drops: one dead job per schedule, which counts up."""
        params = {"kind": self.state.kind, "name": self.state.name, "job": job.id}
        row = self.tx.row(self.tx.sql.misfire_of, params)
        if row is None:
            self.bury(recurrence.occurrence(job, dropped), Why.MISFIRED, now, details=dropped)
            return
        details = recurrence.dropped_so_far(json.loads(row[1]), dropped)
        told = json.dumps(details, ensure_ascii=False)
        self.tx.run(self.tx.sql.update_misfire, {"id": row[0], "details": told, "died_at": now})


def agenda_of(tx: Tx, rows: Sequence[Row]) -> tuple[int, Agenda]:
    """The time and the agenda of one object from the rows of the agenda statement."""
    return tx.now_of(rows[0][0]), Agenda.of(brief_of(row[2], row[3:]) for row in rows if row[3] is not None)


def without(agenda: Agenda, job_id: str) -> Agenda:
    return Agenda(tuple(job for job in agenda.jobs if job.id != job_id))


def with_job(agenda: Agenda, job: Job) -> Agenda:
    return Agenda.of((*without(agenda, job.id).jobs, brief_from(job)))


def lock_by_id(tx: Tx, object_id: int, length: int) -> Locked | None:
    """Lock an object's row; None if it is gone."""
    try:
        row = tx.row(tx.sql.lock_object, {"object": object_id})
    except LockTimeout as error:
        raise _held(f"object id {object_id}") from error
    return Locked(tx, object_of(row), length) if row is not None else None


def lock_by_name(tx: Tx, ref: ObjectRef, length: int, waits: bool = True) -> Locked | None:
    """Lock the row of a named object; None if there is none, or, unless it `waits`, if somebody else holds it."""
    statement = tx.sql.lock_named if waits else tx.sql.lock_named_if_free
    try:
        row = tx.row(statement, {"kind": ref.kind, "name": ref.name})
    except LockTimeout as error:
        raise _held(str(ref)) from error
    return Locked(tx, object_of(row), length) if row is not None else None


def lock_or_make(tx: Tx, ref: ObjectRef, length: int) -> Locked:
    """Lock the row of a named object, made if absent: insert and lock are repeated until the row is held."""
    if tx.sql.dialect == "mysql":
        return _mysql_lock_or_make(tx, ref, length)
    names = {"kind": ref.kind, "name": ref.name}
    # A write first in a caller's transaction of SQLite, which can't upgrade a read lock that somebody else has outrun.
    insert_first = tx.foreign and tx.sql.dialect == "sqlite"
    while True:
        if not insert_first:
            held = lock_by_name(tx, ref, length)
            if held is not None:
                return held
        insert_first = False
        try:
            made = tx.row(tx.sql.insert_object, names)
            if made is not None:
                return Locked(tx, ObjectState(int(made[0]), ref.kind, ref.name), length, fresh=True)
        except LockTimeout as error:
            raise _held(str(ref)) from error


def _mysql_lock_or_make(tx: Tx, ref: ObjectRef, length: int) -> Locked:
    """A read by name locks the gap before the row too, in which others insert, and two of them deadlock; one by id does not.

    So rows are locked by id: that of the row made, of the one that is there, or, in a caller's transaction, of the one that
    its snapshot shows.
    """
    names = {"kind": ref.kind, "name": ref.name}
    seen = tx.row(tx.sql.find_named, names) if tx.foreign else None
    try:
        while True:
            if seen is None:
                tx.run(tx.sql.insert_object, names)
            row = tx.row(tx.sql.lock_object, {"object": tx.last_id if seen is None else seen[0]})
            if row is not None:
                return Locked(tx, object_of(row), length)
            seen = None
    except LockTimeout as error:
        raise _held(str(ref)) from error


def lock_or_add_heartbeat(tx: Tx, params: Mapping[str, Any]) -> Row:
    """A row beside the objects, locked: made if absent, and again if somebody took the old one away before it was locked."""
    row = None
    while row is None:
        tx.run(tx.sql.add_heartbeat, params)
        row = tx.row(tx.sql.lock_heartbeat, params)
    return row


def _held(what: str) -> LockTimeout:
    return LockTimeout(
        f"The row of {what} stayed locked for longer than lifecycle_lock_timeout. Probably a transaction that pushed to "
        "it was left open: commit or roll it back, and keep transactions that push short."
    )
