"""The frozen values that everything else passes around: jobs, the state of an object, outcomes, contexts of hooks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from celery_lifecycle.errors import PolicyInvalid

# Ids of the protocol's own jobs. They begin with `#`, which no id given by a user may.
ALARM: Final = "#alarm"
ALIVE: Final = "#alive"
START: Final = "#start"
HOOK_PREFIX: Final = "#hook-"

HOST: Final = "host"
SCHEDULER: Final = "scheduler"
SEALED: Final = "sealed"


def is_protocol_id(job_id: str) -> bool:
    """Whether `job_id` is one of the protocol's own jobs, which are in no list."""
    return job_id.startswith("#")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how fast a failing job is tried again within its run.

    The n-th delay is drawn evenly from `0 … min(2**n * base_delay, max_delay)` seconds (full jitter).

    Args:
        max_attempts: calls of the function in all, at least 1. Default 3.
        base_delay: seconds, at least 0. Default 0.1.
        max_delay: seconds, at least 0. Default 3.

    Raises:
        PolicyInvalid: an option is out of range.
    """

    max_attempts: int = 3
    base_delay: float = 0.1
    max_delay: float = 3.0

    def __post_init__(self) -> None:
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise PolicyInvalid(f"max_attempts={self.max_attempts!r}: give a whole number of at least 1.")
        for name in ("base_delay", "max_delay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
                raise PolicyInvalid(f"{name}={value!r}: give seconds, 0 or more.")

    def to_json(self) -> str:
        return json.dumps([self.max_attempts, self.base_delay, self.max_delay])

    @classmethod
    def from_json(cls, text: str | None) -> RetryPolicy:
        return cls(*json.loads(text)[:3]) if text else cls()  # a newer version may have added more


class _Yield:
    """The outcome "there is more to do: give others a turn, then run me again"."""

    def __repr__(self) -> str:
        return "YIELD"


YIELD: Final = _Yield()


@dataclass(frozen=True, slots=True)
class Reschedule:
    """The outcome "run me again at a time", with the attempt count back at its start.

    Args:
        delay: seconds or timedelta from now, not negative.
        at: an aware datetime; a past one is due at once.

    Exactly one of the two must be given; they are checked when the job returns.
    """

    delay: float | timedelta | None = None
    at: datetime | None = None


Outcome: TypeAlias = "Reschedule | _Yield | None"
"""What a lifecycle job returns."""


class Why(str, Enum):
    """Why a job is dead."""

    FAILED = "failed"
    SEALED = "sealed"
    REVOKED = "revoked"
    EXPIRED = "expired"
    REJECTED = "rejected"
    UNKNOWN_TASK = "unknown task"
    UNKNOWN_OWNER = "unknown owner"
    TIMED_OUT = "timed out"
    HUNG = "hung"
    MISFIRED = "misfired"
    LIFTED = "lifted"


class Cause(str, Enum):
    """What a strike was made of (design, section 7)."""

    OOM = "oom"
    SUSPECTED = "suspected"
    CRASH = "crash"
    MEMORY_ERROR = "memory_error"
    MEMORY_LIMIT = "memory_limit"
    LOST = "lost"


def _utc(ms: int) -> datetime:
    return datetime.fromtimestamp(0, timezone.utc) + timedelta(milliseconds=ms)


class ObjectRef(NamedTuple):
    """The name of a logical object: its kind and its name within the kind. They sort as rows are locked: by kind, then name."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


