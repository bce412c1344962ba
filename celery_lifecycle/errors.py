"""Every error this package raises on purpose: one tree, whose messages say what was given, what is allowed, what to do.

A class docstring is the default message, so that an error raised without words still tells the fix.
"""

from __future__ import annotations


class LifecycleError(Exception):
    """Something in celery_lifecycle could not be done."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message if message is not None else " ".join((type(self).__doc__ or "").split()))


class ConfigurationError(LifecycleError):
    """A setting is unknown or has a value that is not allowed. Correct it in `app.conf` or in `Lifecycle(…)`."""


class NameInvalid(LifecycleError, ValueError):
    """A kind, name or id is not allowed. Names and ids: 1 to 200 bytes of UTF-8, no control characters, no leading `#`."""


class TimeInvalid(LifecycleError, ValueError):
    """A time or delay is not allowed. Give an aware datetime, a timedelta, or seconds that are not negative."""


class ScheduleInvalid(LifecycleError, ValueError):
    """A schedule is not allowed. See `celery lifecycle preview` for what an expression means."""


class PayloadError(LifecycleError, ValueError):
    """A payload must be JSON (dict, list, str, int, float, bool, None) and at most 2 MB. Store large data elsewhere and push its id."""


class PolicyInvalid(LifecycleError, ValueError):
    """An option of a job is not allowed."""


class UnknownJob(LifecycleError, LookupError):
    """The object has no pending job of this id. `jobs.list()` shows those it has."""


class UnknownTask(LifecycleError, LookupError):
    """No task of this name is known in this process. Import the class or module that defines it before you push to it."""


class KindConflict(LifecycleError):
    """Two object classes have the same kind, or two jobs the same task name. Give one of them its own `kind = "…"`, or `name="…"`."""


class OwnerConflict(LifecycleError):
    """The id belongs to a job of another owner. Choose another id."""


class ObjectDisabled(LifecycleError):
    """Alarms of this object were disabled for good. `destroy()` it, or push to another object."""


class DatabaseUnavailable(LifecycleError):
    """The job database could not be reached. Check `lifecycle_database_url` and that the server runs.

    Nothing was stored, unless the connection broke at the commit: then nobody knows.
    """


class LockTimeout(DatabaseUnavailable):
    """The row of an object stayed locked for too long. A caller's transaction that pushed to it is probably still open: commit it."""


class SchemaOutdated(LifecycleError):
    """The tables of celery_lifecycle are missing or old. Run `celery -A <your app> lifecycle migrate`."""


class WrongDatabase(LifecycleError):
    """A message belongs to another job database. Give beat and workers of one app the same `lifecycle_database_url`."""


class OutcomeInvalid(LifecycleError, TypeError):
    """A lifecycle job must return None, `Reschedule(…)` or `YIELD`. Store results elsewhere, for instance in `ctx.storage`."""


class OutOfMemory(LifecycleError):
    """A job ran out of memory. It was counted as a strike; `lifecycle show` tells when it is tried again."""


class Fenced(LifecycleError):
    """The run of this job was ended by somebody else meanwhile; its late result is refused."""


class StartFailed(LifecycleError):
    """`on_start` raised; the object's jobs stay and are tried again with back-off."""
