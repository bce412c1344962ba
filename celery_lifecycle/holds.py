"""Keep-alives and tracked work: rows that their holder renews while it lives, so that its death is noticed."""

from __future__ import annotations

import threading
import uuid
import weakref
from typing import Any

from celery_lifecycle import events
from celery_lifecycle.deployment import Deployment, current_run
from celery_lifecycle.errors import LifecycleError
from celery_lifecycle.model import ObjectRef


class _Renewer:
    """One daemon thread per process that renews what is held in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakSet[Hold] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, hold: Hold) -> None:
        with self._lock:
            self._held.add(hold)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="lifecycle-holds", daemon=True)
                self._thread.start()

    def discard(self, hold: Hold) -> None:
        with self._lock:
            self._held.discard(hold)

    def _run(self) -> None:
        while True:
            with self._lock:
                held = list(self._held)
                if not held:
                    self._thread = None
                    return
            for hold in held:
                hold.renew()
            every = min(hold.every for hold in held)
            del held, hold
            self._stop.wait(every)


_renewer = _Renewer()


class Hold:
    """Something that keeps an object: it has a row that must be renewed."""

    def __init__(self, deployment: Deployment, ref: ObjectRef, kind: str, key: str, job: str | None = None) -> None:
        self._deployment = deployment
        self._ref = ref
        self._kind = kind
        self._key = key
        self._released = False
        self.every = deployment.config.keep_alive / 3
        deployment.store.objects.hold(ref, kind, key, job, {}, deployment.config.keep_alive_ms)
        _renewer.add(self)

    def renew(self) -> None:
        """Extend the row, best effort: the next round tries again."""
        try:
            self._deployment.store.objects.extend(self._kind, self._key, self._deployment.config.keep_alive_ms)
        except LifecycleError as error:
            events.database_failed(f"Keep-alive of {self._ref} could not be renewed", error)

    def release(self) -> bool:
        """Give it back. Only the first call does anything, and returns True."""
        if self._released:
            return False
        self._released = True
        _renewer.discard(self)
        return self._deployment.store.objects.let_go(self._ref, self._kind, self._key)


class KeepAlive(Hold):
    """A counted keep-alive of an object, renewed by this process until it is released; a context manager.

    It is in no list. If this process dies, the object wakes (`on_start`, `on_alarm`) within `lifecycle_keep_alive`
    (default 30 s) and one look of beat (10 s).
    """

    def __init__(self, deployment: Deployment, ref: ObjectRef) -> None:
        super().__init__(deployment, ref, "alive", uuid.uuid4().hex)

    def __enter__(self) -> KeepAlive:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def track(deployment: Deployment, ref: ObjectRef, job_id: str, work: Any) -> bool:
    """Track work that a running job hands off; see `JobContext.track`."""
    if hasattr(work, "add_done_callback"):
        hold = Hold(deployment, ref, "track", uuid.uuid4().hex, job_id)
        work.add_done_callback(lambda _: hold.release())
        return True
    if hasattr(work, "apply_async") and hasattr(work, "freeze"):
        task_id = work.freeze().id
        _hold_for_task(deployment, ref, task_id, job_id)
        headers = {"lifecycle_tracked": {"object": str(ref), "job": job_id}}
        work.apply_async(task_id=task_id, headers=headers)
        return True
    task_id = getattr(work, "id", None)
    if isinstance(task_id, str):
        _hold_for_task(deployment, ref, task_id, job_id)
        return True
    raise TypeError(f"track({work!r}): give a Celery signature, an AsyncResult or a future.")


def _hold_for_task(deployment: Deployment, ref: ObjectRef, task_id: str, job_id: str) -> None:
    deployment.store.objects.hold(ref, "track", task_id, job_id, {"task_id": task_id}, 86_400_000)


def track_alarm_work(work: Any) -> bool:
    """Inside a run: the same as `ctx.track(work)`, True. Outside: nothing is tracked, False."""
    run = current_run.get()
    if run is None:
        return False
    return track(run.deployment, run.pusher.ref, run.pusher.job, work)
