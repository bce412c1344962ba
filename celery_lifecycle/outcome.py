"""What a link came to: the one decision made of what a job returned or raised, and the words for it."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kombu.utils.encoding import safe_repr

from celery_lifecycle import events
from celery_lifecycle.code import Code
from celery_lifecycle.context import JobContext
from celery_lifecycle.errors import OutcomeInvalid
from celery_lifecycle.model import YIELD, Job, ObjectRef, Reschedule, Why
from celery_lifecycle.queue import when
from celery_lifecycle.store.database import is_outage
from celery_lifecycle.store.ends import Ended
from celery_lifecycle.store.runs import Finished
from celery_lifecycle.timing.backoff import full_jitter
from celery_lifecycle.transitions.run import Action, Verdict

AFTER_OUTAGE_MS = 1000
Classify = Callable[[BaseException, int], "Verdict | None"]


def decide(
    code: Code, ctx: JobContext, value: Any, error: BaseException | None, classify: Classify, started: int
) -> tuple[Verdict, BaseException | None]:
    """One decision about an ended attempt: what its value or its error stands for, and the error to show.

    Args:
        classify: what the task layer's own exceptions mean; None: an ordinary error.
        started: when the run of the job began, in milliseconds by the database's clock.
    """
    try:
        return _decided(code, ctx, value, error, classify, started)
    except Exception as wrong:  # an outcome that can't be understood is the job's failure: it is not left in flight
        return replace(_dead(wrong), started_ms=started), wrong


def _decided(
    code: Code, ctx: JobContext, value: Any, error: BaseException | None, classify: Classify, started: int
) -> tuple[Verdict, BaseException | None]:
    if error is None:
        return replace(verdict_of(value, code.plain), started_ms=started, strikes=ctx.job.strikes), None
    if is_outage(error):  # what happens to the platform uses up no attempt
        return Verdict(Action.AGAIN, delay_ms=AFTER_OUTAGE_MS, attempt=ctx.attempt - 1), error
    known = classify(error, ctx.attempt)
    if known is not None:
        return replace(known, started_ms=started), error
    again = _tried_again(code, ctx.job, ctx.attempt)
    return again or replace(_given_up(code, ctx, error), started_ms=started), error


def decide_outside(code: Code, job: Job, error: Exception) -> Verdict:
    """The decision about a job whose run failed around its body: at a soft time limit between two steps, or by our own fault."""
    return _tried_again(code, job, job.attempt + 1) or _dead(error)


def _tried_again(code: Code, job: Job, attempt: int) -> Verdict | None:
    """The next attempt by the retry policy; None if this one was the last."""
    policy = job.retry if job.retry_json else code.retry
    if attempt >= policy.max_attempts:
        return None
    delay = full_jitter(attempt, policy.base_delay, policy.max_delay, random.random())
    return Verdict(Action.AGAIN, delay_ms=delay, attempt=attempt)


def _dead(error: BaseException) -> Verdict:
    told = "".join(traceback.format_exception(error))
    return Verdict(Action.DEAD, why=Why.FAILED, error=safe_repr(error), traceback=told)


def _given_up(code: Code, ctx: JobContext, error: BaseException) -> Verdict:
    """After the last attempt a capability's `on_job_error` decides; without it the job is dead."""
    if code.on_error is None:
        return _dead(error)
    try:
        return replace(verdict_of(code.on_error(ctx, error), False), clean=False)
    except Exception as raised:  # whatever a user's hook throws must not break the run
        events.hook_failed(code.ref, "on_job_error", raised)
        return _dead(error)


def verdict_of(value: Any, plain: bool) -> Verdict:
    """The decision that an outcome stands for.

    Raises:
        OutcomeInvalid: it is no outcome (and `plain`, which allows any value, is False).
    """
    if value is YIELD:
        return Verdict(Action.YIELD)
    if isinstance(value, Reschedule):
        if (value.at is None) == (value.delay is None):
            raise OutcomeInvalid(f"{value!r}: give exactly one of delay= and at=.")
        at_ms, delay_ms = when(value.at, value.delay)
        return Verdict(Action.RESCHEDULE, at_ms=at_ms, delay_ms=delay_ms, clean=True)
    if value is None or plain:
        return Verdict(Action.COMPLETE, clean=True)
    raise OutcomeInvalid(
        f"A lifecycle job returned {events.text_of(value)[:80]!r} ({type(value).__name__}): return None, Reschedule(…) or YIELD."
    )


def tell_finished(
    ref: ObjectRef, job: Job, attempt: int, verdict: Verdict, done: Finished, error: BaseException | None
) -> None:
    """Say what became of a job whose finish was accepted."""
    if done.discarded:
        events.discarded(ref, job.id)
        return
    if done.dropped:
        events.misfired(ref, job.id, done.dropped)
    if done.skipped:
        events.skipped_intervals(ref, job.id, done.skipped)
    if verdict.action is Action.COMPLETE:
        events.completed(ref, job.id, attempt)
    elif verdict.action is Action.YIELD:
        events.yielded(ref, job.id)
    elif verdict.action is Action.DEAD:
        events.died(ref, job.id, verdict.why or Why.FAILED, error)
    elif verdict.action is Action.AGAIN and error is not None:
        events.retrying(ref, job.id, attempt, verdict.delay_ms / 1000, error)
    if verdict.action is Action.RESCHEDULE or (done.due_ms is not None and job.schedule_json):
        events.rescheduled(ref, job.id, done.due_ms)


def told_of(ended: Ended) -> str:
    """What became of a death, in words, for whoever meets it in Flower."""
    name = f"{ended.ref}#{ended.flight.job}"
    context = ended.context
    if context is None:
        return f"{name} is put back." if ended.put_back else f"{name} was stopped."
    if context.sealed:
        return f"{name} died of memory or with its process ({context.cause}) for the {context.strikes}. time: sealed."
    return (
        f"{name} died of memory or with its process ({context.cause}): strike {context.strikes} of {context.limit},"
        f" next try not before {context.next_time}."
    )


def tell(ended: Ended) -> None:
    """Say what became of a run that did not end well."""
    for job in ended.dead:
        events.died(ended.ref, job.id, ended.why)
    if ended.context is not None:
        events.struck(ended.ref, ended.flight.job, ended.context)
    elif ended.put_back:
        events.put_back(ended.ref, ended.flight.job, "its process was stopped, not its job at fault")
