"""What must hold, looked at after every step: the invariants, kept apart from the code that they judge."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from celery_lifecycle.model import HOOK_PREFIX, SEALED, START
from celery_lifecycle.store.rows import job_of, object_of
from celery_lifecycle.store.sql import JOB_COLUMNS, OBJECT_COLUMNS
from tests.simulation.checks.breaker import BreakerChecks
from tests.simulation.checks.chains import ChainChecks
from tests.simulation.checks.dead import DeadChecks
from tests.simulation.checks.delays import DelayChecks
from tests.simulation.checks.facts import FENCES, Changes, Facts, Thing
from tests.simulation.checks.holds import HoldChecks
from tests.simulation.checks.jobs import JobChecks
from tests.simulation.checks.lateness import Lateness
from tests.simulation.checks.lines import LineChecks
from tests.simulation.checks.objects import ObjectChecks
from tests.simulation.checks.pushes import PushChecks
from tests.simulation.checks.refusals import RefusalChecks
from tests.simulation.checks.runs import RunChecks
from tests.simulation.checks.storage import StorageChecks
from tests.simulation.world.calls import Call
from tests.simulation.world.database import PREFIX, shared

if TYPE_CHECKING:
    from tests.simulation.world.simulation import Simulation

OBJECTS = f"SELECT {', '.join(OBJECT_COLUMNS)} FROM {PREFIX}objects"
JOBS = f"SELECT object_id, {', '.join(JOB_COLUMNS)} FROM {PREFIX}jobs"
DEAD = f"SELECT id, kind, name, job_id, reason, job FROM {PREFIX}dead_jobs WHERE id > ? ORDER BY id"


MOST_COMMITS = 5000
"""Ten times as many transactions as the liveliest seeds of the suite have."""

NOTHING = "nothing"
AREAS = {"DeadJobs": "dead"}
"""Where the store's name for its verbs is not that of their class."""


def verb_of(label: str) -> str:
    """The store's verb in whose transaction something was changed."""
    place, _, name = label.partition(".")
    return f"{AREAS.get(place, place.lower())}.{name.strip('_').removesuffix('_in')}"


