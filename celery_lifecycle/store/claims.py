"""What beat does to the table: see what is due, claim it in batches, take back what could not be sent."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from celery_lifecycle.config import Config
from celery_lifecycle.errors import LockTimeout
from celery_lifecycle.model import Brief, ObjectRef, ObjectState, Phase, Shipment
from celery_lifecycle.store.arrays import array
from celery_lifecycle.store.database import Database, Tx
from celery_lifecycle.store.rows import object_of
from celery_lifecycle.store.sql import CLAIMED_COLUMNS
from celery_lifecycle.store.unit import Locked, lock_by_id, lock_by_name, new_token
from celery_lifecycle.transitions import chain
from celery_lifecycle.transitions.derive import SPARE, Agenda

NOTHING = Agenda()


@dataclass(frozen=True, slots=True)
class Heads:
    """The time, and the next alarms of one queue by phase."""

    queue: str
    now: int
    idle: int | None
    sent: int | None
    open: int | None


@dataclass(frozen=True, slots=True)
class Claimed:
    """What one claim brought: chains to send, runs whose worker must be looked into, and how many rows it took."""

    shipments: tuple[Shipment, ...] = ()
    lost: tuple[int, ...] = ()
    rows: int = 0


def _claimed_columns(state: ObjectState) -> tuple[int | str | None, ...]:
    """The values of `CLAIMED_COLUMNS`."""
    return (
        state.id, state.queue, state.wake_at, int(state.phase), state.dispatch, state.sent_until, state.sent_count,
        state.lease_until,
    )  # fmt: skip


def queues_in(tx: Tx) -> list[str]:
    """The queues that have an alarm, in order."""
    found: list[str] = []
    row = tx.row(tx.sql.next_queue, {"queue": ""})
    while row is not None and row[0] is not None:
        found.append(row[0])
        row = tx.row(tx.sql.next_queue, {"queue": row[0]})
    return found


class Claims:
    """Claims over one database. Every verb is one short transaction."""

    def __init__(self, database: Database, config: Config) -> None:
        self.database = database
        self.config = config

    def heads(self) -> list[Heads]:
        """The next alarms of every queue that has one, in the order of their names. Changes nothing."""
        return self.database.look(self._heads)

    def _heads(self, tx: Tx) -> list[Heads]:
        found: list[Heads] = []
        behind: str | None = ""
        while behind is not None:
            row = tx.row(tx.sql.queue_heads, {"queue": behind})
            behind = None
            if row is not None and row[1] is not None:
                found.append(Heads(row[1], tx.now_of(row[0]), *row[2:5]))
                behind = row[1] if row[5] is not None else None
        return found

    def count_sent(self, queue: str) -> int:
        """How many chains of a queue are on their way, counted up to the dispatch window. Changes nothing."""

        def work(tx: Tx) -> int:
            row = tx.row(tx.sql.count_sent, {"queue": queue, "limit": self.config.dispatch_window})
            assert row is not None
            return int(row[0])

        return self.database.look(work)

    def claim(self, queue: str, phase: Phase, limit: int) -> Claimed:
        """Claim what is due in a queue, earliest first.

        Guard: `wake_at <= now`; rows locked by others are skipped, so two beats claim different objects. The chains that
        come back are on record as sent before they are: a crash now costs each of them one patience.
        """
        return self.database.run(self._claim, queue, phase, limit)

    def _claim(self, tx: Tx, queue: str, phase: Phase, limit: int) -> Claimed:
        params = {"queue": queue, "phase": int(phase), "now": tx.now(), "limit": limit}
        states = [object_of(row) for row in tx.rows(tx.sql.claimable, params)]
        if not states:
            return Claimed()
        now, agendas = self._agendas(tx, [state.id for state in states])
        shipments: list[Shipment] = []
        lost: list[int] = []
        many: list[ObjectState] = []
        for state in states:
            agenda = agendas.get(state.id, NOTHING)
            claim = chain.claim(state, agenda, now, self.config, new_token())
            if claim.lost:
                lost.append(state.id)
                continue
            if claim.shipment is not None:
                shipments.append(claim.shipment)
            if claim.shipment is not None or claim.state.token is not None:
                many.append(claim.state)
            else:
                Locked(tx, state, self.config.chain_length).save(claim.state, agenda)
        self._save(tx, many)
        return Claimed(tuple(shipments), tuple(lost), len(states))

    def _agendas(self, tx: Tx, ids: list[int]) -> tuple[int, dict[int, Agenda]]:
        rows = tx.rows(tx.sql.agendas, {"ids": tx.sql.ids(ids), "length": self.config.chain_length + SPARE})
        by_object: dict[int, list[Brief]] = defaultdict(list)
        for row in rows:
            if row[1] is not None:
                by_object[row[1]].append(Brief(*row[2:]))
        agendas = {key: Agenda.of(briefs) for key, briefs in by_object.items()}
        return tx.now_of(rows[0][0]), agendas

    def _save(self, tx: Tx, states: list[ObjectState]) -> None:
        if not states:
            return
        if tx.sql.takes_arrays:
            columns = zip(*map(_claimed_columns, states), strict=True)
            tx.run(tx.sql.update_claimed, dict(zip(CLAIMED_COLUMNS, map(array, columns), strict=True)))
        else:
            rows = [dict(zip(CLAIMED_COLUMNS, _claimed_columns(state), strict=True)) for state in states]
            tx.run_many(tx.sql.update_claimed, rows)

    def claim_one(self, tx: Tx, ref: ObjectRef, waits: bool = True) -> Shipment | None:
        """Inside a pusher's transaction: claim one object whose jobs are due, if it has no open run and no chain on its way.

        `waits`: if not, a row that somebody else holds is left alone.
        """
        held = lock_by_name(tx, ref, self.config.chain_length, waits)
        if held is None or held.state.phase is not Phase.IDLE:
            return None
        now, agenda, _ = held.agenda()
        claim = chain.dispatch(held.state, agenda, now, self.config, new_token())
        if claim.shipment is not None:
            held.save(claim.state, agenda)
        return claim.shipment

    def claim_named(self, ref: ObjectRef) -> Shipment | None:
        """`claim_one` in a transaction of its own."""
        return self.database.run(self.claim_one, ref)

    def claim_several(self, refs: Sequence[ObjectRef], seconds: float) -> list[Shipment]:
        """`claim_one` for several objects in one transaction. It waits for no row that others hold, so their order is free.

        Those that are not reached within the time are left to beat.
        """

        def work(tx: Tx) -> list[Shipment]:
            until = time.monotonic() + seconds
            claimed = (self.claim_one(tx, ref, waits=False) for ref in refs if time.monotonic() < until)
            return [shipment for shipment in claimed if shipment is not None]

        return self.database.run(work)

    def release(self, shipments: list[Shipment], back_off_ms: int) -> int:
        """Take back chains that could not be sent, so that they are sent again after the back-off.

        Guard: the row still carries this dispatch (or, for a revived run, this token at this step). Returns how many.
        """
        done = 0
        for shipment in sorted(shipments, key=lambda one: one.object_id):
            try:
                done += self.database.run(self._release, shipment, back_off_ms)
            except LockTimeout:
                continue  # a caller holds the row: it costs this chain one patience, and the others nothing
        return done

    def _release(self, tx: Tx, shipment: Shipment, back_off_ms: int) -> int:
        held = lock_by_id(tx, shipment.object_id, self.config.chain_length)
        if held is None:
            return 0
        now, agenda, _ = held.agenda()
        released = chain.release(held.state, agenda, shipment, now, back_off_ms)
        if released is None:
            return 0
        held.save(released, agenda)
        return 1
