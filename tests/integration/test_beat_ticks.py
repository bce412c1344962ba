"""Beat's tick where others stand in its way: rows that are held, signals that come while it waits."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import create_engine, text

from celery_lifecycle import Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.beat import LOCKED_FOR, LOOK_AT_HOLDS_EVERY, LifecycleScheduler, Stop
from celery_lifecycle.model import ObjectRef, Phase, Shipment
from celery_lifecycle.queue import Push, draft_of
from celery_lifecycle.store.holds import Hold
from celery_lifecycle.store.runs import Calling
from tests.support import wait_until
from tests.support.protocol import WORKER, links_of
from tests.support.tables import make_tables


@pytest.mark.databases("postgresql", "mariadb")
def test_a_due_object_whose_row_a_caller_holds_is_looked_for_again_later_and_not_at_once(database_url: str) -> None:
    beat, lifecycle = _beat_with_due(database_url, "anna", dispatch_window=1)
    engine = create_engine(database_url)
    with engine.connect() as caller:
        caller.execute(text("SELECT id FROM lifecycle_objects FOR UPDATE"))
        assert beat._dispatch_due() >= LOCKED_FOR
        caller.rollback()
    beat._dispatch_due()
    state = lifecycle.store.objects.find(ObjectRef("cart", "anna"))
    assert state is not None
    assert state.dispatch is not None
    engine.dispose()
    lifecycle.close()


def test_everything_that_is_due_is_sent_in_one_look_by_batches_that_are_claimed_ahead(database_url: str) -> None:
    beat, lifecycle = _beat_with_due(database_url, *"abcdefg", claim_batch=2)
    sent: list[Shipment] = []
    lifecycle.sender.send = lambda shipments: sent.extend(shipments) or []
    beat._dispatch_due()
    assert sorted(one.ref.name for one in sent) == list("abcdefg")
    assert [one.phase for one in lifecycle.store.objects.find_many()] == [Phase.SENT] * 7
    lifecycle.close()


def test_what_was_claimed_ahead_of_a_broker_that_is_away_is_released_with_the_rest(database_url: str) -> None:
    beat, lifecycle = _beat_with_due(database_url, *"abcdefg", claim_batch=2)
    tried: list[Shipment] = []
    lifecycle.sender.send = lambda shipments: tried.extend(shipments) or list(shipments)
    beat._dispatch_due()
    states = lifecycle.store.objects.find_many()
    claimed = [one for one in states if one.phase is Phase.SENT]
    assert sorted(one.ref for one in tried) == sorted(one.ref for one in claimed)
    assert 2 <= len(claimed) <= 4  # the batch that failed, and the one behind it
    assert all(one.sent_until < lifecycle.store.beats.now() + 2000 and one.sent_count == 0 for one in claimed)
    lifecycle.close()


def test_what_is_lost_is_not_claimed_again_before_it_has_been_looked_into(database_url: str) -> None:
    beat, lifecycle = _beat_with_due(database_url, "a", "b", claim_batch=1, backup_alarm=3)
    for shipment in lifecycle.store.claims.claim("celery", Phase.IDLE, 2).shipments:
        (link,) = links_of(shipment)
        assert lifecycle.store.runs.begin(link, Calling("cart.remind", 3), WORKER).job is not None
    wait_until(
        lambda: all(one.lease_until <= lifecycle.store.beats.now() for one in lifecycle.store.objects.find_many())
    )
    looked_into: list[int] = []
    rescue = beat._rescue
    beat._rescue = lambda object_id: (looked_into.append(object_id), rescue(object_id))
    beat._dispatch_due()
    assert sorted(looked_into) == [one.id for one in lifecycle.store.objects.find_many()]
    lifecycle.close()


@pytest.mark.databases("postgresql", "mariadb")
def test_a_tick_does_not_wait_for_a_row_that_a_caller_holds_and_whose_holder_is_gone(database_url: str) -> None:
    beat, lifecycle = _beat_with_due(database_url)
    holds, kept = lifecycle.store.holds, {"one": ObjectRef("cart", "one"), "two": ObjectRef("cart", "two")}
    for key, ref in kept.items():
        holds.hold(ref, "alive", key, None, {}, lasts_ms=1)
    wait_until(lambda: len(holds.expired()) == 2)
    beat._keep_house()  # the first look only notes what has expired
    wait_until(lambda: beat._house and beat._house.done())
    engine = create_engine(database_url)
    with engine.connect() as caller:
        caller.execute(text("SELECT id FROM lifecycle_objects WHERE kind = 'cart' AND name = 'one' FOR UPDATE"))
        beat._looked -= 3600
        beat._keep_house()
        house = beat._house
        assert house is not None
        assert not house.done()
        beat._keep_house()  # beat ticks on meanwhile
        assert beat._house is house
        wait_until(house.done, 30)  # the lock timeout: the other holder was dealt with all the same
        assert holds.of(kept["two"]) == []
        assert [hold.key for hold in holds.of(kept["one"])] == ["one"]
        caller.rollback()
    beat._keep_house()
    beat._looked -= 3600
    beat._keep_house()
    wait_until(lambda: holds.of(kept["one"]) == [])
    engine.dispose()
    lifecycle.close()


@pytest.mark.databases("sqlite")
def test_a_beat_that_stood_still_before_a_look_leaves_holders_their_time_until_the_next(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was suspended: beat and holders go on at the same moment."""
    beat, lifecycle = _beat_with_due(database_url)
    holds, clock = lifecycle.store.holds, [1000.0]
    monkeypatch.setattr("celery_lifecycle.beat.time", SimpleNamespace(monotonic=lambda: clock[0]))
    cart = ObjectRef("cart", "one")
    holds.hold(cart, "alive", "key", None, {}, lasts_ms=1)
    [hold] = wait_until(holds.expired)

    def expired_when_it_goes_on() -> list[Hold]:
        clock[0] += 60
        return [hold]

    with monkeypatch.context() as stands_still:
        stands_still.setattr(holds, "expired", expired_when_it_goes_on)
        beat._keep_house()
    beat._keep_house()
    assert holds.of(cart) == [hold]
    clock[0] += LOOK_AT_HOLDS_EVERY + 1
    beat._keep_house()
    assert holds.of(cart) == []
    lifecycle.close()


def _beat_with_due(database_url: str, *names: str, **settings: Any) -> tuple[LifecycleScheduler, Lifecycle]:
    """A beat, and carts of these names whose job is due."""
    app = Celery("ticks", broker="memory://", set_as_current=False)
    lifecycle = Lifecycle(app, database_url=database_url, **settings)
    make_tables(lifecycle.store.database)

    class Cart(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def remind(self, ctx: Any) -> None: ...

    remind = Cart("anna")._resolve("remind")
    drafts = [draft_of(lifecycle, ObjectRef("cart", name), "host", remind, Push("remind")) for name in names]
    lifecycle.store.jobs.push_many(drafts)
    return LifecycleScheduler(app), lifecycle


def test_beat_can_be_closed_by_a_signal_while_it_waits() -> None:
    stop = Stop()
    before = signal.signal(signal.SIGALRM, lambda *_: stop.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        stop.wait(0.1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert stop.is_set()
    stop.wait(3600)
