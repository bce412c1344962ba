"""Several beats over one database: what they claim, look into and clean up is disjoint, complete, and waits for nobody."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from celery_lifecycle.model import ObjectRef, Phase
from celery_lifecycle.store.jobs import Pusher
from tests.support.protocol import QUEUE, TASK, Table, carts, links_of
from tests.support.races import Call, Gate, wait_for_block
from tests.support.waiting import wait_until

SERVERS = pytest.mark.databases("postgresql", "mariadb")


# --- objects that are due in each of the phases


def due(t: Table, count: int) -> None:
    t.store.jobs.push_many([t.draft(job_id, ref) for ref in carts(count) for job_id in "ab"])


def lost_on_their_way(t: Table, count: int) -> None:
    due(t, count)
    t.claim(limit=count)
    t.clock.forward(31)


def in_flight(t: Table, count: int) -> None:
    due(t, count)
    for chain in t.claim(limit=count).shipments:
        t.begin(links_of(chain)[0])


def left_between_two_links(t: Table, count: int) -> None:
    due(t, count)
    for chain in t.claim(limit=count).shipments:
        first = links_of(chain)[0]
        t.finish(first, t.begin(first))
    t.clock.forward(31)


def lost_with_their_worker(t: Table, count: int) -> None:
    in_flight(t, count)
    t.clock.forward(21)


CHAINS: dict[str, tuple[Callable[[Table, int], None], Phase]] = {
    "due": (due, Phase.IDLE),
    "lost on their way": (lost_on_their_way, Phase.SENT),
    "left between two links": (left_between_two_links, Phase.OPEN),
}


@SERVERS
@pytest.mark.parametrize("name", [*CHAINS, "lost with their worker"])
def test_claims_of_two_beats_are_disjoint_and_neither_waits_for_the_other(name, tables):
    one, two, _ = tables
    prepare, phase = CHAINS.get(name, (lost_with_their_worker, Phase.OPEN))
    prepare(one, 10)
    with Gate(one).holding(lambda: one.claim(phase, limit=6)) as first:
        second = two.claim(phase, limit=10)
    taken = [{*claimed.lost, *(chain.object_id for chain in claimed.shipments)} for claimed in (first.result(), second)]
    assert [len(ids) for ids in taken] == [6, 4]
    assert not taken[0] & taken[1]


@pytest.mark.parametrize("name", CHAINS)
def test_beats_that_claim_at_once_in_many_batches_take_each_object_once(name, tables):
    """C25: one beat's claim fails once in between; 60 objects in batches of 7, 60 chains."""
    one, two, _ = tables
    prepare, phase = CHAINS[name]
    prepare(one, 60)
    failures = iter([True])

    def beat(t: Table, fails: bool) -> list[str]:
        claimed: list[str] = []
        while True:
            if fails and next(failures, False):
                with pytest.raises(ZeroDivisionError):
                    claim_and_fail(t, phase)
            taken = t.claim(phase, limit=7)
            claimed += [chain.ref.name for chain in taken.shipments]
            if not taken.rows:
                return claimed

    calls = [Call(lambda t=t, fails=fails: beat(t, fails)) for t, fails in ((one, True), (two, False))]
    claimed = [name for call in calls for name in call.result()]
    # What one held as the other ended its round is left to the next round.
    claimed += beat(one, False)
    assert sorted(claimed) == [ref.name for ref in carts(60)]


def claim_and_fail(t: Table, phase: Phase) -> None:
    with t.store.database.transaction() as tx:
        assert t.store.claims._claim(tx, QUEUE, phase, 7).rows
        raise ZeroDivisionError


def test_beats_that_look_into_the_same_lost_runs_strike_each_death_once(tables, clock):
    one, two, _ = tables
    lost_with_their_worker(one, 12)

    def beat(t: Table) -> list[Any]:
        return [ended for found in t.claim(Phase.OPEN).lost if (ended := t.store.ends.rescue(found)) is not None]

    for forward, deaths in ((0, 0), (6, 12), (0, 0)):
        clock.forward(forward)
        calls = [Call(lambda t=t: beat(t)) for t in (one, two)]
        came = [ended for call in calls for ended in call.result()] + beat(one)
        assert len(came) == deaths
    assert {one.job("a", ref).strikes for ref in carts(12)} == {1}
    assert {one.job("b", ref).strikes for ref in carts(12)} == {0}


