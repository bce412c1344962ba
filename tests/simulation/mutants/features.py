"""The guards of what there is beside the alarm: holds, lines over objects, replay, strangers, limits, storage, many at once."""

from __future__ import annotations

from tests.simulation.mutants.mutation import PACKAGE as P
from tests.simulation.mutants.mutation import one

HOLDS, LOOK, DEAD, QUEUE = f"{P}.store.holds", f"{P}.holds", f"{P}.store.dead", f"{P}.queue"
RUN, RUNS, ENDS, JOBS = f"{P}.transitions.run", f"{P}.store.runs", f"{P}.store.ends", f"{P}.store.jobs"
SQL, WORKERS, RUNNER, TASK = f"{P}.store.sql", f"{P}.store.workers", f"{P}.runner", f"{P}.task"
DISPATCH, LIFECYCLE, TRACKED = f"{P}.dispatch", f"{P}.lifecycle", f"{P}.tracked"
WHO = "(state.worker, state.worker_pid) != (worker.instance, worker.pid)"
SAME = "(state.worker, state.worker_pid) == (worker.instance, worker.pid)"

MUTANTS = (
    # --- holds
    one(
        "a hold is given back twice",
        HOLDS,
        "Holds.let_go",
        '{"kind": kind, "key": key}) == 0 or held is None',
        '{"kind": kind, "key": key}) < 0 or held is None',
    ),
    one("a hold that is gone is lost", HOLDS, "Holds._lost", "gone == 0 or held is None", "held is None"),
    one("a holder that was renewed is given up", HOLDS, "Holds._lost", "if expires_ms is None:", "if True:"),
    one("one look at a holder", LOOK, "look", "doubts.get((row.kind, row.key)) != row.expires_ms", "False"),
    one(
        "what a draining worker ran is struck",
        HOLDS,
        "Holds._strikes",
        "(worker is None or was_draining(tx, worker))",
        "worker is None",
    ),
    one("a loss wakes nobody", HOLDS, "Holds._woken", "wake is None or state.disabled", "True"),
    one("a loss wakes a disabled object", HOLDS, "Holds._woken", "wake is None or state.disabled", "wake is None"),
    one(
        "the end of handed off work is not told", TRACKED, "_on_postrun", 'rows.let_go_by_key("track", task_id)', "None"
    ),
    one("handed off work is not renewed", TRACKED, "renew", "TRACKED in", "False and TRACKED in"),
    one("nobody knows who runs handed off work", TRACKED, "_on_prerun", "deployment is not None", "False"),
    one(
        "an end is clean beside unfinished work",
        RUNS,
        "Runs._finish",
        "verdict.action is Action.RESCHEDULE and held.state.holds",
        "False",
    ),
    one("an end clears a strike that came meanwhile", RUNS, "Runs._finish", "job.strikes > verdict.strikes", "False"),
    # --- lines over several objects
    one("a sealed line goes on", RUNS, "Runs._start", "lines.is_sealed(held.tx, job, now)", "False"),
    one(
        "deaths on other objects are not counted",
        ENDS,
        "struck_by",
        "is_shared = lines.is_own_object(held.ref, flight.task, flight.job)",
        "is_shared = False",
    ),
    one(
        "a clean end leaves its deaths to the line",
        RUNS,
        "Runs._finish",
        "lines.clear(tx, job, now, self.config)",
        "pass",
    ),
    one(
        "push_many forgets who pushes",
        JOBS,
        "Jobs.push_many_in",
        "self.push_in(tx, drafts[index], pusher)",
        "self.push_in(tx, drafts[index], None)",
    ),
    one(
        "what a sealed line has counted stays",
        RUNS,
        "Runs._start",
        "lines=breaker.without_line(state.lines, job.line)",
        "lines=state.lines",
    ),
    # --- dead jobs
    one("a replay leaves its line sealed", DEAD, "DeadJobs.replay", "lines.lift(tx, old)", "pass"),
    one(
        "a replayed job keeps its deaths",
        DEAD,
        "DeadJobs.replay",
        "state = state.but(lines=breaker.cleared(state.lines, old.line, old.id))",
        "pass",
    ),
    one(
        "a replayed job keeps its strikes",
        DEAD,
        "DeadJobs.replay",
        "attempt=0, strikes=0",
        "attempt=0, strikes=old.strikes",
    ),
    one("a replay keeps the dead job", DEAD, "DeadJobs.replay", 'tx.run(tx.sql.delete_dead, {"id": key})', "pass"),
    one("a replay on a disabled object", DEAD, "DeadJobs.replay", "if held.state.disabled:", "if False:"),
    one(
        "a replay replaces a pending job",
        DEAD,
        "DeadJobs.replay",
        "id=old.id if existing is None else _replayed_id(old.id, key)",
        "id=old.id",
    ),
    one("a replayed job expires again", DEAD, "DeadJobs.replay", "_without_end(old)", "old.options_json"),
    one("a stranger's job is run", RUNNER, "Runner._job", "job.owner not in code.owners", "False"),
    one(
        "a late word on a stranger's job",
        ENDS,
        "Ends.unknown",
        "held is None or not run.may_finish(held.state, link, token)",
        "held is None",
    ),
    one("a stranger's job is dead at once", RUN, "not_understood", "now - since >= grace_ms", "True"),
    one("a stranger's job waits for ever", RUN, "not_understood", "now - since >= grace_ms", "False"),
    # --- limits
    one("what has expired is run", RUNS, "Runs._start", "expires is not None and expires <= now", "False"),
    one("a time limit uses up nothing", ENDS, "Ends._used_up", "failed = job.attempt + 1", "failed = job.attempt"),
    one(
        "a job that is stopped is never dead",
        ENDS,
        "Ends._used_up",
        "end is End.REVOKED or failed >= job.retry.max_attempts",
        "end is End.REVOKED",
    ),
    one(
        "a stop is charged to a newer change",
        ENDS,
        "Ends._used_up",
        "elif job is not None and job.version == flight.version:",
        "elif job is not None:",
    ),
    one(
        "a retry forgets its attempts",
        TASK,
        "classify",
        "delay_ms=0 if past else delay_to_millis(when), attempt=attempt",
        "delay_ms=0 if past else delay_to_millis(when)",
    ),
    # --- storage
    one(
        "storage is written by a refused finish",
        RUNS,
        "Runs._finish",
        "return _finished_before(held, link, token, again)",
        "return (held and self._stored(held, held.state, storage), _finished_before(held, link, token, again))[1]",
    ),
    one(
        "storage is written by a failed attempt",
        RUNNER,
        "Runner._finish",
        "ctx.storage.pending if error is None or verdict.clean else {}",
        "ctx.storage.pending",
    ),
    one("storage is written to a destroyed object", RUNS, "Runs._finish", "if flight.final:", "if False:"),
    one(
        "storage is written beside the finish",
        RUNNER,
        "Runner._finish",
        "done = self._stored(link.task_id, finish, refusable=bool(writes))",
        "self.deployment.store.objects.put_values(code.ref, writes) if writes else None\n"
        "    done = self._stored(link.task_id, finish)",
    ),
    one(
        "storage goes with an outcome that is discarded",
        RUNS,
        "Runs._finish",
        "self._stored(held, done.state, storage)",
        "self._stored(held, done.state, {} if done.discarded else storage)",
    ),
    one("an object forgets what it has stored", RUNS, "Runs._stored", "state.but(stored=True)", "state"),
    # --- many at once
    one(
        "push_many is many transactions",
        QUEUE,
        "store_many",
        "deployment.store.jobs.push_many(drafts, run.pusher if run else None)",
        "[deployment.store.jobs.push(one).job for one in drafts]",
    ),
    one(
        "what can't be sent is not released",
        LIFECYCLE,
        "Lifecycle.send",
        "self.store.claims.release(failed, self._back_off_ms)",
        "pass",
    ),
    one(
        "one message that can't be sent keeps the others",
        DISPATCH,
        "Sender._send_batch",
        "failed.append(shipment)",
        "return list(shipments)",
    ),
    one("a message that can't be made ends its sender's work", DISPATCH, "Sender._encoded", "return None", "raise"),
    # --- processes of the same number
    one("an end by another worker's process", ENDS, "Ends._end", WHO, "state.worker_pid != worker.pid"),
    one("an end by the same worker's other process", ENDS, "Ends._end", WHO, "state.worker != worker.instance"),
    one(
        "a renewal by another worker", SQL, "Sql.__init__", "AND worker = :worker{skip}", "AND :worker = :worker{skip}"
    ),
    one(
        "a renewal for the same worker's other process",
        WORKERS,
        "Workers._renew",
        "(row[0], row[1], row[2]) in seen",
        "(row[0], row[1]) in {one[:2] for one in seen}",
    ),
    one("a begin of another worker's process goes on", RUNS, "_is_begun", SAME, "state.worker_pid == worker.pid"),
    one(
        "a begin of the same worker's other process goes on", RUNS, "_is_begun", SAME, "state.worker == worker.instance"
    ),
)

