"""A row that stays locked: whoever waits for it gives up in time, says so, and has changed nothing; a later try does it all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from celery_lifecycle import holds
from celery_lifecycle.beat import LifecycleScheduler
from celery_lifecycle.code import Code
from celery_lifecycle.errors import LockTimeout
from celery_lifecycle.model import ObjectRef, Phase, RetryPolicy
from celery_lifecycle.outcome import YIELD
from celery_lifecycle.runner import Runner
from celery_lifecycle.store.unit import lock_by_name
from tests.support.comparison import left, told, tried
from tests.support.databases import Database
from tests.support.eyes import Eyes
from tests.support.protocol import CART, QUEUE, TASK, WORKER, Clock, Table, links_of
from tests.support.races import Call
from tests.support.scenes import SCENES, SKIPPING, twins
from tests.support.waiting import wait_until

#: With MariaDB a second is the shortest.
SHORT = {"sqlite": 0.3, "postgresql": 0.3, "mariadb": 1.0}


@pytest.fixture
def tables(database: Database):
    clock = Clock()
    one = Table(database.url, clock=clock)
    two = Table(database.url, clock=clock, migrates=False, lock_timeout=SHORT[database.kind])
    watcher = Table(database.url, clock=clock, migrates=False)
    Eyes(database, two, watcher)
    yield one, two, watcher
    for table in (one, two, watcher):
        table.close()


def given_up(verb: Any) -> Any:
    """What a verb raises, or else what it comes to."""
    try:
        return verb()
    except LockTimeout as error:
        return error


@pytest.mark.parametrize("name", SCENES)
def test_a_verb_that_waits_in_vain_says_so_and_changes_nothing(name, tables, database):
    """Every verb of the scene at once, each on an object of its own, while one transaction holds all of these."""
    one, two, _ = tables
    play = SCENES[name]
    verbs = {verb: call for verb, call in {**play.verbs, **play.seldom}.items() if verb not in SKIPPING}
    pairs = {verb: twins(verb) for verb in verbs}
    begin_at = one.clock.ms
    for scene in (scene for pair in pairs.values() for scene in pair):
        one.clock.ms = begin_at
        play.prepare(one, scene)
    before = {verb: left(one, raced) for verb, (raced, _) in pairs.items()}
    with one.store.database.transaction() as tx:
        for raced, _ in pairs.values():
            assert lock_by_name(tx, raced.ref, 50) is not None
        calls = {
            verb: Call(lambda verb=verb, raced=raced: given_up(lambda: verbs[verb](two, raced)))
            for verb, (raced, _) in pairs.items()
        }
        came = {verb: call.result() for verb, call in calls.items()}
    for verb, error in came.items():
        raced, _ = pairs[verb]
        if verb == "release":  # the others of its batch must not wait for this one: it costs its chain a patience
            assert error == 0
            continue
        assert isinstance(error, LockTimeout), f"{verb}: {error!r}"
        if database.kind != "sqlite":
            assert "transaction that pushed to it" in str(error)
            assert str(raced.ref) in str(error) or f"object id {one.find(raced.ref).id} " in str(error)
    assert {verb: left(one, raced) for verb, (raced, _) in pairs.items()} == before
    for verb, (raced, apart) in pairs.items():
        assert told(tried(verbs[verb], two, raced)) == told(tried(verbs[verb], two, apart)), verb
        assert left(one, raced) == left(one, apart), verb
    one.check()


# --- those who have more to do than to say so

SERVERS = pytest.mark.databases("postgresql", "mariadb")


@contextmanager
def held(t: Table, *refs: ObjectRef):
    """Within, a caller's open transaction holds the rows of these objects."""
    with t.store.database.transaction() as tx:
        for ref in refs:
            assert lock_by_name(tx, ref, 50) is not None
        yield


class Tries:
    """Counts the calls of a verb that ended in a lock timeout."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verbs: Any, name: str) -> None:
        self.failed = 0
        self._verb: Callable[..., Any] = getattr(verbs, name)
        monkeypatch.setattr(verbs, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._verb(*args, **kwargs)
        except LockTimeout:
            self.failed += 1
            raise


@pytest.mark.parametrize("what", ["begin", "attempted", "finish"])
def test_a_link_whose_row_stays_locked_tries_again_until_it_is_stored(what, tables, monkeypatch):
    """The job runs as often as it would have, and its outcome is not lost, however long a caller holds the row."""
    one, two, _ = tables
    one.push("a", retry_json=RetryPolicy(2, 0.01, 0.01).to_json())
    [link] = links_of(one.shipped())
    holds_now, free = threading.Event(), threading.Event()
    called: list[int] = []
    tries = Tries(monkeypatch, two.store.runs, what)

    def hold() -> None:
        with held(one, CART):
            holds_now.set()
            assert free.wait(20)

    def call(ctx: Any) -> Any:
        called.append(ctx.attempt)
        if what != "begin" and len(called) == 1:
            holders.append(Call(hold))
            assert holds_now.wait(20)
        if what == "attempted" and len(called) == 1:
            raise ValueError
        return YIELD

    holders = [Call(hold)] if what == "begin" else []
    assert what != "begin" or holds_now.wait(20)
    deployment: Any = SimpleNamespace(config=two.store.config, store=two.store, send=lambda shipments: 0)
    runner = Runner(deployment, WORKER, lambda error, attempt: None)
    running = Call(lambda: runner.run(link, Code(TASK, CART, None, lambda fn: fn, call)))
    wait_until(lambda: tries.failed >= 1, 20, "it did not time out")
    free.set()
    report = running.result()
    assert (report.error, report.result["outcome"]) == (None, "yield")
    assert called == ([1, 2] if what == "attempted" else [1])
    assert one.job("a").version > 1
    for holder in holders:
        holder.result()


@SERVERS
def test_beat_looks_into_a_lost_run_though_a_caller_holds_another(tables):
    one, two, _ = tables
    refs = [ObjectRef("cart", name) for name in "ab"]
    for ref in refs:
        one.push("job", ref)
    for chain in one.claim().shipments:
        one.begin(links_of(chain)[0])
    one.clock.forward(21)
    lost = one.claim(Phase.OPEN).lost
    beat = LifecycleScheduler.__new__(LifecycleScheduler)
    beat._lifecycle = SimpleNamespace(store=two.store)
    with held(one, refs[0]):
        for object_id in lost:
            beat._rescue(object_id)
        assert [one.find(ref).doubt for ref in refs] == [False, True]
    for object_id in lost:
        beat._rescue(object_id)
    assert [one.find(ref).doubt for ref in refs] == [True, True]


@SERVERS
def test_beat_wakes_an_object_whose_holder_is_gone_though_a_caller_holds_another(tables):
    """What could not be written is looked at again at the next look, and is not taken for something new."""
    one, two, _ = tables
    refs = [ObjectRef("cart", name) for name in "ab"]
    for ref in refs:
        one.store.holds.hold(ref, "alive", str(ref), None, {"wake": [TASK, QUEUE]}, 1_000)
    one.clock.forward(2)
    deployment: Any = SimpleNamespace(store=two.store)
    doubts: dict[tuple[str, str], int] = {}
    holds.look(deployment, doubts)
    assert len(doubts) == 2
    with held(one, refs[0]):
        holds.look(deployment, doubts)
        assert [len(one.store.holds.of(ref)) for ref in refs] == [1, 0]
    holds.look(deployment, doubts)
    assert [len(one.store.holds.of(ref)) for ref in refs] == [0, 0]
    assert [one.find(ref).wake_at for ref in refs] == [one.clock.ms] * 2
