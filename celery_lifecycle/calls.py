"""A call of an ordinary task that waits in the table: what is kept of its message, and how the task gets it back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.app.trace import get_actual_ignore_result
from celery.exceptions import WorkerLostError
from celery.utils.time import maybe_iso8601
from kombu.utils import json as kombu_json

from celery_lifecycle import events
from celery_lifecycle.deployment import routed
from celery_lifecycle.errors import PayloadError, TimeInvalid
from celery_lifecycle.model import Job, Why
from celery_lifecycle.timing.instants import delay_to_millis, from_millis, to_millis

# What of a message is kept, under the names that `apply_async` and the request have for it.
_CANVAS = ("chain", "chord", "group_id", "group_index", "link", "link_error")
_MESSAGE = (
    "ignore_result",
    "time_limit",
    "soft_time_limit",
    "root_id",
    "parent_id",
    "retries",
    "headers",
    "reply_to",
)


def payload_of(task: str, args: Any, kwargs: Any) -> Any:
    """The arguments of a call as plain JSON: dates, Decimal, UUID and bytes in the envelopes that Celery's JSON has for them.

    Raises:
        PayloadError: they can't be in a message of Celery's either, unless by another serializer.
    """
    return json.loads(_json_of({"args": list(args), "kwargs": dict(kwargs)}, f"The arguments of {task} are"))


def options_of(task: str, task_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a job keeps of the options of its call.

    Raises:
        PayloadError: the canvas around it is not JSON.
    """
    kept: dict[str, Any] = {"call": True, "task_id": task_id, **routed(options)}
    kept.update({key: options[key] for key in _MESSAGE if options.get(key) is not None})
    canvas = {key: options[key] for key in _CANVAS if options.get(key) is not None}
    for key in ("link", "link_error"):
        if key in canvas:
            canvas[key] = canvas[key] if isinstance(canvas[key], list) else [canvas[key]]
    if canvas:
        kept["canvas"] = _json_of(canvas, f"The canvas around {task} is")
    return kept


def _json_of(value: Any, what: str) -> str:
    try:
        return str(kombu_json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadError(f"{what} not JSON: {error}.") from error


def due_of(eta: Any, countdown: Any) -> tuple[datetime | None, Any]:
    """When a call is due, as a date or a delay: `countdown` goes before `eta`, as in Celery.

    Raises:
        TimeInvalid: the eta is no date.
    """
    if countdown or not eta:
        return None, countdown
    return _date(eta, "eta"), None


def expires_ms(expires: Any, now: Callable[[], int], is_retry: bool) -> int:
    """When a call expires; a retry has it as its own message had it, where Celery reads a naive date as one in UTC.

    Raises:
        TimeInvalid: it is neither a date, a timedelta nor seconds.
    """
    if not isinstance(expires, (str, datetime)):
        return now() + delay_to_millis(expires)
    date = _date(expires, "expires")
    return to_millis(date.replace(tzinfo=timezone.utc) if is_retry and date.tzinfo is None else date)


def _date(given: Any, what: str) -> datetime:
    try:
        date = maybe_iso8601(given)
    except (TypeError, ValueError):
        date = None
    if not isinstance(date, datetime):
        raise TimeInvalid(f"{what}={given!r} is no date: give an aware datetime, or the ISO 8601 text of one.")
    return date


def arguments_of(job: Job) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an ordinary task: those of its call, or a pushed payload as keywords, list or nothing."""
    if is_call(job):
        payload = kombu_json.loads(job.payload_json)
        return list(payload["args"]), dict(payload["kwargs"])
    payload = job.payload
    if isinstance(payload, dict):
        return [], dict(payload)
    if isinstance(payload, list):
        return list(payload), {}
    return ([] if payload is None else [payload]), {}


def restore(request: Any, job: Job, attempt: int = 1) -> None:
    """Make a link's request that of the call: as if its message had come with its eta."""
    options = job.options
    args, kwargs = arguments_of(job)
    canvas = kombu_json.loads(options["canvas"]) if "canvas" in options else {}
    retries = options.get("retries", 0) if is_call(job) else attempt - 1
    request.update(args=args, kwargs=kwargs, retries=retries, eta=None, lifecycle_pushed=not is_call(job))
    request.update(
        callbacks=canvas.get("link"), errbacks=canvas.get("link_error"), chord=canvas.get("chord"),
        group=canvas.get("group_id"), group_index=canvas.get("group_index"), lifecycle_chain=canvas.get("chain"),
        chain=canvas.get("chain"),
        expires=from_millis(options["expires_ms"]).isoformat() if "expires_ms" in options else None,
    )  # fmt: skip


def is_call(job: Job) -> bool:
    """Whether a job was born of `apply_async`, whose caller may wait for its result."""
    return "call" in job.options


def tell_of_death(task: Any, request: Any, job: Job, why: Why) -> None:
    """Tell whoever waits for a call that it will never run: as Celery does, in its result, its chord and its `link_error`."""
    if not is_call(job):
        return
    restore(request, job)
    stores = not get_actual_ignore_result(task, request) or task.store_errors_even_if_ignored
    if why in (Why.EXPIRED, Why.REVOKED):
        task.backend.mark_as_revoked(request.id, why.value, request=request, store_result=stores)
        return
    error = WorkerLostError(f"{job.object}#{job.id} is a dead job ({why.value}); it is not run any more.")
    task.backend.mark_as_failure(request.id, error, request=request, store_result=stores)


def tell_from_outside(app: Celery, jobs: Iterable[Job], why: Why) -> None:
    """`tell_of_death` for jobs that none of this process's requests stands for: revoked ones, those of a lost worker."""
    for job in jobs:
        if job.task in app.tasks:
            kept = {key: job.options.get(key) for key in ("root_id", "parent_id", "reply_to", "ignore_result")}
            request = Context(id=job.id, correlation_id=job.id, task=job.task, delivery_info={}, **kept)
            try:
                tell_of_death(app.tasks[job.task], request, job, why)
            except Exception as error:  # the result backend's client raises whatever its transport does
                events.unexpected(f"Whoever waits for {job.id} could not be told that it is a dead job", error)
