"""Makes the message of a chain itself and publishes it: a template per task, links as plain dicts, one reused producer."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from amqp.exceptions import FrameSyntaxError, MessageNacked
from celery import Celery, signals
from celery.app.amqp import anon_nodename
from kombu import Connection, Producer, Queue
from kombu.exceptions import BatchPublishError, EncodeError

from celery_lifecycle import events
from celery_lifecycle.link import HEADER, header_of, rest_header
from celery_lifecycle.model import Brief, Shipment

BATCH = 200
BODY_WITHOUT_CHAIN = '[[],{},{"callbacks":null,"errbacks":null,"chain":null,"chord":null}]'
SEND_TIMEOUT = 1.0
AWAY_FOR = 0.1  # threads that have waited for one that failed do not each try in their turn
# A broker that is there but says nothing must not hold its sender either: neither a push nor a tick of beat.
_TIMEOUTS = {
    "redis": {"socket_timeout": SEND_TIMEOUT, "socket_connect_timeout": SEND_TIMEOUT},
    "amqp": {"read_timeout": SEND_TIMEOUT, "write_timeout": SEND_TIMEOUT},
}
_DEFAULT_EXCHANGE = ""
_HEADERS = ("root_id", "parent_id", "retries", "ignore_result")
_LINK_OPTIONS = (
    "queue",
    "exchange",
    "routing_key",
    "priority",
    "time_limit",
    "soft_time_limit",
    "ignore_result",
    "reply_to",
)


class Refused(Exception):
    """The broker does not take a message."""


# What concerns one message: it could not be encoded, so nothing of it was written, or the broker does not want it.
_OF_ONE_MESSAGE = (
    TypeError, ValueError, OverflowError, struct.error, EncodeError, FrameSyntaxError, MessageNacked, Refused
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Route:
    """Where the messages of one task go, as the app's router said once, and what all of them have in common."""

    queue: str
    exchange: str | None
    routing_key: str | None
    entity: Queue
    headers: dict[str, Any]
    message: dict[str, Any]


def task_id_of(shipment: Shipment, position: int, job: Brief) -> str:
    """`<dispatch>-<position>`; a job born of `apply_async` keeps the id that it promised."""
    if job.options_json is not None:
        promised = json.loads(job.options_json).get("task_id")
        if promised is not None:
            return str(promised)
    return f"{shipment.dispatch}-{position}"


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def _fresh_locks() -> None:
    """In a forked child: another thread of the parent may have held a lock, and none is here to let it go."""
    for sender in list(_senders):
        sender._lock = threading.RLock()


os.register_at_fork(after_in_child=_fresh_locks)


