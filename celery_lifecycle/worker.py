"""What runs in a worker's parent process: deaths are struck, leases renewed, hung jobs stopped, strangers refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import Celery, bootsteps, signals
from celery.exceptions import Retry, Terminated, WorkerLostError
from celery.worker import state as worker_state
from celery.worker.control import Panel
from celery.worker.request import Request

from celery_lifecycle import events, tracked
from celery_lifecycle.calls import restore, tell_from_outside
from celery_lifecycle.errors import ConfigurationError, DatabaseUnavailable, LifecycleError, SchemaOutdated
from celery_lifecycle.life import begin_life, this_life, what_ended
from celery_lifecycle.link import header_in, link_of
from celery_lifecycle.model import Link, ObjectRef, Why
from celery_lifecycle.outcome import tell, told_of
from celery_lifecycle.store.ends import End
from celery_lifecycle.store.workers import Running
from celery_lifecycle.task import LifecycleTask
from celery_lifecycle.transitions.run import Worker

MAINTAIN_EVERY = 0.25
WAIT_FOR_RESULT = 1.0


def install(app: Celery) -> None:
    """Add the steps of this module to an app's workers, once."""
    app.steps["worker"].add(MaintainStep)
    app.steps["worker"].add(RenewStep)
    app.steps["consumer"].add(GuardStep)


# --- deaths, seen in the parent


class LifecycleRequest(Request):
    """The parent's side of a link: it sees the death of the child, and nothing of it may ever stop the worker."""

    accepted_at: float | None = None
    """When its process took it, by a clock that nobody sets (`time.monotonic`)."""

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        self.accepted_at = time_accepted
        super().on_accepted(pid, time_accepted)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        try:
            header = header_in(self.request_dict)
            if header is not None:
                link = link_of(header, self.id, last=False)
                exc_info = self._ended_in_time(link, exc_info)
        except LifecycleError as error:
            events.database_failed(f"The end of {self.id} could not be recorded; its lease will tell", error)
        except Exception as error:  # an exception here would leave the worker without its other duties
            events.unexpected(f"The end of {self.id} could not be recorded", error)
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def _ended_in_time(self, link: Link, exc_info: Any) -> Any:
        """A database that takes what it is told and says nothing must not hold up the worker."""
        lifecycle = self.app.lifecycle
        seconds = lifecycle.config.lock_timeout + 1
        try:
            return lifecycle.store.database.beside(self._ended, link, exc_info).result(seconds)
        except FutureTimeout:
            raise DatabaseUnavailable(f"The job database has said nothing for {seconds:g} s.") from None

    def _ended(self, link: Link, exc_info: Any) -> Any:
        """Record how the process of a link ended; returns what the task is to show for it."""
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        end, cause = what_ended(error)
        if end is None:
            return exc_info
        who = Worker(this_life().instance, this_life().process(self.worker_pid))
        details = {"told": str(error), "worker": str(self.hostname), "pid": who.pid}
        ended = self.app.lifecycle.store.ends.end(link, who, end, cause, details)
        if ended is None:
            return exc_info
        tell(ended)
        for job in ended.dead:
            if link.is_promised and job.id == link.job:
                restore(self._context, job)  # its message had none of the call's callbacks
        if ended.dead or isinstance(error, Terminated):
            return _shown(WorkerLostError(f"{told_of(ended)} {error}")) if ended.context else exc_info
        if link.is_promised:  # whoever waits for this id must not be told of a failure: the job runs again under it
            return _shown(Retry(told_of(ended), error))
        return _shown(WorkerLostError(f"{told_of(ended)} {error}")) if ended.context else exc_info


def _shown(error: Exception) -> ExceptionInfo:
    """An error as the parent's request wants it; the bare exception, so that events show its own text."""
    try:
        raise error
    except Exception as raised:
        info = ExceptionInfo()
        if not isinstance(raised, Retry):
            info.exception = raised
        return info


# --- steps


class MaintainStep(bootsteps.StartStopStep):
    """Notice a child's death within a quarter of a second, without an event loop within two; Celery takes five or ten."""

    requires = ("celery.worker.components:Pool", "celery.worker.components:Hub")

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        pool = getattr(parent.pool, "_pool", None)
        if parent.use_eventloop or not _is_prefork(parent) or pool is None:
            return
        pool.lost_worker_timeout = min(pool.lost_worker_timeout, WAIT_FOR_RESULT)
        pool.on_job_process_lost = _lost_once

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        maintain = getattr(parent.pool, "maintain_pool", None)
        if maintain is not None:
            hub.call_repeatedly(MAINTAIN_EVERY, maintain)


