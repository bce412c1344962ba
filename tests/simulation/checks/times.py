"""The times that the design promises, worked out anew from the settings: no property of `Config` is asked.

docs/design.md has them in words, under "How late at most".
"""

from __future__ import annotations

from celery_lifecycle.config import Config
from celery_lifecycle.model import RetryPolicy

LONGEST_QUEUE = 12
"""Times `patience_max` that a long queue may lengthen the patience to."""
OUTAGE = 1000
"""An attempt that an outage ended is made again after so long."""
UNKNOWN = (1000, 60_000)
"""A job of an unknown task is looked at again after as long as it has been unknown, but within these."""


class Times:
    """Milliseconds, from settings in seconds."""

    def __init__(self, config: Config) -> None:
        self.backup = round(config.backup_alarm * 1000)
        self.lease = self.backup * 2 // 3
        self.doubt = self.backup // 6
        self.renewal = self.backup // 6
        self.patience_max = round(config.patience_max * 1000)
        self.suspect = round(config.suspect_delay * 1000)
        self.grace = round(config.unknown_task_grace * 1000)
        self.hold = round(config.retry_hold * 1000)
        self.hung = round(config.hung_timeout * 1000)
        self._strike, self._strike_max = config.strike_delay, config.strike_delay_max

    def patience(self, sendings: int, queue_wait: int) -> int:
        """How long the n-th sending is waited for."""
        doubled = min(self.backup * 2 ** min(max(sendings, 1) - 1, 20), max(self.patience_max, self.backup))
        return max(doubled, min(2 * queue_wait, LONGEST_QUEUE * self.patience_max))

    def strike(self, strikes: int, spread: float = 1) -> int:
        """How long a loop waits after so many deaths; one that was lost with its worker up to three times that."""
        return round(min(self._strike * strikes * spread, self._strike_max) * 1000)

    def start(self, failures: int) -> int:
        """How long an object is held back after so many failures of `on_start` in a row."""
        return min(1000 * 2 ** min(failures - 1, 40), round(self._strike_max * 1000))

    def retry(self, policy: RetryPolicy, attempt: int) -> int:
        """The longest delay after a failed attempt."""
        return round(min(2 ** min(attempt, 40) * policy.base_delay, policy.max_delay) * 1000)

    def unknown(self, since: int, now: int) -> int:
        return min(max(UNKNOWN[0], now - since), UNKNOWN[1])

    def alarm(self, failures: int) -> int:
        """How long a bare alarm waits after so many failures of `on_alarm` in a row."""
        return 2000 * 2 ** (failures - 1)
