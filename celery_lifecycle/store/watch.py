"""What people and probes look at: the whole of one object, lists, counts, what is overdue. Nothing here changes anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery_lifecycle.model import DeadJob, Job, ObjectRef, ObjectState, Phase
from celery_lifecycle.store.claims import queues_in
from celery_lifecycle.store.database import Database, Tx
from celery_lifecycle.store.holds import Hold
from celery_lifecycle.store.rows import dead_of, job_of, object_of

COUNTED_TO = 10_000
LAST_NAME = "\U0010ffff" * 51  # behind every name of 200 bytes
FILTERS = ("any", "idle", "overdue", "sent", "running", "paused", "disabled", "struck")


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that is known of one object at one time.

    Attributes:
        jobs: the earliest ones in due order, also the protocol's own.
        worker: the heartbeat of the worker instance that runs it, if there is one.
        storage: keys with the size of their values, at most `limit` of each kind of thing.
        dead: its dead jobs, newest first.
    """

    now: int
    state: ObjectState
    jobs: tuple[Job, ...]
    worker: dict[str, Any] | None
    holds: tuple[Hold, ...]
    storage: tuple[tuple[str, int], ...]
    dead: tuple[DeadJob, ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of a list of objects."""

    state: ObjectState
    jobs: int


@dataclass(frozen=True, slots=True)
class Alarms:
    """The alarms of one queue in one phase."""

    queue: str
    phase: Phase
    count: int
    earliest: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The job table in numbers."""

    now: int
    objects: int
    paused: int
    disabled: int
    sealed: int
    jobs: int
    alarms: tuple[Alarms, ...]
    dead: dict[str, int]


@dataclass(frozen=True, slots=True)
class Due:
    """What an alarm is for: the first job of its object. `job` is None if that is gone meanwhile, or not known.

    `object` is the name of the object, or what is known of it.
    """

    object: str
    job: str | None
    task: str | None
    queue: str
    due_ms: int
    phase: Phase = Phase.IDLE

    def to_json(self) -> dict[str, Any]:
        return {
            "object": self.object, "job": self.job, "task": self.task, "queue": self.queue, "due": self.due_ms,
            "phase": int(self.phase),
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: dict[str, Any] | None) -> Due | None:
        if not found:
            return None
        return cls(found["object"], found["job"], found["task"], found["queue"], found["due"], Phase(found["phase"]))


@dataclass(frozen=True, slots=True)
class QueueLateness:
    """How late one queue is: its earliest alarm, how many are past `before` (counted to 10,000), chains on their way."""

    queue: str
    first: Due
    late: int
    sent: int


def first_due(tx: Tx, queue: str) -> Due | None:
    """The earliest alarm of a queue, whatever its phase, with the first job of its object."""
    first: ObjectState | None = None
    for phase in Phase:
        row = tx.row(tx.sql.first_alarm, {"queue": queue, "phase": int(phase)})
        state = object_of(row) if row is not None else None
        if state is not None and (first is None or (state.wake_at or 0) < (first.wake_at or 0)):
            first = state
    if first is None:
        return None
    job = tx.row(tx.sql.first_job, {"object": first.id})
    job_id, task = (job[0], job[1]) if job is not None else (None, None)
    return Due(str(first.ref), job_id, task, queue, first.wake_at or 0, first.phase)


def next_due(tx: Tx) -> Due | None:
    """The earliest alarm of all."""
    found = [due for queue in queues_in(tx) if (due := first_due(tx, queue)) is not None]
    return min(found, key=lambda due: due.due_ms, default=None)


class Watch:
    """Looks into one database."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def picture(self, ref: ObjectRef, limit: int = 100, max_jobs: int = 1000) -> Picture | None:
        """Everything about one object, of each kind of thing at most so many; None if it has no row."""

        def work(tx: Tx) -> Picture | None:
            row = tx.row(tx.sql.find_named, {"kind": ref.kind, "name": ref.name})
            if row is None:
                return None
            state, params = object_of(row), {"object": row[0]}
            jobs = tuple(job_of(ref, found) for found in tx.rows(tx.sql.all_jobs_of, {**params, "limit": max_jobs}))
            worker = None
            if state.worker is not None:
                beat = tx.row(tx.sql.get_heartbeat, {"kind": "worker", "key": state.worker})
                worker = json.loads(beat[5]) if beat is not None else None
            holds = tuple(
                Hold(kind, key, job, expires, json.loads(data))
                for kind, key, _, job, expires, data in tx.rows(tx.sql.heartbeats_of, params)
            )
            keys = tuple((key, int(size)) for key, size in tx.rows(tx.sql.storage_keys, {**params, "limit": limit}))
            return Picture(tx.now(), state, jobs, worker, holds, keys, self._dead_in(tx, ref, None, None, limit))

        return self.database.look(work)

    def pick(
        self,
        which: str = "any",
        kind: str | None = None,
        prefix: str = "",
        after: ObjectRef | None = None,
        limit: int = 100,
    ) -> tuple[int, list[Listed]]:
        """The time, and objects in the order of kind and name, from behind `after`: one of `FILTERS`, names by prefix."""

        def work(tx: Tx) -> tuple[int, list[Listed]]:
            now = tx.now()
            params: dict[str, Any] = {
                "kind": kind, "prefix": prefix, "end": prefix + LAST_NAME, "limit": limit, "now": now,
                "after_kind": after.kind if after else "", "after_name": after.name if after else "",
            }  # fmt: skip
            states = [object_of(row) for row in tx.rows(tx.sql.pick_objects[which], params)]
            if not states:
                return now, []
            ids = tx.sql.ids([state.id for state in states])
            counts = {int(key): int(count) for key, count in tx.rows(tx.sql.count_jobs_of, {"ids": ids})}
            return now, [Listed(state, counts.get(state.id, 0)) for state in states]

        return self.database.look(work)

    def kinds(self) -> list[str]:
        """The kinds that have objects, in order."""

        def work(tx: Tx) -> list[str]:
            found: list[str] = []
            row = tx.row(tx.sql.next_kind, {"kind": ""})
            while row is not None and row[0] is not None:
                found.append(row[0])
                row = tx.row(tx.sql.next_kind, {"kind": row[0]})
            return found

        return self.database.look(work)

    def overview(self) -> Overview:
        """The job table in numbers; it reads whole indexes, so it is for people and not for probes."""

        def work(tx: Tx) -> Overview:
            objects, jobs = tx.row(tx.sql.count_objects), tx.row(tx.sql.count_jobs)
            assert objects is not None
            assert jobs is not None
            alarms = tuple(
                Alarms(queue, Phase(phase), int(count), int(earliest))
                for queue, phase, count, earliest in sorted(map(tuple, tx.rows(tx.sql.count_alarms)))
            )
            dead = {reason: int(count) for reason, count in tx.rows(tx.sql.count_dead)}
            count, paused, disabled, sealed = map(int, objects)
            return Overview(tx.now(), count, paused, disabled, sealed, int(jobs[0]), alarms, dead)

        return self.database.look(work)

    def lateness(self, tolerance_ms: int) -> tuple[int, list[QueueLateness]]:
        """The time, and how late each queue is; alarms past for longer than the tolerance are counted. Cheap."""

        def work(tx: Tx) -> tuple[int, list[QueueLateness]]:
            now, found = tx.now(), []
            for queue in queues_in(tx):
                first = first_due(tx, queue)
                if first is None:
                    continue
                params = {"queue": queue, "before": now - tolerance_ms, "limit": COUNTED_TO}
                late = sum(_count(tx, tx.sql.count_late, {**params, "phase": int(phase)}) for phase in Phase)
                sent = _count(tx, tx.sql.count_sent, {"queue": queue, "limit": COUNTED_TO})
                found.append(QueueLateness(queue, first, min(late, COUNTED_TO), sent))
            return now, found

        return self.database.look(work)

    def oldest_job(self) -> Due | None:
        """The job that is due for longest by the table of jobs alone, for when that of objects is locked. Reads it all."""

        def work(tx: Tx) -> Due | None:
            row = tx.row(tx.sql.oldest_job, {"now": tx.now()})
            return Due(f"object id {row[0]}", row[1], row[2], row[3], int(row[4])) if row is not None else None

        return self.database.look(work)

    def dead(
        self, ref: ObjectRef | None = None, reason: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[DeadJob]:
        """Dead jobs, newest first, of one object or all, of one reason or all, with keys below `before`."""
        return list(self.database.look(self._dead_in, ref, reason, before, limit))

    def _dead_in(
        self, tx: Tx, ref: ObjectRef | None, reason: str | None, before: int | None, limit: int
    ) -> tuple[DeadJob, ...]:
        params: dict[str, Any] = {"reason": reason, "before": before or 2**62, "limit": limit}
        if ref is None:
            return tuple(dead_of(row) for row in tx.rows(tx.sql.newest_dead, params))
        params |= {"kind": ref.kind, "name": ref.name}
        return tuple(dead_of(row) for row in tx.rows(tx.sql.newest_dead_of, params))

    def dead_job(self, key: int) -> DeadJob | None:
        """One dead job by its key."""

        def work(tx: Tx) -> DeadJob | None:
            row = tx.row(tx.sql.dead_job, {"id": key})
            return dead_of(row) if row is not None else None

        return self.database.look(work)

    def beats(self) -> tuple[int, list[dict[str, Any]]]:
        """The time, and what is known of beats, the one that ticked last first."""
        return self.database.look(_heartbeats, "beat")

    def workers(self) -> tuple[int, list[dict[str, Any]]]:
        """The time, and what is known of worker instances, the one seen last first."""
        return self.database.look(_heartbeats, "worker")

    def now(self) -> int:
        """The database's time in milliseconds."""
        return self.database.look(lambda tx: tx.now())

    # --- facts about the server, for `doctor`

    def version(self) -> str:
        """What the server calls itself."""
        row = self.database.look(lambda tx: tx.row(tx.sql.version))
        return str(row[0]) if row is not None else ""

    def engines(self) -> dict[str, str]:
        """MySQL and MariaDB: the storage engine of each table."""
        pattern = self.database.config.table_prefix.replace("_", "\\_") + "%"
        rows = self.database.look(lambda tx: tx.rows(tx.sql.engines, {"pattern": pattern}))
        return {str(name): str(engine) for name, engine in rows}

    def backends(self, times: int) -> list[tuple[int, str]]:
        """PostgreSQL: the server process and its lock timeout in so many transactions on one connection.

        Behind a pooler that lends a server connection per transaction they are not always the same.
        """
        rows: Sequence[Any] = [self.database.look(lambda tx: tx.row(tx.sql.backend)) for _ in range(times)]
        return [(int(row[0]), str(row[1])) for row in rows]


def _count(tx: Tx, statement: str, params: dict[str, Any]) -> int:
    row = tx.row(statement, params)
    return int(row[0]) if row is not None else 0


def _heartbeats(tx: Tx, kind: str) -> tuple[int, list[dict[str, Any]]]:
    found = [{"key": row[1], **json.loads(row[5])} for row in tx.rows(tx.sql.list_heartbeats, {"kind": kind})]
    return tx.now(), sorted(found, key=lambda one: -int(one.get("seen", 0)))
