"""Binds one Celery app to one job database: what users make once, beside their app."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import tzinfo
from typing import Any

from celery import Celery

from celery_lifecycle import deployment, events, validate, worker
from celery_lifecycle.config import PREFIX, Config, read_config
from celery_lifecycle.decorator import BoundJob
from celery_lifecycle.deployment import Target
from celery_lifecycle.dispatch import Sender, make_route
from celery_lifecycle.errors import LifecycleError, UnknownTask
from celery_lifecycle.handles import ObjectHandle
from celery_lifecycle.life import this_worker
from celery_lifecycle.migrations.revision import upgrade, verify
from celery_lifecycle.model import ObjectRef, Shipment
from celery_lifecycle.objects import LifecycleObject, shared_kinds
from celery_lifecycle.runner import Runner
from celery_lifecycle.store import Store
from celery_lifecycle.task import LifecycleTask, classify
from celery_lifecycle.window import DispatchWindow

BACKLOG = 10
MAX_BACK_OFF_MS = 1000


class Lifecycle:
    """One Celery app with one job database.

    Args:
        app: the Celery app; it gets this object as `app.lifecycle`.
        database_url: SQLAlchemy URL of the job database; default `app.conf.lifecycle_database_url`, else SQLite in the
            working directory.
        **settings: any `lifecycle_*` setting without its prefix; goes before `app.conf`.

    Raises:
        ConfigurationError: a setting is unknown or not allowed (those of `app.conf`: when they are first needed).
    """

    def __init__(self, app: Celery, *, database_url: str | None = None, **settings: Any) -> None:
        self.app = app
        self.kinds: dict[str, type[LifecycleObject]] = {}
        self._given = {**settings, "database_url": database_url}
        read_config(self._given)
        self._lock = threading.RLock()
        self._config: Config | None = None
        self._store: Store | None = None
        self._database_id: str | None = None
        self._sender: Sender | None = None
        self._runner: Runner | None = None
        self._runner_pid = 0
        self._window: DispatchWindow | None = None
        self._queues: dict[tuple[str, str | None], str] = {}
        self._back_off_ms = 50
        app.lifecycle = self
        worker.install(app)
        deployment.set_default(self)

    # --- what it is made of

    @property
    def config(self) -> Config:
        """The settings, read once."""
        if self._config is None:
            found = _settings_in(self.app.conf)
            self._config = read_config({**found, **{k: v for k, v in self._given.items() if v is not None}})
        return self._config

    @property
    def store(self) -> Store:
        """The job database, opened when first needed. The embedded default makes and upgrades its own tables."""
        if self._store is None:
            with self._lock:
                if self._store is None:
                    store = Store(self.config)
                    events.using_database(store.database.url.render_as_string(hide_password=True), self.config.embedded)
                    if self.config.migrates_itself:
                        upgrade(store.database)
                    self._store = store
        return self._store

    @property
    def timezone(self) -> tzinfo:
        """The app's time zone (`app.conf.timezone`), by which crons go that name none."""
        zone: tzinfo = self.app.timezone
        return zone

    @property
    def database_id(self) -> str:
        """The id of the job database; every message carries it."""
        if self._database_id is None:
            self._database_id = self.store.beats.database_id()
        return self._database_id

    @property
    def sender(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(self.app, self.database_id)
        return self._sender

    @property
    def runner(self) -> Runner:
        """What runs links in this process."""
        if self._runner is None or self._runner_pid != os.getpid():
            self._runner_pid = os.getpid()
            self._runner = Runner(self, this_worker(), classify)
        return self._runner

    @property
    def whereabouts(self) -> dict[str, str]:
        """The app and the broker of this process, as beats and workers tell them to `lifecycle doctor`; no password."""
        return {"app": str(self.app.main), "broker": str(self.app.connection_for_write().as_uri())}

    def verify(self) -> None:
        """Check that the database answers and its tables are those of this version.

        Raises:
            DatabaseUnavailable: it can't be reached.
            SchemaOutdated: the tables are missing or old; the message has the command to type.
        """
        verify(self.store.database)

    def close(self) -> None:
        """Close the connections of this process."""
        if self._sender is not None:
            self._sender.close()
        if self._store is not None:
            self._store.close()

    # --- objects and tasks

    def object(self, kind: str, name: str) -> Any:
        """The handle of an object: an instance of its class if that is known here, else a plain `ObjectHandle`.

        Raises:
            NameInvalid: kind or name is not allowed.
        """
        cls = self.kinds.get(kind) or shared_kinds().get(kind)
        if cls is not None:
            return cls(name, lifecycle=self)
        return ObjectHandle(self, ObjectRef(validate.kind(kind), validate.name(name)))

    def knows(self, task: str) -> bool:
        return task in self.app.tasks

    def target(self, task: Any) -> Target:
        if isinstance(task, BoundJob):
            raise UnknownTask(
                f"{task!r} belongs to another object. Push it through that object, or give its task's name."
            )
        name = task if isinstance(task, str) else getattr(task, "name", None)
        if not isinstance(name, str):
            raise UnknownTask(f"{task!r} is no task: give a method name, a full task name or a lifecycle task.")
        validate.name(name, "task name")
        known = self.app.tasks.get(name)
        if known is None:
            return Target(name)
        if not isinstance(known, LifecycleTask):
            raise UnknownTask(
                f"Task {name!r} is not a lifecycle task, and only those are run: define it with @lifecycle_job, or with"
                " @app.task(base=LifecycleTask)."
            )
        return known.push_target

    def queue_of(self, task: str, queue: str | None) -> str:
        known = self._queues.get((task, queue))
        if known is None:
            known = self._queues[task, queue] = make_route(self.app, task, queue).queue
        return known

    # --- sending

    def has_room(self, queue: str) -> bool:
        """Whether the dispatch window has room for one more chain; counted at most once a second. Eager apps send nothing."""
        if self.app.conf.task_always_eager:
            return False
        if self.window.room(queue) <= 0:
            return False
        self.window.take(queue, 1)
        return True

    @property
    def window(self) -> DispatchWindow:
        """The dispatch window as this process sees it."""
        if self._window is None:
            self._window = DispatchWindow(self.store.claims, self.config.dispatch_window)
        return self._window

    def send(self, shipments: Sequence[Shipment]) -> int:
        """Send chains that are on record as sent; what can't be sent is released. Never raises. Returns how many went out."""
        for shipment in shipments:
            self._warn_of_backlog(shipment)
        failed: list[Shipment] = []
        try:
            failed = self.sender.send(shipments)
            if not failed:
                self._back_off_ms = 50
                return len(shipments)
            self._back_off_ms = min(self._back_off_ms * 2, MAX_BACK_OFF_MS)
            self.store.claims.release(failed, self._back_off_ms)
        except LifecycleError as error:
            events.database_failed("Chains that were not sent could not be released; they are sent again", error)
        return len(shipments) - len(failed)

    def _warn_of_backlog(self, shipment: Shipment) -> None:
        if len(shipment.jobs) < BACKLOG:
            return
        for owner, count in Counter(job.owner for job in shipment.jobs).items():
            if count >= BACKLOG:
                events.backlog(shipment.ref, owner, count)


def _settings_in(conf: Any) -> dict[str, Any]:
    """The `lifecycle_*` settings of an app without that prefix, also under the namespace that its configuration has."""
    keys = {str(key): key for key in [*conf.keys(), *getattr(conf, "changes", {})]}
    spaces = {"celery_", str(conf.prefix or "").lower()}  # known once the configuration is read
    found: dict[str, Any] = {}
    for text, key in keys.items():
        name = text.lower()
        for space in spaces:
            name = name[len(space) :] if name.startswith(space + PREFIX) else name
        if name.startswith(PREFIX):
            # The name alone goes first: what is set on `app.conf` later stands under it, above what was read.
            found[name[len(PREFIX) :]] = conf.get(name, conf[key])
    return found


def lifecycle_of(app: Celery) -> Lifecycle:
    """The `Lifecycle` of an app; an app that has only settings gets one made."""
    found = getattr(app, "lifecycle", None)
    return found if isinstance(found, Lifecycle) else Lifecycle(app)