class Checker:
    """Looks at the tables after every commit; bodies, chains and deaths have checks of their own."""

    def __init__(self, simulation: Simulation) -> None:
        self.facts = Facts(simulation)
        self.chains = ChainChecks(self.facts)
        self.breaker = BreakerChecks(self.facts)
        self.delays = DelayChecks(self.facts)
        self.holds = HoldChecks(self.facts, self.breaker)
        self.lines = LineChecks(self.facts, self.breaker)
        self.dead_jobs = DeadChecks(self.facts, self.lines)
        self.storage = StorageChecks(self.facts)
        self.pushes = PushChecks(self.facts)
        self.others = (self.holds, self.lines, self.dead_jobs, self.storage, self.pushes)
        self.runs = RunChecks(self.facts, self.chains, self.breaker, self.delays, self.holds, self.dead_jobs)
        self.lateness = Lateness(self.facts)
        self.jobs = JobChecks(self.facts, self.breaker)
        self.objects = ObjectChecks(self.facts)
        self.refusals = RefusalChecks(self.facts, self.runs)
        self.rows: dict[int, tuple[Any, ...]] = {}
        self.job_rows: dict[tuple[int, str], tuple[Any, ...]] = {}
        self.dead: list[tuple[Any, ...]] = []
        self.versions: dict[int, int] = defaultdict(int)
        self.commits = 0
        self.moves: set[tuple[str, str, str]] = set()
        """Which verb has moved an object from which state to which."""

    def committed(self, call: Call) -> bool:
        """Look at what a transaction has changed. Returns whether it was an object or a job."""
        changes = self._looked_at(call) if call.wrote else {}
        self.refusals.check(call, changes)
        if call.label == "Workers.beat":
            self.breaker.heard_of(call["instance"])
        return bool(changes)

    def _looked_at(self, call: Call) -> Changes:
        """What a transaction that has written has changed: objects as they were and as they are."""
        label, args = call.label, call.args
        self.commits += 1
        if self.commits > MOST_COMMITS:
            self.facts.fail("nobody goes round in circles", f"{label} is transaction {self.commits}")
        execute = shared().connection.execute
        rows = {row[0]: row for row in execute(OBJECTS)}
        job_rows = {(row[0], row[1]): row for row in execute(JOBS)}
        dead = list(execute(DEAD, (self.dead[-1][0] if self.dead else 0,)))
        changed = {key for key in rows.keys() | self.rows.keys() if rows.get(key) != self.rows.get(key)}
        touched = {
            key[0] for key in job_rows.keys() | self.job_rows.keys() if job_rows.get(key) != self.job_rows.get(key)
        }
        changes: Changes = {}
        for key in sorted(changed | touched):
            before, after = self.facts.things.get(key), None
            if key in rows:
                state = object_of(rows[key])
                jobs = {row[1]: job_of(state.ref, row[1:]) for row in job_rows.values() if row[0] == key}
                after = Thing(state, jobs)
            mine = [one for one in dead if after is None or (one[1], one[2]) == (after.state.kind, after.state.name)]
            self._told(label, args, before, after, mine)
            if after is None:
                self.facts.things.pop(key, None)
            else:
                self.facts.things[key] = after
            changes[key] = before, after
            self._changed(call, before, after, mine, key in changed)
        orphans = {key[0] for key in job_rows} - rows.keys()
        if orphans:
            self.facts.fail("no job without its object", f"{label} left jobs of objects {sorted(orphans)}")
        self.rows, self.job_rows = rows, job_rows
        self.dead += dead
        self.facts.buried += dead
        for one in self.others:
            one.committed(label, args)
        if changed or touched:
            self.last_change = self.facts.world.now
        return changes

    def _told(self, label: str, args: Any, before: Thing | None, after: Thing | None, dead: list[Any]) -> None:
        if self.facts.world.trace is None:
            return
        ref = after.state.ref if after else before.state.ref if before else "?"
        if after is None:
            self.facts.world.say(f"{label} {ref}: gone")
            return
        state = after.state
        jobs = ", ".join(
            f"{job.id[:12]} v{job.version} {(job.effective_ms - self.facts.now) / 1000:+g}s"
            + (f" a{job.attempt}" if job.attempt else "") + (f" s{job.strikes}" if job.strikes else "")
            + (f" {job.suspect_on[:12]}" if job.suspect_on else "")
            for job in sorted(after.jobs.values(), key=lambda job: job.effective_ms)
        )  # fmt: skip
        flight = f" in flight {state.in_flight.job[:12]} v{state.in_flight.version}" if state.in_flight else ""
        run = (
            f" token {state.token[:6]} step {state.step}{flight}{' doubt' if state.doubt else ''}"
            if state.token
            else ""
        )
        sent = f" dispatch {state.dispatch[:6]} x{state.sent_count}" if state.dispatch else ""
        wake = f" wake {(state.wake_at - self.facts.now) / 1000:+g}s" if state.wake_at is not None else ""
        more = f" {state.paused}" if state.paused else ""
        more += f" not before {(state.not_before - self.facts.now) / 1000:+g}s" if state.not_before else ""
        gone = "".join(f"; dead {one[3][:12]} ({one[4]})" for one in dead)
        self.facts.world.say(f"{label} {ref}:{wake}{sent}{run}{more} [{jobs}]{gone}")

    def _changed(self, call: Call, before: Thing | None, after: Thing | None, dead: list[Any], row: bool) -> None:
        label, args = call.label, call.args
        old, new = before.state if before else None, after.state if after else None
        if after is not None:
            self._check_wake(label, before, after, row)
            self._check_versions(label, before, after)
            self.breaker.check_marks(label, after)
        if old is not None and old.token is not None and (new is None or new.token != old.token):
            self.facts.ended.setdefault(old.token, label)
        if new is not None and new.token is not None and new.token in self.facts.ended:
            self.facts.fail("a run that was ended stays ended", f"{label} brought token {new.token} back")
        if new is not None and new.doubt and not (old and old.doubt):
            self.breaker.doubted[new.token or ""] = self.facts.world.now
        if label == "Workers._renew" and new is not None:
            self.breaker.check_renewal(new, args)
        if label == "Jobs.push_in" and after is not None:
            self.breaker.check_sealed(args[0], args[1], after)
        if label == "Runs._begin":
            self.runs.check_begin(args[0], args[2], before, after)
        elif label in ("Runs._finish", "Runs._alarm_failed"):
            self.runs.check_finish(label, args, before, after)
        elif label in ("Ends._end", "Ends._rescue", "Ends.struck_inside"):
            self.breaker.check_end(label, before, after, dead)
        self.delays.changed(label, args, before, after)
        self.delays.buried(label, before, dead)
        self.jobs.check(call, before, after, dead)
        self.objects.check(call, old, new)
        for one in self.others:
            one.changed(label, args, before, after, dead)
        phases = (old.phase.name if old else NOTHING, new.phase.name if new else NOTHING)
        if phases[0] != phases[1]:
            self.moves.add((*phases, verb_of(label)))
        if label == "Runs.enter" and old is not None:
            self.breaker.line_deaths.pop((old.id, START, START), None)
        if label in ("Objects.destroy", "Objects.resume"):
            self.breaker.forgive(old or new)
        if after is not None and new is not None:
            self.chains.changed(label, old, new)
            self.chains.remember(label, old, after)
        self.chains.check_punctual(label, old, after)

    def _check_wake(self, label: str, before: Thing | None, after: Thing, row: bool) -> None:
        state, jobs = after.state, after.jobs
        if state.token is not None:
            if not row or state.wake_at == state.lease_until:
                return
            renewed = label == "Workers._renew"
            if renewed and before is not None and state.wake_at == before.state.wake_at:
                return
            self.facts.fail(
                "wake_at is what its definition says", f"{label}: {state.wake_at} and lease {state.lease_until}"
            )
        live = list(jobs.values())
        if state.disabled:
            live = []
        elif state.paused == SEALED:
            live = [job for job in live if job.id.startswith(HOOK_PREFIX)]
        elif state.paused:
            live = []
        if not live:
            wanted = None
        elif state.dispatch is not None:
            wanted = state.sent_until
        else:
            due = {job.id: self.facts.effective(state, job) for job in live}
            exclusive = [due[job.id] for job in live if job.exclusive and due[job.id] <= self.facts.now]
            wanted = min(exclusive or due.values())
        if state.wake_at != wanted or (state.queue is None) != (wanted is None):
            self.facts.fail(
                "wake_at is what its definition says", f"{label} {state.ref}: {state.wake_at}, not {wanted}"
            )

    def _check_versions(self, label: str, before: Thing | None, after: Thing) -> None:
        old = before.jobs if before else {}
        most = self.versions[after.state.id]
        for job in after.jobs.values():
            if job.id in old and old[job.id].version == job.version:
                continue
            if job.version <= most:
                self.facts.fail("a version is never used twice", f"{label}: {job.id} has version {job.version} again")
            self.versions[after.state.id] = max(self.versions[after.state.id], job.version)

    def returned(self, label: str, args: Any, result: Any) -> None:
        """A verb has come back to its caller."""
        if label in ("Runs._begin", "Runs.enter", "Runs.attempted"):
            self.runs.contact[self.facts.world.process] = self.facts.world.now
        if label == "Claims._claim":
            self.chains.claimed(args, result)
        if label != "Runs._begin" or result.refused is None:
            return
        link, thing = args[0], self.facts.things.get(args[0].object_id)
        self.facts.stats["refused"] += 1
        if link.token is None and thing is not None and thing.state.dispatch == link.dispatch:
            self.facts.fail("a chain that ends quietly is not waited for", f"{thing.state.ref}: {result.refused.value}")

    def published(self, queue: str, header: dict[str, Any], task: str) -> None:
        """A message is given to the broker."""
        self.facts.stats["messages"] += 1
        kind = header["name"].partition("/")[0]
        if queue != self.facts.queue_of(kind, task):
            self.facts.fail("each queue has its own", f"{header['name']}#{header['job']} goes to {queue}")
        self.lateness.sent(header)

    def is_over(self) -> bool:
        """Whether all that was due has been run; while it has not, nothing may be late."""
        self.lateness.watch()
        return self._is_quiet()

    def _is_quiet(self) -> bool:
        """Nothing is due, nothing runs, nothing is on its way."""
        return (
            all(self._rests(thing) for thing in self.facts.things.values())
            and not self.facts.simulation.broker.on_its_way
            and self.holds.is_quiet()
        )

    def _rests(self, thing: Thing) -> bool:
        state = thing.state
        if state.token is not None or state.dispatch is not None:
            return False
        return state.wake_at is None or state.wake_at > self.facts.now

    def at_horizon(self) -> None:
        """What was promised for the time in which faults were still possible."""
        for queue in self.facts.simulation.plan.served:
            for thing in self.facts.things.values():
                if not self._rests(thing) and thing.state.queue == queue:
                    self.facts.fail("a queue that is served is not held up by others", f"{thing.state.ref}")

    def at_end(self) -> None:
        late = [thing for thing in self.facts.things.values() if not self._rests(thing)]
        for thing in late:
            told = f"{thing.state.ref} {thing.state.phase.name} with {sorted(thing.jobs)}"
            self.facts.fail("once faults stop, what is due is run", told)
        for one in self.others:
            one.at_end()
        for death in self.facts.deaths.values():
            drained = death.draining or death.worker.draining_stored
            uncounted = not (death.counted or drained or death.killed_by or death.job.startswith(HOOK_PREFIX))
            if uncounted and not death.whole and self.facts.ended.get(death.token) in FENCES:
                self.facts.fail("a death is counted", f"{death.job} of object {death.object_id}")
        for thing in self.facts.things.values():
            state = thing.state
            runnable = thing.jobs and not state.paused and not state.disabled
            if runnable and state.wake_at is None:
                self.facts.fail("once faults stop, what is due is run", f"{state.ref} has jobs and no alarm")
