"""The protocol with one of its times wrong: too long, too short, without its limit, or taken from the wrong place.

Most of them break nothing that a user would call broken: everything is run, only later than it need be.
"""

from __future__ import annotations

from tests.simulation.mutants.mutation import PACKAGE as P
from tests.simulation.mutants.mutation import one

CHAIN, RUN, CONFIG, BREAKER = f"{P}.transitions.chain", f"{P}.transitions.run", f"{P}.config", f"{P}.breaker"
RUNS, ENDS, ALARMS, OUTCOME = f"{P}.store.runs", f"{P}.store.ends", f"{P}.store.alarms", f"{P}.outcome"
BEAT, WORKER, RUNNER, LIFECYCLE = f"{P}.beat", f"{P}.worker", f"{P}.runner", f"{P}.lifecycle"
DERIVE, DISPATCH, BACKOFF = f"{P}.transitions.derive", f"{P}.dispatch", f"{P}.timing.backoff"


MUTANTS = (
    # --- lease, doubt, renewal
    one("the backup alarm is twenty times as long", CONFIG, "Config.backup_ms", "* 1000", "* 20_000"),
    one("a lease is twenty times as long", CONFIG, "Config.lease_ms", "* 2 // 3", "* 2 * 20 // 3"),
    one("a lease is half as long", CONFIG, "Config.lease_ms", "* 2 // 3", "// 3"),
    one("the second look comes after a backup alarm", CONFIG, "Config.doubt_ms", "// 6", ""),
    one("leases are renewed four times as rarely", CONFIG, "Config.renew_every", "/ 6", "* 4 / 6"),
    one("on_start leaves its job a lease of a minute", RUN, "entered", "now + config.lease_ms", "now + 60_000"),
    one("a renewal gives an hour", f"{P}.store.workers", "Workers._renew", "self.config.lease_ms", "3_600_000"),
    # --- patience
    one(
        "patience has no limit", CHAIN, "patience",
        "min(config.backup_ms << doublings, config.patience_max_ms)", "config.backup_ms << doublings",
    ),
    one(
        "a long queue makes patience without limit", CHAIN, "patience",
        "min(2 * state.queue_wait, QUEUED_AT_MOST * config.patience_max_ms)", "2 * state.queue_wait",
        "windows",
    ),
    one("the next link is waited for an hour", RUN, "waiting", "patience(state, config)", "3_600_000"),
    one("the back-off of a sender grows without limit", LIFECYCLE, "Lifecycle.send", "MAX_BACK_OFF_MS", "60_000"),
    # --- beat
    one("beat looks every ten minutes", BEAT, "LifecycleScheduler.tick", "max(wait, 0.0)", "600.0"),
    one("beat sleeps until the next alarm that it knows of", BEAT, "LifecycleScheduler.tick",
        "self._entries.run(self._stopping), poll)", "self._entries.run(self._stopping))"),
    one(
        "beat does not sleep until the next alarm but for its poll", BEAT, "LifecycleScheduler.tick",
        "min(self._dispatch_due(), self._entries.run(self._stopping), poll)", "self._dispatch_due() and poll",
    ),
    one("beat forgets leases", BEAT, "LifecycleScheduler._next_wake", "heads.sent, heads.open]", "heads.sent]"),
    one("beat forgets what was sent", BEAT, "LifecycleScheduler._next_wake", "heads.sent, heads.open]", "heads.open]"),
    one("a queue that could not be sent to is left alone for a minute", BEAT, "LifecycleScheduler._dispatch_phase",
        "time.monotonic() + HELD_FOR", "time.monotonic() + 60"),
    one("a worker's parent says nothing of a death", WORKER, "LifecycleRequest._ended", "if end is None:", "if True:"),
    one("places in the window are counted once a minute", f"{P}.window", "DispatchWindow.room", "COUNT_FOR", "60"),
    one("a closing worker sends nothing on", CHAIN, "close",
        "return dispatch(ended(state).but(sent_count=0), agenda, now, config, new_id)",
        "return Claim(derive(ended(state).but(sent_count=0), agenda, now))"),
    one("a chain holds those that are due last", DERIVE, "due_links", "links[:length]", "links[-length:]"),
    # --- what is held back
    one("a strike holds back for twenty minutes more", BREAKER, "delay_ms", "* 1000)", "* 1000) + 1_200_000"),
    one("a strike's delay does not grow", BREAKER, "delay_ms", "config.strike_delay * strikes", "config.strike_delay"),
    one("a strike's delay has no limit", BREAKER, "delay_ms",
        "min(config.strike_delay * strikes * spread, config.strike_delay_max)", "config.strike_delay * strikes * spread"),
    one("deaths are forgotten at once", BREAKER, "strike", "round(config.strike_window * 1000)", "0"),
    one("what is lost together waits ten times as long", ENDS, "Ends._rescue", "uniform(1, 3)", "uniform(10, 30)"),
    one("a suspect waits for ten minutes", RUNS, "Runs._boards", "suspect_delay * 1000", "suspect_delay * 120_000"),
    one("a suspect waits for one that no longer runs", RUN, "unmarked", "job.suspect_on is None", "True", "suspects"),
    one("on_start is tried again without doubling", RUN, "start_failed", "1000 << min(count - 1, 30)", "1000"),
    one("on_start is tried again without limit", RUN, "start_failed",
        "min(1000 << min(count - 1, 30), round(config.strike_delay_max * 1000))", "1000 << min(count - 1, 30)", "doomed"),
    one("on_alarm is tried again without doubling", ALARMS, "again", "2000 << (failed - 1)", "2000"),
    one("an unknown task is looked at every hour", RUN, "not_understood", "60_000", "3_600_000", "deploys"),
    one("an unknown task has ten times its grace", RUN, "not_understood", ">= grace_ms", ">= 10 * grace_ms", "deploys"),
    one("an unknown task has no grace", RUN, "not_understood", ">= grace_ms", ">= 0", "deploys"),
    # --- attempts
    one("a retry waits a minute more", BACKOFF, "full_jitter", "return math.ceil(", "return 60_000 + math.ceil("),
    one("a retry's delay has no limit", BACKOFF, "full_jitter", "min(2**exponent * base, cap)", "2**exponent * base"),
    one("any delay is waited for in the process", RUNNER, "Runner._holds",
        "verdict.delay_ms <= self.deployment.config.retry_hold * 1000", "True"),
    one("no delay is waited for in the process", RUNNER, "Runner._holds",
        "verdict.delay_ms <= self.deployment.config.retry_hold * 1000", "False"),
    one("an outage uses up an attempt", OUTCOME, "_decided", "attempt=ctx.attempt - 1", "attempt=ctx.attempt"),
    one("after an outage it is tried again in an hour", OUTCOME, "_decided", "AFTER_OUTAGE_MS", "3_600_000"),
    one("what hangs is stopped ten times as late", WORKER, "Renewer._look_for_hung", "seconds < limit", "seconds < 10 * limit"),
    one("what hangs is stopped before its time", WORKER, "Renewer._look_for_hung", "seconds < limit", "seconds < limit / 3"),
    one("a finish is tried again every minute", RUNNER, "Runner._stored", "RETRY_DATABASE", "60"),
    one("on_job_error clears the strikes of its job", OUTCOME, "_given_up", "clean=False", "clean=True", "doomed"),
    # --- where to
    one("an object waits in another queue", DERIVE, "next_wake",
        "return first.queue, effective_due(state, first)", "return 'celery', effective_due(state, first)"),
    one("a chain goes to another queue", DISPATCH, "Sender._message",
        "self.route(first.task, options.get(\"queue\"))", "self.route(first.task, \"celery\")"),
)  # fmt: skip

