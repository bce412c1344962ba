"""The protocol with one guard taken out: each of these must be caught, or the simulation proves nothing.

`python -m tests.simulation.mutants [WORD …]` looks for seeds that catch them and prints the table `CAUGHT_BY`.
"""

from __future__ import annotations

import json
import sys
import time

from tests.simulation import mutants_of_features
from tests.simulation.mutants_guards import GUARDS, GUARDS_CAUGHT_BY
from tests.simulation.mutants_timing import TIMING, TIMING_CAUGHT_BY
from tests.simulation.mutation import PACKAGE as P
from tests.simulation.mutation import Change, Mutant, one, seed_for

SEEDS = 2000
"""How many seeds CI plays: 0 and those that follow."""

CHAIN, RUN, DERIVE = f"{P}.transitions.chain", f"{P}.transitions.run", f"{P}.transitions.derive"
CLAIMS, RUNS, ENDS, JOBS = f"{P}.store.claims", f"{P}.store.runs", f"{P}.store.ends", f"{P}.store.jobs"
UNIT, SQL, WORKERS, BREAKER = f"{P}.store.unit", f"{P}.store.sql", f"{P}.store.workers", f"{P}.breaker"
RUNNER, OUTCOME, LIFE, WINDOW = f"{P}.runner", f"{P}.outcome", f"{P}.life", f"{P}.window"


