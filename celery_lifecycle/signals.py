"""The signals: one per fact, with frozen payloads, sent where the fact becomes known, never failing the work.

Every signal is a `celery.utils.dispatch.Signal` and sends the keyword arguments listed with it; `object` is an `ObjectRef`
and the sender. A receiver that raises is logged and forgotten. Connect with `@job_failed.connect`.
"""

from celery.utils.dispatch import Signal

__all__ = [
    "alarm_failed",
    "alarm_memory_limit_reset",
    "job_backlog_warning",
    "job_completed",
    "job_discarded",
    "job_failed",
    "job_misfired",
    "job_put_back",
    "job_rescheduled",
    "job_retrying",
    "job_skipped",
    "job_slow_dispatch",
    "job_started",
    "job_yielded",
    "start_failed",
]

job_started = Signal(name="job_started", providing_args={"object", "job", "attempt", "task_id"})
"""An attempt has been put in flight. `attempt` counts from 1."""

job_completed = Signal(name="job_completed", providing_args={"object", "job", "attempt"})
"""A job returned None, and that was applied."""

job_rescheduled = Signal(name="job_rescheduled", providing_args={"object", "job", "due_at"})
"""A job returned `Reschedule`, or a schedule goes on with its next occurrence. `due_at`: aware datetime or None."""

job_yielded = Signal(name="job_yielded", providing_args={"object", "job"})
"""A job returned `YIELD`: it is due again, behind the others."""

job_retrying = Signal(name="job_retrying", providing_args={"object", "job", "attempt", "delay", "error"})
"""An attempt failed and another follows after `delay` seconds."""

job_failed = Signal(name="job_failed", providing_args={"object", "job", "reason", "error"})
"""A job became a dead job; `reason` is one of the reasons of dead jobs."""

job_discarded = Signal(name="job_discarded", providing_args={"object", "job"})
"""A newer push, reschedule or cancel won: the outcome of the older version was not applied."""

job_put_back = Signal(name="job_put_back", providing_args={"object", "job", "reason"})
"""The platform, not the job, failed (shutdown, lost suspect's neighbour): it stays, with its attempts."""

job_misfired = Signal(name="job_misfired", providing_args={"object", "job", "count", "first", "last"})
"""Times of a schedule were missed and are not run: how many, the first and the last of them (aware datetimes)."""

job_skipped = Signal(name="job_skipped", providing_args={"object", "job", "intervals"})
"""A run outlasted its interval by so many whole intervals."""

job_slow_dispatch = Signal(name="job_slow_dispatch", providing_args={"object", "job", "seconds", "fenced"})
"""A job runs for longer than its `hung_timeout`; `fenced`: it is singleflight and was stopped."""

job_backlog_warning = Signal(name="job_backlog_warning", providing_args={"object", "owner", "count"})
"""Ten or more jobs of one owner were due in one run."""

start_failed = Signal(name="start_failed", providing_args={"object", "error", "next_at"})
"""`on_start` raised; the object is tried again at `next_at` (aware datetime)."""

alarm_failed = Signal(name="alarm_failed", providing_args={"object", "error", "next_at"})
"""`on_alarm` raised; it is retried at `next_at`, or given up if that is None."""

alarm_memory_limit_reset = Signal(name="alarm_memory_limit_reset", providing_args={"object", "job", "context"})
"""A death was counted as a strike; `context` is a `MemoryLimitContext`."""