def _lost_once(job: Any, pid: int, exitcode: int) -> None:
    """The loss of a pool process, in a pool of threads: the first news of it has the exit code, later ones only delay it."""
    if not job._worker_lost:
        job._worker_lost = (time.monotonic(), exitcode)


class RenewStep(bootsteps.StartStopStep):
    """Checks the schema at start, then renews leases and the instance's heartbeat in a thread."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._renewer: Renewer | None = None

    def start(self, parent: Any) -> None:
        this_life().forks = _is_prefork(parent)
        self._renewer = Renewer(parent.app, parent.hostname, kills=_is_prefork(parent))
        self._renewer.start()

    def stop(self, parent: Any) -> None:
        if self._renewer is not None:
            self._renewer.stop()

    terminate = stop


def _is_prefork(parent: Any) -> bool:
    return "prefork" in str(getattr(parent.pool_cls, "__module__", parent.pool_cls))


class Renewer(threading.Thread):
    """Renews every sixth of the backup alarm; five times as often while it can't, or not all."""

    def __init__(self, app: Celery, hostname: str, kills: bool) -> None:
        super().__init__(name="lifecycle-renewer", daemon=True)
        self.app = app
        self.hostname = hostname
        self.kills = kills
        self.wake = threading.Event()
        self.stopping = False
        self._slow: set[str] = set()
        self._failing = False
        _renewers.append(self)

    def run(self) -> None:
        every = self.app.lifecycle.config.renew_every
        # A warm shutdown stops this step before the pool, whose last jobs may take longer than a lease.
        while not self.stopping or running_links():
            done = self._round()
            self.wake.wait(every if done else every / 5)
            self.wake.clear()

    def stop(self) -> None:
        self.stopping = True
        self.wake.set()

    def _round(self) -> bool:
        try:
            renewed = self.renew()
            tracked.renew(self.app)
            self._beat()
            self._look_for_hung()
        except LifecycleError as error:
            if not self._failing:
                events.database_failed("Leases could not be renewed; trying again", error)
            self._failing = True
            return False
        except Exception as error:  # this thread must not end while its worker lives
            events.unexpected("Leases could not be renewed; trying again", error)
            return False
        if self._failing:
            events.database_back()
        self._failing = False
        return renewed

    def renew(self) -> bool:
        """Renew the leases of all links that run in this worker now.

        False: some were skipped, so a caller holds their rows and it is to be tried again soon: once they are free, beat's
        second look comes no later than the next regular renewal.
        """
        running = [
            Running(header["object"], request.id, this_life().process(request.worker_pid))
            for request, header in running_links()
        ]
        return bool(self.app.lifecycle.store.workers.renew(this_life().instance, running) == len(running))

    def _beat(self) -> None:
        lifecycle = self.app.lifecycle
        data = {
            "hostname": self.hostname,
            "pid": os.getpid(),
            "draining": this_life().draining,
            **lifecycle.whereabouts,
        }
        lifecycle.store.workers.beat(this_life().instance, data)

    def _look_for_hung(self) -> None:
        default = self.app.lifecycle.config.hung_timeout
        for request, header in running_links():
            limit = header["hung"] / 1000 if "hung" in header else default
            seconds = time.monotonic() - request.accepted_at
            if seconds < limit or request.id in self._slow:
                continue
            self._slow.add(request.id)
            fences = bool(header.get("single"))
            events.slow(header["name"], header["job"], seconds, fences)
            if fences:
                self._fence(request, header)
        self._slow &= {request.id for request, _ in running_links()}

    def _fence(self, request: Any, header: dict[str, Any]) -> None:
        """First the database, then the process: so its death is no strike."""
        link = link_of(header, request.id, last=False)
        who = Worker(this_life().instance, this_life().process(request.worker_pid))
        ended = self.app.lifecycle.store.ends.end(link, who, End.HUNG)
        if ended is None:
            return
        tell(ended)
        if self.kills and request.worker_pid and request.worker_pid != os.getpid():
            try:
                os.kill(request.worker_pid, signal.SIGKILL)
            except ProcessLookupError:
                events.put_back(ended.ref, ended.flight.job, "its process had ended already")


_renewers: list[Renewer] = []


def running_links() -> list[tuple[Any, dict[str, Any]]]:
    """The links that this worker's processes run now, with their headers."""
    found = []
    for request in list(worker_state.requests.values()):
        header = header_in(getattr(request, "request_dict", None))
        if header is not None and getattr(request, "accepted_at", None) is not None:
            found.append((request, header))
    return found


