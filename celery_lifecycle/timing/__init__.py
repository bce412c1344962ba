"""Times and schedules as pure functions: nothing in here reads a clock, a random source or a connection."""

from __future__ import annotations

from celery_lifecycle.timing.backoff import doubling, full_jitter
from celery_lifecycle.timing.cron import Cron, parse_cron
from celery_lifecycle.timing.instants import Millis, delay_to_millis, from_millis, resolve_when, to_millis
from celery_lifecycle.timing.preview import PreviewRow, preview
from celery_lifecycle.timing.schedule import (
    Dropped,
    NextDue,
    ScheduleSpec,
    Wake,
    first_due,
    jitter_offset,
    next_due,
    on_wake,
    spec_every,
    spec_for,
)

__all__ = [
    "Cron",
    "Dropped",
    "Millis",
    "NextDue",
    "PreviewRow",
    "ScheduleSpec",
    "Wake",
    "delay_to_millis",
    "doubling",
    "first_due",
    "from_millis",
    "full_jitter",
    "jitter_offset",
    "next_due",
    "on_wake",
    "parse_cron",
    "preview",
    "resolve_when",
    "spec_every",
    "spec_for",
    "to_millis",
]
