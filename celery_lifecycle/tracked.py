"""Tracked Celery tasks, of whatever base class: marked while a worker runs them, given back at their end, struck at their death."""

from __future__ import annotations

from typing import Any

from celery import Celery, signals
from celery.worker import state as worker_state

from celery_lifecycle import events, holds
from celery_lifecycle.errors import LifecycleError
from celery_lifecycle.holds import TRACKED, WAITS_MS
from celery_lifecycle.life import this_life, what_ended
from celery_lifecycle.model import Cause
from celery_lifecycle.store.ends import End


def renew(app: Celery) -> None:
    """In a worker's parent: renew the rows of the tracked tasks that run in it."""
    deployment = app.lifecycle
    for request in list(worker_state.requests.values()):
        if request.time_start is not None and TRACKED in (getattr(request, "request_dict", None) or {}):
            deployment.store.holds.extend("track", request.id, deployment.config.keep_alive_ms)


def died_of_memory(task: Any) -> None:
    """In the process that ran it: a task, which may be tracked, met a `MemoryError`."""
    deployment, task_id = _deployment_of(task, task.request), task.request.id
    if deployment is not None:
        _safely(task_id, lambda: holds.lost(deployment, "track", task_id, Cause.MEMORY_ERROR))


def _safely(task_id: str, verb: Any) -> None:
    """What is not recorded now expires later; a task must not fail for it."""
    try:
        verb()
    except LifecycleError as error:
        events.database_failed(f"What became of tracked task {task_id} could not be recorded; it will expire", error)


def _deployment_of(task: Any, request: Any) -> Any:
    """The deployment of a task that is tracked, else None."""
    tracked = getattr(request, TRACKED, None) or (getattr(request, "headers", None) or {}).get(TRACKED)
    return getattr(task.app, "lifecycle", None) if tracked else None


@signals.task_prerun.connect
def _on_prerun(task: Any = None, task_id: str = "", **_: Any) -> None:
    deployment = _deployment_of(task, task.request)
    if deployment is not None:
        lasts, instance = deployment.config.keep_alive_ms, this_life().instance
        _safely(task_id, lambda: deployment.store.holds.run_by(task_id, instance, lasts))


@signals.task_postrun.connect
def _on_postrun(task: Any = None, task_id: str = "", state: str | None = None, **_: Any) -> None:
    """The task has ended by itself, however; one that is to be retried waits. No state: its process is being ended."""
    deployment = _deployment_of(task, task.request)
    if deployment is None or state is None:
        return
    rows = deployment.store.holds
    if state == "RETRY":
        _safely(task_id, lambda: rows.run_by(task_id, None, WAITS_MS))
    else:
        _safely(task_id, lambda: rows.let_go_by_key("track", task_id))


@signals.task_failure.connect
def _on_failure(sender: Any = None, task_id: str = "", exception: Any = None, **_: Any) -> None:
    """In the parent: the process of a task is gone, killed or stopped. An error of the task itself ends it in its process."""
    deployment = _deployment_of(sender, sender.request)
    if deployment is None:
        return
    end, cause = what_ended(exception)
    if end is End.DIED:
        _safely(task_id, lambda: holds.lost(deployment, "track", task_id, cause, {"told": str(exception)}))
    elif end is not None:
        _safely(task_id, lambda: holds.lost(deployment, "track", task_id))


@signals.task_revoked.connect
def _on_revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    deployment = _deployment_of(sender, request)
    if deployment is not None:
        _safely(request.id, lambda: holds.lost(deployment, "track", request.id))


@signals.worker_process_shutdown.connect
def _on_process_shutdown(**_: Any) -> None:
    holds.leave_all()
