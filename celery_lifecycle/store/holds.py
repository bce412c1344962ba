"""What keeps an object: keep-alives and tracked work, rows of a holder that must be renewed, and what their loss comes to."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from celery_lifecycle.breaker import protocol_job
from celery_lifecycle.config import Config
from celery_lifecycle.model import ALIVE, Cause, InFlight, Job, MemoryLimitContext, ObjectRef, ObjectState
from celery_lifecycle.store.database import Database, Tx
from celery_lifecycle.store.ends import struck_by, was_draining
from celery_lifecycle.store.unit import Locked, lock_by_name, lock_or_add_heartbeat, lock_or_make, with_job
from celery_lifecycle.transitions.derive import Agenda, derive


@dataclass(frozen=True, slots=True)
class Hold:
    """A keep-alive (`alive`) or tracked work (`track`) of an object.

    Attributes:
        key: a random one, or the task id of a tracked task.
        job: the job that handed tracked work off.
        expires_ms: when it counts as lost, unless it is renewed.
    """

    kind: str
    key: str
    job: str | None
    expires_ms: int
    data: dict[str, Any]

    @property
    def ref(self) -> ObjectRef:
        return ObjectRef(self.data["kind"], self.data["name"])


@dataclass(frozen=True, slots=True)
class Lost:
    """What the loss of a hold came to: the object wakes, and with `context` it was a strike of `job`."""

    ref: ObjectRef
    kind: str
    job: str | None
    context: MemoryLimitContext | None = None
    dead: tuple[Job, ...] = ()


class Holds:
    """Keep-alives and tracked work over one database. Every verb is one short transaction."""

    def __init__(self, database: Database, config: Config) -> None:
        self.database = database
        self.config = config

    def hold(
        self, ref: ObjectRef, kind: str, key: str, job: str | None, data: dict[str, Any], lasts_ms: int,
        by_object: bool = False,
    ) -> str:  # fmt: skip
        """Keep the object. For tracked work what is in flight is remembered with it: whom a death of it strikes.

        Args:
            by_object: other objects may hold under the same key; each has a row of its own then.

        Returns:
            The key of the row.
        """

        def work(tx: Tx) -> str:
            held = lock_or_make(tx, ref, self.config.chain_length)
            now, agenda, _ = held.agenda()
            state = held.state
            flight = state.in_flight if state.in_flight is not None and state.in_flight.job == job else None
            known = {"kind": ref.kind, "name": ref.name, "flight": flight.to_json() if flight else None, **data}
            values = {
                "kind": kind, "object": state.id, "job": job, "expires_at": now + lasts_ms, "data": json.dumps(known),
            }  # fmt: skip
            under, is_new = _put(tx, key, by_object, values)
            held.save(derive(state.but(holds=state.holds + is_new), agenda, now), agenda)
            return under

        return self.database.run(work)

    def extend(self, kind: str, key: str, lasts_ms: int) -> bool:
        """Renew a hold. False: it is gone."""

        def work(tx: Tx) -> bool:
            return tx.run(tx.sql.extend_heartbeat, {"kind": kind, "key": key, "expires_at": tx.now() + lasts_ms}) > 0

        return self.database.run(work)

    def run_by(self, task_id: str, worker: str | None, lasts_ms: int) -> bool:
        """A tracked task is run by this worker instance from now on (None: it waits for one). False: it is not tracked."""

        def work(tx: Tx) -> bool:
            row = tx.row(tx.sql.lock_heartbeat, {"kind": "track", "key": task_id})
            if row is None:
                return False
            data = json.dumps({**json.loads(row[5]), "worker": worker})
            params = {"kind": "track", "key": task_id, "expires_at": tx.now() + lasts_ms, "data": data}
            return tx.run(tx.sql.update_heartbeat, params) > 0

        return self.database.run(work)

    def let_go(self, ref: ObjectRef, kind: str, key: str) -> bool:
        """Give a hold back, once. Returns whether it was there."""

        def work(tx: Tx) -> bool:
            held = lock_by_name(tx, ref, self.config.chain_length)
            if tx.run(tx.sql.delete_heartbeat, {"kind": kind, "key": key}) == 0 or held is None:
                return False
            now, agenda, _ = held.agenda()
            held.save(derive(_one_less(held.state), agenda, now), agenda)
            return True

        return self.database.run(work)

    def let_go_by_key(self, kind: str, key: str) -> bool:
        """The same, for one who knows no more than its key."""
        row = self.database.run(lambda tx: tx.row(tx.sql.get_heartbeat, {"kind": kind, "key": key}))
        return row is not None and self.let_go(_hold_of(row).ref, kind, key)

    def lost(
        self, kind: str, key: str, cause: Cause | None = None, details: dict[str, Any] | None = None,
        expires_ms: int | None = None,
    ) -> Lost | None:  # fmt: skip
        """The holder is gone: `#alive` is pushed, due now, so that the object wakes.

        With a cause, tracked work strikes the job that handed it off, without any end of a run: one death, one strike. Of
        cause `lost` only if a worker that was not draining ran it.

        Guard: the row is there (and still expires at `expires_ms`: it was not renewed); else None.
        """
        return self.database.run(self._lost, kind, key, cause, details or {}, expires_ms)

    def _lost(
        self, tx: Tx, kind: str, key: str, cause: Cause | None, details: dict[str, Any], expires_ms: int | None
    ) -> Lost | None:
        row = tx.row(tx.sql.get_heartbeat, {"kind": kind, "key": key})
        if row is None:
            return None
        hold = _hold_of(row)
        held = lock_by_name(tx, hold.ref, self.config.chain_length)
        if expires_ms is None:
            gone = tx.run(tx.sql.delete_heartbeat, {"kind": kind, "key": key})
        else:
            gone = tx.run(tx.sql.delete_expired, {"kind": kind, "key": key, "expires_at": expires_ms})
        if gone == 0 or held is None:
            return None
        flight = self._strikes(tx, hold, cause)
        state = _one_less(held.state)
        context: MemoryLimitContext | None = None
        dead: tuple[Job, ...] = ()
        if flight is not None and cause is not None:
            spread = random.uniform(1, 3) if cause is Cause.LOST else 1.0
            held.state = state
            told = {"tracked": key, **details}
            struck, state = struck_by(held, flight, cause, told, self.config, spread=spread)
            context, dead = struck.context, struck.seal
        now, agenda, _ = held.agenda()
        state, agenda = self._woken(held, state, agenda, now, hold.data.get("wake"))
        held.save(derive(state, agenda, now), agenda)
        return Lost(hold.ref, kind, hold.job, context, dead)

    def _strikes(self, tx: Tx, hold: Hold, cause: Cause | None) -> InFlight | None:
        worker = hold.data.get("worker")
        if cause is None or (cause is Cause.LOST and (worker is None or was_draining(tx, worker))):
            return None
        return InFlight.from_json(hold.data.get("flight"))

    def _woken(
        self, held: Locked, state: ObjectState, agenda: Agenda, now: int, wake: list[str] | None
    ) -> tuple[ObjectState, Agenda]:
        if wake is None or state.disabled:
            return state, agenda
        version = state.versions + 1
        job = protocol_job(state, ALIVE, version, wake[0], wake[1], "null", now)
        held.put_job(job)
        return state.but(versions=version), with_job(agenda, job)

    def of(self, ref: ObjectRef) -> list[Hold]:
        """What keeps one object. Changes nothing."""

        def work(tx: Tx) -> list[Hold]:
            row = tx.row(tx.sql.find_named, {"kind": ref.kind, "name": ref.name})
            rows = tx.rows(tx.sql.heartbeats_of, {"object": row[0]}) if row is not None else []
            return [_hold_of(found) for found in rows]

        return self.database.look(work)

    def expired(self, before_ms: int | None = None, limit: int = 100) -> list[Hold]:
        """What expired before a time (None: before now), of each kind the longest expired first. Changes nothing."""

        def work(tx: Tx) -> list[Hold]:
            now = tx.now() if before_ms is None else before_ms
            return [
                _hold_of(row)
                for kind in ("alive", "track")
                for row in tx.rows(tx.sql.expired_heartbeats, {"kind": kind, "now": now, "limit": limit})
            ]

        return self.database.look(work)


def _put(tx: Tx, key: str, by_object: bool, values: dict[str, Any]) -> tuple[str, bool]:
    """Write an object's row, under a key of its own if another object has this one. The key, and whether it had no such row.

    The object is locked, so a row of its own comes and goes with nobody else; one of another object may come at any time.
    """
    mine, params = values["object"], {**values, "key": key}
    row = tx.row(tx.sql.get_heartbeat, params)
    is_new = row is None or row[2] != mine
    if is_new and not by_object:
        row = lock_or_add_heartbeat(tx, params)
    if row is None or row[2] != mine:
        params["key"] = f"{key}@{mine}"
        is_new = tx.row(tx.sql.get_heartbeat, params) is None
    tx.run(tx.sql.put_heartbeat, params)
    return params["key"], is_new


def _hold_of(row: Any) -> Hold:
    kind, key, _, job, expires, data = row
    return Hold(kind, key, job, int(expires), json.loads(data))


def _one_less(state: ObjectState) -> ObjectState:
    return state.but(holds=max(state.holds - 1, 0))
