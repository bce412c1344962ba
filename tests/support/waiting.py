"""Waiting for a condition with a deadline, the only way in which a test may wait."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class WaitTimeout(AssertionError):
    """The condition did not hold before the deadline."""


def wait_until(
    predicate: Callable[[], T | None],
    timeout: float = 10.0,
    message: str | Callable[[], str] = "",
    *,
    interval: float = 0.01,
) -> T:
    """Poll ``predicate`` until it gives something true, and give that back.

    ``timeout`` and ``interval`` are seconds. ``message`` says what was waited for; as a function it is called
    only when the wait has failed, so it can describe the state at that time.
    """
    deadline = time.monotonic() + timeout
    while True:
        # The clock is read before the look: a predicate is not refused for its own slowness.
        last_look = time.monotonic() >= deadline
        value = predicate()
        if value:
            return value
        if last_look:
            said = message() if callable(message) else message
            raise WaitTimeout(f"still not after {timeout:g} s: {said or predicate}")
        time.sleep(interval)