class Job(NamedTuple):
    """One durable row: something that an object is to do at a time.

    Instances are snapshots; change a job through `object.jobs`.

    Attributes:
        object: whose job it is.
        id: unique within the object.
        version: changes with every change of the job; never used twice in an object's life.
        line: where the job comes from; strikes are counted per line.
        owner: `"host"` or a capability's id.
        task: the Celery task name.
        queue: the queue that its message goes to.
        due_ms, not_before_ms, created_ms: milliseconds since the epoch; `due_at`, `not_before` and
            `created_at` give them as aware datetimes.
        payload: the JSON value given at push.
        attempt: failed calls so far.
        strikes: deaths so far (design, section 7).
        sealed: True only on what a push from inside a run gets back for a sealed job.
    """

    object: ObjectRef
    id: str
    version: int
    line: str
    owner: str
    task: str
    queue: str
    due_ms: int
    not_before_ms: int | None
    payload_json: str
    options_json: str | None
    retry_json: str | None
    schedule_json: str | None
    singleflight: bool
    hung_timeout_ms: int | None
    exclusive: bool
    recovery_loop: bool
    attempt: int
    strikes: int
    suspect_on: str | None
    unknown_since_ms: int | None
    created_ms: int
    sealed: bool = False

    @property
    def payload(self) -> Any:
        return json.loads(self.payload_json)

    @property
    def options(self) -> dict[str, Any]:
        return dict(json.loads(self.options_json)) if self.options_json else {}

    @property
    def retry(self) -> RetryPolicy:
        return RetryPolicy.from_json(self.retry_json)

    @property
    def due_at(self) -> datetime:
        return _utc(self.due_ms)

    @property
    def not_before(self) -> datetime | None:
        return None if self.not_before_ms is None else _utc(self.not_before_ms)

    @property
    def created_at(self) -> datetime:
        return _utc(self.created_ms)

    @property
    def effective_ms(self) -> int:
        """When the job itself may run; its object's own `not_before` comes on top."""
        return self.due_ms if self.not_before_ms is None else max(self.due_ms, self.not_before_ms)


class Brief(NamedTuple):
    """What the protocol needs to know of a job to send it or to derive an alarm from it.

    `due` is when it may run; `own_due` when it was to run, before a strike or a suspicion put it off: its place among those
    that may run.
    """

    id: str
    version: int
    task: str
    queue: str
    due: int
    exclusive: bool = False
    options_json: str | None = None
    hung_timeout_ms: int | None = None
    singleflight: bool = False
    owner: str = HOST
    own_due: int | None = None

    @property
    def place(self) -> tuple[int, str]:
        return self.due if self.own_due is None else self.own_due, self.id


@dataclass(frozen=True, slots=True)
class InFlight:
    """The durable mark "this attempt has started": on the object, so that no change of a job can lose it.

    `limit`, `hook` and `queue` are what a process without the object's class (beat) must know to strike it; `alive` is
    the version of the `#alive` job that an `on_alarm` link answers; `final`: the object was destroyed meanwhile, so its run
    ends with this link; `carrier`: while `on_start` runs, the job whose link it comes before.
    """

    job: str
    version: int
    task_id: str
    line: str
    owner: str
    task: str
    queue: str
    limit: int
    hook: str | None = None
    alive: int | None = None
    recovery_loop: bool = False
    suspect: bool = False
    final: bool = False
    carrier: str | None = None

    @property
    def marked(self) -> str:
        """The job that is marked as a suspect, if this flight makes one."""
        return self.job if self.carrier is None else self.carrier

    def to_json(self) -> str:
        values = (
            self.job, self.version, self.task_id, self.line, self.owner, self.task, self.queue, self.limit, self.hook,
            self.alive, self.recovery_loop, self.suspect, self.final, self.carrier,
        )  # fmt: skip
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | None) -> InFlight | None:
        """Of a newer version's text, in a rolling deploy, what this version knows: fields are only ever added at the end."""
        return cls(*json.loads(text)[: len(fields(cls))]) if text else None


class Phase(int, Enum):
    """Where an object's chain is: the second column of the index that beat reads."""

    IDLE = 0
    SENT = 1
    OPEN = 2


