"""The broker of a test: a list of messages, encoded as kombu does it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from celery import Celery
from kombu import Connection, Producer
from kombu.message import Message as KombuMessage

from celery_lifecycle.dispatch import Sender
from celery_lifecycle.link import header_in


@dataclass(slots=True)
class Message:
    """A message on its way, as its broker would hold it.

    Attributes:
        queue, task, task_id: where it goes, what it runs.
        job: id of the job, or None for a message that is no link.
        due_ms: before that time it is not delivered (an ordinary task with `eta`).
    """

    queue: str
    task: str
    task_id: str
    job: str | None
    body: Any
    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    due_ms: int = 0

    def received(self) -> KombuMessage:
        """The message as a consumer gets it."""
        return _Received(
            body=self.body, content_type=self.content_type, content_encoding=self.content_encoding,
            headers=dict(self.headers), properties=self.properties, delivery_info={"routing_key": self.queue},
            accept={self.content_type},
        )  # fmt: skip


class _Received(KombuMessage):
    """A message without a channel: there is nobody to acknowledge it to."""

    def ack(self, multiple: bool = False) -> None: ...

    def reject(self, requeue: bool = False) -> None: ...


class ListProducer(Producer):
    """Puts messages into a list.

    Args:
        messages: the list.
        now_ms: the time of the test.
    """

    def __init__(self, messages: list[Message], now_ms: Callable[[], int]) -> None:
        super().__init__(Connection("localhost", transport="memory").channel(), auto_declare=False)
        self.is_down = False
        self._messages = messages
        self._now_ms = now_ms

    @contextlib.contextmanager
    def batch(self, max_size: int = 100) -> Iterator[None]:
        yield

    def publish(
        self, body: Any, routing_key: str | None = None, *, headers: dict[str, Any] | None = None,
        serializer: str | None = None, content_type: str | None = None, content_encoding: str | None = None,
        compression: str | None = None, exchange: Any = None, declare: Any = None, retry: bool = False,
        retry_policy: Any = None, delivery_mode: Any = None, timeout: Any = None, confirm_timeout: Any = None,
        **properties: Any,
    ) -> None:  # fmt: skip
        if self.is_down:
            raise ConnectionError("The harness's broker is down.")
        headers = dict(headers or {})
        encoded, content_type, encoding = self._prepare(
            body, serializer or "json", content_type, content_encoding, compression, headers
        )
        eta, due = headers.pop("eta", None), 0
        if eta is not None:  # made by the real clock, so it is the distance that counts
            ahead = (datetime.fromisoformat(eta) - datetime.now(timezone.utc)).total_seconds()
            due = self._now_ms() + round(ahead * 1000)
        job = (header_in(headers) or {}).get("job")
        task, task_id = headers["task"], headers["id"]
        message = Message(
            routing_key or "", task, task_id, job, encoded, content_type, encoding, headers, properties, due
        )
        self._messages.append(message)


class ListSender(Sender):
    """The sender of chains, over the producer of a test."""

    def __init__(self, app: Celery, database_id: str, producer: ListProducer) -> None:
        super().__init__(app, database_id)
        self._given = producer

    def _ready_producer(self) -> Producer:
        return self._given

    def reset(self) -> None:
        """The list has no connection that could be dropped."""

    close = reset
