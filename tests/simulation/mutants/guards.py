"""More of the protocol's guards, each taken out: who is refused, what a push keeps, what a row remembers, what is counted anew."""

from __future__ import annotations

from tests.simulation.mutants.mutation import PACKAGE as P
from tests.simulation.mutants.mutation import Change, Mutant, one

CHAIN, RUN, DERIVE = f"{P}.transitions.chain", f"{P}.transitions.run", f"{P}.transitions.derive"
CLAIMS, RUNS, ENDS, JOBS = f"{P}.store.claims", f"{P}.store.runs", f"{P}.store.ends", f"{P}.store.jobs"
OBJECTS, WORKERS, RUNNER = f"{P}.store.objects", f"{P}.store.workers", f"{P}.runner"

MAY_FINISH = "not run.may_finish(held.state, link, token)"
NOTHING_FLIES = "held.state.in_flight is None"


MUTANTS = (
    # --- who is refused
    one("a skip of another dispatch", ENDS, "Ends._skip", "held.state.dispatch != link.dispatch", "False"),
    one("a skip of a link that is not the next", ENDS, "Ends._skip", "run.may_begin(held.state, link) is not None", "False"),
    one("a strike inside without guard", ENDS, "Ends.struck_inside", MAY_FINISH, NOTHING_FLIES),
    one("a start that fails without guard", RUNS, "Runs.start_failed", MAY_FINISH, "False"),
    one("an enter without guard", RUNS, "Runs.enter", MAY_FINISH, NOTHING_FLIES),
    one("an alarm that fails without guard", RUNS, "Runs._alarm_failed", MAY_FINISH, NOTHING_FLIES),
    one(
        "an attempt of a newer version", RUNS, "Runs.attempted",
        "current is not None and current.version == job.version", "current is not None",
    ),
    one("release of another run", CHAIN, "release", "state.token != shipment.token or ", ""),
    one("release of a step that is over", CHAIN, "release", " or state.step != shipment.first_position", ""),
    Mutant(
        "release of a run that goes on",
        (
            Change(CHAIN, "release", "or state.in_flight is not None ", ""),
            Change(CHAIN, "release", " or state.step != shipment.first_position", ""),
        ),
    ),
    one("a pusher claims what is on its way", CLAIMS, "Claims.claim_one", "held.state.phase is not Phase.IDLE", "False"),
    one("a push to a disabled object", JOBS, "Jobs.push_in", "if state.disabled:", "if False:"),
    one(
        "a begin found out too late runs another version", RUNS, "Runs._resumed",
        "job is not None and job.version != state.in_flight.version", "False",
    ),
    one(
        "a finish that was committed is forgotten, its run goes on", RUNS, "_finished_before",
        "accepted=held.state.step > link.position", "accepted=False",
    ),
    one(
        "a finish that was committed is forgotten, its run is over", RUNS, "_finished_before",
        "accepted=job is None or job.version != again.version", "accepted=False",
    ),
    one("a cancel of another owner's job", JOBS, "Jobs.cancel_in", "owner not in (None, job.owner)", "False"),
    one("a reschedule of another owner's job", JOBS, "Jobs.reschedule_in", "owner not in (None, job.owner)", "False"),
    one("a push in place of another owner's job", JOBS, "Jobs.push_in", "existing.owner != draft.owner", "False"),
    # --- what a change of a job keeps, and what it must not
    one("a reschedule without a new version", JOBS, "Jobs.reschedule_in", "held.state.versions + 1", "job.version"),
    one("a replaced job forgets its strikes", JOBS, "Jobs._made", "existing.strikes if existing else 0", "0"),
    one("a replaced job forgets its suspicion", JOBS, "Jobs._made", "existing.suspect_on if existing else None", "None"),
    one(
        "an alarm that fails takes the place of a newer one", RUNS, "Runs._alarm_failed",
        "stands = job is not None and job.version != flight.version", "stands = False",
    ),
    one(
        "a cancel takes all jobs", JOBS, "Jobs.cancel_in", "held.remove_job(job_id)",
        'tx.run(tx.sql.delete_jobs, {"object": held.state.id})\n    agenda = Agenda()',
    ),
    # --- what a row remembers
    one("a paused row is removed", DERIVE, "is_forgettable", "or state.paused", ""),
    one("a disabled row is removed", DERIVE, "is_forgettable", "or state.disabled", ""),
    one("a row with strikes is removed", DERIVE, "is_forgettable", "or state.lines", ""),
    one("a row that is held back is removed", DERIVE, "is_forgettable", "or state.not_before is not None", ""),
    one("a row with storage is removed", DERIVE, "is_forgettable", "or state.stored", ""),
    one("a row with a seal is removed", DERIVE, "is_forgettable", "or state.sealed", ""),
    # --- how a run ends
    one("a last link that is passed over does not close", RUNS, "Runs._pass", "if not link.last:", "if True:"),
    one("a destroyed object's run goes on", CHAIN, "destroyed", "final=True", "final=False"),
    one("a destroyed object stays held back", CHAIN, "destroyed", "not_before=None, not_before_count=0, ", ""),
    one("a destroyed object keeps its deaths", CHAIN, "destroyed", "lines=None, ", ""),
    one("a resume keeps the deaths of jobs", OBJECTS, "Objects.resume", "held.rewrite_job(job, cleared)", "pass"),
    # --- what is counted anew
    one("a sending that is taken back counts", CHAIN, "release", "max(state.sent_count - 1, 0)", "state.sent_count"),
    one("sendings are not forgotten at close", CHAIN, "close", ".but(sent_count=0)", ""),
    one(
        "who was aboard is not forgotten", WORKERS, "Workers.beat",
        'tx.run(tx.sql.delete_heartbeat, {"kind": "lost", "key": instance})', "pass",
    ),
    one(
        "deaths of on_start are not forgotten", RUN, "entered",
        "lines = breaker.cleared(state.lines, START, START)", "lines = state.lines",
    ),
    one("on_start once per process", RUNNER, "Runner.run", "link.token not in self._started", "not self._started"),
    one("on_start before each link", RUNNER, "Runner.run", " and link.token not in self._started", ""),
    one("an object whose on_start fails waits a second", RUN, "start_failed", "1000 << min(count - 1, 30)", "1000"),
)  # fmt: skip