MUTANTS = (
    # --- links of a run
    one(
        "begin without token",
        RUN,
        "may_begin",
        "state.token is None or state.token != link.token",
        "state.token is None",
    ),
    one("begin without step", RUN, "may_begin", "state.step != link.position", "False"),
    one("begin runs what is not due", RUN, "is_due", "job is None or job.effective_ms > now", "job is None"),
    one("begin ignores the object's not_before", RUN, "is_due", "state.not_before <= now", "True"),
    one(
        "open beside a run whose lease is over",
        RUN,
        "open_run",
        "if state.token is not None:",
        "if state.token is not None and (state.lease_until or 0) > now:",
        "returns",
    ),
    one("open beside any run", RUN, "open_run", "state.token is not None", "False"),
    one("open with nothing due", RUN, "open_run", "not something_due", "False"),
    one("open of a paused object", RUN, "open_run", "(state.paused or state.disabled)", "False"),
    one("a refused chain leaves its dispatch", RUN, "open_run", "state.dispatch == link.dispatch", "False"),
    one(
        "begin forgets that it has begun", RUNS, "Runs._begin", "again and _is_begun(held.state, link, worker)", "False"
    ),
    one("finish without token", RUN, "may_finish", "state.token == token", "state.token is not None", "returns"),
    Mutant(
        "finish without step and task id",
        (
            Change(RUN, "may_finish", "state.step == link.position + 1", "True"),
            Change(RUN, "may_finish", "state.in_flight.task_id == link.task_id", "True"),
        ),
    ),
    Mutant(
        "finish without token and task id",
        (
            Change(RUN, "may_finish", "state.token == token", "state.token is not None"),
            Change(RUN, "may_finish", "state.in_flight.task_id == link.task_id", "True"),
        ),
    ),
    one("finish without version", RUN, "finish", "job.version != flight.version", "False"),
    one("an attempt without guard", RUNS, "Runs.attempted", "not run.may_finish(held.state, link, token)", "False"),
    one(
        "an attempt does not look again",
        RUNNER,
        "Runner._job",
        "with masked():  # a run",
        "with masked():\n            continue\n        with masked():  # a run",
        "returns",
    ),
    one("a begin that may be committed is given up", RUNNER, "Runner._begin", "not uncertain and", ""),
    one("a begin found out too late goes on", RUNS, "Runs._resumed", "job is None and not alarm", "False"),
    one(
        "a finish is given up in an outage",
        RUNNER,
        "Runner._stored",
        "except DatabaseUnavailable as error:",
        "except ZeroDivisionError as error:",
    ),
    one(
        "a version is used again",
        JOBS,
        "Jobs.push_in",
        "state.versions + 1",
        "(existing.version + 1 if existing else 1)",
    ),
    one("an outcome without a new version", RUN, "finish", "version = state.versions + 1", "version = job.version"),
    # --- chains
    one("no revival", CHAIN, "claim", "return revive(state, agenda, now, config, new_id)", "return Claim(state)"),
    one(
        "revive with nothing due",
        CHAIN,
        "revive",
        "return Claim(derive(ended(state.but(sent_count=0)), agenda, now))",
        "pass",
    ),
    one("revive from the first link", CHAIN, "revive", "state.token, state.step,", "state.token, 0,"),
    one("revive under a new token", CHAIN, "revive", "state.token, state.step,", "None, 0,"),
    one("no release", CLAIMS, "Claims._release", "if released is None:", "if True:"),
    one("release of another dispatch", CHAIN, "release", "state.dispatch != shipment.dispatch", "False"),
    one("patience does not double", CHAIN, "patience", "config.backup_ms << doublings", "config.backup_ms"),
    one("patience ignores the queue", CHAIN, "patience", "2 * state.queue_wait", "0"),
    one(
        "sendings are forgotten at open", RUN, "open_run", "token=token, step=0,", "token=token, step=0, sent_count=0,"
    ),
    one(
        "a claim with nothing due leaves the dispatch",
        CHAIN,
        "dispatch",
        "state.but(dispatch=None, sent_until=None)",
        "state",
    ),
    Mutant(
        "a pusher claims beside a run",
        (
            Change(CHAIN, "dispatch", "state.token is not None", "False"),
            Change(JOBS, "Jobs.push_in", "claims and state.token is None and state.dispatch is None", "claims"),
        ),
    ),
    one("a pusher sends again what is on its way", JOBS, "Jobs.push_in", "and state.dispatch is None", ""),
    one("no window", WINDOW, "DispatchWindow.room", "return self._places - taken", "return 1000"),
    Mutant(
        "one window for all queues",
        (
            Change(
                WINDOW,
                "DispatchWindow.room",
                "self._claims.count_sent(queue)",
                "self._claims.count_sent('celery') + self._claims.count_sent('side')",
            ),
        ),
        ("windows",),
    ),
    one("due order by id", DERIVE, "due_links", "key=lambda job: job.place", "key=lambda job: job.id"),
    one("exclusive jobs with others", DERIVE, "due_links", "(exclusive or due)", "due"),
    one("exclusive jobs do not hold back", DERIVE, "next_wake", "exclusive or jobs", "jobs"),
    one("on_alarm after every slice", DERIVE, "due_links", "len(links) <= length", "True"),
    one(
        "wake_at is moved up to now",
        DERIVE,
        "next_wake",
        "return first.queue, effective_due(state, first)",
        "return first.queue, max(now, effective_due(state, first))",
    ),
    one(
        "the alarm of a paused object",
        DERIVE,
        "runnable",
        "return () if state.paused else agenda.jobs",
        "return agenda.jobs",
    ),
    one("the alarm forgets the open run", DERIVE, "next_wake", "if state.token is not None:", "if False:"),
    one("a row with an open run is removed", DERIVE, "is_forgettable", "or state.token is not None", ""),
    one("a dispatch without jobs is kept", DERIVE, "derive", "wake_at is None and", "False and"),
    one(
        "a refused link goes on",
        RUNNER,
        "Runner.run",
        '"reason": begun.refused.value, "at": None}',
        '"reason": begun.refused.value, "at": None}, goes_on=True, token=link.token',
    ),
    Mutant(
        "a refused link goes on, begin without 'nothing in flight'",
        (
            Change(
                RUNNER,
                "Runner.run",
                '"reason": begun.refused.value, "at": None}',
                '"reason": begun.refused.value, "at": None}, goes_on=True, token=link.token',
            ),
            Change(RUN, "may_begin", "state.in_flight is not None", "False"),
        ),
    ),
    one(
        "the last link does not close",
        RUNS,
        "Runs._finish",
        "closes = link.last or flight.final",
        "closes = flight.final",
    ),
    # --- lost workers
    one("one look", ENDS, "Ends._rescue", "not state.doubt", "False"),
    one("a renewal keeps the doubt", SQL, "Sql.__init__", ", doubt = 0 WHERE", " WHERE"),
    one("no renewal", WORKERS, "Workers._renew", "if not mine:", "if True:"),
    one(
        "a renewal that skipped a row waits for the next one",
        f"{P}.worker",
        "Renewer._round",
        "return renewed",
        "return True",
        "returns",
    ),
    one(
        "renewal for a task that no longer runs", WORKERS, "Workers._renew", "(row[0], row[1], row[2]) in seen", "True"
    ),
    Mutant(
        "rescue of a run whose lease lives",
        (
            Change(CHAIN, "claim", "state.lease_until is not None and state.lease_until > now", "False"),
            Change(ENDS, "Ends._rescue", "or (state.lease_until or 0) > now", ""),
        ),
    ),
    one(
        "an end by another process",
        ENDS,
        "Ends._end",
        "(state.worker, state.worker_pid) != (worker.instance, worker.pid)",
        "False",
    ),
    Mutant(
        "an end of whatever is in flight",
        (
            Change(ENDS, "Ends._end", "flight is None or flight.task_id != link.task_id", "flight is None"),
            Change(ENDS, "Ends._end", "(state.worker, state.worker_pid) != (worker.instance, worker.pid)", "False"),
        ),
    ),
    one("a drained worker is struck", ENDS, "Ends._rescue", "was_draining(tx, state.worker)", "False"),
    one("a death while draining is struck", LIFE, "what_ended", "leaving = _life.is_leaving", "leaving = False"),
    one(
        "a hung job is stopped before it is written",
        f"{P}.worker",
        "Renewer._fence",
        "ended = self.app.lifecycle.store.ends.end(link, who, End.HUNG)",
        "os.kill(request.worker_pid, 9)\n    ended = None",
    ),
    # --- the breaker
    one(
        "no strike",
        BREAKER,
        "strike",
        "lines, in_line = counted(state.lines, flight.line, flight.job, now, window, before, cause.value, told)",
        "lines, in_line = state.lines, 0",
    ),
    one("a struck job does not wait", BREAKER, "delay_ms", "return round(", "return 0 * round("),
    one(
        "a replaced job forgets its delay",
        JOBS,
        "Jobs._made",
        "not_before_ms=existing.not_before_ms if existing else None",
        "not_before_ms=None",
    ),
    one("never sealed", BREAKER, "strike", "strikes >= flight.limit", "False"),
    one("sealed one death too late", BREAKER, "strike", "strikes >= flight.limit", "strikes > flight.limit"),
    one("sealed one death too early", BREAKER, "strike", "strikes >= flight.limit", "strikes >= flight.limit - 1"),
    Mutant(
        "strikes on the job alone",
        (Change(BREAKER, "strike", "max(before + 1, in_line)", "before + 1"),),
    ),
    one("no lines", JOBS, "Jobs._made", "pusher.line if follows and pusher else job_id", "job_id"),
    one(
        "a seal leaves the line",
        BREAKER,
        "strike",
        "job.line == flight.line or job.recovery_loop or job is struck",
        "job is struck",
    ),
    one(
        "a recovery loop is not slowed",
        BREAKER,
        "strike",
        "job is not struck and not job.recovery_loop",
        "job is not struck",
    ),
    one("a yield clears", OUTCOME, "verdict_of", "Verdict(Action.YIELD)", "Verdict(Action.YIELD, clean=True)"),
    one(
        "a failure clears",
        OUTCOME,
        "_tried_again",
        "Verdict(Action.AGAIN, delay_ms=delay, attempt=attempt)",
        "Verdict(Action.AGAIN, delay_ms=delay, attempt=attempt, clean=True)",
    ),
    one(
        "any clean end clears all lines",
        BREAKER,
        "cleared",
        "entry = known.get(line)",
        "known.clear()\n    entry = None\n    return None",
    ),
    one("no clean end clears", RUN, "finish", "if verdict.clean:", "if False:"),
    one(
        "a sealed job comes back from inside",
        JOBS,
        "Jobs._sealed",
        "same and pusher is not None",
        "False",
    ),
    one("a hook is tried again", BREAKER, "strike", "remove=(struck,) if struck else ()", "remove=()"),
    one("a hook's death is struck", BREAKER, "strike", "if flight.job.startswith(HOOK_PREFIX):", "if False:"),
    one("nobody is suspected", ENDS, "Ends._rescue", "suspect=several", "suspect=False"),
    one(
        "everybody aboard is struck",
        ENDS,
        "Ends._rescue",
        'aboard["suspect"] is not None and aboard["suspect"] != mine',
        "False",
    ),
    one(
        "who was aboard is looked up each time",
        ENDS,
        "Ends._aboard",
        "if row is None:",
        "tx.run(tx.sql.delete_heartbeat, key)\n    if True:",
    ),
    one("who was aboard is looked for in one queue", ENDS, "Ends._aboard", "queues_in(tx)", "[state.queue]"),
    one(
        "neighbours of a suspect are not suspected",
        ENDS,
        "Ends._suspected",
        "held.write_job(recurrence.with_begun(breaker.suspected(job), flight))",
        "pass",
    ),
    one(
        "suspects run side by side",
        RUNS,
        "Runs._boards",
        'held.tx.row(held.tx.sql.suspect_on, {"mark": worker.instance}) is not None',
        "False",
    ),
    one("a suspect stays one", RUN, "acquitted", "suspect_on=None", "suspect_on=job.suspect_on"),
    *GUARDS,
    *TIMING,
    *mutants_of_features.MUTANTS,
)

