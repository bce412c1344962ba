"""The Celery task base class: runs links, carries the chain on, and turns `eta`/`countdown` into durable jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

from celery import Celery, Task, shared_task
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject, Retry
from celery.utils import uuid

from celery_lifecycle import events, memory, tracked, validate
from celery_lifecycle.calls import due_of, expires_ms, options_of, payload_of, restore, tell_of_death
from celery_lifecycle.code import Code
from celery_lifecycle.deployment import Deployment, Target, current_run
from celery_lifecycle.dispatch import forward_chain
from celery_lifecycle.errors import (
    DatabaseUnavailable,
    Fenced,
    KindConflict,
    LifecycleError,
    NameInvalid,
    OutOfMemory,
    PayloadError,
    WrongDatabase,
)
from celery_lifecycle.handles import ObjectHandle
from celery_lifecycle.link import HEADER, carried_on, header_in, link_of
from celery_lifecycle.model import ALARM, HOST, SCHEDULER, YIELD, Job, ObjectRef, Reschedule, RetryPolicy, Why
from celery_lifecycle.outcome import verdict_of
from celery_lifecycle.queue import Push, draft_of, sorted_text, store_many, store_push
from celery_lifecycle.runner import Report
from celery_lifecycle.sessions import push_in_connection, push_in_session
from celery_lifecycle.task_schedules import ONE_ATTEMPT, TaskSchedules
from celery_lifecycle.timing.instants import delay_to_millis, from_millis, to_millis
from celery_lifecycle.transitions.run import Action, Verdict

CodeFactory = Callable[[Deployment, ObjectRef], Code]


class LifecycleTask(TaskSchedules, Task):
    """Base class of everything that this package runs.

    It acknowledges early and never asks the broker for redelivery: the table replays. With `eta` or `countdown`,
    `apply_async` stores a durable job that keeps its task id and the options of its message; without, it is an ordinary
    Celery call. Use it for any task: `@app.task(base=LifecycleTask)`.
    """

    abstract = True
    acks_late = False
    reject_on_worker_lost = False
    retry_on_worker_lost = False
    Request = "celery_lifecycle.worker:LifecycleRequest"

    lifecycle_code: CodeFactory | None = None
    """Set for `@lifecycle_job`s: what makes the code of a link."""
    lifecycle_target: Target | None = None
    """Set for `@lifecycle_job`s: how they are pushed."""
    lifecycle_memory_limit: int | None = None

    # --- links

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        header = header_in(self.request.headers) if not self.request.called_directly else None
        if header is None:
            return self._run_call(args, kwargs)
        return self._run_link(header)

    def _run_call(self, args: Any, kwargs: Any) -> Any:
        """An ordinary call. A `MemoryError` of it must not leave this process either: it would end the whole worker."""
        error: MemoryError | None = None
        # Of two calls of one task, one inside the other, only the outer one is the worker's.
        direct = self.request.called_directly or self.request.is_eager or self.request._protected
        try:
            value = super().__call__(*args, **kwargs)
            if not direct and (value is YIELD or isinstance(value, Reschedule)):
                self._go_on_as_job(value)
            return value
        except MemoryError as out:
            if self.request.called_directly or self.request.is_eager:
                raise
            error = out
        memory.give_back(error)
        del error
        tracked.died_of_memory(self)
        raise OutOfMemory(f"{self.name} ran out of memory.")

    def _go_on_as_job(self, value: Any) -> None:
        """An ordinary call that is to run again becomes a durable job under its task id, as by `retry`, its retries at 0."""
        verdict = verdict_of(value, True)
        eta = from_millis(verdict.at_ms) if verdict.at_ms is not None else None
        # With no delay at all it would be an ordinary call again.
        countdown = max(verdict.delay_ms, 1) / 1000 if eta is None else None
        signature = self.signature_from_request(retries=0, add_to_parent=False, eta=eta, countdown=countdown)
        signature.apply_async()
        raise Retry(when=eta or countdown, sig=signature)

    def _run_link(self, header: dict[str, Any]) -> Any:
        request = self.request
        deployment = self.app.lifecycle
        chain = list(request.chain or [])
        request.chain = None
        if header["db"] != deployment.database_id:
            events.wrong_database(request.id, header["db"], deployment.database_id)
            raise WrongDatabase(
                f"This link belongs to job database {header['db']}, this worker has {deployment.database_id}. "
                "Give beat and workers of one app the same lifecycle_database_url."
            )
        kind, _, name = header["name"].partition("/")
        ref = ObjectRef(kind, name)
        if self.lifecycle_target is not None and self.lifecycle_target.kind not in (None, kind):
            return self._skip(deployment, header)
        try:
            code = self.code(deployment, ref)
        except Exception as error:  # whatever a class throws when it is made for an object
            code = self._code_that_fails(deployment, ref, error)
        appends = bool(header.get("head") and header["all"] and code.alarm and header["job"] != ALARM)
        link = link_of(header, request.id, last=not chain and not appends)
        try:
            report: Report = deployment.runner.run(link, code, request)
        except DatabaseUnavailable as error:
            if not link.is_promised:
                raise
            raise Ignore(f"{self.name} could not begin; it is sent again. {error}") from error
        alarm_task = f"{kind}.on_alarm" if appends else None
        chain = carried_on(header, chain, report.token, alarm_task) if report.goes_on else []
        # Whoever waits for a promised id must not be given the end of a chain that was refused, or a twin's late result.
        quiet = not code.plain or ("reason" in report.result and not link.is_promised)
        if report.error is None and (report.completed or quiet):
            if not chain and code.plain and report.completed:
                chain = list(request.get("lifecycle_chain") or [])
            request.chain = chain or None
            return report.value if code.plain and report.completed else report.result
        self._carry_on(chain)
        if report.dead is not None and report.why is not None:
            tell_of_death(self, request, report.dead, report.why)
        if report.error is None:
            raise Ignore(f"The task goes on: {report.result}")
        if link.is_promised and isinstance(report.error, Fenced):
            raise Ignore(str(report.error))
        if report.again_ms is not None and not isinstance(report.error, Retry):
            raise Retry("The job is put back", report.error, when=from_millis(report.again_ms))
        raise report.error

    def _skip(self, deployment: Any, header: dict[str, Any]) -> dict[str, Any]:
        """A link that is none of this task's: put back, and dead after the grace, as one whose task is not known at all."""
        dead, shipment = deployment.store.ends.skip(link_of(header, self.request.id, last=False), Why.UNKNOWN_TASK)
        events.unknown(header["name"], self.name, header["job"], dead is not None)
        if shipment is not None:
            deployment.send([shipment])
        return {"outcome": "refused", "reason": f"{self.name} is no job of {header['name']}", "at": None}

    def _carry_on(self, chain: list[dict[str, Any]]) -> None:
        """Publish the rest of the chain ourselves; if the broker is away, the run is revived when its lease ends."""
        if not chain:
            return
        try:
            forward_chain(self.app, chain, self.request.root_id, self.request.id)
        except Exception as error:  # the broker's client raises whatever its transport does
            events.broker_failed(1, "the run will be revived", error)

    def code(self, deployment: Deployment, ref: ObjectRef) -> Code:
        """The code of this task for one object."""
        if self.lifecycle_code is not None:
            return self.lifecycle_code(deployment, ref)
        made: Code = deployment.object(ref.kind, ref.name)._code(
            self.name, call=self._call_plain, retry=ONE_ATTEMPT, plain=True, memory_limit=self.lifecycle_memory_limit
        )
        return made

    def _code_that_fails(self, deployment: Deployment, ref: ObjectRef, error: Exception) -> Code:
        """In the place of code whose object can't be made: to fail like a body, so that it is tried again, and dead in the end."""

        def fail(_: Any) -> None:
            raise error

        target, handle = self.push_target, ObjectHandle(deployment, ref)
        owners = frozenset({HOST, SCHEDULER, target.owner or HOST})
        return handle._code(self.name, call=fail, alarm=fail, owners=owners, retry=target.retry or RetryPolicy())

    def _call_plain(self, ctx: Any) -> Any:
        """Call an ordinary task under the request that its caller made, as if the message had come with its eta."""
        request = self.request
        restore(request, ctx.job, ctx.attempt)
        try:
            return self.run(*request.args, **request.kwargs)
        finally:
            request.chain = None

    # --- calling

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        """As Celery's, but with `eta` or `countdown` the call becomes a durable job and no message is sent before it is due.

        Raises:
            TypeError: on a `@lifecycle_job`, which is pushed instead.
            PayloadError: arguments of a durable call are not JSON as Celery has it (with dates, Decimal, UUID and bytes).
        """
        if HEADER in (options.get("headers") or {}):
            return self._publish_link(task_id, options)
        if self.lifecycle_target is not None:
            raise TypeError(
                f"{self.name} is a lifecycle job and takes no arguments from a message: use its push(payload=…, delay=…), "
                "or push(…) of its object's jobs."
            )
        call: dict[str, Any] = dict(
            args=args,
            kwargs=kwargs,
            task_id=task_id,
            link=link,
            link_error=link_error,
            shadow=shadow,
            **options,
        )
        eta, countdown, is_retry = options.get("eta"), options.get("countdown"), bool(options.get("retries"))
        # A retry is durable also without a delay, as autoretry with jitter often draws it: its job leaves the table for it.
        put_off = bool(eta) or (countdown is not None if is_retry else bool(countdown))
        if not put_off or self.app.conf.task_always_eager:
            return super().apply_async(producer=producer, **call)
        try:
            return self._push_call(call)
        except (PayloadError, NameInvalid) as error:
            if not is_retry:
                raise
            # Whoever called has gone: Celery's own message may carry what the table can't.
            events.not_durable(self.name, task_id, error)
            return super().apply_async(producer=producer, **call)

    def _publish_link(self, task_id: str | None, options: dict[str, Any]) -> Any:
        if self.app.conf.task_always_eager:
            return self.apply((), {}, task_id=task_id, **options)
        return self.app.send_task(self.name, (), {}, task_id=task_id, task_type=self, **options)

    def _push_call(self, call: dict[str, Any]) -> Any:
        args, kwargs = call["args"] or (), call["kwargs"] or {}
        if self.typing and hasattr(self, "__header__"):
            self.__header__(*args, **kwargs)
        if self._dump_pydantic_arguments is not None:
            args, kwargs = self._dump_pydantic_arguments(args, kwargs)
        task_id = call["task_id"] or uuid()
        options = {
            **self._get_exec_options(),
            **{key: value for key, value in call.items() if value is not None},
        }
        if "reply_to" not in options and self._replies(options):
            options["reply_to"] = self.app.thread_oid
            self.app.lifecycle.sender.expect_reply(self.backend, task_id)
        parent = self.app.current_worker_task
        if parent is not None:
            options.setdefault("root_id", parent.request.root_id or parent.request.id)
            options.setdefault("parent_id", parent.request.id)
        kept = options_of(self.name, task_id, options)
        expires = options.get("expires")
        if expires is not None:
            now = self.app.lifecycle.store.beats.now
            kept["expires_ms"] = expires_ms(expires, now, is_retry=bool(options.get("retries")))
        at, delay = due_of(call.get("eta"), call.get("countdown"))
        target = replace(self.push_target, owner=HOST)
        push = Push(self.name, at, delay, payload_of(self.name, args, kwargs), task_id)
        ref = ObjectRef(validate.kind(self.name), task_id)
        draft = draft_of(self.app.lifecycle, ref, HOST, target, push, options=kept)
        store_push(self.app.lifecycle, draft)
        result = self.AsyncResult(task_id)
        if parent is not None and options.get("add_to_parent", True):
            parent.add_trail(result)
        return result

    def _replies(self, options: dict[str, Any]) -> bool:
        """Whether the result is a message to the caller, which nobody but the caller's own queue keeps."""
        return isinstance(self.backend, RPCBackend) and not options.get("ignore_result", self.ignore_result)

    def signature_from_request(self, request: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Celery's, for `retry`: the new message is a call, not the link that is running."""
        signature = super().signature_from_request(request, *args, **kwargs)
        headers = signature.options.get("headers")
        if headers:
            signature.options["headers"] = {key: value for key, value in headers.items() if key != HEADER}
        return signature

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Any:
        """In a job that was pushed or scheduled: put it back with its attempt count; in a call: as Celery's, but durable."""
        # What was pushed or scheduled stays what it is, with its id and its schedule, unless it is to have other arguments.
        stays = bool(self.request.get("lifecycle_pushed")) and args is None and kwargs is None and not options
        if self.request.called_directly or not (self.lifecycle_target is not None or stays):
            try:
                return super().retry(args, kwargs, exc, throw, eta, countdown, max_retries, **options)
            except Reject as rejected:
                # Celery rejects whatever it could not send; of ours it is to be seen what it was: an outage costs no attempt.
                if isinstance(rejected.reason, LifecycleError):
                    raise rejected.reason from rejected.reason.__cause__
                raise
        most = self.max_retries if max_retries is None else max_retries
        run = current_run()
        if most is not None and run is not None and run.attempt > most:
            raise exc or MaxRetriesExceededError(f"Can't retry {self.name}: {most} retries are used up.")
        if eta is None and countdown is None:
            countdown = self.default_retry_delay
        raise Retry(exc=exc, when=eta if eta is not None else countdown)

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
        """Store a job of this task as an object of its own (kind: the task's name, name: the job's id), gone when it is done.

        See `JobQueue.push` for arguments and errors.
        """
        push = Push(self.name, at, delay, payload, id, retry, singleflight, hung_timeout, exclusive, recovery_loop)
        draft = self._own_object(push)
        if session is not None:
            return push_in_session(self.app.lifecycle, session, [draft])[0]
        if connection is not None:
            return push_in_connection(self.app.lifecycle, connection, [draft])[0]
        return store_push(self.app.lifecycle, draft)

    def push_many(self, pushes: list[dict[str, Any]], *, session: Any = None, connection: Any = None) -> list[Job]:
        """Store thousands of jobs, each an object of its own, in one transaction; beat sends them.

        Args:
            pushes: the keyword arguments of `push`, one dict per job.
        """
        drafts = [self._own_object(Push(self.name, **push)) for push in pushes]
        return store_many(self.app.lifecycle, drafts, session, connection)

    def _own_object(self, push: Push) -> Any:
        run = current_run()
        target = self.push_target
        if push.id is not None:
            job_id = validate.name(push.id, "id")
        elif run is not None and run.starting:
            text = "\0".join((str(run.pusher.ref), self.name, sorted_text(validate.payload(push.payload))))
            job_id = "=" + sha256(text.encode()).hexdigest()[:32]
        else:
            job_id = uuid()
        ref = ObjectRef(validate.kind(self.name), job_id)
        return draft_of(self.app.lifecycle, ref, HOST, target, push, id=job_id, keep=push.id is None)


def classify(error: BaseException, attempt: int) -> Verdict | None:
    """What Celery's own exceptions mean for the job; None: an ordinary error."""
    if isinstance(error, Retry):
        when = error.when
        if error.sig is not None or when is None:
            return Verdict(Action.COMPLETE)
        if isinstance(when, datetime):
            return Verdict(Action.AGAIN, at_ms=to_millis(when), attempt=attempt)
        # As with Celery, a time that has passed is now.
        past = isinstance(when, (int, float)) and when < 0
        return Verdict(Action.AGAIN, delay_ms=0 if past else delay_to_millis(when), attempt=attempt)
    if isinstance(error, Reject):
        return Verdict(Action.DEAD, why=Why.REJECTED, error=repr(error))
    if isinstance(error, Ignore):
        return Verdict(Action.COMPLETE, clean=True)
    return None


_shared_names: dict[str, str] = {}


def claim_names(claims: Iterable[tuple[str, str]], app: Celery | None) -> None:
    """Take task names for jobs, all or none. Celery would let the first job of a name run in place of the second.

    Args:
        claims: names with the job that each is for; a job that is defined again, in a module that is loaded again, keeps its.
        app: the app in which they are taken; None: in every app of the process.

    Raises:
        KindConflict: a name is taken by another job.
    """
    names = _shared_names if app is None else app.__dict__.setdefault("lifecycle_names", {})
    taken: dict[str, str] = {}
    for name, job in claims:
        known = taken.get(name) or names.get(name) or _shared_names.get(name)
        if known is not None and known != job:
            raise KindConflict(
                f"{job} and {known} both have the task name {name!r}. Give one of them its own: name='…'."
            )
        taken[name] = job
    names.update(taken)


def make_task(
    name: str, factory: CodeFactory, target: Target, options: dict[str, Any], app: Celery | None, module: str
) -> Any:
    """Register a real Celery task for a lifecycle job: in one app, or in every app of the process."""

    def job(ctx: Any) -> Any:
        raise TypeError(f"{name} runs only as a link of its object's chain.")

    job.__name__ = name.rpartition(".")[2]
    job.__module__ = module
    settings = {
        "name": name,
        "base": LifecycleTask,
        "typing": False,
        "lifecycle_code": staticmethod(factory),
        "lifecycle_target": target,
        **options,
    }
    if app is not None:
        # Celery's default shares a task with every app that is finalized later, where the first of a name wins.
        return app.task(shared=False, **settings)(job)
    return shared_task(**settings)(job)
