"""The public names as a type checker of users sees them: what must be accepted, what must be refused, what comes back.

Nothing here is run: ``tests/unit/test_typing.py`` has mypy read it. A line that must be refused carries a ``type: ignore`` with
its code; mypy fails if it is accepted.
"""

from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import Any

from celery import Celery
from typing_extensions import assert_type

import celery_lifecycle
from celery_lifecycle import (
    YIELD,
    AlarmInfo,
    Capability,
    DeadJob,
    Job,
    JobContext,
    JobQueue,
    KeepAlive,
    Lifecycle,
    LifecycleError,
    LifecycleObject,
    LifecycleTask,
    MemoryLimitContext,
    ObjectHandle,
    ObjectRef,
    Outcome,
    Push,
    Reschedule,
    RetryPolicy,
    Schedule,
    Storage,
    lifecycle_job,
    track_alarm_work,
)
from celery_lifecycle.testing import Fact, Harness, HarnessError, Message, Ran

app = Celery("shop")
lifecycle = Lifecycle(app, database_url="sqlite:///shop.db", backup_alarm=30)
assert_type(celery_lifecycle.__version__, str)


class Outbox(Capability):
    def on_start(self) -> None:
        self.jobs.push("send", delay=60)

    @lifecycle_job
    def send(self, ctx: JobContext) -> None:
        assert_type(ctx.attempt, int)

    def on_job_error(self, ctx: JobContext, error: BaseException) -> Outcome:
        return Reschedule(delay=300)

    def on_memory_limit(self, context: MemoryLimitContext) -> None:
        assert_type(context.purged, tuple[str, ...])


class Cart(LifecycleObject, kind="cart", lifecycle=lifecycle):
    max_memory_strikes = 3
    outbox = Outbox()
    second = Outbox(id="second")

    def on_start(self) -> None: ...

    @lifecycle_job
    def remind(self, ctx: JobContext) -> None:
        assert_type(ctx.job, Job)
        assert_type(ctx.strikes, int)
        assert_type(ctx.scheduled_for, datetime | None)
        assert_type(ctx.is_catch_up, bool)
        assert_type(ctx.jobs, JobQueue)
        assert_type(ctx.track(Future()), bool)
        assert_type(ctx.keep_alive(), KeepAlive)
        assert_type(ctx.tracked(), int)
        raise ctx.retry(countdown=60, exc=ValueError(), max_retries=5)

    @lifecycle_job(
        retry=RetryPolicy(max_attempts=5), recovery_loop=True, memory_limit="512M", singleflight=True,
        hung_timeout=timedelta(minutes=1), queue="heavy", priority=3, soft_time_limit=60,
    )  # fmt: skip
    def replay(self, ctx: JobContext) -> Outcome:
        return YIELD if ctx.payload else Reschedule(delay=300)

    @lifecycle_job  # type: ignore[arg-type]
    def wrong(self, ctx: JobContext) -> str:
        return "a job returns an outcome"

    def on_alarm(self, info: AlarmInfo) -> None:
        assert_type(info.retry_count, int)
        assert_type(info.is_retry, bool)
        assert_type(info.scheduled_for, datetime | None)

    def on_memory_limit(self, context: MemoryLimitContext) -> None:
        assert_type(context.sealed, bool)
        assert_type(context.next_time, datetime | None)
        assert_type((context.executing, context.cause), tuple[str, str])
        assert_type((context.strikes, context.limit), tuple[int, int])


@lifecycle_job(name="billing.charge")
def charge(ctx: JobContext) -> None: ...


@lifecycle_job
def bill(ctx: JobContext) -> Outcome:
    return Reschedule(at=datetime.now().astimezone())