class ObjectState(NamedTuple):
    """One row of the object table. `wake_at`, `queue` and the phase are derived (`transitions.derive`), never set by hand.

    A tuple, as beat makes several of each object that it claims.
    """

    id: int
    kind: str
    name: str
    queue: str | None = None
    wake_at: int | None = None
    versions: int = 0
    dispatch: str | None = None
    sent_until: int | None = None
    sent_count: int = 0
    queue_wait: int = 0
    token: str | None = None
    lease_until: int | None = None
    doubt: bool = False
    step: int = 0
    in_flight: InFlight | None = None
    worker: str | None = None
    worker_pid: int | None = None
    paused: str | None = None
    disabled: bool = False
    not_before: int | None = None
    not_before_count: int = 0
    lines: str | None = None
    holds: int = 0
    stored: bool = False
    sealed: bool = False

    def but(self, **changes: Any) -> ObjectState:
        """A copy with changes: what `_replace` does, at a third of its cost."""
        values = list(self)
        for name, value in changes.items():
            values[_STATE_PLACES[name]] = value
        return ObjectState._make(values)

    @property
    def ref(self) -> ObjectRef:
        return ObjectRef(self.kind, self.name)

    @property
    def phase(self) -> Phase:
        if self.token is not None:
            return Phase.OPEN
        return Phase.IDLE if self.dispatch is None else Phase.SENT


_STATE_PLACES: Final = {name: place for place, name in enumerate(ObjectState._fields)}


@dataclass(frozen=True, slots=True)
class Link:
    """One link of a chain as its message carries it: ids only."""

    database: str
    object_id: int
    dispatch: str
    position: int
    token: str | None
    job: str
    task_id: str
    sent_ms: int
    all_due: bool
    last: bool
    hung_timeout_ms: int | None = None
    singleflight: bool = False

    @property
    def is_promised(self) -> bool:
        """Whether its task id was given to a caller of `apply_async`, who may wait for the result."""
        return self.task_id != f"{self.dispatch}-{self.position}"


class Shipment(NamedTuple):
    """A chain that is to be sent: what `dispatch` makes one message of."""

    object_id: int
    ref: ObjectRef
    dispatch: str
    token: str | None
    first_position: int
    jobs: tuple[Brief, ...]
    all_due: bool
    sent_ms: int


@dataclass(frozen=True, slots=True)
class AlarmInfo:
    """What `on_alarm` is told.

    Attributes:
        retry_count: how often this alarm failed before, 0 to 6; 0 in runs that jobs triggered.
        is_retry: whether it failed before.
        scheduled_for: the time given to `set_alarm`; None in runs that jobs triggered.
    """

    retry_count: int = 0
    is_retry: bool = False
    scheduled_for: datetime | None = None


@dataclass(frozen=True, slots=True)
class MemoryLimitContext:
    """What `on_memory_limit` is told, after the fact (design, section 7).

    Attributes:
        sealed: the line was taken out for good; False: it will be tried again at `next_time`.
        next_time: aware datetime of the next try, or None when sealed.
        executing: id of the job that died.
        purged: ids of the jobs that went with it.
        strikes: deaths counted so far.
        limit: at how many it is sealed.
        cause: `oom`, `suspected`, `crash`, `memory_error`, `memory_limit` or `lost`.
    """

    sealed: bool
    next_time: datetime | None
    executing: str
    purged: tuple[str, ...]
    strikes: int
    limit: int
    cause: str

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> MemoryLimitContext:
        """From the payload of the job that calls the hook; what a newer version has added is left out."""
        known = {one.name: given[one.name] for one in fields(cls)}
        next_time = datetime.fromisoformat(known["next_time"]) if known["next_time"] else None
        return cls(**{**known, "next_time": next_time, "purged": tuple(known["purged"])})


@dataclass(frozen=True, slots=True)
class DeadJob:
    """A job that failed for good, was sealed, revoked or is unknown, kept for people to look at, replay or purge.

    Attributes:
        key: the number by which it is replayed or purged.
        reason: one of `Why`.
        job: the job as it was.
        error, traceback: of the last attempt, if it failed.
        strikes: what is known of each death: cause, time and details.
        died_ms: milliseconds since the epoch; `died_at` gives an aware datetime.
    """

    key: int
    reason: str
    job: Job
    error: str | None
    traceback: str | None
    details: dict[str, Any] = field(default_factory=dict)
    died_ms: int = 0

    @property
    def died_at(self) -> datetime:
        return _utc(self.died_ms)


OutcomeName = Literal["complete", "reschedule", "yield"]
