"""Who waits for a lock: asked of the server, or, with SQLite, seen in the process that waits.

Nothing here takes a statement that is slow for one that waits.
"""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from tests.support.databases import Database
from tests.support.protocol import Table

#: How long a `BEGIN IMMEDIATE` of SQLite must not have returned to be waiting: one that is granted takes microseconds.
BUSY = 0.003


class Eyes:
    """Watches the connections of one table, which must be new: those that wait for a lock can be counted."""

    def __init__(self, database: Database, watched: Table, watcher: Table | None = None) -> None:
        self._kind = database.kind
        self._watcher = watcher
        self.numbers: set[int] = set()
        #: With SQLite, by connection: its last statement and when it began.
        self._last: dict[int, tuple[str, float]] = {}
        #: With SQLite: when a transaction that was begun last came to its first statement, so it had its lock.
        self.granted_at = 0.0
        database_of = watched.store.database
        event.listen(database_of.engine, "connect", self._opened)
        if self._kind == "sqlite":
            # The lock of a process that keeps its threads from forking in mid-transaction would be waited for instead: two
            # processes, which these connections stand for, have one each.
            database_of.transaction = contextmanager(database_of._transaction)  # type: ignore[method-assign]

    def _opened(self, connection: Any, _: Any) -> None:
        if self._kind == "sqlite":
            connection.set_trace_callback(lambda statement, key=id(connection): self._saw(key, statement))
        else:
            self.numbers.add(connection.info.backend_pid if self._kind == "postgresql" else connection.thread_id())

    def _saw(self, connection: int, statement: str) -> None:
        now = time.monotonic()
        if self._last.get(connection, ("", 0))[0] == "BEGIN IMMEDIATE":
            self.granted_at = now
        self._last[connection] = statement, now

    def waiting(self) -> int:
        """How many of the watched connections wait for a lock that another one holds."""
        if self._kind == "sqlite":
            before = time.monotonic() - BUSY
            return sum(last == "BEGIN IMMEDIATE" and at < before for last, at in list(self._last.values()))
        assert self._watcher is not None
        with self._watcher.store.database.transaction() as tx:
            if self._kind == "postgresql":
                asked = "SELECT count(*) FROM unnest(CAST(%(pids)s AS int[])) AS pid WHERE cardinality(pg_blocking_pids(pid)) > 0"
                return int(tx.rows(asked, {"pids": list(self.numbers)})[0][0])
            # The tables of information_schema that tell of waits are copies, renewed ten times a second at most.
            [status] = tx.rows("SHOW ENGINE INNODB STATUS")
            return len(self.numbers & _waiting_threads(status[2]))


def _waiting_threads(status: str) -> set[int]:
    """The connections whose transaction is in `LOCK WAIT`, of the report of InnoDB."""
    transactions = status.partition("\nTRANSACTIONS\n")[2].split("---TRANSACTION ")[1:]
    waiting = [
        re.search(r"^LOCK WAIT .*?^\S+ thread id (\d+)", text, re.DOTALL | re.MULTILINE) for text in transactions
    ]
    return {int(found[1]) for found in waiting if found}


def kill_connections(database: Database, watcher: Table, eyes: Eyes) -> None:
    """Let the server end the connections that are watched, as it does with those of a process that died."""
    statement = {"postgresql": "SELECT pg_terminate_backend({})", "mariadb": "KILL {}"}[database.kind]
    with watcher.store.database.transaction() as tx:
        while eyes.numbers:
            tx.run(statement.format(eyes.numbers.pop()))