def jobs(cart: Cart, at: datetime, session: Any) -> None:
    job = cart.jobs.push("remind", delay=3600, payload={"template": "forgot"}, id="remind")
    assert_type(job, Job)
    assert_type((job.id, job.owner, job.task, job.queue, job.line), tuple[str, str, str, str, str])
    assert_type((job.due_at, job.created_at), tuple[datetime, datetime])
    assert_type(job.not_before, datetime | None)
    assert_type((job.attempt, job.strikes, job.version), tuple[int, int, int])
    assert_type(job.sealed, bool)
    assert_type(job.object, ObjectRef)
    assert_type(job.retry, RetryPolicy)
    cart.jobs.push("remind", at=at, session=session)
    cart.jobs.push("remind", delay=timedelta(hours=1), exclusive=True)
    cart.jobs.push("remind", after=3)  # type: ignore[call-arg]
    cart.jobs.push("remind", delay="soon")  # type: ignore[arg-type]
    assert_type(cart.jobs.push_many([Push("remind", delay=1), Push("remind", at=at, payload=[1])]), list[Job])
    assert_type(cart.jobs.get("remind"), Job | None)
    assert_type(cart.jobs.list(), list[Job])
    assert_type(cart.jobs.cancel("remind"), bool)
    assert_type(cart.jobs.reschedule("remind", at=at), Job)
    cart.jobs.rearm()
    assert_type(cart.remind.push(delay=60), Job)
    cart.remind.push(after=60)  # type: ignore[call-arg]
    assert_type(cart.outbox, Outbox)
    assert_type(cart.outbox.jobs, JobQueue)
    assert_type(cart.outbox.send.push(), Job)


def functions() -> None:
    assert_type(charge, LifecycleTask)
    assert_type(charge.push(payload={"amount": 5}, delay=86400), Job)
    assert_type(bill.push_many([{"payload": 1}, {"payload": 2}]), list[Job])


def schedules(cart: Cart, at: datetime) -> None:
    assert_type(cart.schedule(60, "remind", {"a": 1}), Schedule)
    assert_type(cart.schedule(at, "remind"), Schedule)
    assert_type(cart.schedule("0 8 * * *", "remind", timezone="Europe/Berlin", misfire="run_once", jitter=60), Schedule)
    cart.schedule("0 8 * * *", "remind", misfire="sometimes")  # type: ignore[arg-type]
    assert_type(cart.schedule_every(30, "remind", fixed_rate=True), Schedule)
    assert_type(cart.get_schedule("id"), Schedule | None)
    assert_type(cart.list_schedules(type="cron", start=at, end=at), list[Schedule])
    assert_type(cart.cancel_schedule("id"), bool)


def objects(cart: Cart, at: datetime) -> None:
    assert_type(cart.name, str)
    assert_type(cart.ref, ObjectRef)
    cart.set_alarm(at)
    cart.set_alarm(timedelta(minutes=5))
    cart.set_alarm("tomorrow")  # type: ignore[arg-type]
    assert_type(cart.get_alarm(), datetime | None)
    assert_type(cart.delete_alarm(), bool)
    cart.pause()
    assert_type(cart.paused, str | None)
    assert_type(cart.resume(), bool)
    cart.disable_alarms()
    cart.rearm_alarm()
    assert_type(cart.destroy(), bool)
    assert_type(cart.dead_jobs(), list[DeadJob])
    assert_type(cart.storage, Storage)
    cart.storage["import:pending"] = True
    assert_type(cart.storage.list("import:"), dict[str, Any])
    with cart.keep_alive() as held:
        assert_type(held, KeepAlive)
    assert_type(cart.keep_alive().release(), bool)
    assert_type(cart.keep_alive_while(lambda: 5), int)
    assert_type(track_alarm_work(Future()), bool)
    handle: ObjectHandle = cart
    handle.jobs.push(charge)


def dead(one: DeadJob) -> None:
    assert_type((one.key, one.reason), tuple[int, str])
    assert_type((one.error, one.traceback), tuple[str | None, str | None])
    assert_type(one.died_at, datetime)
    assert_type(one.job, Job)


def errors() -> None:
    try:
        RetryPolicy(max_attempts=3, base_delay=0.1, max_delay=3)
        RetryPolicy(attempts=3)  # type: ignore[call-arg]
    except LifecycleError as error:
        assert_type(error, LifecycleError)


def testing(at: datetime) -> None:
    with Harness(lifecycle, database_url=None, start=at) as harness:
        assert_type(harness.now, datetime)
        harness.advance(timedelta(seconds=60))
        assert_type(harness.run_due(), list[Ran])
        assert_type(harness.deliver(), Ran | None)
        assert_type(harness.messages, list[Message])
        assert_type(harness.facts, list[Fact])
        harness.kill_next("remind", cause="oom", times=2)
        assert_type(harness.assert_pending(Cart("a"), "remind"), Job)
        assert_type(harness.assert_dead(Cart("a"), "remind", reason="failed"), DeadJob)
    raise HarnessError("")
