"""What a worker does to the table for the links of an open run: open, begin, enter, attempted, finish, close."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from celery_lifecycle import breaker
from celery_lifecycle.config import Config
from celery_lifecycle.errors import ScheduleInvalid
from celery_lifecycle.model import ALARM, ALIVE, HOST, START, InFlight, Job, Link, ObjectState, Shipment, Why
from celery_lifecycle.store import alarms, lines
from celery_lifecycle.store.database import Database, Tx
from celery_lifecycle.store.unit import Locked, lock_by_id, new_token, with_job, without
from celery_lifecycle.transitions import chain, recurrence, run
from celery_lifecycle.transitions.derive import Agenda, derive, due_links, effective_due
from celery_lifecycle.transitions.run import Action, Refusal, Verdict, Worker


@dataclass(frozen=True, slots=True)
class Calling:
    """What the worker knows of the code behind a link, and beat may not.

    Attributes:
        limit: deaths at which its line is sealed.
        hook: the task that calls `on_memory_limit`, if there is such a hook.
        starts: whether `on_start` is still to run in this process for this run.
    """

    task: str
    limit: int
    hook: str | None = None
    starts: bool = False


@dataclass(frozen=True, slots=True)
class Begun:
    """What a begin came to.

    Exactly one of: `refused` (the chain ends quietly), `job` or `alarm` in flight (run it), or neither (the link was
    passed over; `shipment` and `closed` say what became of the run if it was the last one).
    """

    state: ObjectState | None = None
    refused: Refusal | None = None
    job: Job | None = None
    alarm: bool = False
    now: int = 0
    token: str = ""
    opened: bool = False
    closed: bool = False
    shipment: Shipment | None = None
    dead: Job | None = None
    why: Why | None = None
    waking: recurrence.Waking | None = None
    put_back: Job | None = None
    told: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a finish came to. Not accepted: the run was over, nothing was changed. Discarded: a newer change of the job won."""

    accepted: bool
    discarded: bool = False
    closed: bool = False
    due_ms: int | None = None
    shipment: Shipment | None = None
    skipped: int = 0
    dropped: dict[str, Any] = field(default_factory=dict)


