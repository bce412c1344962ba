"""One durable alarm per logical object for Celery; see the README for the ten-line tour."""

from celery_lifecycle.context import JobContext
from celery_lifecycle.decorator import lifecycle_job
from celery_lifecycle.errors import LifecycleError
from celery_lifecycle.handles import ObjectHandle
from celery_lifecycle.holds import KeepAlive, track_alarm_work
from celery_lifecycle.lifecycle import Lifecycle
from celery_lifecycle.model import (
    YIELD,
    AlarmInfo,
    DeadJob,
    Job,
    MemoryLimitContext,
    ObjectRef,
    Outcome,
    Reschedule,
    RetryPolicy,
)
from celery_lifecycle.objects import Capability, LifecycleObject
from celery_lifecycle.queue import JobQueue, Push
from celery_lifecycle.schedules import Schedule
from celery_lifecycle.storage import Storage
from celery_lifecycle.task import LifecycleTask
from celery_lifecycle.version import __version__

__all__ = [
    "YIELD",
    "AlarmInfo",
    "Capability",
    "DeadJob",
    "Job",
    "JobContext",
    "JobQueue",
    "KeepAlive",
    "Lifecycle",
    "LifecycleError",
    "LifecycleObject",
    "LifecycleTask",
    "MemoryLimitContext",
    "ObjectHandle",
    "ObjectRef",
    "Outcome",
    "Push",
    "Reschedule",
    "RetryPolicy",
    "Schedule",
    "Storage",
    "__version__",
    "lifecycle_job",
    "track_alarm_work",
]
