"""Keeps a soft time limit out of the protocol's own steps: it may interrupt the body of a job, nothing else."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from billiard.exceptions import SoftTimeLimitExceeded


@contextlib.contextmanager
def masked() -> Iterator[None]:
    """Ignore the signal by which prefork pools raise `SoftTimeLimitExceeded`, within the block."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        yield
        return
    handler = signal.getsignal(signal.SIGUSR1)
    if handler in (signal.SIG_DFL, signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, handler)


def is_time_limit(error: BaseException | None) -> bool:
    """Whether a soft time limit has ended the body: it is used up, so the next attempt must not run in the same message."""
    return isinstance(error, SoftTimeLimitExceeded)
