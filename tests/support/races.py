"""Two real connections that meet: the first one holds its row lock until it is told to commit, the second one is watched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.databases import Database
from tests.support.protocol import Table
from tests.support.waiting import wait_until

WAIT = 30.0


class Call(threading.Thread):
    """A verb in a thread of its own; `result()` gives what it returned or raises what it raised."""

    def __init__(self, verb: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._verb = verb
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._verb()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(WAIT)
        assert not self.is_alive(), "it never came back"
        if self._error is not None:
            raise self._error
        return self._value


class Gate:
    """Holds the first transaction of a table's next verb open, right before its commit."""

    def __init__(self, table: Table) -> None:
        self._database = table.store.database
        self._original = self._database.transaction
        self._reached = threading.Event()
        self._go = threading.Event()
        self._used = False

    @contextmanager
    def _transaction(self, reads: bool = False) -> Iterator[Any]:
        with self._original(reads) as tx:
            yield tx
            if not self._used:
                self._used = True
                self._reached.set()
                assert self._go.wait(WAIT), "nobody opened the gate"

    @contextmanager
    def holding(self, verb: Callable[[], Any]) -> Iterator[Call]:
        """Within, the verb has done everything but its commit; at the end it commits, and its call is over."""
        self._database.transaction = self._transaction  # type: ignore[method-assign]
        call = Call(verb)
        try:
            wait_until(
                lambda: self._reached.is_set() or not call.is_alive(), WAIT, "the winner never reached its commit"
            )
            if not self._reached.is_set():
                call.result()
            yield call
        finally:
            self._go.set()
            call.join(WAIT)
            del self._database.transaction  # type: ignore[method-assign]


def waits_for_a_lock(database: Database, watcher: Table) -> bool:
    """Whether some transaction of this database waits for a row that another one holds."""
    queries = {
        "postgresql": "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE NOT granted AND"
        " wait_event_type = 'Lock' AND pid IN (SELECT pid FROM pg_locks JOIN pg_class ON pg_class.oid = relation"
        f" WHERE relnamespace = '{database.name}'::regnamespace)",
        # What InnoDB tells of its waits is refreshed ten times a second at most; a statement that takes so long is one.
        "mariadb": "SELECT count(*) FROM information_schema.processlist WHERE command = 'Query' AND time_ms > 20"
        f" AND id <> connection_id() AND db = '{database.name}'",
    }
    with watcher.store.database.transaction() as tx:
        return bool(tx.rows(queries[database.kind])[0][0])


def race(
    winner: Table, first: Callable[[], Any], second: Callable[[], Any], blocked: Callable[[], bool] | None
) -> tuple[Any, Any]:
    """Run `first` up to its commit, `second` until it is blocked (None: to its end) or over, then let `first` commit."""
    with Gate(winner).holding(first) as ahead:
        behind = Call(second)
        if blocked is None:
            behind.result()
        else:
            wait_until(
                lambda: not behind.is_alive() or blocked(), WAIT, "the loser neither waits nor ends", interval=0.002
            )
            assert behind.is_alive(), f"it did not wait: {behind.result()}"
    return ahead.result(), behind.result()
