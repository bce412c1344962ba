"""Keep-alives and tracked work: rows that their holder renews while it lives, so that its death is noticed."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from typing import Any, Final

from celery_lifecycle import events
from celery_lifecycle.deployment import Deployment, current_run
from celery_lifecycle.errors import LifecycleError, LockTimeout
from celery_lifecycle.model import Cause, ObjectRef, Why

TRACKED: Final = "lifecycle_tracked"
"""The header of a tracked task's message."""

WAITS_MS: Final = 86_400_000
"""How long a tracked task may wait for a worker, or for its retry, before it counts as lost."""

RETRY_RENEWAL: Final = 1.0


class _Renewer:
    """One daemon thread per process that renews what is held in it."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """A forked process holds nothing of what its parent holds."""
        self.by_hand = False
        self._lock = threading.Lock()
        self._held: list[Hold] = []
        self._thread: threading.Thread | None = None

    def held(self) -> list[Hold]:
        with self._lock:
            return list(self._held)

    def add(self, hold: Hold) -> None:
        with self._lock:
            self._held.append(hold)
            if self._thread is None and not self.by_hand:
                self._thread = threading.Thread(target=self._run, name="lifecycle-holds", daemon=True)
                self._thread.start()

    def discard(self, hold: Hold) -> None:
        with self._lock:
            if hold in self._held:
                self._held.remove(hold)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            with self._lock:
                held = list(self._held)
                if not held or self.by_hand:
                    self._thread = None
                    return
            # Each is renewed, whatever becomes of the others.
            done = [hold.renew() for hold in held]
            pause.wait(min(hold.every for hold in held) if all(done) else RETRY_RENEWAL)


_renewer = _Renewer()
os.register_at_fork(after_in_child=_renewer.forget)


def live_holds() -> list[Hold]:
    """What is held in this process now."""
    return _renewer.held()


@contextlib.contextmanager
def renewed_by_hand() -> Iterator[None]:
    """Within the block no thread renews what is held: a test does. At its end this process forgets what it held."""
    before = _renewer.by_hand
    _renewer.by_hand = True
    known = live_holds()
    try:
        yield
    finally:
        _renewer.by_hand = before
        for hold in live_holds():
            if hold not in known:
                hold.abandon()


def leave_all() -> None:
    """This process ends in good order, with something still held: that is given back, and its objects wake."""
    for hold in live_holds():
        hold.leave()


class Hold:
    """Something that keeps an object: it has a row that must be renewed."""

    def __init__(
        self, deployment: Deployment, ref: ObjectRef, kind: str, key: str, job: str | None = None,
        by_object: bool = False, **data: Any,
    ) -> None:  # fmt: skip
        self._deployment = deployment
        self._ref = ref
        self._kind = kind
        self._ending = False
        self.every = deployment.config.keep_alive / 3
        data = {**data, "wake": _wake(deployment, ref)}
        lasts = deployment.config.keep_alive_ms
        self._key: str = deployment.store.holds.hold(ref, kind, key, job, data, lasts, by_object)
        _renewer.add(self)

    def renew(self) -> bool:
        """Extend the row, or give it back if that could not be done at once. False: the database does not answer."""
        rows = self._deployment.store.holds
        try:
            if self._ending:
                rows.let_go(self._ref, self._kind, self._key)
            if self._ending or not rows.extend(self._kind, self._key, self._deployment.config.keep_alive_ms):
                _renewer.discard(self)
        except LifecycleError as error:
            events.database_failed(f"What keeps {self._ref} could not be renewed; trying again", error)
            return False
        return True

    def release(self) -> bool:
        """Give it back; if the database does not answer, that is done as soon as it does.

        Only the first call does anything, and returns True.
        """
        if self._ending:
            return False
        self._ending = True
        self.renew()
        return True

    def leave(self) -> None:
        """Give it back because its process ends: the object wakes."""
        self._ending = True
        _renewer.discard(self)
        try:
            self._deployment.store.holds.lost(self._kind, self._key)
        except LifecycleError as error:
            events.database_failed(f"What keeps {self._ref} could not be given back; it will expire", error)

    def abandon(self) -> None:
        """Never renew it again, as if this process had died."""
        _renewer.discard(self)


class KeepAlive(Hold):
    """A counted keep-alive of an object, renewed by this process until it is released; a context manager.

    It is in no list. If this process dies, the object wakes (`on_start`, `on_alarm`) within `lifecycle_keep_alive`
    (default 30 s) and two looks of beat (10 s each).
    """

    def __init__(self, deployment: Deployment, ref: ObjectRef) -> None:
        super().__init__(deployment, ref, "alive", uuid.uuid4().hex)

    def __enter__(self) -> KeepAlive:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class _ResultHold(Hold):
    """Tracks a task that was sent without our header: through its result, from this process."""

    def __init__(self, deployment: Deployment, ref: ObjectRef, job_id: str, result: Any) -> None:
        self._result = result
        super().__init__(deployment, ref, "track", result.id, job_id, by_object=True)

    def renew(self) -> bool:
        try:
            ready = self._ending or self._result.ready()
        except Exception as error:  # whatever the client of the result backend throws
            events.unexpected(f"The result of tracked task {self._result.id} could not be read; trying again", error)
            ready = False
        if ready and not self._ending:
            self._ending = True
            if type(self._result.result).__name__ == "WorkerLostError":
                return self._strike()
        return super().renew()

    def _strike(self) -> bool:
        try:
            lost(self._deployment, "track", self._key, Cause.CRASH, {"told": str(self._result.result)})
        except LifecycleError as error:
            self._ending = False
            events.database_failed(
                f"The death of tracked task {self._result.id} could not be recorded; trying again", error
            )
            return False
        _renewer.discard(self)
        return True


def _wake(deployment: Deployment, ref: ObjectRef) -> tuple[str, str] | None:
    """The task, and its queue, by which an object wakes; None for one without a class."""
    task = f"{ref.kind}.on_alarm"
    return (task, deployment.queue_of(task, None)) if deployment.knows(task) else None


def track(deployment: Deployment, ref: ObjectRef, job_id: str, work: Any) -> bool:
    """Track work that a running job hands off; see `JobContext.track`."""
    run = current_run()
    if hasattr(work, "add_done_callback"):
        hold = Hold(deployment, ref, "track", uuid.uuid4().hex, job_id, worker=run.worker if run else None)
        work.add_done_callback(lambda _: hold.release())
        return True
    if hasattr(work, "apply_async") and hasattr(work, "freeze"):
        return _send_tracked(deployment, ref, job_id, work)
    if isinstance(getattr(work, "id", None), str) and hasattr(work, "ready"):
        if type(work.backend).__name__ == "DisabledBackend":
            raise TypeError(
                f"track({work!r}): without a result backend only a signature can be tracked; it is sent then."
            )
        _ResultHold(deployment, ref, job_id, work).renew()
        return True
    raise TypeError(f"track({work!r}): give a Celery signature, an AsyncResult or a future.")


def _send_tracked(deployment: Deployment, ref: ObjectRef, job_id: str, work: Any) -> bool:
    if work.get("subtask_type") is not None:
        raise TypeError(f"track({work!r}): give the signature of one task; of a chain or group track each member.")
    task_id = work.freeze().id
    rows = deployment.store.holds
    rows.hold(ref, "track", task_id, job_id, {"wake": _wake(deployment, ref)}, WAITS_MS)
    headers = {**(work.options.get("headers") or {}), TRACKED: {"object": str(ref), "job": job_id}}
    try:
        work.apply_async(task_id=task_id, headers=headers)
    except BaseException:
        rows.let_go(ref, "track", task_id)
        raise
    return True


def track_alarm_work(work: Any) -> bool:
    """Inside a run: the same as `ctx.track(work)`, True. Outside: nothing is tracked, False."""
    run = current_run()
    if run is None:
        return False
    return track(run.deployment, run.pusher.ref, run.pusher.job, work)


# --- what others see of it: the worker that runs a tracked task, and beat


def lost(
    deployment: Deployment, kind: str, key: str, cause: Cause | None = None, details: dict[str, Any] | None = None,
    expires_ms: int | None = None,
) -> bool:  # fmt: skip
    """A holder is gone: its object wakes; with a cause, tracked work strikes the job that handed it off.

    Returns whether it was held still.
    """
    found = deployment.store.holds.lost(kind, key, cause, details, expires_ms)
    if found is None:
        return False
    events.holder_died(found.ref, "a keep-alive" if kind == "alive" else "tracked work", key)
    for job in found.dead:
        events.died(found.ref, job.id, Why.SEALED)
    if found.context is not None and found.job is not None:
        events.struck(found.ref, found.job, found.context)
    return True


def look(deployment: Deployment, doubts: dict[tuple[str, str], int]) -> None:
    """Beat's look at what has expired. What had expired at the last look already has nobody who renews it.

    `doubts` is what the last look saw. So an outage of the database, after which beat comes back first, kills nothing.
    """
    seen: dict[tuple[str, str], int] = {}
    for row in deployment.store.holds.expired():
        if doubts.get((row.kind, row.key)) != row.expires_ms:
            seen[row.kind, row.key] = row.expires_ms
            continue
        try:
            lost(deployment, row.kind, row.key, Cause.LOST, {"worker": row.data.get("worker")}, row.expires_ms)
        except LockTimeout as error:  # a caller holds the object's row: the others are looked into all the same
            seen[row.kind, row.key] = row.expires_ms
            events.database_failed(f"The holder of {row.ref} is gone, which could not be written yet", error)
    doubts.clear()
    doubts.update(seen)
