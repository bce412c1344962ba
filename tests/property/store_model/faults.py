"""Guards taken out of the package, one at a time: the model must tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from celery_lifecycle import breaker
from celery_lifecycle.store import alarms, dead, ends, holds, jobs, runs, unit, workers
from celery_lifecycle.transitions import chain, derive, recurrence, run


class Fault(NamedTuple):
    """What is put in whose place."""

    place: Any
    name: str
    instead: Callable[..., Any]


def _whatever_version(state, job, verdict, now, config, finish=run.finish):
    if job is not None and state.in_flight is not None:
        state = state.but(in_flight=replace(state.in_flight, version=job.version))
    return finish(state, job, verdict, now, config)


def _over_lost_runs(state, link, something_due, now, token, open_run=run.open_run):
    if state.token is not None and (state.lease_until or 0) <= now:
        state = chain.ended(state)
    return open_run(state, link, something_due, now, token)


def _without_revival(state, agenda, now, config, new_id, claim=chain.claim):
    if state.token is not None and state.in_flight is None and (state.lease_until or 0) <= now:
        state = chain.ended(state)
    return claim(state, agenda, now, config, new_id)


def _storage_before_the_guard(self, tx, link, token, verdict, storage, again, finish=runs.Runs._finish):
    held = unit.lock_by_id(tx, link.object_id, self.config.chain_length)
    if held is not None and held.state.token is not None:
        held.save(self._stored(held, held.state, storage), None)
    return finish(self, tx, link, token, verdict, storage, again)


def _releases_whatever_runs(state, agenda, shipment, now, back_off, release=chain.release):
    if shipment.token is not None and state.token == shipment.token:
        state = state.but(in_flight=None, step=shipment.first_position)
    return release(state, agenda, shipment, now, back_off)


def _renews_all(self, tx, instance, running, renew=workers.Workers._renew):
    rows = tx.rows(tx.sql.renewable, {"ids": tx.sql.ids([one.object_id for one in running]), "worker": instance})
    return renew(self, tx, instance, [workers.Running(*row) for row in rows])


def _lost_whatever_was_renewed(self, tx, kind, key, cause, details, expires_ms, lost=holds.Holds._lost):
    return lost(self, tx, kind, key, cause, details, None)


def _nobody_was_suspected(self, tx, state, now, aboard=ends.Ends._aboard):
    return {**aboard(self, tx, state, now), "suspect": None}


def _never_several(self, tx, state, now, aboard=ends.Ends._aboard):
    return {**aboard(self, tx, state, now), "count": 1}


def _attempts_are_free(self, held, end, details, used_up=ends.Ends._used_up):
    return used_up(self, held, end, details) if end is ends.End.REVOKED else self._put_back(held)


def _forgets_what_was_replaced(self, draft, job_id, version, existing, pusher, now, made=jobs.Jobs._made):
    return made(self, draft, job_id, version, None, pusher, now)


def _outside_a_line(self, draft, job_id, version, existing, pusher, now, made=jobs.Jobs._made):
    return made(self, draft, job_id, version, existing, None, now)


def _cancels_whose_it_is_not(self, tx, ref, job_id, owner, why=None, cancel=jobs.Jobs.cancel_in):
    return cancel(self, tx, ref, job_id, None, why)


def _exclusive_with_others(state, agenda, now, length, due_links=derive.due_links):
    shared = tuple(job._replace(exclusive=False) for job in agenda.jobs)
    return due_links(state, derive.Agenda(shared), now, length)


def _entered_with_a_doubt(state, flight, config, now, entered=run.entered):
    return entered(state, flight, config, now).but(doubt=state.doubt)


def _held_back_for_ever(state, flight, config, now, entered=run.entered):
    return entered(state, flight, config, now).but(not_before=state.not_before)


def _no_second_look(self, tx, object_id, rescue=ends.Ends._rescue):
    held = unit.lock_by_id(tx, object_id, self.config.chain_length)
    if held is not None:
        held.save(held.state.but(doubt=True), None)
    return rescue(self, tx, object_id)


FAULTS = {
    # runs and their links
    "a link begins whatever its position": Fault(run, "may_begin", lambda state, link: None),
    "a finish is accepted from anybody": Fault(
        run, "may_finish", lambda state, link, token: state.in_flight is not None and state.token is not None
    ),
    "a finish does not need the token": Fault(
        run, "may_finish",
        lambda state, link, token: state.in_flight is not None and state.in_flight.task_id == link.task_id,
    ),
    "an outcome is applied to a newer version": Fault(run, "finish", _whatever_version),
    "a refused finish writes its storage": Fault(runs.Runs, "_finish", _storage_before_the_guard),
    "a run is opened beside one whose lease is over": Fault(run, "open_run", _over_lost_runs),
    "a job runs before its time": Fault(run, "is_due", lambda state, job, now: job is not None),
    "the end of a run forgets too little": Fault(
        chain, "ended", lambda state: state.but(token=None, lease_until=None, in_flight=None)
    ),
    "a destroyed object's run goes on": Fault(
        chain, "destroyed", lambda state: state.but(paused=None, lines=None, holds=0, stored=False, sealed=False)
    ),
    "rows are never forgotten": Fault(unit, "is_forgettable", lambda state, agenda: False),
    # chains
    "a run is ended instead of revived": Fault(chain, "claim", _without_revival),
    "a revival is released whatever runs": Fault(chain, "release", _releases_whatever_runs),
    "exclusive jobs hold back nobody": Fault(chain, "due_links", _exclusive_with_others),
    # workers
    "a renewal does not look at the process": Fault(workers.Workers, "_renew", _renews_all),
    "there is no second look": Fault(ends.Ends, "_rescue", _no_second_look),
    "a doubt stays after on_start": Fault(run, "entered", _entered_with_a_doubt),
    "a start that went well leaves the delay": Fault(run, "entered", _held_back_for_ever),
    "a draining worker is struck": Fault(ends, "was_draining", lambda tx, worker: False),
    "a hung job uses up no attempt": Fault(ends.Ends, "_used_up", _attempts_are_free),
    # strikes and suspects
    "any clean end clears all strikes": Fault(breaker, "cleared", lambda lines, line, job_id: None),
    "no clean end clears strikes": Fault(breaker, "cleared", lambda lines, line, job_id: lines),
    "a clean end leaves the strikes of the job": Fault(run, "acquitted", lambda job: job),
    "suspects run beside each other": Fault(runs.Runs, "_boards", lambda *_: True),
    "a suspect aboard is not looked for": Fault(ends.Ends, "_aboard", _nobody_was_suspected),
    "nobody who was lost together is suspected": Fault(ends.Ends, "_aboard", _never_several),
    "a suspect keeps its place when it has run": Fault(run, "unmarked", lambda job: job),
    "a replaced job loses its strikes": Fault(jobs.Jobs, "_made", _forgets_what_was_replaced),
    "a job that is pushed from inside begins a line": Fault(jobs.Jobs, "_made", _outside_a_line),
    "a sealed job comes back from inside": Fault(jobs.Jobs, "_sealed", lambda *_: None),
    "a purge leaves the seal": Fault(dead.DeadJobs, "_still_sealed", lambda *_: True),
    # what else there is
    "an owner cancels the job of another": Fault(jobs.Jobs, "cancel_in", _cancels_whose_it_is_not),
    "an unknown job is never given up": Fault(
        run, "not_understood", lambda job, now, grace: job._replace(unknown_since_ms=now, due_ms=now + 1000)
    ),
    "a hold that was renewed is lost": Fault(holds.Holds, "_lost", _lost_whatever_was_renewed),
    "tracked work does not hold the strikes": Fault(runs.Runs, "_has_tracked_work", lambda *_: False),
    "on_alarm answers a later keep-alive": Fault(
        runs.alarms, "answered", lambda held, agenda, version, answer=alarms.answered: answer(
            held, agenda, next((job.version for job in agenda.jobs if job.id == "#alive"), None)
        ),
    ),
    "an occurrence that has begun is skipped": Fault(recurrence, "with_begun", lambda job, flight: job),
    "a schedule ends with its first run": Fault(recurrence, "following", lambda *_: None),
}  # fmt: skip
