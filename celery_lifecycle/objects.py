"""Object classes and capabilities: where an application says what its logical objects do."""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from celery_lifecycle import validate
from celery_lifecycle.code import Code
from celery_lifecycle.decorator import BoundJob, JobMethod
from celery_lifecycle.deployment import Deployment, Target, default_deployment
from celery_lifecycle.errors import KindConflict, LifecycleError, UnknownTask
from celery_lifecycle.handles import ObjectHandle
from celery_lifecycle.model import HOST, SCHEDULER, AlarmInfo, MemoryLimitContext, ObjectRef, RetryPolicy
from celery_lifecycle.queue import JobQueue, Resolve
from celery_lifecycle.schedules import Scheduling
from celery_lifecycle.task import claim_names, make_task

C = TypeVar("C", bound="Capability")

_shared_kinds: dict[str, type[LifecycleObject]] = {}
RESERVED_OWNERS = frozenset({HOST, SCHEDULER})


def snake_case(name: str) -> str:
    """`ShoppingCart` → `shopping_cart`: the default kind of a class."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


class Capability(Scheduling):
    """A reusable part of object classes, installed by assignment: `outbox = Outbox()`. It owns its jobs under its own id.

    Args:
        id: who owns the jobs; default the name it is assigned to. `"host"` and `"scheduler"` are taken.

    On an object's instance, `self.object` is the object, `self.jobs` the capability's own jobs; `self.schedule(…)` and the
    like make and see the capability's own schedules, which are jobs of its too.
    """

    id: str = ""
    object: Any = None

    def __init__(self, id: str | None = None) -> None:
        if id is not None:
            self.id = self._checked(id)

    def __set_name__(self, owner: type, name: str) -> None:
        if not self.id:
            self.id = self._checked(name)
        self._attribute = name

    @staticmethod
    def _checked(id: str) -> str:
        if id in RESERVED_OWNERS:
            raise LifecycleError(f"A capability can't have the id {id!r}: it is taken. Choose another one.")
        return validate.name(id, "capability id")

    def __get__(self: C, instance: Any, owner: type | None = None) -> C:
        if instance is None:
            return self
        bound = copy.copy(self)
        bound.object = instance
        return bound

    @property
    def jobs(self) -> JobQueue:
        """The capability's own jobs of this object; those of other owners are neither seen nor changed."""
        handle: LifecycleObject = self.object
        if handle is None:
            raise LifecycleError("A capability has jobs only on an object: use it through an instance of its class.")
        return JobQueue(handle._deployment, handle.ref, self.id, self._resolve)

    def _resolve(self, fn: Any) -> Target:
        handle: LifecycleObject = self.object
        target = _method_target(handle, self.id, type(self), fn)
        if target is None:
            target = handle._deployment.target(fn)
        if target.kind is None:  # of no class: a function, or an ordinary task
            return replace(target, owner=self.id)
        if target.owner != self.id:
            raise UnknownTask(
                f"{target.task} belongs to {target.owner!r} and not to {self.id!r}: push it through {handle}'s own jobs."
            )
        return target

    def _scheduling(self) -> tuple[Deployment, ObjectRef, str, Resolve]:
        handle: LifecycleObject = self.object
        if handle is None:
            raise LifecycleError(
                "A capability has schedules only on an object: use it through an instance of its class."
            )
        return handle._deployment, handle.ref, self.id, self._resolve

    def _callback_of(self, task: str) -> str:
        return _method_of(type(self.object), self.id, task) or str(self.object._callback_of(task))

    def on_start(self) -> None:
        """Called before the first job of a run, after the host's, and in each further process that gets a link of it."""

    def on_job_error(self, ctx: Any, error: BaseException) -> Any:
        """Called after the last attempt of one of the capability's jobs; returns an outcome, as the job would."""

    def on_memory_limit(self, context: MemoryLimitContext) -> None:
        """Called after a strike of the object, before the host's."""