class GuardStep(bootsteps.StartStopStep):
    """Refuses links of tasks that are no lifecycle tasks, whatever a row or a message says."""

    requires = ("celery.worker.consumer:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        for name, strategy in list(parent.strategies.items()):
            if not isinstance(parent.app.tasks[name], LifecycleTask):
                parent.strategies[name] = _guarded(parent, name, strategy)


def _guarded(consumer: Any, name: str, strategy: Any) -> Any:
    def handle(message: Any, *args: Any, **kwargs: Any) -> Any:
        if header_in(message.headers) is None:
            return strategy(message, *args, **kwargs)
        message.ack_log_error(events.logger, consumer.connection_errors)
        return _skip(consumer.app, message.headers, name, Why.UNKNOWN_TASK)

    return handle


# --- signals


def _skip(app: Celery, headers: Any, task: str, why: Why) -> None:
    header = header_in(headers)
    lifecycle = getattr(app, "lifecycle", None)
    if header is None or lifecycle is None:
        return
    try:
        link = link_of(header, headers.get("id", ""), last=False)
        dead, shipment = lifecycle.store.ends.skip(link, why)
        if why is Why.UNKNOWN_TASK:
            events.unknown(header["name"], task, header["job"], dead is not None)
        elif dead is not None:
            kind, _, name = header["name"].partition("/")
            events.died(ObjectRef(kind, name), dead.id, why)
        if shipment is not None:
            lifecycle.send([shipment])
    except LifecycleError as error:
        events.database_failed(f"{header['name']}#{header['job']} could not be put back; it is sent again", error)
    except Exception as error:  # what a message holds must not end the consumer
        events.unexpected(f"A link of {task!r} that is not run here could not be put back", error)


@signals.task_unknown.connect
def _on_unknown(sender: Any = None, message: Any = None, name: str = "", **_: Any) -> None:
    if message is not None and message.headers:
        _skip(sender.app, message.headers, name, Why.UNKNOWN_TASK)


@signals.task_revoked.connect
def _on_revoked(sender: Any = None, request: Any = None, terminated: bool = False, **_: Any) -> None:
    headers = getattr(request, "request_dict", None) or getattr(request, "headers", None)
    if request is None or terminated or not headers:
        return
    app = getattr(request, "app", None) or getattr(sender, "app", None)
    if app is not None:
        _skip(app, {**headers, "id": request.id}, str(sender), Why.REVOKED)


@signals.worker_init.connect
def _on_worker_init(sender: Any = None, **_: Any) -> None:
    """A worker that can't work stops here; while the database is only away it starts, and waits for it."""
    begin_life()
    lifecycle = getattr(sender.app, "lifecycle", None)
    if lifecycle is None:
        return
    try:
        lifecycle.verify()
        # Read here, so that the pool's processes inherit it: one that is born in an outage must not waste its messages.
        _ = lifecycle.database_id
    except (ConfigurationError, SchemaOutdated) as error:
        # Whatever else a receiver of a signal raises is logged and forgotten.
        raise SystemExit(f"celery_lifecycle: {error}") from error
    except LifecycleError as error:
        events.database_failed("This worker starts without its job database", error)


@signals.worker_shutting_down.connect
def _on_shutting_down(**_: Any) -> None:
    this_life().draining = True
    for renewer in _renewers:
        renewer.wake.set()


def _revoking(state: Any, task_id: Any, terminate: bool = False, *args: Any, **kwargs: Any) -> Any:
    """The `revoke` control command: what still waits in the table is taken out there, whoever is restarted meanwhile.

    What runs is left alone unless it is to be terminated, as Celery has it.
    """
    lifecycle = getattr(state.app, "lifecycle", None)
    if lifecycle is not None:
        names = [task.name for task in state.app.tasks.values() if isinstance(task, LifecycleTask)]
        for one in [task_id] if isinstance(task_id, str) else list(task_id or []):
            try:
                job = lifecycle.store.jobs.revoke(names, one, running=terminate)
                if job is not None:
                    tell_from_outside(state.app, [job], Why.REVOKED)
            except LifecycleError as error:
                events.database_failed(f"Revoked tasks from {one} on could not be taken out of the job table", error)
                break  # each try holds the worker's event loop until it is given up
    return _celery_revoke(state, task_id, terminate, *args, **kwargs)


_celery_revoke = Panel.data["revoke"]
Panel.data["revoke"] = _revoking
