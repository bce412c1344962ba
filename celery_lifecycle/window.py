"""The dispatch window: how many chains may be on their way in a queue."""

from __future__ import annotations

import time

from celery_lifecycle.store.claims import Claims

COUNT_FOR = 1.0


class DispatchWindow:
    """Places for chains on their way, per queue, as this process sees them: counted at most once a second.

    What this process takes in between is counted here; what others take, at the next count. Chains that are sent again, and
    those of closing workers, need no place.
    """

    def __init__(self, claims: Claims, places: int) -> None:
        self._claims = claims
        self._places = places
        self._taken: dict[str, tuple[float, int]] = {}

    def room(self, queue: str) -> int:
        """Places left in a queue."""
        at, taken = self._taken.get(queue, (0.0, 0))
        if queue not in self._taken or time.monotonic() - at > COUNT_FOR:
            at, taken = time.monotonic(), self._claims.count_sent(queue)
            self._taken[queue] = (at, taken)
        return self._places - taken

    def take(self, queue: str, count: int) -> None:
        """Note that this process has sent so many."""
        at, taken = self._taken.get(queue, (0.0, 0))
        self._taken[queue] = (at, taken + count)
