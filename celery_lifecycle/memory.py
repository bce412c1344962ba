"""Memory of the process that runs a job: a limit for the time of the job, and memory that is really given back."""

from __future__ import annotations

import contextlib
import gc
import resource
import traceback
from collections.abc import Iterator


@contextlib.contextmanager
def limited(limit: int | None) -> Iterator[None]:
    """Bound the private writable memory of this process (`RLIMIT_DATA`, bytes) within the block.

    What the process holds already counts too. Allocations beyond it raise `MemoryError`; C code that cannot bear a failed
    allocation aborts, and is seen as a crash.
    """
    if limit is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def give_back(error: BaseException) -> None:
    """Free what the frames of an error hold on to, so that the next job finds its memory. Call it after the except block."""
    seen: set[int] = set()
    todo: list[BaseException] = [error]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
        todo += [other for other in (one.__context__, one.__cause__) if other is not None]
        one.__traceback__ = one.__context__ = one.__cause__ = None
    gc.collect()


def peak_kib() -> int:
    """The largest resident size of this process so far, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
