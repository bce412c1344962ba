"""Work beside the caller's: beat claims the next batch while it sends one; a worker does not wait for ever for an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def beside(work: Callable[..., T], *args: Any) -> Future[T]:
    """Do it in a thread of its own, which holds nobody's exit up: at the end of its process it is a crash like any other."""
    future: Future[T] = Future()
    threading.Thread(target=_done, args=(future, work, args), name="lifecycle-beside", daemon=True).start()
    return future


def at_once(work: Callable[..., T], *args: Any) -> Future[T]:
    """Do it here and now, in the same order of commits and sends; an error waits until the result is asked for, too."""
    future: Future[T] = Future()
    _done(future, work, args)
    return future


def _done(future: Future[T], work: Callable[..., T], args: tuple[Any, ...]) -> None:
    try:
        future.set_result(work(*args))
    except Exception as error:
        future.set_exception(error)
