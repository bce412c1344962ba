"""Faults of the protocol that the simulation has found, each as the shortest story that shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_lifecycle.model import ObjectRef, Phase
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
