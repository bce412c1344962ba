"""The lifecycle classes and tasks of the application under test; what a job does is said by its payload.

=============== ============================================================================
``seconds``     how long the job takes, before it does what ``do`` says
``do``          one of ``DEEDS``
``times``       how many of the job's first runs do it; without, all of them
``until``       a file: the job waits until it is there
``slices``      the job yields until it has come to its end so many times
``again``       the job is rescheduled by so many seconds, ``rounds`` times
``push``        a job that is pushed within the run: ``fn``, and keywords of ``push``
``push_self``   the job pushes its own id again, within the run
``progress``    the run writes its number into the object's storage, at once
``reads``       the run reads the object's storage at its end
``stamp``       a key of ``ctx.storage`` that gets the number of the process
=============== ============================================================================
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery

from celery_lifecycle import YIELD, Lifecycle, LifecycleObject, LifecycleTask, Reschedule, RetryPolicy, lifecycle_job
from tests.acceptance.ledger import Ledger
from tests.support import wait_until

MIB = 1024 * 1024


def _out_of_memory(_: Ledger) -> None:
    raise MemoryError("asked for by the test")


def _fail(_: Ledger) -> None:
    raise ValueError("asked for by the test")


def _grow(_: Ledger) -> None:
    """Take memory until there is none, touching every page."""
    held = []
    while True:
        held.append(bytearray(16 * MIB))


def _exit(ledger: Ledger) -> None:
    ledger.append("gone")
    os._exit(3)


def _system_exit(_: Ledger) -> None:
    raise SystemExit(7)


def _hang(_: Ledger) -> None:
    time.sleep(600)


def _kill_worker(ledger: Ledger) -> None:
    """Kill the worker's parent; the pool's processes die with it."""
    ledger.append("killed-worker")
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


DEEDS: dict[str, Callable[[Ledger], None]] = {
    "sigkill": lambda ledger: ledger.die(signal.SIGKILL),
    "segfault": lambda ledger: ledger.die(signal.SIGSEGV),
    "abort": lambda ledger: ledger.die(signal.SIGABRT),
    "exit": _exit,
    "system_exit": _system_exit,
    "memory_error": _out_of_memory,
    "grow": _grow,
    "fail": _fail,
    "hang": _hang,
    "kill_worker": _kill_worker,
}


def act(ledger: Ledger, object: str, job: str, payload: dict[str, Any], **data: Any) -> int:
    """One run of a job, up to its outcome; gives the number of runs that began before it."""
    earlier = len(ledger.starts(job, object))
    with ledger.run(object, job, rss=rss_mib(), **data):
        time.sleep(payload.get("seconds", 0))
        if "until" in payload:
            wait_until(Path(payload["until"]).exists, 120, payload["until"])
        if "do" in payload and earlier < payload.get("times", earlier + 1):
            DEEDS[payload["do"]](ledger)
    return earlier


def rss_mib() -> float:
    """The resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / MIB


def perform(ledger: Ledger, ctx: Any) -> Any:
    """Run a lifecycle job by its payload and return its outcome."""
    payload = ctx.payload or {}
    name = str(ctx.object)
    if "push" in payload:
        push = dict(payload["push"])
        ctx.jobs.push(push.pop("fn"), **push)
    if payload.get("push_self"):
        ctx.jobs.push(ctx.job.task, id=ctx.job.id, payload=payload)
    if payload.get("progress"):
        ctx.object.storage["progress"] = ctx.object.storage.get("progress", 0) + 1
    if "stamp" in payload:
        ctx.storage[payload["stamp"]] = os.getpid()
    act(ledger, name, ctx.job.id, payload, attempt=ctx.attempt, strikes=ctx.strikes, task=ctx.task.id)
    if payload.get("reads"):
        ctx.storage.get("anything")
    ended = len(ledger.ends(ctx.job.id, name))
    if ended < payload.get("slices", 0):
        return YIELD
    if ended <= payload.get("rounds", 0):
        return Reschedule(delay=payload["again"])
    return None


def add_jobs(app: Celery, lifecycle: Lifecycle, ledger: Ledger) -> None:
    """Define the classes and tasks in ``app``."""

    class Thing(LifecycleObject, lifecycle=lifecycle):
        """An object whose jobs do what their payload says, and which tells the ledger of its strikes."""

        @lifecycle_job(retry=RetryPolicy(base_delay=0.05, max_delay=0.1))
        def work(self, ctx: Any) -> Any:
            return perform(ledger, ctx)

        @lifecycle_job(recovery_loop=True)
        def recover(self, ctx: Any) -> Any:
            return perform(ledger, ctx)

        @lifecycle_job(memory_limit="400M")
        def limited(self, ctx: Any) -> Any:
            return perform(ledger, ctx)

        @lifecycle_job(singleflight=True, hung_timeout=1.5)
        def single(self, ctx: Any) -> Any:
            return perform(ledger, ctx)

        @lifecycle_job(soft_time_limit=1)
        def softly(self, ctx: Any) -> Any:
            return perform(ledger, ctx)

        @lifecycle_job(time_limit=1)
        def hardly(self, ctx: Any) -> Any:
            return perform(ledger, ctx)

        @lifecycle_job(queue="other")
        def elsewhere(self, ctx: Any) -> Any:
            return perform(ledger, ctx)

        def on_memory_limit(self, context: Any) -> None:
            ledger.append(
                "struck",
                object=str(self),
                job=context.executing,
                strikes=context.strikes,
                sealed=context.sealed,
                cause=context.cause,
                purged=list(context.purged),
            )

    class Starting(LifecycleObject, lifecycle=lifecycle):
        """An object whose ``on_start`` kills its process for as long as the object's storage says so."""

        def on_start(self) -> None:
            with ledger.run(str(self), "#start"):
                if self.storage.get("deadly"):
                    ledger.die()

        @lifecycle_job
        def work(self, ctx: Any) -> Any:
            return perform(ledger, ctx)

        def on_alarm(self, info: Any) -> None:
            with ledger.run(str(self), "#alarm", retry_count=info.retry_count):
                pass

    @lifecycle_job(name="errand", app=app, retry=RetryPolicy(base_delay=0.05, max_delay=0.1))
    def errand(ctx: Any) -> Any:
        return perform(ledger, ctx)

    @app.task(name="plain", base=LifecycleTask, shared=False)
    def plain(job: str, **payload: Any) -> str:
        """An ordinary task with the base class of this package."""
        act(ledger, f"plain/{job}", job, payload)
        return job

    @app.task(name="add", base=LifecycleTask, shared=False)
    def add(*numbers: float) -> float:
        """The sum of numbers, given one by one, in lists, or before what a chain passes on."""
        flat = [one for number in numbers for one in (number if isinstance(number, list) else [number])]
        with ledger.run(f"add/{flat}", "add"):
            return sum(flat)

    @app.task(name="flaky", base=LifecycleTask, bind=True, shared=False, max_retries=3)
    def flaky(self: Any, job: str, failures: int) -> str:
        """Fails so many times, each time with a retry in half a second."""
        with ledger.run(f"flaky/{job}", job, retries=self.request.retries, id=self.request.id):
            pass
        if self.request.retries < failures:
            raise self.retry(countdown=0.5)
        return job

    @app.task(name="told", shared=False)
    def told(*args: Any) -> None:
        """A callback: it writes what it was called with."""
        ledger.append("told", args=[str(arg) for arg in args])