def sealed(t: Table, refs: list[ObjectRef]) -> None:
    """Objects whose only job was sealed a moment ago."""
    for ref in refs:
        t.push("a", ref)
    for chain in t.claim().shipments:
        [link] = links_of(chain)
        t.begin(link, limit=1)
        t.die(link)
    assert {t.find(ref).sealed for ref in refs} == {True}


def test_beats_that_purge_old_dead_jobs_at_once_forget_each_once_and_lift_its_seal(tables, clock):
    one, two, _ = tables
    refs = carts(12)
    sealed(one, refs)
    clock.forward(31 * 86_400)
    calls = [Call(lambda t=t: [t.store.dead.purge_old(limit=5) for _ in range(4)]) for t in (one, two)]
    counts = [count for call in calls for count in call.result()]
    assert sum(counts) == 12
    assert one.store.dead.list() == []
    assert not any(one.exists(ref) and one.find(ref).sealed for ref in refs)


def test_a_push_that_meets_the_purge_of_its_seal_is_stored_and_leaves_no_seal(tables, clock):
    one, two, eyes = tables
    refs = carts(2)
    sealed(one, refs)
    clock.forward(31 * 86_400)
    purges, pushes = lambda t: t.store.dead.purge_old(), lambda t: [t.push("a", ref) for ref in refs]
    for winner, loser in ((purges, pushes), (pushes, purges)):
        with Gate(one).holding(lambda winner=winner: winner(one)) as ahead:
            behind = Call(lambda loser=loser: loser(two))
            wait_for_block(behind, eyes)
        ahead.result()
        behind.result()
        assert [one.ids(ref) for ref in refs] == [["a"], ["a"]]
        assert not any(one.find(ref).sealed for ref in refs)
        assert {dead.reason for dead in one.store.dead.list()} <= {"lifted"}
        one.empty()
        sealed(one, refs)
        clock.forward(31 * 86_400)
    one.empty()


def struck_an_hour_ago(t: Table, refs: list[ObjectRef]) -> None:
    """Objects without an alarm that remember only an old strike."""
    for ref in refs:
        t.push("a", ref)
    for chain in t.claim().shipments:
        [link] = links_of(chain)
        t.begin(link)
        t.die(link)
        t.store.jobs.cancel(chain.ref, "a", "host")
    assert all(t.exists(ref) for ref in refs)
    t.clock.forward(7_200)


@SERVERS
def test_beats_that_forget_old_strikes_skip_what_the_other_forgets(tables):
    one, two, _ = tables
    refs = carts(9)
    struck_an_hour_ago(one, refs)
    with Gate(one).holding(lambda: one.store.beats.forget_old(limit=4)) as first:
        assert two.store.beats.forget_old() == 5
    assert first.result() == 4
    assert one.count("objects") == 0


def test_a_push_to_an_object_that_a_beat_just_forgets_makes_it_anew(tables):
    one, two, eyes = tables
    [ref] = refs = carts(1)
    struck_an_hour_ago(one, refs)
    with Gate(one).holding(lambda: one.store.beats.forget_old()) as first:
        behind = Call(lambda: two.push("new", ref))
        wait_for_block(behind, eyes)
    assert first.result() == 1
    assert behind.result().job.version == 1
    assert one.ids(ref) == ["new"]


