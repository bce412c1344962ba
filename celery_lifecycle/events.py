"""Every text that is logged, and every signal that is sent: one function per fact. Other modules pass facts only."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

from kombu.utils.encoding import safe_repr

from celery_lifecycle import signals
from celery_lifecycle.model import MemoryLimitContext, ObjectRef, Why

logger = logging.getLogger("celery_lifecycle")


def text_of(value: object) -> str:
    """What a value says of itself, whatever it is: one whose text can't be made is no reason to fail."""
    try:
        return str(value)
    except Exception:  # whatever a user's `__str__` throws
        return safe_repr(value)


def _at(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(0, timezone.utc) + timedelta(milliseconds=ms)


def _say(level: int, text: str, *args: object, ref: ObjectRef | None = None, job: str | None = None, **kw: Any) -> None:
    extra = {"lifecycle_object": str(ref) if ref else None, "lifecycle_job": job}
    logger.log(level, text, *args, extra=extra, **kw)


def _send(signal: Any, ref: ObjectRef, **facts: Any) -> None:
    if signal.receivers:
        signal.send(sender=ref, object=ref, **facts)


# --- jobs


def started(ref: ObjectRef, job: str, attempt: int, task_id: str) -> None:
    _send(signals.job_started, ref, job=job, attempt=attempt, task_id=task_id)


def completed(ref: ObjectRef, job: str, attempt: int) -> None:
    _send(signals.job_completed, ref, job=job, attempt=attempt)


def rescheduled(ref: ObjectRef, job: str, due_ms: int | None) -> None:
    _send(signals.job_rescheduled, ref, job=job, due_at=_at(due_ms))


def yielded(ref: ObjectRef, job: str) -> None:
    _send(signals.job_yielded, ref, job=job)


def discarded(ref: ObjectRef, job: str) -> None:
    _say(
        logging.INFO,
        "%s#%s: a newer change of the job won, its outcome is discarded",
        ref,
        job,
        ref=ref,
        job=job,
    )
    _send(signals.job_discarded, ref, job=job)


def refused(ref: ObjectRef, job: str, reason: str) -> None:
    _say(logging.WARNING, "%s#%s: its late result is refused: %s", ref, job, reason, ref=ref, job=job)


def retrying(ref: ObjectRef, job: str, attempt: int, delay: float, error: BaseException) -> None:
    _say(
        logging.WARNING, "%s#%s: attempt %d failed (%s), the next one in %.2f s", ref, job, attempt, safe_repr(error),
        delay, ref=ref, job=job,
    )  # fmt: skip
    _send(signals.job_retrying, ref, job=job, attempt=attempt, delay=delay, error=error)


def died(ref: ObjectRef, job: str, why: Why, error: BaseException | str | None = None) -> None:
    told = f": {text_of(error)}" if error is not None else ""
    _say(logging.ERROR, "%s#%s is a dead job (%s)%s", ref, job, why.value, told, ref=ref, job=job)
    _send(signals.job_failed, ref, job=job, reason=why.value, error=error)


def put_back(ref: ObjectRef, job: str, reason: str) -> None:
    _say(logging.WARNING, "%s#%s is put back: %s", ref, job, reason, ref=ref, job=job)
    _send(signals.job_put_back, ref, job=job, reason=reason)


def skipped_intervals(ref: ObjectRef, job: str, intervals: int) -> None:
    _say(
        logging.WARNING, "Skipping interval schedule %s#%s: its run outlasted %d interval(s)", ref, job, intervals,
        ref=ref, job=job,
    )  # fmt: skip
    _send(signals.job_skipped, ref, job=job, intervals=intervals)


def misfired(ref: ObjectRef, job: str, dropped: dict[str, Any]) -> None:
    count, first, last = dropped["count"], dropped["first"], dropped["last"]
    _say(
        logging.WARNING, "%s#%s: %d missed time(s) of its schedule are not run, from %s to %s", ref, job, count, first,
        last, ref=ref, job=job,
    )  # fmt: skip
    _send(
        signals.job_misfired,
        ref,
        job=job,
        count=count,
        first=datetime.fromisoformat(first),
        last=datetime.fromisoformat(last),
    )


def slow(ref: str, job: str, seconds: float, fenced: bool) -> None:
    kind, _, name = ref.partition("/")
    told = ", it is fenced off and stopped" if fenced else ""
    _say(logging.WARNING, "%s#%s has been running for %.1f s%s", ref, job, seconds, told, job=job)
    _send(signals.job_slow_dispatch, ObjectRef(kind, name), job=job, seconds=seconds, fenced=fenced)


def backlog(ref: ObjectRef, owner: str, count: int) -> None:
    _say(logging.WARNING, "%s: %d jobs of %r were due in one run", ref, count, owner, ref=ref)
    _send(signals.job_backlog_warning, ref, owner=owner, count=count)


def unknown(ref: ObjectRef | str, task: str, job: str, dead: bool) -> None:
    then = "it is a dead job now" if dead else "it is put back: a deploy may still bring it"
    _say(logging.ERROR, "%s#%s: no task %r in this worker, %s", ref, job, task, then, job=job)


def wrong_database(task_id: str, theirs: str, ours: str) -> None:
    _say(
        logging.CRITICAL, "Link %s belongs to job database %s, this worker has %s: beat and workers of one app need the"
        " same lifecycle_database_url", task_id, theirs, ours,
    )  # fmt: skip


def not_durable(task: str, task_id: str | None, error: BaseException) -> None:
    _say(
        logging.WARNING,
        "%s[%s] is tried again by a message of Celery's own, not by the table: %s",
        task,
        task_id,
        error,
    )


def sealed_stays(ref: ObjectRef, job: str) -> None:
    _say(
        logging.WARNING,
        "%s#%s is sealed: a push from inside a run does not bring it back",
        ref,
        job,
        ref=ref,
        job=job,
    )


# --- hooks


def start_failed(ref: ObjectRef, error: BaseException, next_ms: int) -> None:
    _say(logging.ERROR, "%s: on_start failed, tried again at %s", ref, _at(next_ms), ref=ref, exc_info=error)
    _send(signals.start_failed, ref, error=error, next_at=_at(next_ms))


def alarm_failed(ref: ObjectRef, error: BaseException, next_ms: int | None) -> None:
    then = f"retried at {_at(next_ms)}" if next_ms is not None else "not retried"
    _say(logging.ERROR, "%s: on_alarm failed, %s", ref, then, ref=ref, exc_info=error)
    _send(signals.alarm_failed, ref, error=error, next_at=_at(next_ms))


def hook_failed(ref: ObjectRef, hook: str, error: BaseException) -> None:
    _say(logging.ERROR, "%s: %s failed", ref, hook, ref=ref, exc_info=error)


# --- the breaker


def struck(ref: ObjectRef, job: str, context: MemoryLimitContext) -> None:
    if context.sealed:
        _say(
            logging.ERROR, "%s#%s died for the %d. time (%s): sealed, %s taken out", ref, job, context.strikes,
            context.cause, ", ".join(context.purged) or "nothing", ref=ref, job=job,
        )  # fmt: skip
    else:
        _say(
            logging.WARNING, "%s#%s died (%s), strike %d of %d: not before %s", ref, job, context.cause,
            context.strikes, context.limit, context.next_time, ref=ref, job=job,
        )  # fmt: skip
    _send(signals.alarm_memory_limit_reset, ref, job=job, context=context)


# --- the platform


def broker_failed(count: int, how: str, error: BaseException) -> None:
    _say(logging.WARNING, "The broker took no more chains (%d, %s): %r", count, how, error)


def unsendable(ref: ObjectRef, error: BaseException) -> None:
    _say(logging.ERROR, "The chain of %s can't be sent: %r", ref, error, ref=ref)


def no_reply_queue(task_id: str, error: BaseException) -> None:
    _say(
        logging.WARNING, "The queue for the result of %s could not be declared; who waits for it late may miss it: %s", task_id, error
    )  # fmt: skip


def close_failed(error: BaseException) -> None:
    _say(logging.DEBUG, "Closing a broken broker connection failed: %r", error)


def entry_due(name: str, task: str) -> None:
    _say(logging.INFO, "Scheduler: Sending due task %s (%s)", name, task)


def entry_waits(name: str, error: BaseException) -> None:
    _say(logging.WARNING, "Beat entry %r is due and waits for the broker: %r", name, error)


def entry_failed(name: str, error: BaseException) -> None:
    _say(logging.ERROR, "Beat entry %r could not be run, it is tried again: %r", name, error, exc_info=error)


def database_failed(what: str, error: BaseException) -> None:
    _say(logging.ERROR, "%s: %s", what, error)


def database_back() -> None:
    _say(logging.INFO, "The job database answers again")


def unexpected(what: str, error: BaseException) -> None:
    _say(logging.CRITICAL, "%s: %r", what, error, exc_info=error)


def using_database(url: str, embedded: bool) -> None:
    told = " (embedded default; set lifecycle_database_url for anything else)" if embedded else ""
    _say(logging.INFO, "Job database: %s%s", url, told)


def migrated(names: Iterable[str]) -> None:
    _say(logging.INFO, "Tables of celery_lifecycle are at %s", ", ".join(names))


def holder_died(ref: ObjectRef, kind: str, key: str) -> None:
    _say(logging.WARNING, "%s: the holder of %s %s died", ref, kind, key, ref=ref)


def changed_by_hand(ref: ObjectRef, action: str, what: str, who: str) -> None:
    _say(logging.INFO, "%s: %s in Flower by %s: %s", ref, action, who, what or "-", ref=ref)