CAUGHT_BY: dict[str, int] = {
    "a hold is given back twice": 45,
    "a hold that is gone is lost": 1485,
    "a holder that was renewed is given up": 1485,
    "one look at a holder": 135,
    "what a draining worker ran is struck": 45,
    "a loss wakes nobody": 135,
    "a loss wakes a disabled object": 1287,
    "the end of handed off work is not told": 36,
    "handed off work is not renewed": 180,
    "nobody knows who runs handed off work": 36,
    "an end is clean beside unfinished work": 45,
    "an end clears a strike that came meanwhile": 45,
    "a sealed line goes on": 38,
    "deaths on other objects are not counted": 38,
    "a clean end leaves its deaths to the line": 92,
    "push_many forgets who pushes": 47,
    "what a sealed line has counted stays": 137,
    "a replay leaves its line sealed": 47,
    "a replayed job keeps its deaths": 1092,
    "a replayed job keeps its strikes": 47,
    "a replay keeps the dead job": 39,
    "a replay on a disabled object": 183,
    "a replay replaces a pending job": 39,
    "a replayed job expires again": 186,
    "a stranger's job is run": 39,
    "a late word on a stranger's job": 39,
    "a stranger's job is dead at once": 39,
    "a stranger's job waits for ever": 39,
    "what has expired is run": 42,
    "a time limit uses up nothing": 42,
    "a job that is stopped is never dead": 49,
    "a stop is charged to a newer change": 564,
    "a retry forgets its attempts": 95,
    "storage is written by a refused finish": 86,
    "storage is written by a failed attempt": 95,
    "storage is written to a destroyed object": 230,
    "storage is written beside the finish": 86,
    "an object forgets what it has stored": 86,
    "push_many is many transactions": 44,
    "what can't be sent is not released": 134,
    "one message that can't be sent keeps the others": 143,
    "a message that can't be made ends its sender's work": 143,
    "an end by another worker's process": 232,
    "an end by the same worker's other process": 763,
    "a renewal by another worker": 133,
    "a renewal for the same worker's other process": 187,
    "a begin of another worker's process goes on": 574,
    "a begin of the same worker's other process goes on": 43,
    "storage goes with an outcome that is discarded": 284,
}
"""A seed that catches each."""