class Runs:
    """The links of open runs. Every verb is one short transaction whose guard is the link's token and position."""

    def __init__(self, database: Database, config: Config) -> None:
        self.database = database
        self.config = config

    # --- begin

    def begin(self, link: Link, calling: Calling, worker: Worker, again: bool = False) -> Begun:
        """The durable "attempt has started", for the first link together with the opening of the run.

        Guard: see `run.open_run` and `run.may_begin`. A link whose job is gone, not due, expired or held back is passed
        over. Changes nothing when it is refused, but that a first chain which finds nothing to do forgets its dispatch.

        `again`: this very process has tried to begin this link and does not know whether that was committed; if it was,
        the link goes on from there.
        """
        return self.database.run(self._begin, link, calling, worker, again)

    def _begin(self, tx: Tx, link: Link, calling: Calling, worker: Worker, again: bool) -> Begun:
        held = lock_by_id(tx, link.object_id, self.config.chain_length)
        if held is None:
            return Begun(refused=Refusal.NO_OBJECT)
        if again and _is_begun(held.state, link, worker):
            return self._resumed(held, link)
        if link.job == ALARM:
            now, agenda, job = held.agenda(ALARM)
            return self._begin_alarm(held, link, calling, worker, now, agenda, job)
        now, job = held.job(link.job)
        due = run.is_due(held.state, job, now)
        opened = self._open_or_check(held, link, due, now)
        if opened.refused is not None:
            return opened
        assert opened.state is not None
        state = opened.state
        if job is None or not due:
            return self._pass(held, state, link, opened)
        return self._start(held, state, link, calling, worker, now, job, opened)

    def _resumed(self, held: Locked, link: Link) -> Begun:
        """What the begin that was committed, but not heard of, came to."""
        state = held.state
        now, job = held.job(link.job)
        assert state.in_flight is not None
        assert state.token is not None
        alarm, found = link.job == ALARM, job
        if job is not None and job.version != state.in_flight.version:
            job = None
        begun = Begun(state=state, job=job, alarm=alarm, now=now, token=state.token, opened=True)
        if job is None and not alarm:
            return self._pass_after_all(held, link, begun, found)
        return replace(begun, waking=recurrence.wake(job, now, begun=True) if job is not None else None)

    def _pass_after_all(self, held: Locked, link: Link, begun: Begun, job: Job | None) -> Begun:
        """Pass over a link that had begun: its job was taken out, moved or replaced before it could be run."""
        flight = held.state.in_flight
        assert flight is not None
        if job is not None:
            held.rewrite_job(job, run.unmarked(job))
        state = held.state.but(in_flight=None, step=link.position)
        return self._pass(held, state, replace(link, last=link.last or flight.final), begun)

    def _open_or_check(self, held: Locked, link: Link, own_due: bool, now: int) -> Begun:
        state = held.state
        if link.token is not None:
            refused = run.may_begin(state, link)
            return Begun(state=state, refused=refused, token=link.token, now=now)
        agenda: Agenda | None = None
        if not own_due:
            now, agenda, _ = held.agenda()
        # Of a sealed object only the hook itself may run: what else its chain holds is older than the seal.
        something = own_due or bool(agenda and not state.paused and due_links(state, agenda, now, 1)[0])
        token = new_token()
        opened, refused = run.open_run(state, link, something, now, token)
        if refused is not None:
            if opened != state:
                if agenda is None:
                    now, agenda, _ = held.agenda()
                held.save(derive(opened, agenda, now), agenda)
            return Begun(refused=refused)
        return Begun(state=opened, token=token, opened=True, now=now)

    def _pass(self, held: Locked, state: ObjectState, link: Link, opened: Begun, **facts: Any) -> Begun:
        """Pass over a link; the last one closes the run."""
        if not link.last:
            state = run.passed(state, opened.now, self.config)
            held.save(state, None)
            return replace(opened, state=state, **facts)
        now, agenda, _ = held.agenda()
        closing = chain.close(state, agenda, now, self.config, new_token())
        held.save(closing.state, agenda)
        return replace(opened, state=closing.state, closed=True, shipment=closing.shipment, **facts)

    def _start(
        self, held: Locked, state: ObjectState, link: Link, calling: Calling, worker: Worker, now: int, job: Job, opened: Begun
    ) -> Begun:  # fmt: skip
        expires = job.options.get("expires_ms") if job.options_json else None
        if expires is not None and expires <= now:
            held.bury(job, Why.EXPIRED, now)
            held.remove_job(job.id)
            return self._pass(held, state, link, opened, dead=job, why=Why.EXPIRED)
        is_old_line = job.line != job.id or job.strikes > 0
        if is_old_line and lines.is_own_object(held.ref, job.task, job.id) and lines.is_sealed(held.tx, job, now):
            held.bury(job, Why.SEALED, now, error="sealed with its line, which died on other objects")
            held.remove_job(job.id)
            # As with every seal, what was counted here goes with it: once it is lifted, the line begins anew.
            state = state.but(sealed=True, lines=breaker.without_line(state.lines, job.line))
            return self._pass(held, state, link, opened, dead=job, why=Why.SEALED)
        try:
            waking = recurrence.wake(job, now)
        except ScheduleInvalid as error:
            return self._not_understood(held, state, link, opened, job, now, error)
        if not waking.runs:
            if waking.over:
                held.bury(job, Why.MISFIRED, now, details=waking.dropped)
                held.remove_job(job.id)
                return self._pass(held, state, link, opened, dead=job, why=Why.MISFIRED)
            state = self._moved_on(held, state, job, waking, now)
            return self._pass(held, state, link, opened, waking=waking)
        if waking.dropped:
            held.record_misfire(job, now, waking.dropped)
        if waking.job != job:
            job = waking.job
            held.write_job(job)
        if not self._boards(held, job, worker, now):
            return self._pass(held, state, link, opened)
        flight = InFlight(
            job=START if calling.starts else job.id, version=job.version, task_id=link.task_id,
            line=START if calling.starts else job.line, owner=job.owner, task=job.task, queue=job.queue,
            limit=calling.limit, hook=calling.hook, recovery_loop=job.recovery_loop, suspect=job.suspect_on is not None,
            carrier=job.id if calling.starts else None,
        )  # fmt: skip
        state = run.started(state, flight, worker, now, self.config)
        held.save(state.but(queue=state.queue or job.queue), None)
        return replace(opened, state=state, job=job, now=now, waking=waking)

    def _not_understood(
        self, held: Locked, state: ObjectState, link: Link, opened: Begun, job: Job, now: int, error: Exception
    ) -> Begun:
        """A schedule that this process can't read, for it lacks its time zone: as a job of an unknown task."""
        again = run.not_understood(job, now, self.config.unknown_grace_ms)
        if again is None:
            held.bury(job, Why.FAILED, now, error=str(error))
            held.remove_job(job.id)
            return self._pass(held, state, link, opened, dead=job, why=Why.FAILED)
        held.write_job(again)
        return self._pass(held, state, link, opened, put_back=job, told=str(error))

    def _boards(self, held: Locked, job: Job, worker: Worker, now: int) -> bool:
        """At most one suspect runs per worker instance: one that finds another there comes back a little later."""
        if job.suspect_on is None or job.suspect_on == worker.instance:
            return True
        if held.tx.row(held.tx.sql.suspect_on, {"mark": worker.instance}) is not None:
            held.write_job(job._replace(not_before_ms=now + round(self.config.suspect_delay * 1000)))
            return False
        held.write_job(job._replace(suspect_on=worker.instance))
        return True

    def _moved_on(
        self, held: Locked, state: ObjectState, job: Job, waking: recurrence.Waking, now: int
    ) -> ObjectState:  # fmt: skip
        """A schedule whose occurrence is dropped goes on with its next one."""
        if waking.dropped:
            held.record_misfire(job, now, waking.dropped)
        state = state.but(versions=state.versions + 1)
        held.write_job(waking.job._replace(version=state.versions, unknown_since_ms=None))
        return state

    def _begin_alarm(
        self, held: Locked, link: Link, calling: Calling, worker: Worker, now: int, agenda: Agenda, job: Job | None
    ) -> Begun:  # fmt: skip
        state = held.state
        due = {one.id: one for one in agenda.jobs if effective_due(state, one) <= now}
        own_due = ALARM in due or ALIVE in due
        opened = self._open_or_check(held, link, own_due, now)
        if opened.refused is not None:
            return opened
        assert opened.state is not None
        if opened.opened and not own_due:
            return self._pass(held, opened.state, link, opened)
        alive = due[ALIVE].version if ALIVE in due else None
        triggered = job if ALARM in due else None
        if triggered is not None and not self._boards(held, triggered, worker, now):
            return self._pass(held, opened.state, link, opened)
        flight = InFlight(
            job=START if calling.starts else ALARM, version=triggered.version if triggered else 0,
            task_id=link.task_id, line=START if calling.starts else ALARM, owner=HOST, task=calling.task,
            queue=opened.state.queue or state.queue or "", limit=calling.limit, hook=calling.hook, alive=alive,
            suspect=triggered is not None and triggered.suspect_on is not None, carrier=ALARM if calling.starts else None,
        )  # fmt: skip
        started = run.started(opened.state, flight, worker, now, self.config)
        held.save(started, None)
        return replace(opened, state=started, job=triggered, alarm=True, now=now)

    def enter(self, link: Link, token: str, begun: Begun) -> Begun | None:
        """`on_start` has ended well: put the job itself in flight. None if the run was ended meanwhile.

        What `on_start` took out or moved is passed over, as a link is that comes too late. What it pushed anew under the same
        id, as an `on_start` may in each run, is run as it stands now.
        """

        def work(tx: Tx) -> Begun | None:
            held = lock_by_id(tx, link.object_id, self.config.chain_length)
            if held is None or not run.may_finish(held.state, link, token):
                return None
            flight = held.state.in_flight
            assert flight is not None
            now, found = held.job(link.job)
            job, entering = found, begun
            if not begun.alarm and job is not None and job.version != flight.version:
                same = job.task == flight.task and job.owner == flight.owner and not job.schedule_json
                job = job if same and run.is_due(held.state, job, now) else None
                entering = replace(begun, job=job, waking=None)
            if flight.final or (not begun.alarm and job is None):
                return self._pass_after_all(held, link, replace(begun, job=None, alarm=False, now=now), found)
            if begun.alarm or job is None:
                flying = replace(flight, job=ALARM, line=ALARM, carrier=None)
            else:
                flying = replace(flight, job=job.id, version=job.version, line=job.line, queue=job.queue, carrier=None)
            state = run.entered(held.state, flying, self.config, now)
            held.save(state, None)
            return entering

        return self.database.run(work)

    def attempted(self, link: Link, token: str, job: Job, failed: int) -> bool:
        """Record that an attempt has failed, before the next one in the same run. False if the run was ended meanwhile."""

        def work(tx: Tx) -> bool:
            held = lock_by_id(tx, link.object_id, self.config.chain_length)
            if held is None or not run.may_finish(held.state, link, token):
                return False
            _, current = held.job(job.id)
            if current is not None and current.version == job.version:
                held.write_job(current._replace(attempt=failed))
            return True

        return self.database.run(work)

    # --- finish

    def finish(
        self,
        link: Link,
        token: str,
        verdict: Verdict,
        storage: Mapping[str, str | None] | None = None,
        again: Job | None = None,
    ) -> Finished:
        """Apply the outcome of the attempt in flight; the last link closes the run and dispatches what is due already.

        Guard: token and step match and this link is in flight; the outcome only if the job's version is still the one
        that ran. `storage` (None deletes) is written if and only if the finish is accepted and the object was not destroyed
        meanwhile; then this link is the last one.

        `again`: this very process has tried to finish this job, as it ran, and does not know whether that was committed; if
        it was, that is what comes back, and nothing is changed.
        """
        return self.database.run(self._finish, link, token, verdict, storage or {}, again)

    def _finish(
        self, tx: Tx, link: Link, token: str, verdict: Verdict, storage: Mapping[str, str | None], again: Job | None
    ) -> Finished:
        held = lock_by_id(tx, link.object_id, self.config.chain_length)
        if held is None or not run.may_finish(held.state, link, token):
            return _finished_before(held, link, token, again)
        flight = held.state.in_flight
        assert flight is not None
        closes = link.last or flight.final
        if flight.final:
            storage = {}
        agenda: Agenda | None = None
        if closes or storage:
            now, agenda, job = held.agenda(flight.job)
        else:
            now, job = held.job(flight.job)
        if verdict.clean and verdict.action is Action.RESCHEDULE and held.state.holds:
            verdict = replace(verdict, clean=not self._has_tracked_work(tx, held.state.id, flight.job))
        if job is not None and verdict.strikes is not None and job.strikes > verdict.strikes:
            verdict = replace(verdict, clean=False)
        if verdict.clean and job is not None and job.strikes and lines.is_own_object(held.ref, job.task, job.id):
            lines.clear(tx, job, now, self.config)
        skipped, dropped = 0, {}
        if job is not None and job.schedule_json and verdict.action in (Action.COMPLETE, Action.DEAD):
            following = recurrence.following(job, now, verdict.started_ms)
            if following is not None:
                verdict = replace(verdict, next=(following.due, following.schedule_json))
                skipped = following.passed_intervals
                if following.dropped and job.version == flight.version:
                    dropped = following.dropped
                    held.record_misfire(job, now, dropped)
        done = run.finish(held.state, job, verdict, now, self.config)
        state = self._stored(held, done.state, storage)
        if agenda is not None:
            agenda = alarms.answered(held, agenda, flight.alive)
        if done.dead is not None:
            dead = done.dead if verdict.next is None else recurrence.occurrence(done.dead)
            held.bury(dead, verdict.why or Why.FAILED, now, verdict.error, verdict.traceback)
        closing: chain.Claim | None = None
        if closes:
            assert agenda is not None
            if done.remove is not None:
                agenda = without(agenda, done.remove.id)
            if done.write is not None:
                agenda = with_job(agenda, done.write)
            closing = chain.close(state, agenda, now, self.config, new_token())
            state = closing.state
        else:
            agenda = None
        if done.remove is not None:
            held.save_with_job(state, agenda, tx.sql.delete_job, done.remove)
        elif done.write is not None:
            held.save_with_job(state, agenda, tx.sql.update_job, done.write)
        else:
            held.save(state, agenda)
        return Finished(
            accepted=True,
            discarded=done.discarded,
            closed=closing is not None,
            due_ms=done.write.due_ms if done.write and not done.discarded else None,
            shipment=closing.shipment if closing else None,
            skipped=skipped,
            dropped=dropped,
        )

    def _has_tracked_work(self, tx: Tx, object_id: int, job_id: str) -> bool:
        rows = tx.rows(tx.sql.heartbeats_of, {"object": object_id})
        return any(row[0] == "track" and row[3] == job_id for row in rows)

    def _stored(self, held: Locked, state: ObjectState, storage: Mapping[str, str | None]) -> ObjectState:
        tx = held.tx
        for key, value in sorted(storage.items()):
            if value is None:
                tx.run(tx.sql.delete_value, {"object": state.id, "key": key})
            else:
                tx.run(tx.sql.put_value, {"object": state.id, "key": key, "value": value})
        if not storage:
            return state
        if any(value is not None for value in storage.values()):
            return state.but(stored=True)
        return state.but(stored=tx.row(tx.sql.any_value, {"object": state.id}) is not None)

    def alarm_failed(self, link: Link, token: str, queue: str, task: str, error: str, traceback: str) -> Finished:
        """`on_alarm` threw: put the bare alarm at 2 s × 2^n unless a newer one stands; a dead job after six retries."""
        return self.database.run(self._alarm_failed, link, token, queue, task, error, traceback)

    def _alarm_failed(
        self, tx: Tx, link: Link, token: str, queue: str, task: str, error: str, traceback: str
    ) -> Finished:
        held = lock_by_id(tx, link.object_id, self.config.chain_length)
        if held is None or not run.may_finish(held.state, link, token):
            return Finished(accepted=False)
        flight = held.state.in_flight
        assert flight is not None
        now, agenda, job = held.agenda(ALARM)
        state = held.state
        stands = job is not None and job.version != flight.version
        due = None
        if not stands and not flight.final:
            state, agenda, retry, is_dead = alarms.again(
                held, state, agenda, job, now, error, traceback, task=task, queue=queue
            )
            due = None if is_dead else retry.due_ms
        elif job is not None:
            held.rewrite_job(job, run.unmarked(job))
        agenda = alarms.answered(held, agenda, flight.alive)
        closing = chain.close(run.waiting(state, now, self.config), agenda, now, self.config, new_token())
        held.save(closing.state, agenda)
        return Finished(True, discarded=stands, closed=True, due_ms=due, shipment=closing.shipment)

    def start_failed(self, link: Link, token: str) -> int | None:
        """`on_start` threw: the jobs stay, the object is held back (doubling), the run is ended. None: it was ended before.

        Returns the time (ms) of the next try.
        """

        def work(tx: Tx) -> int | None:
            held = lock_by_id(tx, link.object_id, self.config.chain_length)
            if held is None or not run.may_finish(held.state, link, token):
                return None
            now, agenda, job = held.agenda(link.job)
            if job is not None:
                held.rewrite_job(job, run.unmarked(job))
            state = run.start_failed(held.state, now, self.config)
            held.save(derive(state, agenda, now), agenda)
            return state.not_before if state.not_before is not None else now

        return self.database.run(work)


def _is_begun(state: ObjectState, link: Link, worker: Worker) -> bool:
    flight = state.in_flight
    return (
        flight is not None
        and flight.task_id == link.task_id
        and state.step == link.position + 1
        and (state.worker, state.worker_pid) == (worker.instance, worker.pid)
    )


def _finished_before(held: Locked | None, link: Link, token: str, again: Job | None) -> Finished:
    """A finish that is not accepted, unless it is the repetition of one that was: the run went on, or the job did."""
    if again is None:
        return Finished(accepted=False)
    if held is not None and held.state.token == token:
        return Finished(accepted=held.state.step > link.position)
    _, job = held.job(again.id) if held is not None else (0, None)
    return Finished(accepted=job is None or job.version != again.version, closed=True)
