"""How a run ends that did not end well: struck, lost, hung, revoked, unknown; each a guarded transaction."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from enum import Enum
from typing import Any

from celery_lifecycle import breaker
from celery_lifecycle.config import Config
from celery_lifecycle.model import (
    ALARM,
    ALIVE,
    HOOK_PREFIX,
    START,
    Cause,
    InFlight,
    Job,
    Link,
    MemoryLimitContext,
    ObjectRef,
    ObjectState,
    Shipment,
    Why,
)
from celery_lifecycle.store import alarms, lines
from celery_lifecycle.store.claims import queues_in
from celery_lifecycle.store.database import Database, Tx
from celery_lifecycle.store.rows import job_of
from celery_lifecycle.store.unit import Locked, lock_by_id, new_token, with_job, without
from celery_lifecycle.transitions import chain, recurrence, run
from celery_lifecycle.transitions.derive import Agenda, derive
from celery_lifecycle.transitions.run import Worker


class End(str, Enum):
    """What became of a link's process, as its worker's parent sees it."""

    DIED = "died"
    HUNG = "hung"
    TIMED_OUT = "timed out"
    REVOKED = "revoked"
    PUT_BACK = "put back"


@dataclass(frozen=True, slots=True)
class Ended:
    """What ending a run came to.

    Attributes:
        context: the strike, where the death counts.
        dead: jobs that became dead jobs, and why.
        put_back: the job stays and uses up no attempt.
    """

    ref: ObjectRef
    flight: InFlight
    cause: Cause | None = None
    context: MemoryLimitContext | None = None
    dead: tuple[Job, ...] = ()
    why: Why = Why.SEALED
    put_back: bool = False


class Ends:
    """Ends of runs over one database."""

    def __init__(self, database: Database, config: Config) -> None:
        self.database = database
        self.config = config

    def end(
        self,
        link: Link,
        worker: Worker,
        end: End,
        cause: Cause | None = None,
        details: dict[str, Any] | None = None,
    ) -> Ended | None:
        """End the run whose link is in flight in this very process.

        Guard: task id, worker instance and pid are those in flight; else nothing is changed and None comes back, so that
        one death is one strike, whoever sees it.
        """
        return self.database.run(self._end, link, worker, end, cause, details or {})

    def _end(
        self, tx: Tx, link: Link, worker: Worker, end: End, cause: Cause | None, details: dict[str, Any]
    ) -> Ended | None:
        held = lock_by_id(tx, link.object_id, self.config.chain_length)
        if held is None:
            return None
        state = held.state
        flight = state.in_flight
        if flight is None or flight.task_id != link.task_id:
            return None
        if (state.worker, state.worker_pid) != (worker.instance, worker.pid):
            return None
        if end is End.DIED:
            return self._strike(held, cause or Cause.CRASH, details)
        if end is End.PUT_BACK:
            return self._put_back(held)
        return self._used_up(held, end, details)

    def _used_up(self, held: Locked, end: End, details: dict[str, Any]) -> Ended:
        """A hard time limit or a fenced-off hung job uses up an attempt; a revoked job is dead at once."""
        flight = held.state.in_flight
        assert flight is not None
        now, agenda, job = held.agenda(flight.marked)
        why = {End.HUNG: Why.HUNG, End.TIMED_OUT: Why.TIMED_OUT, End.REVOKED: Why.REVOKED}[end]
        state = chain.ended(held.state)
        dead: tuple[Job, ...] = ()
        if job is not None and (flight.job == START or job.version != flight.version):
            held.rewrite_job(job, run.unmarked(job))
        if end is not End.REVOKED and flight.job == START:
            state = run.start_failed(held.state, now, self.config)
        elif end is not End.REVOKED and flight.job == ALARM:
            if not flight.final and (job is None or job.version == flight.version):
                state, agenda, alarm, is_dead = alarms.again(
                    held, state, agenda, job, now, why.value, task=flight.task, queue=flight.queue, why=why
                )
                dead = (alarm,) if is_dead else ()
            agenda = alarms.answered(held, agenda, flight.alive)
        elif job is not None and flight.job.startswith(HOOK_PREFIX):
            held.remove_job(job.id)
            agenda = without(agenda, job.id)
        elif job is not None and job.version == flight.version:
            failed = job.attempt + 1
            if end is End.REVOKED or failed >= job.retry.max_attempts:
                error = f"{why.value} in attempt {failed}"
                state, agenda = _given_up(held, state, agenda, job, why, now, error, details)
                dead = (job,)
            else:
                job = run.unmarked(job._replace(attempt=failed))
                held.write_job(job)
                agenda = with_job(agenda, job)
        held.save(derive(state, agenda, now), agenda)
        return Ended(held.ref, flight, dead=dead, why=why)

    def _put_back(self, held: Locked) -> Ended:
        """What a deploy does: the job stays as it was, no attempt is used up, nothing is counted."""
        flight = held.state.in_flight
        assert flight is not None
        now, agenda, job = held.agenda(flight.marked)
        if job is not None:
            held.rewrite_job(job, recurrence.with_begun(run.unmarked(job), flight))
        held.save(derive(chain.ended(held.state), agenda, now), agenda)
        return Ended(held.ref, flight, put_back=True)

    def _strike(
        self,
        held: Locked,
        cause: Cause,
        details: dict[str, Any],
        *,
        spread: float = 1.0,
        suspect: bool = False,
    ) -> Ended:
        """Count the death, end the run, slow or seal the loop (design, section 7)."""
        flight = held.state.in_flight
        assert flight is not None
        struck, state = struck_by(held, flight, cause, details, self.config, spread=spread, suspect=suspect)
        state = chain.ended(state)
        now, agenda, _ = held.agenda()
        held.save(derive(state, agenda, now), agenda)
        return Ended(held.ref, flight, cause, struck.context, struck.seal, Why.SEALED)

    # --- a whole worker is lost

    def rescue(self, object_id: int) -> Ended | None:
        """Look into a run whose lease is over with a link in flight. By beat only.

        The first look sets a doubt and gives the worker a little longer; a renewal clears it. The second look is a
        strike of cause `lost`, or, if the worker was draining, puts the job back without one. None: not this time.
        """
        return self.database.run(self._rescue, object_id)

    def _rescue(self, tx: Tx, object_id: int) -> Ended | None:
        held = lock_by_id(tx, object_id, self.config.chain_length)
        if held is None:
            return None
        state = held.state
        now, agenda, job = held.agenda(state.in_flight.marked if state.in_flight else "")
        if state.token is None or state.in_flight is None or (state.lease_until or 0) > now:
            held.save(derive(state, agenda, now), agenda)
            return None
        if not state.doubt:
            doubted = state.but(doubt=True, lease_until=now + self.config.doubt_ms)
            held.save(derive(doubted, agenda, now), agenda)
            return None
        if was_draining(tx, state.worker):
            return self._put_back(held)
        aboard = self._aboard(tx, state, now)
        spread = random.uniform(1, 3)
        details = {"worker": state.worker, "aboard": aboard["count"]}
        mine = [state.id, state.in_flight.job]
        if aboard["suspect"] is not None and aboard["suspect"] != mine:
            return self._suspected(held, agenda, job, now)
        several = aboard["count"] > 1 and aboard["suspect"] is None
        return self._strike(held, Cause.LOST, details, spread=spread, suspect=several)

    def _suspected(self, held: Locked, agenda: Agenda, job: Job | None, now: int) -> Ended:
        """A suspect was aboard: its neighbour becomes a suspect too, without a strike."""
        flight = held.state.in_flight
        assert flight is not None
        if job is not None:
            held.write_job(recurrence.with_begun(breaker.suspected(job), flight))
        held.save(derive(chain.ended(held.state), agenda, now), agenda)
        return Ended(held.ref, flight, put_back=True)

    def _aboard(self, tx: Tx, state: ObjectState, now: int) -> dict[str, Any]:
        """Who was aboard a lost worker, in all queues: written once per instance, by the first rescue; later ones read it."""
        key = {"kind": "lost", "key": state.worker}
        row = tx.row(tx.sql.get_heartbeat, key)
        if row is None:
            there = [
                one
                for queue in queues_in(tx)
                for one in tx.rows(tx.sql.aboard, {"queue": queue, "worker": state.worker})
            ]
            flights = [(found[0], InFlight.from_json(found[1])) for found in there]
            running = [[object_id, flight.job] for object_id, flight in flights if flight]
            suspects = [[object_id, flight.job] for object_id, flight in flights if flight and flight.suspect]
            data = {"count": len(running), "suspect": suspects[0] if suspects else None}
            tx.run(
                tx.sql.add_heartbeat,
                {
                    **key,
                    "object": None,
                    "job": None,
                    "expires_at": now + 86_400_000,
                    "data": json.dumps(data),
                },
            )
            row = tx.row(tx.sql.get_heartbeat, key)
            assert row is not None
        return dict(json.loads(row[5]))

    # --- links that never come to run

    def skip(self, link: Link, why: Why) -> tuple[Job | None, Shipment | None]:
        """A link that its worker dropped before any task code ran: revoked while it waited, or of an unknown task.

        Guard: the row still waits for this very link (its token and position, or its dispatch). A revoked job is dead; one
        of an unknown task is put back with a doubling delay, and dead after the grace. The run is closed, and a chain
        with the object's other jobs comes back to be sent at once.
        """
        return self.database.run(self._skip, link, why)

    def _skip(self, tx: Tx, link: Link, why: Why) -> tuple[Job | None, Shipment | None]:
        held = lock_by_id(tx, link.object_id, self.config.chain_length)
        if held is None:
            return None, None
        if link.token is None and held.state.dispatch != link.dispatch:
            return None, None
        if link.token is not None and run.may_begin(held.state, link) is not None:
            return None, None
        return self._skipped(held, held.state, link.job, why)

    def _skipped(self, held: Locked, state: ObjectState, job_id: str, why: Why) -> tuple[Job | None, Shipment | None]:
        now, agenda, job = held.agenda(job_id)
        jobs = [job] if job is not None else []
        if job_id == ALARM:  # the link stood for a keep-alive too, if its holder had died
            _, alive = held.job(ALIVE)
            jobs += [alive] if alive is not None else []
        dead: Job | None = None
        for one in jobs:
            state, agenda, is_dead = self._not_run(held, state, agenda, one, why, now)
            dead = one if is_dead and dead is None else dead
        closing = chain.close(state, agenda, now, self.config, new_token())
        held.save(closing.state, agenda)
        return dead, closing.shipment

    def _not_run(
        self, held: Locked, state: ObjectState, agenda: Agenda, job: Job, why: Why, now: int
    ) -> tuple[ObjectState, Agenda, bool]:
        """A job whose link no worker runs: put back with a doubling delay, or dead, which the flag tells."""
        error = f"{why.value}: {job.task}"
        if why not in (Why.UNKNOWN_TASK, Why.UNKNOWN_OWNER):
            return *_given_up(held, state, agenda, job, why, now, error), True
        again = run.not_understood(job, now, self.config.unknown_grace_ms)
        if again is None:
            held.bury(job, why, now, error=error)
            held.remove_job(job.id)
            return state, without(agenda, job.id), True
        held.write_job(again)
        return state, with_job(agenda, again), False

    def unknown(self, link: Link, token: str, why: Why) -> tuple[Job | None, Shipment | None, bool]:
        """The same for a link that has begun, whose owner this process does not know. The flag: whether it was accepted."""

        def work(tx: Tx) -> tuple[Job | None, Shipment | None, bool]:
            held = lock_by_id(tx, link.object_id, self.config.chain_length)
            if held is None or not run.may_finish(held.state, link, token):
                return None, None, False
            dead, shipment = self._skipped(held, held.state, link.job, why)
            return dead, shipment, True

        return self.database.run(work)

    def struck_inside(self, link: Link, token: str, cause: Cause, details: dict[str, Any]) -> Ended | None:
        """A `MemoryError` that was caught in the job's own process: a strike, and the process goes on."""

        def work(tx: Tx) -> Ended | None:
            held = lock_by_id(tx, link.object_id, self.config.chain_length)
            if held is None or not run.may_finish(held.state, link, token):
                return None
            return self._strike(held, cause, details)

        return self.database.run(work)


