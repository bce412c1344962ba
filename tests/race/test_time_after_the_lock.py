"""A transaction that waited for a row lock goes by the time at which it was granted, whatever it writes or compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from celery_lifecycle.model import ALARM, ALIVE, Cause, ObjectRef, Why
from celery_lifecycle.store.ends import End
from celery_lifecycle.store.unit import lock_by_name
from tests.support import scenes
from tests.support.databases import Database
from tests.support.eyes import Eyes
from tests.support.protocol import AGAIN_LATER, MORE, Table
from tests.support.races import Call
from tests.support.scenes import Scene
from tests.support.waiting import wait_until

#: How long the rows are held once all wait: far more than two reads of a clock can be apart.
HELD_MS = 300


@dataclass(frozen=True)
class Waits:
    """A verb that waits for its row, and the time that it took for now, as it shows in what it wrote."""

    prepare: Callable[[Table, Scene], None]
    verb: scenes.Verb
    written: Callable[[Table, Scene, Any], int | None]


def row(name: str, ahead_ms: int = 0) -> Callable[[Table, Scene, Any], int | None]:
    return lambda t, s, _: getattr(t.find(s.ref), name) - ahead_ms


def job(job_id: str, name: str = "due_ms", ahead_ms: int = 0) -> Callable[[Table, Scene, Any], int | None]:
    return lambda t, s, _: getattr(t.job(job_id, s.ref), name) - ahead_ms


def death(t: Table, s: Scene, _: Any) -> int:
    return t.store.dead.list(s.ref)[-1].died_ms


def release(t: Table, s: Scene) -> Any:
    return t.store.claims.release([s.chain], 100)


def enter(t: Table, s: Scene) -> Any:
    return t.store.runs.enter(s.links[0], s.begun.token, s.begun)


def struck_inside(t: Table, s: Scene) -> Any:
    return t.store.ends.struck_inside(s.links[0], s.begun.token, Cause.MEMORY_ERROR, {})


#: What writes a time.
WRITES = {
    "push": Waits(scenes.idle, lambda t, s: t.push("new", s.ref, delay=60), job("new", ahead_ms=60_000)),
    "push at once": Waits(scenes.idle, scenes.ANYONE["push"], row("sent_until", 30_000)),
    "push many": Waits(scenes.idle, scenes.SELDOM["push many"], job("many")),
    "reschedule": Waits(scenes.idle, scenes.ANYONE["reschedule"], job("b", ahead_ms=5_000)),
    "set alarm": Waits(scenes.idle, scenes.SELDOM["set alarm"], job(ALARM)),
    "hold": Waits(scenes.idle, scenes.SELDOM["hold"], lambda t, s, _: t.store.holds.of(s.ref)[0].expires_ms - 60_000),
    "claim named": Waits(scenes.idle, scenes.claim_named, row("sent_until", 30_000)),
    "revoke": Waits(scenes.promised, scenes.revoke(running=True), death),
    "release": Waits(scenes.sent, release, row("sent_until", 100)),
    "skip": Waits(scenes.sent, lambda t, s: t.store.ends.skip(s.links[0], Why.UNKNOWN_TASK), job("a", "unknown_since_ms")),
    "begin": Waits(scenes.sent, scenes.begin(0), row("lease_until", 20_000)),
    "begin the next": Waits(scenes.between, scenes.begin(1), row("lease_until", 20_000)),
    "enter": Waits(scenes.starting, enter, row("lease_until", 20_000)),
    "finish": Waits(scenes.running, scenes.finish(), row("lease_until", 30_000)),
    "finish with reschedule": Waits(scenes.running, scenes.finish(AGAIN_LATER), job("a", ahead_ms=60_000)),
    "finish the last": Waits(scenes.running_the_last, scenes.finish(MORE, 1), row("sent_until", 30_000)),
    "die": Waits(scenes.running, scenes.end(End.DIED), job("a", "not_before_ms", 30_000)),
    "struck inside": Waits(scenes.running, struck_inside, job("a", "not_before_ms", 30_000)),
    "revoked": Waits(scenes.running, scenes.end(End.REVOKED), death),
    "alarm failed": Waits(scenes.alarm_running, scenes.alarm_failed, job(ALARM, ahead_ms=2_000)),
    "lose": Waits(scenes.kept, scenes.lost("alive"), job(ALIVE)),
}  # fmt: skip


def later(t: Table, scene: Scene) -> None:
    t.push("a", scene.ref, queue=scene.queue, delay=60)


def running_with_another(t: Table, scene: Scene) -> None:
    scenes.running_the_last(t, scene)
    t.push("later", scene.ref, queue=scene.queue, delay=60)


#: What compares with a time that comes while it waits, and what it comes to if that has come.
COMPARES = {
    "claim named": Waits(later, scenes.claim_named, lambda t, s, came: came is not None),
    "push at once": Waits(later, scenes.ANYONE["push"], lambda t, s, came: len(came.shipment.jobs) == 2),
    "begin": Waits(scenes.sent, scenes.begin(0), lambda t, s, came: came.job is not None),
    "begin the next": Waits(scenes.between, scenes.begin(1), lambda t, s, came: came.job is not None),
    "finish the last": Waits(running_with_another, scenes.finish(None, 1), lambda t, s, came: came.shipment is not None),
    "rescue": Waits(scenes.running, scenes.rescue, lambda t, s, came: t.find(s.ref).doubt),
}  # fmt: skip


@pytest.fixture
def tables(database: Database):
    one = Table(database.url, clock=None, lock_timeout=20)
    two = Table(database.url, clock=None, migrates=False, lock_timeout=20)
    watcher = Table(database.url, clock=None, migrates=False)
    yield one, two, watcher, Eyes(database, two, watcher)
    for table in (one, two, watcher):
        table.close()


def played(waits: dict[str, Waits], tables: Any, moves_dues: bool) -> tuple[int, dict[str, Any]]:
    """All verbs at once, while one transaction holds their rows; until when it did, and what each shows of its time.

    With `moves_dues` the one that holds the rows lets everything in them be due while the others wait already.
    """
    one, two, watcher, eyes = tables
    stage = {name: Scene(ObjectRef("cart", name)) for name in waits}
    for name, scene in stage.items():
        waits[name].prepare(one, scene)
    prefix = one.config.table_prefix
    with one.store.database.transaction() as tx:
        for scene in stage.values():
            assert lock_by_name(tx, scene.ref, 50) is not None
        calls = {
            name: Call(lambda name=name, scene=scene: waits[name].verb(two, scene)) for name, scene in stage.items()
        }
        wait_until(lambda: eyes.waiting() == len(calls), 20, lambda: f"{eyes.waiting()} of {len(calls)} wait")
        until = tx.now() + HELD_MS
        if moves_dues:
            tx.run(f"UPDATE {prefix}jobs SET due_at = {until}")
            tx.run(f"UPDATE {prefix}objects SET lease_until = {until} WHERE lease_until IS NOT NULL")
        wait_until(lambda: tx.now() > until)
    return until, {name: waits[name].written(watcher, stage[name], call.result()) for name, call in calls.items()}


def test_times_that_are_written_count_from_when_the_lock_was_granted(tables):
    until, written = played(WRITES, tables, moves_dues=False)
    assert {name: at - until for name, at in written.items() if at <= until} == {}


def test_what_comes_due_while_a_transaction_waits_is_due_for_it(tables):
    _, came = played(COMPARES, tables, moves_dues=True)
    assert {name for name, is_due in came.items() if not is_due} == set()
