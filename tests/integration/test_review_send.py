"""Sending while the broker says nothing, and what the broker does not take: neither holds up anything else."""

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, signals
from kombu import Exchange, Queue

from celery_lifecycle import Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.dispatch import AWAY_FOR, Sender
from celery_lifecycle.errors import NameInvalid, PolicyInvalid
from celery_lifecycle.model import Brief, ObjectRef, Shipment
from celery_lifecycle.task import LifecycleTask
from celery_lifecycle.testing import Harness
from tests.support.brokers import Broker
from tests.support.proxy import Proxy
from tests.support.tables import make_tables
from tests.support.waiting import wait_until


@pytest.mark.parametrize("confirm", [False, True], ids=["plain", "confirmed"])
def test_a_push_waits_for_a_silent_broker_for_a_second_at_most(
    broker_url: str, proxy: Callable[[str], Proxy], tmp_path: Path, confirm: bool
) -> None:
    way = proxy(broker_url)
    app = Celery("silent", broker=way.url, set_as_current=False)
    app.conf.task_default_queue = "silent"
    if confirm and broker_url.startswith("amqp"):
        app.conf.broker_transport_options = {"confirm_publish": True}
    lifecycle = Lifecycle(app, database_url=f"sqlite:///{tmp_path}/silent.db")
    make_tables(lifecycle.store.database)

    class Cart(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def go(self, ctx: Any) -> None: ...

    def push(name: str) -> float:
        began = time.monotonic()
        Cart(name).jobs.push("go")
        return time.monotonic() - began

    try:
        push("before")
        way.stall()
        assert max(push("first"), push("second")) < 3
        together: list[float] = []
        threads = [threading.Thread(target=lambda n=n: together.append(push(f"t{n}"))) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(together) == 6
        assert max(together) < 4, "they do not wait for each other's turns"
        way.restore()
        names = itertools.count()

        def goes_out() -> bool:
            name = f"after{next(names)}"
            push(name)
            state = lifecycle.store.objects.find(ObjectRef("cart", name))
            return state is not None and state.sent_count == 1

        wait_until(goes_out, 10, "nothing is sent after the broker is back")
    finally:
        lifecycle.close()


@pytest.mark.parametrize(
    ("option", "bad"),
    [("priority", 300), ("priority", 2.5), ("headers", {"n": 2**70}), ("headers", [1]), ("routing_key", "r" * 300)],
)
def test_what_no_message_can_carry_is_refused_by_the_call(
    lifecycle: Lifecycle, harness: Harness, option: str, bad: Any
) -> None:
    @lifecycle.app.task(base=LifecycleTask, name="later", shared=False)
    def later() -> None: ...

    with pytest.raises(PolicyInvalid, match=option):
        later.apply_async(countdown=5, **{option: bad})
    assert lifecycle.store.objects.find_many() == []


@pytest.mark.parametrize("bad", ["q" * 201, "a\0b"], ids=["long", "nul"])
def test_a_queue_that_no_column_takes_is_refused_by_the_push(lifecycle: Lifecycle, harness: Harness, bad: str) -> None:
    lifecycle.app.conf.task_routes = {"routed": {"queue": bad}}

    class Cart(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job(queue=bad)
        def go(self, ctx: Any) -> None: ...

    @lifecycle.app.task(base=LifecycleTask, name="routed", shared=False)
    def routed() -> None: ...

    with pytest.raises(NameInvalid, match="queue"):
        Cart("a").jobs.push("go", delay=60)
    with pytest.raises(NameInvalid, match="queue"):
        Cart("a").go.schedule("0 8 * * *")
    with pytest.raises(NameInvalid, match="queue"):
        routed.apply_async(countdown=60, queue=bad)
    with pytest.raises(NameInvalid, match="queue"):
        routed.push(delay=60)
    assert lifecycle.store.objects.find_many() == []


@pytest.mark.parametrize("bad", [300, -1, "high"])
def test_a_priority_that_no_message_can_carry_is_refused_by_the_decorator(bad: Any) -> None:
    with pytest.raises(PolicyInvalid, match="priority"):
        lifecycle_job(priority=bad)


def sender(broker: Broker, confirm: bool = False, **conf: Any) -> Sender:
    app = Celery("shop", set_as_current=False)
    app.conf.update(broker.conf(), **conf)
    app.conf.broker_transport_options = {"confirm_publish": confirm}
    return Sender(app, "database")


def shipment(name: str, options: dict[str, Any] | None = None, queue: str = "celery") -> Shipment:
    """A chain of one job, with options that its row has had since before they were checked."""
    options_json = json.dumps(options) if options is not None else None
    job = Brief("job", 1, "shop.work", queue, 0, options_json=options_json)
    return Shipment(1, ObjectRef("cart", name), f"dispatch-{name}", None, 0, (job,), False, 0)


def arrived(sender: Sender, queue: str) -> list[str]:
    """The objects whose messages are in a queue, which is emptied."""
    with sender.app.connection_for_read() as connection:
        entity = sender.app.amqp.queues[queue](connection.default_channel)
        found = []
        while (message := entity.get(no_ack=True)) is not None:
            found.append(message.headers["argsrepr"].partition("#")[0].removeprefix("cart/"))
    return found


NOT_TAKEN = {
    "priority=300": {"priority": 300},
    "priority=-1": {"priority": -1},
    "priority=2.5": {"priority": 2.5},
    "priority=high": {"priority": "high"},
    "number of 70 bits": {"headers": {"n": 2**70}},
    "nested number": {"headers": {"a": [{"n": -(2**70)}]}},
    "long key": {"headers": {"k" * 300: 1}},
    "headers are a list": {"headers": [1]},
    "long routing key": {"exchange": "amq.topic", "routing_key": "r" * 300},
    "missing exchange": {"exchange": "missing", "routing_key": "x"},
}


@pytest.mark.brokers("rabbitmq")
@pytest.mark.parametrize("confirm", [False, True], ids=["plain", "confirmed"])
@pytest.mark.parametrize("options", NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_a_message_that_the_broker_does_not_take_comes_back_alone_and_the_others_go_out(
    broker: Broker, caplog: pytest.LogCaptureFixture, options: dict[str, Any], confirm: bool
) -> None:
    """D18"""
    sends = sender(broker, confirm)
    try:
        for times in (1, 2):
            failed = sends.send([shipment("bad", options), shipment("a"), shipment("bad too", options), shipment("b")])
            assert [one.ref.name for one in failed] == ["bad", "bad too"]
            assert caplog.text.count("The chain of cart/bad can't be sent") == times
            assert caplog.text.count("The chain of cart/bad too can't be sent") == times
            assert "took no more chains" not in caplog.text
            assert arrived(sends, broker.default_queue) == ["a", "b"]
    finally:
        sends.close()


@pytest.mark.brokers("rabbitmq")
def test_a_header_of_a_receiver_that_amqp_can_not_write_concerns_its_own_message_alone(broker: Broker) -> None:
    def add(headers: dict[str, Any], **_: Any) -> None:
        if "bad" in headers["argsrepr"]:
            headers["extra"] = {1, 2}

    sends = sender(broker)
    signals.before_task_publish.connect(add, weak=False)
    try:
        failed = sends.send([shipment("a"), shipment("bad"), shipment("b")])
        assert [one.ref.name for one in failed] == ["bad"]
        assert arrived(sends, broker.default_queue) == ["a", "b"]
    finally:
        signals.before_task_publish.disconnect(add)
        sends.close()


@pytest.mark.brokers("rabbitmq")
@pytest.mark.parametrize("confirm", [False, True], ids=["plain", "confirmed"])
def test_an_exchange_of_a_calls_own_that_is_there_takes_its_messages_until_it_is_gone(
    broker: Broker, confirm: bool
) -> None:
    sends = sender(broker, confirm)
    own = {"exchange": "own", "routing_key": "x"}
    try:
        with sends.app.connection_for_write() as connection:
            exchange = Exchange("own", "topic")(connection.default_channel)
            exchange.declare()
            Queue("elsewhere", exchange, "x")(connection.default_channel).declare()
            sends.app.amqp.queues.add(Queue("elsewhere", exchange, "x"))
            names = ["first", "second", "third"]
            for name in names:
                assert sends.send([shipment(name, own), shipment("a")]) == []
            assert arrived(sends, "elsewhere") == names
            exchange.delete()
        wait_until(lambda: bool(sends.send([shipment("late", own), shipment("b")])), 5, "the loss is not noticed")
        time.sleep(AWAY_FOR)
        assert [one.ref.name for one in sends.send([shipment("late", own), shipment("c")])] == ["late"]
        assert arrived(sends, broker.default_queue)[-1] == "c"
    finally:
        sends.close()
