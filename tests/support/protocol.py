"""Pieces of the alarm protocol for tests: values for the pure functions, a table with its own clock, its invariants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from celery_lifecycle.config import Config, read_config
from celery_lifecycle.model import HOST, Brief, InFlight, Job, Link, ObjectRef, ObjectState, Phase, Shipment
from celery_lifecycle.store import Store
from celery_lifecycle.store.claims import Claimed
from celery_lifecycle.store.ends import End, Ended
from celery_lifecycle.store.jobs import Draft, Pushed, Pusher
from celery_lifecycle.store.rows import brief_from, job_of, object_of
from celery_lifecycle.store.runs import Begun, Calling, Finished
from celery_lifecycle.transitions.derive import Agenda, is_forgettable, next_wake
from celery_lifecycle.transitions.run import Action, Verdict, Worker
from tests.support.tables import make_tables

NOW = 1_800_000_000_000
CART = ObjectRef("cart", "user-42")
TASK = "cart.remind"
QUEUE = "celery"
WORKER = Worker("w1", 101)
CONFIG = Config(database_url="sqlite://")
DONE = Verdict(Action.COMPLETE, clean=True)
AGAIN_LATER = Verdict(Action.RESCHEDULE, delay_ms=60_000, clean=True)
MORE = Verdict(Action.YIELD)


# --- values


def carts(count: int) -> list[ObjectRef]:
    return [ObjectRef("cart", f"user-{number:03}") for number in range(count)]


def state(**more: Any) -> ObjectState:
    return ObjectState(**{"id": 7, "kind": CART.kind, "name": CART.name, **more})


def sent_state(dispatch: str = "d1", until: int = NOW + 30_000, **more: Any) -> ObjectState:
    """An object whose chain is on its way."""
    return state(
        **{"dispatch": dispatch, "sent_until": until, "sent_count": 1, "queue": QUEUE, "wake_at": until, **more}
    )


def open_state(token: str = "t1", lease: int = NOW + 20_000, **more: Any) -> ObjectState:
    """An object with an open run, between two links."""
    return state(**{"token": token, "lease_until": lease, "queue": QUEUE, "wake_at": lease, **more})


def busy_state(job_id: str = "a", **more: Any) -> ObjectState:
    """An object with an open run whose first link is in flight."""
    flying = more.pop("in_flight", None) or flight(job_id)
    held = {"step": 1, "worker": WORKER.instance, "worker_pid": WORKER.pid, "sent_count": 1, **more}
    return open_state(in_flight=flying, **held)


def brief(job_id: str, due: int = NOW, **more: Any) -> Brief:
    return Brief(**{"id": job_id, "version": 1, "task": TASK, "queue": QUEUE, "due": due, **more})


def agenda(*jobs: Brief | str) -> Agenda:
    return Agenda.of(brief(job) if isinstance(job, str) else job for job in jobs)


def job(job_id: str, due: int = NOW, **more: Any) -> Job:
    values: dict[str, Any] = {
        "object": CART, "id": job_id, "version": 1, "line": job_id, "owner": HOST, "task": TASK, "queue": QUEUE,
        "due_ms": due, "not_before_ms": None, "payload_json": "null", "options_json": None, "retry_json": None,
        "schedule_json": None, "singleflight": False, "hung_timeout_ms": None, "exclusive": False,
        "recovery_loop": False, "attempt": 0, "strikes": 0, "suspect_on": None, "unknown_since_ms": None,
        "created_ms": NOW,
    }  # fmt: skip
    return Job(**{**values, **more})


def flight(job_id: str = "a", **more: Any) -> InFlight:
    values: dict[str, Any] = {
        "job": job_id, "version": 1, "task_id": "d1-0", "line": job_id, "owner": HOST, "task": TASK, "queue": QUEUE,
        "limit": 3,
    }  # fmt: skip
    return InFlight(**{**values, **more})


def link(job_id: str = "a", position: int = 0, **more: Any) -> Link:
    dispatch = more.get("dispatch", "d1")
    values: dict[str, Any] = {
        "database": "db", "object_id": 7, "dispatch": dispatch, "position": position, "token": None, "job": job_id,
        "task_id": f"{dispatch}-{position}", "sent_ms": NOW, "all_due": True, "last": False,
    }  # fmt: skip
    return Link(**{**values, **more})


# --- a table


class Clock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self, now: int = NOW) -> None:
        self.ms = now

    def __call__(self) -> int:
        return self.ms

    def forward(self, seconds: float) -> int:
        self.ms += round(seconds * 1000)
        return self.ms

    def to(self, ms: int) -> None:
        self.ms = max(self.ms, ms)


class Table:
    """The real store on one database, under a test clock (`clock=None`: the database's own), with short words for its verbs."""

    def __init__(self, url: str, *, clock: Clock | None, migrates: bool = True, **settings: Any) -> None:
        self.url = url
        self.clock = clock or Clock()
        self.config = read_config({"database_url": url, **settings})
        self.store = Store(self.config, clock)
        if migrates:
            make_tables(self.store.database)

    def close(self) -> None:
        self.store.close()

    # jobs

    def draft(self, job_id: str | None = None, ref: ObjectRef = CART, **more: Any) -> Draft:
        values: dict[str, Any] = {"task": TASK, "queue": QUEUE, "owner": HOST, "payload_json": "null", "id": job_id}
        return Draft(ref=ref, **{**values, **more})

    def push(
        self, job_id: str | None = None, ref: ObjectRef = CART, *, delay: float = 0, claims: bool = False,
        pusher: Pusher | None = None, **more: Any,
    ) -> Pushed:  # fmt: skip
        given = self.draft(job_id, ref, **{"delay_ms": round(delay * 1000), **more})
        return self.store.jobs.push(given, pusher, claims)

    def ids(self, ref: ObjectRef = CART) -> list[str]:
        return [found.id for found in self.store.jobs.list(ref, None)]

    def job(self, job_id: str, ref: ObjectRef = CART) -> Job:
        found = self.store.jobs.get(ref, job_id, None)
        assert found is not None, f"{ref} has no job {job_id!r}"
        return found

    def find(self, ref: ObjectRef = CART) -> ObjectState:
        found = self.store.objects.find(ref)
        assert found is not None, f"{ref} has no row"
        return found

    def exists(self, ref: ObjectRef = CART) -> bool:
        return self.store.objects.find(ref) is not None

    # chains and links

    def claim(self, phase: Phase = Phase.IDLE, limit: int = 500, queue: str = QUEUE) -> Claimed:
        return self.store.claims.claim(queue, phase, limit)

    def shipped(self, ref: ObjectRef = CART) -> Shipment:
        """The one chain that a claim of everything due brings for an object."""
        chains = [one for phase in (Phase.IDLE, Phase.SENT, Phase.OPEN) for one in self.claim(phase).shipments]
        mine = [one for one in chains if one.ref == ref]
        assert len(mine) == 1, f"{len(mine)} chains for {ref}"
        return mine[0]

    def begin(self, given: Link, worker: Worker = WORKER, **calling: Any) -> Begun:
        return self.store.runs.begin(given, Calling(**{"task": TASK, "limit": 3, **calling}), worker)

    def finish(self, given: Link, begun: Begun, verdict: Verdict = DONE, **more: Any) -> Finished:
        return self.store.runs.finish(given, begun.token, verdict, **more)

    def run_link(self, given: Link, verdict: Verdict = DONE, worker: Worker = WORKER) -> tuple[Begun, Finished | None]:
        """One link from begin to finish, if it was accepted and had something to run."""
        begun = self.begin(given, worker)
        if begun.refused is not None or (begun.job is None and not begun.alarm):
            return begun, None
        return begun, self.finish(given, begun, verdict)

    def run_chain(
        self, chain: Shipment, verdict: Verdict = DONE, worker: Worker = WORKER
    ) -> tuple[list[str], Shipment | None]:
        """All links of a chain, one after the other; what has run, and the chain that the closing worker sends."""
        token, ran, following = chain.token, [], None
        for given in links_of(chain):
            begun, done = self.run_link(replace(given, token=token), verdict, worker)
            if begun.refused is not None:
                break
            token = begun.token
            if done is not None:
                ran.append(given.job)
            following = done.shipment if done is not None else begun.shipment
        return ran, following

    def die(self, given: Link, worker: Worker = WORKER, end: End = End.DIED, **more: Any) -> Ended | None:
        return self.store.ends.end(given, worker, end, **more)

    def empty(self) -> None:
        """Forget all objects with what they have, also those with an open run."""
        with self.store.database.transaction() as tx:
            for name in ("jobs", "storage", "heartbeats", "dead_jobs", "objects"):
                tx.run(f"DELETE FROM {self.config.table_prefix}{name}")

    # looks

    def count(self, table: str) -> int:
        with self.store.database.transaction() as tx:
            return int(tx.rows(f"SELECT count(*) FROM {self.config.table_prefix}{table}")[0][0])

    def check(self) -> None:
        check_invariants(self)


def links_of(chain: Shipment, database: str = "db") -> list[Link]:
    """The links of a chain as their messages carry them (without `on_alarm`, which a worker appends)."""
    count = len(chain.jobs)
    return [
        Link(
            database=database, object_id=chain.object_id, dispatch=chain.dispatch, position=chain.first_position + ahead,
            token=chain.token, job=one.id, task_id=f"{chain.dispatch}-{chain.first_position + ahead}",
            sent_ms=chain.sent_ms, all_due=chain.all_due, last=ahead == count - 1,
        )
        for ahead, one in enumerate(chain.jobs)
    ]  # fmt: skip


@contextmanager
def table(url: str, *, clock: Clock | None = None, real_time: bool = False, **settings: Any) -> Iterator[Table]:
    made = Table(url, clock=None if real_time else clock or Clock(), **settings)
    try:
        yield made
    finally:
        made.close()


def check_invariants(checked: Table) -> None:
    """What must hold after every verb, whatever was done before.

    `wake_at` is the definition's value for a time at which it may have been derived: the definition looks at the clock
    only to see whether an exclusive job is due.
    """
    prefix = checked.config.table_prefix
    with checked.store.database.transaction() as tx:
        now = checked.clock.ms if checked.store.database._given_clock else tx.now()
        states = [object_of(row) for row in tx.rows(tx.sql.list_objects, {"kind": None, "after": 0, "limit": 100_000})]
        shadows = {
            row[0]: (row[1], row[2]) for row in tx.rows(f"SELECT id, phase, in_flight_task FROM {prefix}objects")
        }
        owners = {one.id: one.ref for one in states}
        columns = ", ".join(["object_id", *(tx.sql._quoted(name) for name in _job_columns())])
        jobs: dict[int, list[Job]] = {}
        for row in tx.rows(f"SELECT {columns} FROM {prefix}jobs"):
            assert row[0] in owners, f"job {row[1]!r} has no object"
            jobs.setdefault(row[0], []).append(job_of(owners[row[0]], row[1:]))
    assert len({one.ref for one in states}) == len(states), "one row per object"
    for one in states:
        mine = jobs.get(one.id, [])
        known = Agenda.of(brief_from(found) for found in mine)
        assert shadows[one.id] == (one.phase, one.in_flight.task_id if one.in_flight else None), f"shadows of {one.ref}"
        assert not is_forgettable(one, known), f"{one.ref} has nothing to remember, but a row"
        assert all(0 < found.version <= one.versions for found in mine), f"versions of {one.ref}"
        assert len({found.version for found in mine}) == len(mine), f"two jobs of {one.ref} have one version"
        assert one.token is None or one.dispatch is None, f"{one.ref} has both a run and a chain on its way"
        if one.token is not None:
            assert one.lease_until is not None
            assert one.wake_at is not None, f"nobody looks after the run of {one.ref}"
            # A renewal leaves `wake_at` to the claim.
            assert one.wake_at <= one.lease_until, f"wake_at of {one.ref} is behind its lease"
            continue
        times = {now, 0, *(found.due for found in known.jobs if found.exclusive)}
        allowed = {next_wake(one, known, at) for at in times if at <= now}
        assert (one.queue, one.wake_at) in allowed, f"{one.ref} wakes at {one.queue, one.wake_at}, not {allowed}"


def _job_columns() -> tuple[str, ...]:
    from celery_lifecycle.store.sql import JOB_COLUMNS

    return JOB_COLUMNS
