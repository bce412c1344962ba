"""Schedules of objects under real beats, with a real database and a real broker: from the row to the message."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery

from celery_lifecycle import Lifecycle
from celery_lifecycle.beat import LifecycleScheduler
from celery_lifecycle.link import header_in
from tests.support.brokers import Broker
from tests.support.tables import make_tables
from tests.support.waiting import wait_until


@pytest.fixture
def shop(database_url: str, broker: Broker) -> Iterator[Any]:
    """Makes beats of one deployment, each with an app of its own; `messages()` are those at the workers' queue."""

    class Shop:
        apps: list[Any] = []

        def app(self) -> Any:
            app = Celery("shop", set_as_current=False)
            app.conf.update(broker.conf(), result_backend=None)
            Lifecycle(app, database_url=database_url, poll_interval=0.05)
            self.apps.append(app)
            return app

        def beat(self) -> LifecycleScheduler:
            return LifecycleScheduler(self.app())

        def messages(self) -> list[Any]:
            found: list[Any] = []
            with self.apps[0].connection_for_read() as connection:
                queue = connection.SimpleQueue(broker.default_queue)
                try:
                    while True:
                        message = queue.get(block=broker.kind == "rabbitmq", timeout=0.2)
                        message.ack()
                        found.append(message)
                except queue.Empty:
                    return found
                finally:
                    queue.close()

    made = Shop()
    make_tables(made.app().lifecycle.store.database)
    yield made
    for app in made.apps:
        app.lifecycle.close()


def test_a_delay_and_an_interval_are_sent_when_they_are_due_and_not_before(shop: Any) -> None:
    cart = shop.apps[0].lifecycle.object("cart", "user-42")
    delayed, interval = cart.schedule(1, "cart.remind"), cart.schedule_every(1.2, "cart.poll")
    beat, sent = shop.beat(), []
    while not sent:
        beat.tick()
        sent = shop.messages()
        assert not sent or datetime.now(timezone.utc) >= delayed.time
    assert [message.headers["task"] for message in sent] == ["cart.remind"]
    assert header_in(sent[0].headers)["job"] == delayed.id
    assert cart.get_schedule(interval.id).time == interval.time, "it stays until its run has ended"


def test_an_occurrence_of_a_cron_is_sent_once_by_three_beats_at_once(shop: Any) -> None:
    """C26, for schedules of objects."""
    lifecycle = shop.apps[0].lifecycle
    for number in range(20):
        made = lifecycle.object("cart", f"user-{number}").schedule("* * * * *", "cart.digest", id="d")
    assert timedelta(0) < made.time - datetime.now(timezone.utc) <= timedelta(seconds=60)
    with lifecycle.store.database.transaction() as tx:
        for table, column in (("jobs", "due_at"), ("objects", "wake_at")):
            tx.run(f"UPDATE {lifecycle.config.table_prefix}{table} SET {column} = {column} - 60000")
    beats, found = [shop.beat() for _ in range(3)], []
    threads = [threading.Thread(target=lambda beat=beat: [beat.tick() for _ in range(5)]) for beat in beats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: found.extend(shop.messages()) or len(found) >= 20, message="all are sent")
    assert len(found) == 20
    assert len({header_in(message.headers)["name"] for message in found}) == 20