class LifecycleObject(ObjectHandle):
    """Base class of object classes. An instance is a handle: making one stores nothing, and each link makes one.

    An `__init__` of a class's own can be called as this one: `def __init__(self, name, *, lifecycle=None)`.

    Class attributes:
        kind: default the class name in snake_case. Also `class Cart(LifecycleObject, kind="basket")`.
        max_memory_strikes: deaths at which a loop is sealed; default `lifecycle_max_memory_strikes`.

    Class arguments:
        lifecycle: register the class in this deployment only; default in every app of the process.
        abstract: a base class of object classes, with no kind of its own.
    """

    kind: ClassVar[str] = ""
    max_memory_strikes: ClassVar[int | None] = None
    _targets: ClassVar[dict[tuple[str, str], Target]] = {}
    _capabilities: ClassVar[dict[str, str]] = {}
    _lifecycle: ClassVar[Any] = None

    def __init__(self, name: str, *, lifecycle: Deployment | None = None) -> None:
        deployment = lifecycle or type(self)._lifecycle or default_deployment()
        super().__init__(deployment, ObjectRef(type(self).kind, validate.name(name)))

    def __init_subclass__(cls, *, kind: str | None = None, lifecycle: Any = None, abstract: bool = False) -> None:
        super().__init_subclass__()
        if abstract:
            return
        own = cls.__dict__.get("kind") or kind or snake_case(cls.__name__)
        cls.kind = validate.kind(own)
        cls._lifecycle = lifecycle
        kinds = _shared_kinds if lifecycle is None else lifecycle.kinds
        known = kinds.get(cls.kind) or _shared_kinds.get(cls.kind)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise KindConflict(
                f"{cls.__module__}.{cls.__qualname__} and {known.__module__}.{known.__qualname__} both have the kind"
                f" {cls.kind!r}. Give one of them its own: kind = '…'."
            )
        _check_strikes(cls)
        _check_init(cls)
        _register(cls)
        kinds[cls.kind] = cls

    # What an object class may define.

    def on_start(self) -> None:
        """Called before the first job of a run, and in each further process that gets a link of it. It runs often."""

    def on_alarm(self, info: AlarmInfo) -> None:
        """Called once per run, after the due jobs."""

    def on_memory_limit(self, context: MemoryLimitContext) -> None:
        """Called after a strike of the object, sealed or not; tried once."""

    def _resolve(self, fn: Any) -> Target:
        if isinstance(fn, BoundJob) and isinstance(fn._holder, Capability):
            return _method_target(self, fn._holder.id, type(fn._holder), fn) or self._deployment.target(fn)
        return _method_target(self, HOST, type(self), fn) or self._deployment.target(fn)

    def _callback_of(self, task: str) -> str:
        return _method_of(type(self), HOST, task) or super()._callback_of(task)

    def _code(self, task: str, **job: Any) -> Code:
        cls = type(self)
        parts = [getattr(self, name) for name in cls._capabilities.values()]
        starts = [self.on_start] if _overrides(cls, "on_start", LifecycleObject) else []
        starts += [part.on_start for part in parts if _overrides(type(part), "on_start", Capability)]
        hooks = [part.on_memory_limit for part in parts if _overrides(type(part), "on_memory_limit", Capability)]
        hooks += [self.on_memory_limit] if _overrides(cls, "on_memory_limit", LifecycleObject) else []
        return replace(
            super()._code(task, **job),
            starts=tuple(starts),
            alarm=self.on_alarm if _overrides(cls, "on_alarm", LifecycleObject) else None,
            memory_hooks=tuple(hooks),
            hook_task=f"{cls.kind}.on_memory_limit" if hooks else None,
            owners=frozenset({HOST, SCHEDULER, *cls._capabilities}),
            limit=cls.max_memory_strikes or self._deployment.config.max_memory_strikes,
        )


def _method_of(cls: type[LifecycleObject], owner: str, task: str) -> str | None:
    """The name of the method that a task is made of."""
    return next((name for (of, name), known in cls._targets.items() if of == owner and known.task == task), None)


def _method_target(handle: LifecycleObject, owner: str, definer: type, fn: Any) -> Target | None:
    """What a name, a method or a bound job stands for among the methods of one owner; None: it is none, but may be a task.

    Args:
        definer: the class of the owner, which has the methods.

    Raises:
        UnknownTask: it can be nothing but a method, and the owner has none such.
    """
    targets = type(handle)._targets
    if isinstance(fn, BoundJob):
        holder = fn._holder.object if isinstance(fn._holder, Capability) else fn._holder
        whose = fn._holder.id if isinstance(fn._holder, Capability) else HOST
        if holder.ref != handle.ref:
            raise UnknownTask(f"{fn!r} belongs to another object than {handle.ref}: push it through its own.")
        if whose != owner:
            raise UnknownTask(
                f"{fn!r} belongs to {whose!r} and not to {owner!r}: push it through the jobs of its owner."
            )
        return targets[owner, fn.method_name]
    if isinstance(fn, JobMethod):
        if any(base.__dict__.get(fn.name) is fn for base in definer.__mro__):
            return targets[owner, fn.name]
    elif not isinstance(fn, str):
        return None
    elif (owner, fn) in targets:
        return targets[owner, fn]
    elif "." in fn or handle._deployment.knows(fn):
        return None
    names = sorted(name for of, name in targets if of == owner)
    raise UnknownTask(
        f"{definer.__name__} has no job {fn!r}. It has: {', '.join(names) or 'none'}; mark a method with @lifecycle_job."
    )


