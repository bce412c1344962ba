"""What the floor of objects and runner needs of a deployment, and which run is under way in this context."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any, Protocol

from celery import _state

from celery_lifecycle.config import Config
from celery_lifecycle.errors import ConfigurationError
from celery_lifecycle.model import RetryPolicy, Shipment
from celery_lifecycle.store import Store
from celery_lifecycle.store.jobs import Pusher


@dataclass(frozen=True, slots=True)
class Target:
    """A task that can be pushed, with the defaults of its decorator; `kind`: to objects of this kind only."""

    task: str
    owner: str | None = None
    kind: str | None = None
    queue: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    priority: int | None = None
    retry: RetryPolicy | None = None
    singleflight: bool = False
    hung_timeout_ms: int | None = None
    exclusive: bool = False
    recovery_loop: bool = False


def routed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Where the options of a Celery task or call send its messages: `queue`, `exchange` and `routing_key` by name, `priority`."""
    given = {
        key: options[key] for key in ("queue", "exchange", "routing_key", "priority") if options.get(key) is not None
    }
    for key in ("queue", "exchange"):
        if key in given:
            given[key] = str(getattr(given[key], "name", given[key]))
    return given


class Deployment(Protocol):
    """One app with one job database, as seen from this process."""

    @property
    def config(self) -> Config: ...

    @property
    def store(self) -> Store: ...

    @property
    def database_id(self) -> str:
        """The id of the job database."""
        ...

    @property
    def timezone(self) -> tzinfo:
        """The app's time zone, by which crons go that name none."""
        ...

    def send(self, shipments: Sequence[Shipment]) -> int:
        """Send chains that are on record as sent; what can't be sent is released. Never raises. Returns how many went out."""
        ...

    def has_room(self, queue: str) -> bool:
        """Whether the dispatch window of a queue has room for one more chain."""
        ...

    def queue_of(self, task: str, queue: str | None) -> str:
        """The name of the queue that messages of a task go to."""
        ...

    def knows(self, task: str) -> bool:
        """Whether a task of this name is registered in this process."""
        ...

    def object(self, kind: str, name: str) -> Any:
        """The handle of an object."""
        ...

    def target(self, task: Any) -> Target:
        """The target of a full task name or of a task.

        Raises:
            UnknownTask: it is no lifecycle task.
        """
        ...


@dataclass(slots=True, eq=False)
class CurrentRun:
    """The job that runs in this context."""

    deployment: Deployment
    pusher: Pusher
    starting: bool = False
    attempt: int = 1
    worker: str | None = None


_current_run: ContextVar[CurrentRun | None] = ContextVar("lifecycle_current_run", default=None)
_under_way: list[CurrentRun] = []


@contextlib.contextmanager
def running(run: CurrentRun) -> Iterator[None]:
    """Within the block this context runs a job."""
    set_to = _current_run.set(run)
    _under_way.append(run)
    try:
        yield
    finally:
        _under_way.remove(run)
        _current_run.reset(set_to)


def current_run() -> CurrentRun | None:
    """The job that runs in this context; in a thread that the only job of this process has started, that one.

    Without this a job could push from a helper thread what no loop would be seen in.
    """
    run = _current_run.get()
    if run is None and len(_under_way) == 1 and threading.current_thread() is not threading.main_thread():
        return _under_way[0]
    return run


_default: list[Deployment] = []


def set_default(deployment: Deployment) -> None:
    _default[:] = [deployment]


def default_deployment() -> Deployment:
    """The deployment of the job that runs in this context, else that of Celery's current app, else the one made last.

    Raises:
        ConfigurationError: there is none.
    """
    run = current_run()
    if run is not None:
        return run.deployment
    # Not `celery.current_app`: where there is none, that makes one.
    app = getattr(_state._tls, "current_app", None) or _state.default_app
    current: Deployment | None = getattr(app, "lifecycle", None)
    if current is not None:
        return current
    if not _default:
        raise ConfigurationError(
            "No Lifecycle was made in this process. Write `lifecycle = Lifecycle(app)` where the app is made, and import it."
        )
    return _default[0]