CAUGHT_BY: dict[str, int] = {
    "the backup alarm is twenty times as long": 0,
    "a lease is twenty times as long": 0,
    "a lease is half as long": 0,
    "the second look comes after a backup alarm": 3,
    "leases are renewed four times as rarely": 21,
    "on_start leaves its job a lease of a minute": 0,
    "a renewal gives an hour": 2,
    "patience has no limit": 15,
    "a long queue makes patience without limit": 262,
    "the next link is waited for an hour": 0,
    "the back-off of a sender grows without limit": 6,
    "beat looks every ten minutes": 0,
    "beat sleeps until the next alarm that it knows of": 0,
    "beat does not sleep until the next alarm but for its poll": 0,
    "beat forgets leases": 9,
    "beat forgets what was sent": 3,
    "a queue that could not be sent to is left alone for a minute": 6,
    "a worker's parent says nothing of a death": 27,
    "places in the window are counted once a minute": 2,
    "a closing worker sends nothing on": 0,
    "a strike holds back for twenty minutes more": 3,
    "a strike's delay does not grow": 7,
    "a strike's delay has no limit": 79,
    "deaths are forgotten at once": 7,
    "what is lost together waits ten times as long": 3,
    "a suspect waits for ten minutes": 20,
    "a suspect waits for one that no longer runs": 176,
    "on_start is tried again without doubling": 171,
    "on_start is tried again without limit": 739,
    "on_alarm is tried again without doubling": 31,
    "an unknown task is looked at every hour": 1269,
    "an unknown task has ten times its grace": 177,
    "an unknown task has no grace": 453,
    "a retry waits a minute more": 2,
    "a retry's delay has no limit": 29,
    "any delay is waited for in the process": 127,
    "no delay is waited for in the process": 2,
    "an outage uses up an attempt": 23,
    "after an outage it is tried again in an hour": 23,
    "what hangs is stopped ten times as late": 21,
    "what hangs is stopped before its time": 15,
    "a finish is tried again every minute": 4,
    "on_job_error clears the strikes of its job": 31,
    "an object waits in another queue": 3,
    "a chain goes to another queue": 3,
    "a chain holds those that are due last": 397,
}
"""A seed that catches each."""