def shared_kinds() -> dict[str, type[LifecycleObject]]:
    """The object classes that belong to every app of this process, by kind."""
    return _shared_kinds


def _check_strikes(cls: type[LifecycleObject]) -> None:
    limit = cls.max_memory_strikes
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 1000):
        raise LifecycleError(f"{cls.__name__}.max_memory_strikes is {limit!r}: give a whole number from 1 to 1000.")


def _check_init(cls: type[LifecycleObject]) -> None:
    """Each link makes an instance: one that can't be made would fail before it begins, again and again."""
    signature = inspect.signature(cls.__init__)
    try:
        signature.bind(None, "name", lifecycle=None)
    except TypeError as error:
        raise LifecycleError(
            f"{cls.__name__}.__init__{signature} can't be called as {cls.__name__}(name, lifecycle=…), as each link does"
            f" ({error}). Write def __init__(self, name, *, lifecycle=None) and call super().__init__(name, lifecycle=lifecycle)."
        ) from None


def _register(cls: type[LifecycleObject]) -> None:
    """Make a Celery task of each job, of `on_alarm` and of the memory hooks of a class."""
    app = cls._lifecycle.app if cls._lifecycle is not None else None
    cls._targets, cls._capabilities = {}, {}
    jobs: list[tuple[str, str | None, JobMethod]] = []
    for attribute in dir(cls):
        member = _member(cls, attribute)
        if isinstance(member, JobMethod):
            jobs.append((HOST, None, member))
        elif isinstance(member, Capability):
            if member.id in cls._capabilities:
                raise LifecycleError(f"{cls.__name__} has two capabilities with the id {member.id!r}.")
            cls._capabilities[member.id] = attribute
            for inner in dir(type(member)):
                method = _member(type(member), inner)
                if isinstance(method, JobMethod):
                    jobs.append((member.id, attribute, method))
    hooks = {f"{cls.kind}.{name}": f"the hook {name} of {_path(cls)}" for name in ("on_alarm", "on_memory_limit")}
    claim_names([*hooks.items(), *(_claim(cls, owner, method) for owner, _, method in jobs)], app)
    for owner, held_as, method in jobs:
        _add_job(cls, owner, held_as, method, app)
    for task in hooks:
        make_task(task, _code_factory(cls, task, None, None), Target(task, HOST, cls.kind), {}, app, cls.__module__)


def _member(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _task_name(cls: type[LifecycleObject], owner: str, method: JobMethod) -> str:
    middle = "" if owner == HOST else f"{owner}."
    return method.options.name or f"{cls.kind}.{middle}{method.name}"


def _claim(cls: type[LifecycleObject], owner: str, method: JobMethod) -> tuple[str, str]:
    of = _path(cls) if owner == HOST else f"the capability {owner!r} of {_path(cls)}"
    return _task_name(cls, owner, method), f"the job {method.name} of {of}"


def _add_job(cls: type[LifecycleObject], owner: str, attribute: str | None, method: JobMethod, app: Any) -> None:
    task = _task_name(cls, owner, method)
    target = replace(method.options.target(task, owner), kind=cls.kind)
    cls._targets[owner, method.name] = target
    factory = _code_factory(cls, task, attribute, method)
    make_task(task, factory, target, method.options.celery, app, cls.__module__)


def _code_factory(cls: type[LifecycleObject], task: str, attribute: str | None, method: JobMethod | None) -> Any:
    def factory(deployment: Deployment, ref: ObjectRef) -> Code:
        return _code(cls, deployment, ref, task, attribute, method)

    return factory


def _code(
    cls: type[LifecycleObject], deployment: Deployment, ref: ObjectRef, task: str, attribute: str | None,
    method: JobMethod | None,
) -> Code:  # fmt: skip
    handle = cls(ref.name, lifecycle=deployment)
    if method is None:
        return handle._code(task)
    holder: Any = getattr(handle, attribute) if attribute is not None else handle
    has_error_hook = attribute is not None and _overrides(type(holder), "on_job_error", Capability)
    return handle._code(
        task,
        resolve=holder._resolve,
        call=method.function.__get__(holder),
        on_error=holder.on_job_error if has_error_hook else None,
        owner=holder.id if isinstance(holder, Capability) else HOST,
        memory_limit=method.options.memory_limit,
        retry=method.options.retry or RetryPolicy(),
    )


def _overrides(cls: type, name: str, base: type) -> bool:
    return getattr(cls, name) is not getattr(base, name)
