"""Faults of the protocol that the simulation has found, each as the shortest story that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_lifecycle import worker
from celery_lifecycle.code import Code
from celery_lifecycle.errors import DatabaseUnavailable, Fenced
from celery_lifecycle.model import ObjectRef, Phase
from celery_lifecycle.runner import Runner
from celery_lifecycle.store.database import Disconnected
from celery_lifecycle.store.runs import Calling
from celery_lifecycle.transitions.run import Worker
from tests.support.protocol import Clock, Table, links_of, table

WORKER = Worker("lost", 7)
FIRST, SECOND = ObjectRef("cart", "first"), ObjectRef("cart", "second")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def t(database_url: str, clock: Clock) -> Iterator[Table]:
    with table(database_url, clock=clock) as made:
        yield made


def test_who_was_aboard_a_lost_worker_is_looked_for_in_all_queues(t, clock):
    """Beat meets the queues one after the other; the first rescue writes down who was aboard for all of them."""
    for ref, queue in ((FIRST, "a-queue"), (SECOND, "z-queue")):
        t.push("a", ref, queue=queue)
        [claimed] = t.claim(queue=queue).shipments
        [link] = links_of(claimed)
        assert t.begin(link, WORKER).job is not None
    for seconds in (20, 5):
        clock.forward(seconds)
        for queue in ("a-queue", "z-queue"):
            [object_id] = t.claim(Phase.OPEN, queue=queue).lost
            t.store.ends.rescue(object_id)
    assert [t.job("a", ref).suspect_on is not None for ref in (FIRST, SECOND)] == [True, True]


def test_a_begin_whose_answer_was_lost_is_found_out_however_long_the_database_is_away(t, clock, monkeypatch):
    """Given up, it would be left in flight: an outage would count as a strike."""
    t.push("a", FIRST)
    [link] = links_of(t.shipped(FIRST))
    began, back_at = clock.ms, clock.ms + 60_000
    begin = t.store.runs.begin

    def unreliable(*args: Any) -> Any:
        if clock.ms == began:
            begin(*args)
            raise Disconnected("the answer to the commit is lost")
        if clock.ms < back_at:
            raise DatabaseUnavailable("away")
        return begin(*args)

    called = []
    monkeypatch.setattr(t.store.runs, "begin", unreliable)
    monkeypatch.setattr(
        "celery_lifecycle.runner.time", SimpleNamespace(monotonic=lambda: clock.ms / 1000, sleep=clock.forward)
    )
    deployment: Any = SimpleNamespace(config=t.store.config, store=t.store, send=lambda shipments: 0)
    code = Code("cart.remind", FIRST, None, lambda fn: fn, called.append)
    report = Runner(deployment, WORKER, lambda error, attempt: None).run(link, code)

    assert (report.result["outcome"], len(called)) == ("complete", 1)
    assert not t.exists(FIRST)


@pytest.mark.parametrize("how", ["cancel", "destroy", "push"])
def test_a_job_that_is_taken_out_before_its_begin_is_heard_of_leaves_nothing_in_flight(t, how):
    t.push("a", FIRST)
    [link] = links_of(t.shipped(FIRST))
    assert t.begin(link, WORKER).job is not None
    if how == "cancel":
        t.store.jobs.cancel(FIRST, "a", None)
    elif how == "destroy":
        t.store.objects.destroy(FIRST)
    else:
        t.push("a", FIRST, delay_ms=60_000)
    again = t.store.runs.begin(link, Calling("cart.remind", 3), WORKER, True)

    assert (again.job, again.closed) == (None, True)
    assert not t.exists(FIRST) or t.find(FIRST).phase is Phase.IDLE


def test_an_attempt_does_not_begin_beside_the_run_that_took_the_place_of_its_own(t, clock):
    """While it waited for its next attempt its run was given up, and another one is under way."""
    t.push("a", FIRST)
    [link] = links_of(t.shipped(FIRST))
    called = []

    def fails(ctx: Any) -> None:
        called.append(ctx.attempt)
        raise ValueError

    def sleep(seconds: float) -> None:
        for ahead in (20, 5):
            clock.forward(ahead)
            [object_id] = t.claim(Phase.OPEN).lost
            t.store.ends.rescue(object_id)

    deployment: Any = SimpleNamespace(config=t.store.config, store=t.store, send=lambda shipments: 0)
    runner = Runner(deployment, WORKER, lambda error, attempt: None, sleep=sleep)
    report = runner.run(link, Code("cart.remind", FIRST, None, lambda fn: fn, fails))

    assert called == [1]
    assert isinstance(report.error, Fenced)


@pytest.mark.databases("postgresql", "mariadb")
def test_a_renewal_that_skipped_a_held_row_is_tried_again_soon(t, monkeypatch):
    """Else beat's second look can come before it: a caller's open transaction would be a strike."""
    t.push("a", FIRST)
    [link] = links_of(t.shipped(FIRST))
    assert t.begin(link, WORKER).job is not None
    request = SimpleNamespace(id=link.task_id, worker_pid=WORKER.pid)
    life = SimpleNamespace(instance=WORKER.instance, process=lambda pid: pid)
    monkeypatch.setattr(worker, "_renewers", [])
    monkeypatch.setattr(worker, "this_life", lambda: life)
    monkeypatch.setattr(worker, "running_links", lambda: [(request, {"object": link.object_id})])
    renewer = worker.Renewer(SimpleNamespace(lifecycle=SimpleNamespace(store=t.store)), "host", kills=False)
    with t.store.database.engine.connect() as caller:
        caller.exec_driver_sql("SELECT id FROM lifecycle_objects FOR UPDATE").all()
        assert not renewer.renew()
    assert renewer.renew()
