"""A private broker for one test: Redis, RabbitMQ, folders of the filesystem transport, or memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kombu.transport import filesystem, memory

from tests.support.redis_databases import private_redis_url
from tests.support.virtual_hosts import private_virtual_host

BROKERS = ("redis", "rabbitmq", "filesystem", "memory")

#: What a test of brokers runs on unless it says otherwise: the others are for tests that ask for them.
DEFAULT_BROKERS = ("redis", "rabbitmq")


@dataclass(frozen=True)
class Broker:
    """A broker of one test.

    ``result_backend`` is a result backend that lives and ends with it. ``default_queue`` is to be the
    application's ``task_default_queue``: it is private even where the virtual host is not.
    """

    kind: str
    url: str
    result_backend: str
    transport_options: dict[str, Any] = field(default_factory=dict)
    default_queue: str = "celery"

    def conf(self) -> dict[str, Any]:
        """The Celery settings that lead an application here."""
        return {
            "broker_url": self.url,
            "broker_transport_options": self.transport_options,
            "result_backend": self.result_backend,
            "task_default_queue": self.default_queue,
        }


@contextmanager
def private_broker(kind: str, directory: Path) -> Iterator[Broker]:
    """An empty broker that nobody else uses, gone at the end."""
    provide = {"redis": _redis, "rabbitmq": _rabbitmq, "filesystem": _filesystem, "memory": _memory}[kind]
    with provide(directory) as broker:
        yield broker


@contextmanager
def _redis(_: Path) -> Iterator[Broker]:
    with private_redis_url() as url:
        yield Broker("redis", url, result_backend=url)


@contextmanager
def _rabbitmq(_: Path) -> Iterator[Broker]:
    with private_virtual_host() as (url, queue):
        yield Broker("rabbitmq", url, result_backend="rpc://", default_queue=queue)


@contextmanager
def _filesystem(directory: Path) -> Iterator[Broker]:
    folders = {name: directory / "broker" / name for name in ("messages", "processed", "control", "results")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    options = {
        "data_folder_in": str(folders["messages"]),
        "data_folder_out": str(folders["messages"]),
        "processed_folder": str(folders["processed"]),
        "control_folder": str(folders["control"]),
        # The transport's own default of a second would make each step of a test that slow.
        "polling_interval": 0.05,
    }
    with _forgotten(filesystem.Transport.global_state):
        yield Broker("filesystem", "filesystem://", f"file://{folders['results']}", options)


@contextmanager
def _memory(_: Path) -> Iterator[Broker]:
    channel = memory.Channel
    with _forgotten(memory.Transport.global_state, channel.queues, channel.events):
        yield Broker("memory", "memory://", "cache+memory://", {"polling_interval": 0.01})


@contextmanager
def _forgotten(*states: Any) -> Iterator[None]:
    """What kombu's transports know is kept in their classes: without this the next test would know it too."""
    for state in states:
        state.clear()
    try:
        yield
    finally:
        for state in states:
            state.clear()
