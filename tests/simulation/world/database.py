"""The job database of a simulation: SQLite in memory, one connection, each transaction one step that can fail."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool

from celery_lifecycle.errors import DatabaseUnavailable, LockTimeout
from celery_lifecycle.store.database import Conflict, Database, Disconnected, Tx
from celery_lifecycle.tables import make_tables
from tests.simulation.world.calls import Call

PREFIX = "lifecycle_"


class Shared:
    """The one connection that all simulations of this process share, one after the other."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, cached_statements=512
        )
        self.connection.execute("PRAGMA synchronous=OFF")
        self.engine = create_engine("sqlite://", creator=lambda: self.connection, poolclass=StaticPool)
        tables = make_tables(PREFIX)
        tables.metadata.create_all(self.engine)
        self.names = [table.name for table in tables.metadata.sorted_tables]

    def empty(self) -> None:
        execute = self.connection.execute
        if self.connection.in_transaction:
            execute("ROLLBACK")
        execute("BEGIN")
        for name in self.names:
            execute(f"DELETE FROM {name}")
        if execute("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_sequence'").fetchone():
            execute("DELETE FROM sqlite_sequence")
        execute("COMMIT")


_shared: list[Shared] = []


def shared() -> Shared:
    if not _shared:
        _shared.append(Shared())
    return _shared[0]


class HeldTx(Tx):
    """A transaction beside one that was left open: rows that the other holds are waited for in vain, or skipped."""

    held: frozenset[int] = frozenset()

    def row(self, statement: str, params: Any = None) -> Any:
        found = super().row(statement, params)
        if found is not None and statement in (self.sql.lock_object, self.sql.lock_named) and found[0] in self.held:
            raise LockTimeout("simulated: another transaction holds the row")
        return found

    def rows(self, statement: str, params: Any = None) -> Any:
        if statement not in (self.sql.claimable, self.sql.renewable, self.sql.lock_stale):
            return super().rows(statement, params)
        limit = params.get("limit", 1000)
        found = super().rows(statement, {**params, "limit": limit + len(self.held)})
        return [row for row in found if row[0] not in self.held][:limit]


class SimDatabase(Database):
    """The `Database` of one simulated process."""

    simulation: Any = None
    call: Call

    @property
    def engine(self) -> Any:
        return shared().engine

    def back_off(self, attempt: int) -> None:
        """Here nobody is in the way of a transaction: it is one step."""

    def _run(self, reads: bool, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        simulation = self.simulation
        if simulation.world.current is None:
            return super()._run(reads, work, *args, **kwargs)
        call = Call(work, args, kwargs)
        simulation.before_transaction(call.label)
        self.call = call
        result = super()._run(reads, call.run)
        simulation.after_transaction(call)
        return result

    @contextlib.contextmanager
    def transaction(self, reads: bool = False) -> Iterator[Tx]:
        simulation = self.simulation
        connection = shared().connection
        tx: Tx = Tx(connection, self.sql, self.engine.dialect, self.clock)
        if simulation.holds and simulation.world.current is not None:
            tx = HeldTx(connection, self.sql, self.engine.dialect, self.clock)
            tx.held = simulation.held_rows()
        before = connection.total_changes
        tx.run("BEGIN IMMEDIATE")
        try:
            yield tx
            if simulation.world.current is not None and simulation.faults.hits("conflict"):
                raise Conflict("simulated: another transaction got in the way")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        if simulation.world.current is None:
            return
        self.call.wrote = connection.total_changes != before
        simulation.committed(self.call)
        if self.call.wrote:
            cut = simulation.lost_answer()
            if cut is not None:
                simulation.unheard(self.call.label, cut)
                raise Disconnected("simulated: the connection broke at the commit")


def away() -> DatabaseUnavailable:
    return DatabaseUnavailable("simulated: the database is away")


def lost_on_record(instance: str) -> bool:
    """Whether a worker instance counts as lost: it was given up once, and has not been heard of since."""
    found = shared().connection.execute(
        f"SELECT 1 FROM {PREFIX}heartbeats WHERE kind = 'lost' AND key = ?", (instance,)
    )
    return found.fetchone() is not None


def draining_on_record(instance: str) -> bool:
    """Whether the table knows that a worker instance was on its way out."""
    found = (
        shared()
        .connection.execute(f"SELECT data FROM {PREFIX}heartbeats WHERE kind = 'worker' AND key = ?", (instance,))
        .fetchone()
    )
    return found is not None and bool(json.loads(found[0])["draining"])
