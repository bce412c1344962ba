"""Transactions that hold what the other one wants: the server ends one of them, it is repeated as a whole, and both are done.

Verbs that lock several objects do so in one order, or wait for none, so that they never meet like this among each other.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from celery_lifecycle.model import Link, ObjectRef, Why
from celery_lifecycle.store.database import Tx
from celery_lifecycle.store.jobs import Pusher
from celery_lifecycle.store.unit import lock_by_name
from tests.support.protocol import TASK, Table, links_of
from tests.support.races import Call, Gate, wait_for_block

pytestmark = pytest.mark.databases("postgresql", "mariadb")

A, B = ObjectRef("cart", "a"), ObjectRef("cart", "b")


def test_two_transactions_that_lock_two_objects_crosswise_are_both_done_in_the_end(tables):
    """A deadlock: the server ends one of them, and it is repeated as a whole."""
    one, two, _ = tables
    for ref in (A, B):
        one.push("a", ref)
    both_hold = threading.Barrier(2)
    tries: list[str] = []

    def crosswise(t: Table, name: str, near: ObjectRef, far: ObjectRef) -> None:
        def work(tx: Tx) -> None:
            tries.append(name)
            t.store.jobs.push_in(tx, t.draft(f"{name} near", near))
            if tries.count(name) == 1:
                both_hold.wait(10)
            t.store.jobs.push_in(tx, t.draft(f"{name} far", far))

        t.store.database.run(work)

    calls = [Call(lambda: crosswise(one, "one", A, B)), Call(lambda: crosswise(two, "two", B, A))]
    for call in calls:
        call.result()
    assert len(tries) > 2, "there was no deadlock"
    assert set(one.ids(A)) == {"a", "one near", "two far"}
    assert set(one.ids(B)) == {"a", "two near", "one far"}


class Caller:
    """A caller's own transaction: it has pushed to `near`, and will push to `far`; if it is ended, he repeats it."""

    def __init__(self, table: Table, near: ObjectRef, far: ObjectRef) -> None:
        self._table, self._near, self._far = table, near, far
        self._holds, self._go = threading.Event(), threading.Event()
        self.tries = 0
        self._call = Call(self._pushes)
        assert self._holds.wait(20)

    def _pushes(self) -> None:
        def work(tx: Tx) -> None:
            self.tries += 1
            self._table.store.jobs.push_in(tx, self._table.draft("caller's near", self._near, delay_ms=60_000))
            self._holds.set()
            assert self._go.wait(20)
            self._table.store.jobs.push_in(tx, self._table.draft("caller's far", self._far, delay_ms=60_000))

        self._table.store.database.run(work)

    def goes_on(self) -> None:
        self._go.set()
        self._call.result()


def seal(t: Table, *refs: ObjectRef, **draft: Any) -> None:
    for ref in refs:
        t.push("a", ref, **draft)
    for chain in t.claim().shipments:
        [link] = links_of(chain)
        t.begin(link, limit=1)
        t.die(link)


def links_by_name(t: Table) -> list[Link]:
    chains = sorted(t.claim().shipments, key=lambda chain: chain.ref)
    return [links_of(chain)[0] for chain in chains]


def push_many(t: Table) -> Any:
    return t.store.jobs.push_many([t.draft("many", ref, delay_ms=60_000) for ref in (B, A)])


def purge_old(t: Table) -> Any:
    return t.store.dead.purge_old()


@pytest.mark.parametrize("verb", [push_many, purge_old])
def test_a_verb_over_several_objects_that_meets_a_caller_crosswise_is_done_and_so_is_the_caller(verb, tables, clock):
    one, two, eyes = tables
    seal(one, A, B)
    clock.forward(31 * 86_400)
    caller = Caller(one, near=B, far=A)
    ours = Call(lambda: verb(two))
    wait_for_block(ours, eyes)  # it holds A, and waits for B
    caller.goes_on()
    came = ours.result()
    expected = {"caller's near"}, {"caller's far"}
    if verb is push_many:
        assert [job.id for job in came] == ["many", "many"]
        expected = tuple(ids | {"many"} for ids in expected)
    else:
        assert came == 2
        assert one.store.dead.list() == []
        assert not any(one.find(ref).sealed for ref in (A, B))
    assert (set(one.ids(B)), set(one.ids(A))) == expected