def struck_by(
    held: Locked, flight: InFlight, cause: Cause, details: dict[str, Any], config: Config, *,
    spread: float = 1.0, suspect: bool = False,
) -> tuple[breaker.Strike, ObjectState]:  # fmt: skip
    """Count a death, slow or seal its loop: the jobs are written, the object's new state is left to be saved."""
    now = held.now()
    params = {"object": held.state.id, "job": flight.marked, "line": flight.line}
    related = [job_of(held.ref, row) for row in held.tx.rows(held.tx.sql.related_jobs, params)]
    told, elsewhere = details.get("told"), 0
    is_shared = lines.is_own_object(held.ref, flight.task, flight.job)
    if is_shared:
        before = next((job.strikes for job in related if job.id == flight.job), 0)
        elsewhere = lines.count(held.tx, flight.task, flight.line, flight.job, before, now, config)
    struck = breaker.strike(
        held.state, flight, related, now, cause, config, spread=spread, suspect=suspect, told=told, elsewhere=elsewhere
    )
    if is_shared and struck.context is not None and struck.context.sealed:
        lines.seal(held.tx, flight.task, flight.line, now, config)
    for job in struck.write:
        held.put_job(recurrence.with_begun(job, flight))
    for job in struck.remove:
        held.remove_job(job.id)
    history = [
        {"at": death.at_ms, "job": death.job, "cause": death.cause, "told": death.told} for death in struck.deaths
    ]
    strikes = struck.context.strikes if struck.context else 0
    facts = {"cause": cause.value, "strikes": strikes, "deaths": history, **details}
    for job in struck.seal:
        held.bury(job, Why.SEALED, now, error=f"sealed after a {cause.value} death", details=facts)
        held.remove_job(job.id)
    return struck, struck.state.but(sealed=True) if struck.seal else struck.state


def was_draining(tx: Tx, worker: str | None) -> bool:
    """Whether a worker instance was on its way out (SIGTERM) when it was last heard of."""
    row = tx.row(tx.sql.get_heartbeat, {"kind": "worker", "key": worker})
    return row is not None and bool(json.loads(row[5]).get("draining"))


def _given_up(
    held: Locked, state: ObjectState, agenda: Agenda, job: Job, why: Why, now: int, error: str,
    details: dict[str, Any] | None = None,
) -> tuple[ObjectState, Agenda]:  # fmt: skip
    """A job that is not tried again becomes a dead job; of a recurring one this run only: the schedule goes on."""
    after = recurrence.following(job, now)
    if after is None:
        held.bury(job, why, now, error=error, details=details)
        held.remove_job(job.id)
        return state, without(agenda, job.id)
    held.bury(recurrence.occurrence(job), why, now, error=error, details=details)
    if after.dropped:
        held.record_misfire(job, now, after.dropped)
    state = state.but(versions=state.versions + 1)
    job = run.unmarked(job)._replace(
        version=state.versions, due_ms=after.due, schedule_json=after.schedule_json, attempt=0,
        unknown_since_ms=None,
    )  # fmt: skip
    held.write_job(job)
    return state, with_job(agenda, job)