class Sender:
    """Sends the chains of this process over one connection of its own, made when first needed and again after a fork."""

    def __init__(self, app: Celery, database_id: str) -> None:
        self.app = app
        self.database_id = database_id
        self._lock = threading.RLock()
        self._routes: dict[tuple[str, str | None], Route] = {}
        self._declared: set[str] = set()
        self._exchanges = {_DEFAULT_EXCHANGE}
        self._closes_channels = False
        self._connection: Connection | None = None
        self._producer: Producer | None = None
        self._pid = 0
        self._away_until = 0.0
        _senders.add(self)

    def send(self, shipments: Sequence[Shipment]) -> list[Shipment]:
        """Publish one message per shipment; those that could not be published come back, to be released.

        Each is built and encoded on its own, so one that can't be sent, or that the broker does not take, does not stop the
        others. Of a batch whose delivery is uncertain all come back: duplicates are only hints.
        """
        failed: list[Shipment] = []
        with self._lock:
            for start in range(0, len(shipments), BATCH):
                failed += self._send_batch(shipments[start : start + BATCH])
        return failed

    def _send_batch(self, shipments: Sequence[Shipment]) -> list[Shipment]:
        failed: list[Shipment] = []
        if time.monotonic() < self._away_until:
            return list(shipments)
        try:
            producer = self._ready_producer()
            with producer.batch(max_size=BATCH):
                for shipment in shipments:
                    message = self._encoded(shipment)
                    if message is None or not self._published(producer, shipment, message):
                        failed.append(shipment)
        except Exception as error:  # the broker's client raises whatever its transport does
            self.reset()
            uncertain = "delivery is uncertain" if isinstance(error, BatchPublishError) else "not sent"
            events.broker_failed(len(shipments), uncertain, error)
            return list(shipments)
        return failed

    def expect_reply(self, backend: Any, task_id: str) -> None:
        """Have a backend whose results are messages declare the queue for them, as Celery does before it publishes a call."""
        with self._lock:
            try:
                backend.on_task_call(self._ready_producer(), task_id)
            except Exception as error:  # the broker's client raises whatever its transport does
                self.reset()
                events.no_reply_queue(task_id, error)

    def _published(self, producer: Producer, shipment: Shipment, message: dict[str, Any]) -> bool:
        try:
            if self._closes_channels and message["exchange"] not in self._exchanges:
                self._publish_apart(message)
            else:
                producer.publish(**message)
        except _OF_ONE_MESSAGE as error:
            if "declare" in message:
                self._declared.discard(message["declare"][0].name)
            events.unsendable(shipment.ref, error)
            return False
        return True

    def _publish_apart(self, message: dict[str, Any]) -> None:
        """Publish to an exchange that may not be there, on a channel of its own: AMQP closes the channel of what it refuses.

        It does so later on, and drops what came behind it, so something is asked whose answer tells that it was taken.
        """
        assert self._connection is not None
        try:
            with self._connection.channel() as channel:
                self.app.amqp.Producer(channel, auto_declare=False).publish(**message)
                channel.basic_qos(0, 1, False)
        except self._connection.channel_errors as error:
            raise Refused(str(error)) from error
        self._exchanges.add(message["exchange"])

    def _encoded(self, shipment: Shipment) -> dict[str, Any] | None:
        try:
            return self._message(shipment)
        except Exception as error:  # whatever a router, a header or a signal receiver throws concerns this object alone
            events.unsendable(shipment.ref, error)
            return None

    def _message(self, shipment: Shipment) -> dict[str, Any]:
        first = shipment.jobs[0]
        options = json.loads(first.options_json) if first.options_json else {}
        route = self.route(first.task, options.get("queue"))
        task_id = task_id_of(shipment, shipment.first_position, first)
        name = str(shipment.ref)
        headers = {**route.headers, "id": task_id, "root_id": task_id, "argsrepr": f"{name}#{first.id}"}
        message = {**route.message, "headers": headers, "correlation_id": task_id}
        if options:
            self._add_options(options, route, message)
        headers[HEADER] = header_of(shipment, name, self.database_id)
        if route.queue not in self._declared:
            message["declare"] = [route.entity]
            self._declared.add(route.queue)
            self._exchanges.add(route.entity.exchange.name)
        chain = self._chain(shipment, name) if len(shipment.jobs) > 1 else None
        message["body"] = BODY_WITHOUT_CHAIN
        if chain or signals.before_task_publish.receivers:
            body: tuple[Any, ...] = ((), {}, {"callbacks": None, "errbacks": None, "chain": chain, "chord": None})
            signals.before_task_publish.send(
                sender=first.task, body=body, exchange=message["exchange"], routing_key=message["routing_key"],
                declare=message.get("declare"), headers=headers, properties={"correlation_id": task_id},
                retry_policy=None,
            )  # fmt: skip
            message["body"] = json.dumps(body, ensure_ascii=False)
        return message

    def _add_options(self, options: dict[str, Any], route: Route, message: dict[str, Any]) -> None:
        """What the caller of `apply_async` gave, or the schedule's or the job's own options."""
        if options.get("exchange") or options.get("routing_key"):
            message["exchange"], message["routing_key"] = address(
                route.entity, options.get("exchange") or route.exchange, options.get("routing_key") or route.routing_key
            )
        headers = message["headers"]
        headers.update({key: options[key] for key in _HEADERS if options.get(key)})
        if options.get("time_limit") or options.get("soft_time_limit"):
            headers["timelimit"] = [options.get("time_limit"), options.get("soft_time_limit")]
        headers.update(options.get("headers") or {})
        if options.get("priority") is not None:
            message["priority"] = options["priority"]
        if options.get("reply_to"):
            message["reply_to"] = options["reply_to"]

    def _chain(self, shipment: Shipment, name: str) -> list[dict[str, Any]]:
        """The links behind the first, in Celery's order: the next one is the last."""
        position = shipment.first_position
        chain = [self._link(shipment, name, position + ahead, job) for ahead, job in enumerate(shipment.jobs) if ahead]
        chain.reverse()
        return chain

    def _link(self, shipment: Shipment, name: str, position: int, job: Brief) -> dict[str, Any]:
        options = json.loads(job.options_json) if job.options_json else {}
        settings: dict[str, Any] = {
            "task_id": task_id_of(shipment, position, job),
            "headers": {**(options.get("headers") or {}), HEADER: rest_header(position, job)},
            "argsrepr": f"{name}#{job.id}",
        }
        for option in _LINK_OPTIONS:
            if options.get(option) is not None:
                settings[option] = options[option]
        return {"task": job.task, "args": [], "kwargs": {}, "options": settings, "immutable": True}

    def route(self, task: str, queue: str | None = None) -> Route:
        """Where a task's messages go: the app's router is asked once per task."""
        known = self._routes.get((task, queue))
        if known is None:
            known = self._routes[task, queue] = make_route(self.app, task, queue)
        return known

    def _ready_producer(self) -> Producer:
        if self._producer is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._forget_declared()
            kind = self.app.connection_for_write().transport.driver_type
            connection = self.app.connection_for_write(
                connect_timeout=SEND_TIMEOUT, transport_options=_TIMEOUTS.get(kind, {})
            )
            connection.ensure_connection(max_retries=1, timeout=SEND_TIMEOUT, interval_start=0)
            self._connection = connection
            self._closes_channels = kind == "amqp"
            self._producer = self.app.amqp.Producer(connection.default_channel, auto_declare=False)
        return self._producer

    def reset(self) -> None:
        """Drop a broken connection without a word to the broker; a send makes a new one, but not at once."""
        self._away_until = time.monotonic() + AWAY_FOR
        self._drop(Connection.collect)

    def close(self) -> None:
        """Close the connection; the next send makes a new one."""
        self._drop(Connection.release)

    def _drop(self, end: Callable[[Connection], Any]) -> None:
        with self._lock:
            connection, self._connection, self._producer = self._connection, None, None
            self._forget_declared()
            if connection is not None and self._pid == os.getpid():
                try:
                    end(connection)
                except Exception as error:  # a broken connection may break once more while it is closed
                    events.close_failed(error)

    def _forget_declared(self) -> None:
        self._declared.clear()
        self._exchanges = {_DEFAULT_EXCHANGE}


