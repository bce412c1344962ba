"""One life of one worker: who it is, whether it is leaving, and what the end of one of its processes means."""

from __future__ import annotations

import os
import re
import uuid

from celery.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker import state as worker_state

from celery_lifecycle.model import Cause
from celery_lifecycle.oom import OomCounter
from celery_lifecycle.store.ends import End
from celery_lifecycle.transitions.run import Worker


class Life:
    """Made in the parent at its start, inherited by its children."""

    def __init__(self) -> None:
        self.instance = uuid.uuid4().hex
        self.draining = False
        self.counter = OomCounter()
        self.forks = True

    def process(self, pid: int | None) -> int:
        """The process that runs a link which its pool says is run by `pid`: greenlets have such numbers too."""
        return pid if pid and self.forks else os.getpid()

    @property
    def is_leaving(self) -> bool:
        """Whether this worker is shutting down, so that the end of a process says nothing about its job."""
        return self.draining or worker_state.should_terminate is not None or worker_state.should_stop is not None


_life = Life()


def begin_life() -> Life:
    """A new worker instance begins in this process."""
    global _life
    _life = Life()
    return _life


def this_life() -> Life:
    """The life that this process is part of."""
    return _life


def this_worker() -> Worker:
    """Who runs links in this process."""
    return Worker(_life.instance, os.getpid())


def what_ended(error: BaseException) -> tuple[End | None, Cause | None]:
    """What an error that the parent sees says about the process; (None, None): the child itself has ended its link."""
    leaving = _life.is_leaving
    if isinstance(error, (WorkerLostError, SystemExit, KeyboardInterrupt)):
        return (End.PUT_BACK, None) if leaving else (End.DIED, _cause(str(error)))
    if isinstance(error, TimeLimitExceeded):
        return End.TIMED_OUT, None
    if isinstance(error, Terminated):
        return (End.PUT_BACK if leaving else End.REVOKED), None
    return None, None


def _cause(told: str) -> Cause:
    if re.search(r"signal 9\b", told) is None:
        return Cause.CRASH
    return Cause.OOM if _life.counter.has_moved() else Cause.SUSPECTED
