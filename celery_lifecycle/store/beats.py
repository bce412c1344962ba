"""What beats keep in the database: their ticks, the database's own id, housekeeping."""

from __future__ import annotations

import json
import secrets
from typing import Any

from celery_lifecycle.breaker import fresh_lines
from celery_lifecycle.config import Config
from celery_lifecycle.errors import SchemaOutdated
from celery_lifecycle.store.database import Database, Tx
from celery_lifecycle.store.rows import object_of
from celery_lifecycle.store.unit import Locked
from celery_lifecycle.store.watch import next_due
from celery_lifecycle.transitions.derive import derive


def _files(tx: Tx) -> list[str]:
    """The files that a connection to SQLite has open."""
    return [str(row[2]) for row in tx.rows("PRAGMA database_list")]


class Beats:
    """What beats of one database share."""

    def __init__(self, database: Database, config: Config) -> None:
        self.database = database
        self.config = config

    def database_id(self) -> str:
        """The id of this database, made with its tables, or by whoever asks first; every message carries it."""

        def look(tx: Tx) -> str | None:
            row = tx.row(tx.sql.get_meta, {"name": "id"})
            return str(row[0]) if row is not None else None

        def make(tx: Tx) -> str:
            tx.run(tx.sql.add_meta, {"name": "id", "value": secrets.token_hex(8)})
            made = look(tx)
            assert made is not None
            return made

        return self.database.look(look) or self.database.run(make)

    def is_home_of(self, tx: Tx, database_id: str) -> bool:
        """Whether a caller's transaction is in this database, whose id is given. Changes nothing.

        True also where that can't be told: in SQLite's memory, and in a snapshot that was taken before there was an id.
        """
        if tx.sql.dialect == "sqlite":
            # To read a table could make the caller's transaction one that can't write any more.
            return bool(set(_files(tx)) & set(self.database.look(_files)))
        try:
            row = tx.row(tx.sql.get_meta, {"name": "id"})
        except SchemaOutdated:
            return False
        return row is None or str(row[0]) == database_id

    def ticked(self, beat: str, data: dict[str, Any]) -> None:
        """Record that a beat has ticked, and the earliest alarm that it then saw.

        When the table of objects is locked later, this is what `lifecycle health` still knows of what is due.
        """

        def work(tx: Tx) -> None:
            due = next_due(tx)
            now = tx.now()
            params = {
                "kind": "beat",
                "key": beat,
                "object": None,
                "job": None,
                "expires_at": now + 86_400_000,
            }
            seen = {**data, "seen": now, "next": due.to_json() if due is not None else None}
            tx.run(tx.sql.put_heartbeat, {**params, "data": json.dumps(seen)})

        self.database.run(work)

    def list(self) -> list[dict[str, Any]]:
        """What is known of beats, with `beat` and `seen` (ms). Changes nothing."""

        def work(tx: Tx) -> list[dict[str, Any]]:
            rows = tx.rows(tx.sql.list_heartbeats, {"kind": "beat"})
            return [{"beat": row[1], **json.loads(row[5])} for row in rows]

        return self.database.look(work)

    def now(self) -> int:
        """The database's time in milliseconds."""
        return self.database.run(lambda tx: tx.now())

    # --- housekeeping

    def forget_old(self, limit: int = 500) -> int:
        """Forget heartbeats whose time is over, and of objects without an alarm old strikes and delays that are over."""

        def work(tx: Tx) -> int:
            now = tx.now()
            for kind in ("worker", "beat", "lost", "line"):
                tx.run(tx.sql.purge_heartbeats, {"kind": kind, "now": now})
            window = round(self.config.strike_window * 1000)
            done = 0
            for row in tx.rows(tx.sql.lock_stale, {"after": 0, "limit": limit, "now": now}):
                before = object_of(row)
                state = before.but(lines=fresh_lines(before.lines, now, window))
                if state.not_before is not None and state.not_before <= now:
                    state = state.but(not_before=None, not_before_count=0)
                if state == before:
                    continue
                held = Locked(tx, state, self.config.chain_length)
                at, agenda, _ = held.agenda()
                held.save(derive(state, agenda, at), agenda)
                done += 1
            return done

        return self.database.run(work)
