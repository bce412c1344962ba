"""Two real connections that meet: the first one holds its row lock until it is told to go on, the second one is watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from celery_lifecycle.store.database import Tx
from tests.support.eyes import Eyes
from tests.support.protocol import Table
from tests.support.waiting import wait_until

WAIT = 30.0


class TakenBack(Exception):
    """What makes a transaction roll back that would have committed."""


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
    """Holds a table's next verb open: right before the commit of its first transaction, or after a certain statement."""

    def __init__(self, table: Table, after: str | None = None, takes_back: bool = False) -> None:
        self._database = table.store.database
        self._original = self._database.transaction
        self._after = after
        self._takes_back = takes_back
        self._reached = threading.Event()
        self._go = threading.Event()
        #: How many transactions were begun, of which all but the first are repetitions.
        self.tries = 0
        self.opened_at = 0.0

    @contextmanager
    def _transaction(self, reads: bool = False) -> Iterator[Tx]:
        self.tries += 1
        first = self.tries == 1
        with self._original(reads) as tx:
            if self._after is not None and not self._reached.is_set():
                self._watch(tx)
            yield tx
            if first and self._after is None:
                self._stop()
                if self._takes_back:
                    raise TakenBack

    def _watch(self, tx: Tx) -> None:
        execute = tx._execute

        def watched(statement: str, params: Any) -> None:
            execute(statement, params)
            if statement == self._after and not self._reached.is_set():
                self._stop()

        tx._execute = watched  # type: ignore[method-assign]

    def _stop(self) -> None:
        self._reached.set()
        assert self._go.wait(WAIT), "nobody opened the gate"

    def open(self) -> None:
        if not self._go.is_set():
            self.opened_at = time.monotonic()
            self._go.set()

    @contextmanager
    def holding(self, verb: Callable[[], Any]) -> Iterator[Call]:
        """Within, the verb has done everything up to the gate; at the end it goes on, and its call is over."""
        before = vars(self._database).get("transaction")
        self._database.transaction = self._transaction  # type: ignore[method-assign]
        call = Call(verb)
        try:
            wait_until(
                lambda: self._reached.is_set() or not call.is_alive(), WAIT, "the winner never came to its gate",
                interval=0.001,
            )  # fmt: skip
            if not self._reached.is_set():
                call.result()
                raise AssertionError("the winner never came to its gate")
            yield call
        finally:
            self.open()
            call.join(WAIT)
            if before is None:
                del self._database.transaction  # type: ignore[method-assign]
            else:
                self._database.transaction = before  # type: ignore[method-assign]


def wait_for_block(behind: Call, eyes: Eyes) -> None:
    """Until a call waits for a lock; one that comes back instead did not."""
    wait_until(
        lambda: not behind.is_alive() or eyes.waiting(), WAIT, "the loser neither waits nor ends", interval=0.001
    )
    assert behind.is_alive(), f"it did not wait: {behind.result()}"


def race(gate: Gate, first: Callable[[], Any], second: Callable[[], Any], eyes: Eyes | None) -> tuple[Any, Any]:
    """Run `first` up to its gate, `second` until it is blocked (without eyes: to its end), then let `first` go on."""
    with gate.holding(first) as ahead:
        behind = Call(second)
        if eyes is None:
            behind.result()
        else:
            wait_for_block(behind, eyes)
    came = ahead.result(), behind.result()
    assert eyes is None or not eyes.granted_at or eyes.granted_at > gate.opened_at, "it had its lock beside the winner"
    return came
