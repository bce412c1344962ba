"""How long to wait before trying again: exponential with full jitter, and plain doubling."""

from __future__ import annotations

import math

from celery_lifecycle.timing.instants import Millis

# 2**64 times any first delay is beyond every cap in use; larger powers only cost memory.
_LARGEST_EXPONENT = 64


def full_jitter(attempt: int, base: float, cap: float, draw: float) -> Millis:
    """Milliseconds to wait before the attempt after `attempt`: `draw * min(2**attempt * base, cap)`.

    `attempt`: counted from 1. `base`, `cap`: seconds. `draw`: a random number, 0 <= draw < 1, made by the
    caller. Rounded up to the next millisecond; never above the cap.
    """
    exponent = min(max(attempt, 0), _LARGEST_EXPONENT)
    return math.ceil(draw * min(2**exponent * base, cap) * 1000)


def doubling(n: int, first: Millis, cap: Millis) -> Millis:
    """The delay in milliseconds of the n-th wait, counted from 0: `first * 2**n`, never above `cap`."""
    return min(first << min(max(n, 0), _LARGEST_EXPONENT), cap)
