"""A winner that is rolled back, or whose process dies with its row lock: the loser does all that is right, as if it had never been."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from celery_lifecycle.errors import DatabaseUnavailable
from tests.support.comparison import left, told, tried
from tests.support.databases import Database
from tests.support.eyes import Eyes, kill_connections
from tests.support.protocol import Clock, Table
from tests.support.races import Call, Gate, TakenBack, wait_for_block
from tests.support.scenes import SCENES, twins

SERVERS = pytest.mark.databases("postgresql", "mariadb")


class Ring:
    """Two tables whose connections are watched, and one that watches."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = Clock()
        self.one, self.two, self.watcher = (
            Table(database.url, clock=self.clock, migrates=nth == 0, lock_timeout=20) for nth in range(3)
        )
        if database.kind != "sqlite":
            # Those that migrated were opened before they were watched.
            self.one.close()
            self.first = Eyes(database, self.one, self.watcher)
        self.second = Eyes(database, self.two, self.watcher)

    def close(self) -> None:
        for table in (self.one, self.two, self.watcher):
            table.close()

    def roll_back(self, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        """What the second comes to while the first, which it waits for, is rolled back."""
        gate = Gate(self.one, takes_back=True)
        with gate.holding(first) as ahead:
            behind = Call(second)
            wait_for_block(behind, self.second)
        with pytest.raises(TakenBack):
            ahead.result()
        return behind.result()

    def die(self, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        """What the second comes to while the process or the connection of the first, which it waits for, is killed."""
        if self.database.kind == "sqlite":
            return self._die_with_its_process(first, second)
        gate = Gate(self.one)
        with gate.holding(first) as ahead:
            behind = Call(second)
            wait_for_block(behind, self.second)
            kill_connections(self.database, self.watcher, self.first)
            came = behind.result()
        with pytest.raises(DatabaseUnavailable):
            ahead.result()
        return came

    def _die_with_its_process(self, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            with Gate(self.one).holding(first):
                os.write(writing, b".")
                threading.Event().wait()
        os.close(writing)
        try:
            assert os.read(reading, 1) == b".", "the winner never came to its gate"
            behind = Call(second)
            wait_for_block(behind, self.second)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reading)
        return behind.result()


@pytest.fixture
def ring(database: Database):
    made = Ring(database)
    yield made
    made.close()


@pytest.mark.parametrize("name", SCENES)
def test_the_loser_to_a_winner_that_fails_does_what_it_does_alone(name, ring):
    """Each verb of the scene once as the winner, rolled back or killed in turn, once as the loser."""
    play = SCENES[name]
    verbs = {**play.verbs, **play.seldom}
    for nth, (first, second) in enumerate(play.neighbours()):
        fails = ring.die if nth % 2 else ring.roll_back
        begin_at = ring.clock.ms
        raced, apart = twins(f"{first} {second}")
        play.prepare(ring.one, raced)
        ring.clock.ms = begin_at
        play.prepare(ring.one, apart)
        came = fails(
            lambda verb=first, scene=raced: tried(verbs[verb], ring.one, scene),
            lambda verb=second, scene=raced: tried(verbs[verb], ring.two, scene),
        )
        due = tried(verbs[second], ring.two, apart)
        what = f"{name}: {first} fails ({fails.__name__}), then {second}"
        assert told(came) == told(due), what
        assert left(ring.watcher, raced) == left(ring.watcher, apart), what
        ring.watcher.check()
        ring.watcher.empty()
        ring.clock.ms = begin_at + 60_000


@SERVERS
@pytest.mark.parametrize("first", ["finish", "finish with reschedule", "die", "attempted", "struck inside"])
def test_a_winner_that_loses_its_connection_in_the_middle_comes_again_after_the_loser(first, ring):
    """It had locked the row and read; the whole transaction is repeated, and finds what the other one left meanwhile."""
    play = SCENES["running"]
    verbs = {**play.verbs, **play.seldom}
    for second in ("replace", "destroy", "finish"):
        raced, apart = twins(f"{first} {second}")
        for scene in (raced, apart):
            play.prepare(ring.one, scene)
        gate = Gate(ring.one, after=ring.one.store.database.sql.lock_object)
        with gate.holding(lambda scene=raced: verbs[first](ring.one, scene)) as ahead:
            behind = Call(lambda scene=raced, verb=second: verbs[verb](ring.two, scene))
            wait_for_block(behind, ring.second)
            kill_connections(ring.database, ring.watcher, ring.first)
            came = behind.result()
        due = verbs[second](ring.two, apart), verbs[first](ring.two, apart)
        assert (told(came), told(ahead.result())) == (told(due[0]), told(due[1])), second
        assert gate.tries == 2
        assert left(ring.watcher, raced) == left(ring.watcher, apart), second
        ring.watcher.check()
        ring.watcher.empty()