def make_route(app: Celery, task: str, queue: str | None) -> Route:
    """Ask the app's router where a task's messages go."""
    options = app.amqp.router.route({"queue": queue} if queue else {}, task)
    entity = options.get("queue") or app.amqp.default_queue
    if isinstance(entity, str):
        entity = app.amqp.queues[entity]
    exchange = options.get("exchange")
    exchange = getattr(exchange, "name", exchange)
    # What a worker takes as absent or 0 when it is not there is left out: a third of the message is headers.
    headers = {"lang": "py", "task": task, "kwargsrepr": "{}", "origin": anon_nodename()}
    delivery_mode = getattr(entity.exchange, "delivery_mode", None) or app.conf.task_default_delivery_mode
    routing_key = options.get("routing_key")
    exchange_of_message, key_of_message = address(entity, exchange, routing_key)
    message = {
        "exchange": exchange_of_message,
        "routing_key": key_of_message,
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "delivery_mode": delivery_mode,
        "retry": False,
    }
    if options.get("priority") is not None:
        message["priority"] = options["priority"]
    return Route(entity.name, exchange, routing_key, entity, headers, message)


def address(entity: Queue, exchange: str | None, routing_key: str | None) -> tuple[str, str]:
    """The exchange and routing key of a message for a queue, as Celery has them: straight into the queue where that will do."""
    kind = entity.exchange.type if entity.exchange is not None else "direct"
    if (not exchange or not routing_key) and kind == "direct":
        return "", entity.name
    return exchange or entity.exchange.name, routing_key or entity.routing_key


def forward_chain(app: Celery, chain: Iterable[dict[str, Any]], root_id: str | None, parent_id: str) -> None:
    """Publish the rest of a chain behind a link that failed: Celery itself would drop it, and store FAILURE for it."""
    rest = list(chain)
    link = rest.pop()
    app.signature(link).apply_async((), chain=rest or None, root_id=root_id, parent_id=parent_id)