def test_a_death_is_counted_for_its_line_though_a_beat_just_forgets_the_old_row(tables, clock):
    """The line's row was there when the death looked, and gone when it came to lock it."""
    one, two, eyes = tables
    refs = [ObjectRef(TASK, name) for name in "ab"]
    for ref in refs:
        one.push(ref.name, ref, pusher=Pusher(refs[0], "a", TASK, "a"))
    first, second = (links_of(chain)[0] for chain in sorted(one.claim().shipments, key=lambda chain: chain.ref))
    for link in (first, second):
        one.begin(link)
    one.die(first)
    clock.forward(7_200)
    with Gate(one, after=one.store.database.sql.add_heartbeat).holding(lambda: one.die(second)) as ahead:
        behind = Call(lambda: two.store.beats.forget_old())
        wait_until(lambda: not behind.is_alive() or eyes.waiting(), 20)
    ahead.result()
    behind.result()
    with one.store.database.transaction() as tx:
        [line] = tx.rows(f"SELECT data FROM {one.config.table_prefix}heartbeats WHERE kind = 'line'")
    assert json.loads(line[0])["n"] == {"b": 1}


@SERVERS
def test_a_pusher_that_claims_several_leaves_alone_what_a_beat_holds(tables):
    one, two, _ = tables
    refs = carts(6)
    due(one, 6)
    with Gate(one).holding(lambda: one.claim(limit=4)) as first:
        mine = two.store.claims.claim_several(refs, 10)
    taken = {chain.ref for chain in first.result().shipments}
    assert (len(taken), len(mine)) == (4, 2)
    assert taken | {chain.ref for chain in mine} == set(refs)


def test_the_end_of_a_hold_that_its_holder_and_a_beat_tell_at_once_counts_once(tables):
    """The holder gives it back as beat takes it for lost: one of them does it, and the other ones' hold stays."""
    one, two, eyes = tables
    [ref] = carts(1)
    holds = one.store.holds
    gives, loses = (
        lambda t: t.store.holds.let_go_by_key("alive", "first"),
        lambda t: t.store.holds.lost("alive", "first"),
    )
    for winner, loser, wakes in (
        (gives, loses, False),
        (loses, gives, True),
        (loses, loses, True),
        (gives, gives, False),
    ):
        for key in ("first", "second"):
            holds.hold(ref, "alive", key, None, {"wake": ["cart.on_alarm", QUEUE]}, 1_000)
        with Gate(one, after=one.store.database.sql.delete_heartbeat).holding(
            lambda winner=winner: winner(one)
        ) as ahead:
            behind = Call(lambda loser=loser: loser(two))
            wait_for_block(behind, eyes)
        assert ahead.result()
        assert not behind.result()
        state = one.find(ref)
        assert (state.holds, state.wake_at is not None) == (1, wakes)
        one.empty()


def test_two_objects_that_send_one_task_id_at_once_have_a_row_each(tables):
    one, two, eyes = tables
    refs = carts(2)
    tracks = [lambda t, ref=ref: t.store.holds.hold(ref, "track", "task", None, {"wake": None}, 1_000) for ref in refs]
    with Gate(one).holding(lambda: tracks[0](one)) as ahead:
        behind = Call(lambda: tracks[1](two))
        wait_for_block(behind, eyes)
    keys = ahead.result(), behind.result()
    assert keys[0] == "task" != keys[1]
    assert [one.find(ref).holds for ref in refs] == [1, 1]
    assert [one.store.holds.let_go(ref, "track", key) for ref, key in zip(refs, keys, strict=True)] == [True, True]
    assert one.count("objects") == 0


def test_a_task_that_is_tracked_anew_as_a_worker_takes_it_keeps_both(tables):
    """What its job in flight is, and which worker runs it."""
    one, two, eyes = tables
    [ref] = carts(1)
    hold = one.store.holds.hold
    hold(ref, "track", "task", None, {"wake": None, "round": 1}, 1_000)
    again = lambda: hold(ref, "track", "task", None, {"wake": None, "round": 2}, 1_000)  # noqa: E731
    with Gate(one, after=one.store.database.sql.put_heartbeat).holding(again) as ahead:
        behind = Call(lambda: two.store.holds.run_by("task", "w1", 1_000))
        wait_for_block(behind, eyes)
    ahead.result()
    assert behind.result()
    [found] = one.store.holds.of(ref)
    assert (found.data["round"], found.data["worker"]) == (2, "w1")