CAUGHT_BY: dict[str, int] = {
    "a skip of another dispatch": 23,
    "a skip of a link that is not the next": 81,
    "a strike inside without guard": 221,
    "a start that fails without guard": 365,
    "an enter without guard": 1253,
    "an alarm that fails without guard": 17,
    "an attempt of a newer version": 4,
    "release of another run": 654,
    "release of a step that is over": 414,
    "release of a run that goes on": 114,
    "a pusher claims what is on its way": 877,
    "a push to a disabled object": 122,
    "a begin found out too late runs another version": 257,
    "a finish that was committed is forgotten, its run goes on": 140,
    "a finish that was committed is forgotten, its run is over": 35,
    "a cancel of another owner's job": 399,
    "a reschedule of another owner's job": 459,
    "a push in place of another owner's job": 215,
    "a reschedule without a new version": 53,
    "a replaced job forgets its strikes": 99,
    "a replaced job forgets its suspicion": 32,
    "an alarm that fails takes the place of a newer one": 399,
    "a cancel takes all jobs": 24,
    "a paused row is removed": 1,
    "a disabled row is removed": 14,
    "a row with strikes is removed": 243,
    "a row that is held back is removed": 399,
    "a row with storage is removed": 2,
    "a row with a seal is removed": 7,
    "a last link that is passed over does not close": 5,
    "a destroyed object's run goes on": 41,
    "a destroyed object stays held back": 111,
    "a destroyed object keeps its deaths": 111,
    "a resume keeps the deaths of jobs": 771,
    "a sending that is taken back counts": 6,
    "sendings are not forgotten at close": 0,
    "who was aboard is not forgotten": 16,
    "deaths of on_start are not forgotten": 27,
    "on_start once per process": 0,
    "on_start before each link": 5,
    "an object whose on_start fails waits a second": 171,
}
"""A seed that catches each."""