def test_a_pusher_that_claims_several_waits_for_no_caller_and_so_can_never_be_part_of_a_deadlock(tables):
    one, two, _ = tables
    for ref in (A, B):
        one.push("a", ref)
    caller = Caller(one, near=B, far=A)
    gate = Gate(two)
    with gate.holding(lambda: two.store.claims.claim_several([A, B], 10)) as ours:
        pass
    assert [chain.ref for chain in ours.result()] == [A]
    caller.goes_on()
    assert (gate.tries, caller.tries) == (1, 1)


@pytest.mark.parametrize("verb", [push_many, purge_old])
def test_verbs_over_several_objects_lock_them_in_one_order(verb, tables, clock):
    """While one waits for the first object it holds no other, whatever order it was given: two of them never deadlock."""
    one, two, eyes = tables
    seal(one, B, A)
    clock.forward(31 * 86_400)
    with one.store.database.transaction() as tx:
        assert lock_by_name(tx, A, 50) is not None
        ours = Call(lambda: verb(two))
        wait_for_block(ours, eyes)
        assert lock_by_name(tx, B, 50, waits=False) is not None, "it has locked another object before this one"
    ours.result()


def test_a_replay_and_a_purge_that_meet_crosswise_are_both_done(tables, clock):
    """The purge holds the dead job that the replay wants, and wants its object, for that has a sealed one too."""
    one, two, eyes = tables
    one.push("b", A)
    one.store.jobs.cancel(A, "b", "host", why=Why.REVOKED)
    clock.forward(1)
    seal(one, A)
    clock.forward(31 * 86_400)
    revoked = one.store.dead.list(A)[0].key
    gate = Gate(one, after=one.store.database.sql.delete_dead)
    with gate.holding(lambda: purge_old(one)) as ahead:
        behind = Call(lambda: two.store.dead.replay(revoked))
        wait_for_block(behind, eyes)
    purged, replayed = ahead.result(), behind.result()
    # Which of the two the server ends is its choice; that one finds what the other one left.
    assert (purged, replayed is None) == ((2, True) if gate.tries == 1 else (1, False))
    assert one.store.dead.list() == []
    assert one.ids(A) == ([] if replayed is None else ["b"])


def test_a_purge_and_a_death_that_meet_crosswise_at_their_line_are_both_done(tables, clock):
    """The purge holds the line's row, whose seal it lifts, and wants the object of another seal; the death has that, and wants the row."""
    one, two, eyes = tables
    first, second = ObjectRef(TASK, "a"), ObjectRef(TASK, "b")
    seal(one, second)
    one.push("a", first)
    one.push("b", second, pusher=Pusher(first, "a", TASK, "a"))
    dies, runs = links_by_name(one)
    one.begin(dies, limit=1)
    one.begin(runs)
    one.die(dies)
    assert {dead.job.line for dead in one.store.dead.list(first)} == {"a"}
    clock.forward(31 * 86_400)
    gate = Gate(one, after=one.store.database.sql.delete_heartbeat)
    with gate.holding(lambda: purge_old(one)) as ahead:
        behind = Call(lambda: two.die(runs))
        wait_for_block(behind, eyes)
    assert ahead.result() == 2
    assert behind.result().context.strikes == 1
    assert one.job("b", second).strikes == 1
    assert one.store.dead.list() == []


def test_deaths_of_one_line_on_two_objects_wait_for_each_other_and_are_both_counted(tables):
    """Each locks its own object, then the line's row: nobody is in anybody's way twice."""
    one, two, eyes = tables
    first, second = ObjectRef(TASK, "a"), ObjectRef(TASK, "b")
    one.push("a", first)
    one.push("b", second, pusher=Pusher(first, "a", TASK, "a"))
    links = links_by_name(one)
    for link in links:
        one.begin(link)
    gate = Gate(one)
    with gate.holding(lambda: one.die(links[0])) as ahead:
        behind = Call(lambda: two.die(links[1]))
        wait_for_block(behind, eyes)
    assert (ahead.result().context.strikes, behind.result().context.strikes) == (1, 2)
    assert gate.tries == 1
