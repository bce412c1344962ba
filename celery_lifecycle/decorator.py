"""`@lifecycle_job`: makes a method of an object class, or a plain function, a job that can be pushed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeAlias, overload

from celery import Celery

from celery_lifecycle import validate
from celery_lifecycle.code import Code
from celery_lifecycle.deployment import Deployment, Target, routed
from celery_lifecycle.errors import PolicyInvalid
from celery_lifecycle.model import HOST, Job, ObjectRef, Outcome, RetryPolicy
from celery_lifecycle.queue import JobQueue
from celery_lifecycle.task import LifecycleTask, claim_names, make_task

Method: TypeAlias = Callable[[Any, Any], Outcome]
Function: TypeAlias = Callable[[Any], Outcome]

_REFUSED = {
    "rate_limit": "every duplicate of a message would use up its tokens; bound the rate with the queue's concurrency",
    "bind": "ctx.task is the request",
    "acks_late": "the table replays, not the broker",
    "reject_on_worker_lost": "the table replays, not the broker",
    "retry_on_worker_lost": "the table replays, not the broker",
    "autoretry_for": "use retry=RetryPolicy(…)",
    "base": "it is LifecycleTask",
    "typing": "a job takes ctx",
    "expires": "a message that expires would only be sent again; look at ctx.scheduled_for, or give expires= to apply_async",
}


@dataclass(frozen=True)
class JobOptions:
    """The options of a `@lifecycle_job`, checked."""

    name: str | None = None
    retry: RetryPolicy | None = None
    singleflight: bool = False
    hung_timeout_ms: int | None = None
    exclusive: bool = False
    recovery_loop: bool = False
    memory_limit: int | None = None
    celery: dict[str, Any] = field(default_factory=dict)

    def target(self, task: str, owner: str) -> Target:
        return Target(
            task=task, owner=owner, **routed(self.celery), retry=self.retry, singleflight=self.singleflight,
            hung_timeout_ms=self.hung_timeout_ms, exclusive=self.exclusive, recovery_loop=self.recovery_loop,
        )  # fmt: skip


class JobMethod:
    """A method that is a lifecycle job. On an instance it is a bound handle: `cart.remind.push(…)`, `cart.remind(ctx)`."""

    def __init__(self, function: Callable[..., Any], options: JobOptions) -> None:
        self.function = function
        self.options = options
        self.name = function.__name__
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<job {self.function.__qualname__}>"

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> JobMethod: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> BoundJob: ...
    def __get__(self, instance: object, owner: type | None = None) -> JobMethod | BoundJob:
        return self if instance is None else BoundJob(instance, self)


class BoundJob:
    """A job of one object."""

    def __init__(self, holder: Any, method: JobMethod) -> None:
        self._holder = holder
        self._method = method

    @property
    def method_name(self) -> str:
        return self._method.name

    def __call__(self, ctx: Any) -> Outcome:
        """Run the plain function."""
        outcome: Outcome = self._method.function(self._holder, ctx)
        return outcome

    def push(
        self,
        *,
        at: datetime | None = None,
        delay: float | timedelta | None = None,
        payload: Any = None,
        id: str | None = None,
        retry: RetryPolicy | None = None,
        singleflight: bool | None = None,
        hung_timeout: float | timedelta | None = None,
        exclusive: bool | None = None,
        recovery_loop: bool | None = None,
        session: Any = None,
        connection: Any = None,
    ) -> Job:
        """The same as `jobs.push(<this method>, …)` of the object."""
        jobs: JobQueue = self._holder.jobs
        return jobs.push(
            self._method.name, at=at, delay=delay, payload=payload, id=id, retry=retry, singleflight=singleflight,
            hung_timeout=hung_timeout, exclusive=exclusive, recovery_loop=recovery_loop, session=session,
            connection=connection,
        )  # fmt: skip

    def schedule(self, when: Any, payload: Any = None, **options: Any) -> Any:
        """The same as `schedule(when, <this method>, …)` of the object."""
        return self._holder.schedule(when, self._method.name, payload, **options)

    def schedule_every(self, seconds: Any, payload: Any = None, **options: Any) -> Any:
        """The same as `schedule_every(seconds, <this method>, …)` of the object."""
        return self._holder.schedule_every(seconds, self._method.name, payload, **options)

    def __repr__(self) -> str:
        return f"<job {self._method.name} of {self._holder!r}>"


class Decorate(Protocol):
    """What `@lifecycle_job(…)` makes: a decorator of methods and of functions."""

    @overload
    def __call__(self, decorated: Method, /) -> JobMethod: ...
    @overload
    def __call__(self, decorated: Function, /) -> LifecycleTask: ...


@overload
def lifecycle_job(function: Method, /) -> JobMethod: ...
@overload
def lifecycle_job(function: Function, /) -> LifecycleTask: ...
@overload
def lifecycle_job(
    *,
    name: str | None = None,
    retry: RetryPolicy | None = None,
    singleflight: bool = False,
    hung_timeout: float | timedelta | None = None,
    exclusive: bool = False,
    recovery_loop: bool = False,
    memory_limit: str | int | None = None,
    app: Celery | None = None,
    **celery_options: Any,
) -> Decorate: ...
def lifecycle_job(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    retry: RetryPolicy | None = None,
    singleflight: bool = False,
    hung_timeout: float | timedelta | None = None,
    exclusive: bool = False,
    recovery_loop: bool = False,
    memory_limit: str | int | None = None,
    app: Celery | None = None,
    **celery_options: Any,
) -> Any:
    """Make a method of a `LifecycleObject` or `Capability`, or a plain function, a lifecycle job: a real Celery task.

    The function takes `ctx` (a `JobContext`) and returns None (complete), `Reschedule(…)` or `YIELD`.

    Args:
        name: the task name; default `<kind>.<method>`, `<kind>.<capability>.<method>`, or Celery's own for a function.
        retry: attempts and delays; default 3 attempts, 0.1 s doubling to 3 s, full jitter.
        singleflight, hung_timeout, exclusive, recovery_loop: see `JobQueue.push`.
        memory_limit: bytes or `"512M"`: a `MemoryError` is raised beyond it, which counts as a strike.
        app: register a function in this app only; default in every app of the process.
        **celery_options: go to the Celery task: `queue`, `priority`, `soft_time_limit`, `time_limit` …

    Raises:
        PolicyInvalid: an option is out of range, or is one that a lifecycle job can't have (`rate_limit`, `acks_late` …).
    """
    for option, why in _REFUSED.items():
        if option in celery_options:
            raise PolicyInvalid(f"{option}= is not for lifecycle jobs: {why}.")
    validate.retry(retry)
    validate.priority(celery_options.get("priority"))
    options = JobOptions(
        name=name,
        retry=retry,
        singleflight=validate.flag(singleflight, "singleflight"),
        hung_timeout_ms=validate.seconds(hung_timeout, "hung_timeout"),
        exclusive=validate.flag(exclusive, "exclusive"),
        recovery_loop=validate.flag(recovery_loop, "recovery_loop"),
        memory_limit=validate.memory(memory_limit),
        celery=celery_options,
    )

    def decorate(decorated: Any) -> Any:
        if not callable(decorated):
            raise PolicyInvalid(f"@lifecycle_job takes a function, not {decorated!r}.")
        if _is_method(decorated):
            return JobMethod(decorated, options)
        return _function_task(decorated, options, app)

    return decorate(function) if function is not None else decorate


def _is_method(function: Any) -> bool:
    """Whether a function is defined in a class body: nothing else tells at the time of decoration."""
    outer = function.__qualname__.rpartition(".")[0]
    return bool(outer) and not outer.endswith("<locals>")


def _function_task(function: Any, options: JobOptions, app: Celery | None) -> Any:
    name = options.name or f"{function.__module__}.{function.__name__}"
    claim_names([(validate.kind(name), f"the job {function.__module__}.{function.__qualname__}")], app)

    def code(deployment: Deployment, ref: ObjectRef) -> Code:
        made: Code = deployment.object(ref.kind, ref.name)._code(
            name, call=function, memory_limit=options.memory_limit, retry=options.retry or RetryPolicy()
        )
        return made

    return make_task(name, code, options.target(name, HOST), options.celery, app, function.__module__)