CAUGHT_BY: dict[str, int] = {
    "begin without token": 35,
    "begin without step": 145,
    "begin runs what is not due": 3,
    "begin ignores the object's not_before": 1113,
    "open beside a run whose lease is over": 1205,
    "open beside any run": 4,
    "open with nothing due": 195,
    "open of a paused object": 482,
    "a refused chain leaves its dispatch": 14,
    "begin forgets that it has begun": 5,
    "finish without token": 65,
    "finish without step and task id": 629,
    "finish without token and task id": 17,
    "finish without version": 4,
    "an attempt without guard": 161,
    "an attempt does not look again": 197,
    "a begin that may be committed is given up": 5,
    "a begin found out too late goes on": 5,
    "a finish is given up in an outage": 4,
    "a version is used again": 0,
    "an outcome without a new version": 0,
    "no revival": 1,
    "revive with nothing due": 1,
    "revive from the first link": 6,
    "revive under a new token": 6,
    "no release": 6,
    "release of another dispatch": 35,
    "patience does not double": 3,
    "patience ignores the queue": 13,
    "sendings are forgotten at open": 3,
    "a claim with nothing due leaves the dispatch": 23,
    "a pusher claims beside a run": 6,
    "a pusher sends again what is on its way": 6,
    "no window": 226,
    "one window for all queues": 34,
    "due order by id": 6,
    "exclusive jobs with others": 4,
    "exclusive jobs do not hold back": 21,
    "on_alarm after every slice": 27,
    "wake_at is moved up to now": 3,
    "the alarm of a paused object": 25,
    "the alarm forgets the open run": 0,
    "a row with an open run is removed": 64,
    "a dispatch without jobs is kept": 241,
    "a refused link goes on": 148,
    "a refused link goes on, begin without 'nothing in flight'": 124,
    "the last link does not close": 23,
    "one look": 3,
    "a renewal keeps the doubt": 77,
    "no renewal": 3,
    "a renewal that skipped a row waits for the next one": 401,
    "renewal for a task that no longer runs": 35,
    "rescue of a run whose lease lives": 5,
    "an end by another process": 419,
    "an end of whatever is in flight": 33,
    "a drained worker is struck": 9,
    "a death while draining is struck": 177,
    "a hung job is stopped before it is written": 21,
    "no strike": 3,
    "a struck job does not wait": 3,
    "a replaced job forgets its delay": 603,
    "never sealed": 7,
    "sealed one death too late": 7,
    "sealed one death too early": 7,
    "strikes on the job alone": 7,
    "no lines": 31,
    "a seal leaves the line": 31,
    "a recovery loop is not slowed": 151,
    "a yield clears": 31,
    "a failure clears": 127,
    "any clean end clears all lines": 7,
    "no clean end clears": 7,
    "a sealed job comes back from inside": 7,
    "a hook is tried again": 15,
    "a hook's death is struck": 15,
    "nobody is suspected": 8,
    "everybody aboard is struck": 8,
    "who was aboard is looked up each time": 8,
    "who was aboard is looked for in one queue": 8,
    "neighbours of a suspect are not suspected": 8,
    "suspects run side by side": 227,
    "a suspect stays one": 8,
    **GUARDS_CAUGHT_BY,
    **TIMING_CAUGHT_BY,
    **mutants_of_features.CAUGHT_BY,
}
"""A seed that catches each."""


def main() -> int:
    wanted = sys.argv[1:]
    for mutant in MUTANTS:
        if wanted and not any(word in mutant.name for word in wanted):
            continue
        began = time.monotonic()
        found = seed_for(mutant, range(SEEDS))
        took = time.monotonic() - began
        if found is None:
            sys.stdout.write(f"    NOT CAUGHT {mutant.name!r} ({took:.0f} s)\n")
        else:
            sys.stdout.write(f"    {json.dumps(mutant.name)}: {found[0]},\n")
            sys.stderr.write(f"{mutant.name}: seed {found[0]}: {found[1]}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
