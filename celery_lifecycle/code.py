"""The code behind a link, resolved to plain callables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery_lifecycle.deployment import Target
from celery_lifecycle.model import HOST, SCHEDULER, AlarmInfo, MemoryLimitContext, ObjectRef, RetryPolicy


def _nothing(ctx: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Code:
    """What a link runs.

    Attributes:
        ref, handle: the object and what users get as `ctx.object`.
        call: the job's function, bound.
        starts: `on_start` of the host and of its capabilities, in order.
        alarm: `on_alarm`, bound; None where the class has none.
        memory_hooks: `on_memory_limit` of the capabilities, then the host's.
        hook_task: the task that calls them; None where there are none.
        on_error: `on_job_error` of the job's capability.
        owner: who pushes what this code pushes: the host, or the capability that it is a method of.
        owners: who is installed.
        limit: deaths at which a line is sealed.
        plain: any value is a result, not only an outcome.
    """

    task: str
    ref: ObjectRef
    handle: Any
    resolve: Callable[[Any], Target]
    call: Callable[[Any], Any] = _nothing
    starts: tuple[Callable[[], Any], ...] = ()
    alarm: Callable[[AlarmInfo], Any] | None = None
    memory_hooks: tuple[Callable[[MemoryLimitContext], Any], ...] = ()
    hook_task: str | None = None
    on_error: Callable[[Any, BaseException], Any] | None = None
    owner: str = HOST
    owners: frozenset[str] = frozenset({HOST, SCHEDULER})
    limit: int = 3
    memory_limit: int | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    plain: bool = False
