"""What must hold, looked at after every step: the invariants, kept apart from the code that they judge."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_lifecycle.model import ALARM, ALIVE, HOOK_PREFIX, SEALED, START, Job, ObjectRef, ObjectState, Shipment
from celery_lifecycle.store.rows import job_of, object_of
from celery_lifecycle.store.sql import JOB_COLUMNS, OBJECT_COLUMNS
from tests.simulation.database import PREFIX, lost_on_record, shared
from tests.simulation.engine import EPOCH

if TYPE_CHECKING:
    from tests.simulation.simulation import Child, Simulation, WorkerProcess

OBJECTS = f"SELECT {', '.join(OBJECT_COLUMNS)} FROM {PREFIX}objects"
JOBS = f"SELECT object_id, {', '.join(JOB_COLUMNS)} FROM {PREFIX}jobs"
DEAD = f"SELECT id, kind, name, job_id, reason, job FROM {PREFIX}dead_jobs WHERE id > ? ORDER BY id"

FENCES = ("Ends._rescue", "Ends._end")
"""What may end a run whose body still goes on."""
STRIKES = (*FENCES, "Ends.struck_inside")
CLOSERS = (
    "Runs._finish", "Runs._alarm_failed", "Runs._begin", "Ends._skip", "Ends.unknown",
)  # fmt: skip
CLIENTS = (
    "Jobs.cancel_in", "Jobs.revoke", "Objects.destroy", "Jobs.push_in", "Jobs.push_many_in", "DeadJobs.replay",
)  # fmt: skip


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, told: str) -> None:
        super().__init__(f"{invariant}: {told}")
        self.invariant = invariant


@dataclass(slots=True)
class Thing:
    """One object and its jobs as they are stored."""

    state: ObjectState
    jobs: dict[str, Job]


@dataclass(slots=True)
class Body:
    """One call of a job's function."""

    object_id: int
    ref: str
    job: str
    version: int
    line: str
    token: str
    task_id: str
    position: int
    process: Any
    began: int
    ended: int | None = None
    end: str = ""
    act: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Death:
    """A process that died with a link in flight."""

    token: str
    object_id: int
    job: str
    line: str
    culprit: str
    whole: bool
    draining: bool
    at: int
    instance: str
    worker: Any
    killed_by: str | None = None
    counted: bool = False


class Checker:
    """Looks at the tables after every commit, and at bodies when they begin and end."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.config = simulation.config
        self.rows: dict[int, tuple[Any, ...]] = {}
        self.job_rows: dict[tuple[int, str], tuple[Any, ...]] = {}
        self.things: dict[int, Thing] = {}
        self.dead: list[tuple[Any, ...]] = []
        self.versions: dict[int, int] = defaultdict(int)
        self.ended: dict[str, str] = {}
        self.bodies: list[Body] = []
        self.active: dict[int, Body] = {}
        self.starts: Counter[Any] = Counter()
        self.calls: Counter[Any] = Counter()
        self.hook_calls: Counter[Any] = Counter()
        self.applied: set[Any] = set()
        self.completed: set[Any] = set()
        self.begun: dict[tuple[str, int], str] = {}
        self.positions: dict[str, int] = {}
        self.expected: dict[str, tuple[tuple[str, ...], bool]] = {}
        self.held: dict[tuple[int, str], int] = {}
        self.deaths: dict[str, Death] = {}
        self.line_deaths: Counter[Any] = Counter()
        self.root_deaths: Counter[Any] = Counter()
        self.sealed: dict[str, set[str]] = defaultdict(set)
        self.culprits: dict[Any, set[str]] = defaultdict(set)
        self.contact: dict[Any, int] = {}
        self.doubted: dict[str, int] = {}
        self.faulted: set[str] = set()
        self.stats: Counter[str] = Counter()
        self.pushed: dict[Any, Any] = {}
        self.last_change = 0
        self.ready: dict[int, int] = {}
        self.sendings: Counter[int] = Counter()
        self.waits: dict[int, int] = {}
        self.dispatched: dict[int, int] = {}
        self.all_due: dict[str, bool] = {}
        self.aboard: dict[str, list[tuple[int, str, bool]]] = {}
        self.returned_from_loss: set[str] = set()
        self.hooks_begun: Counter[Any] = Counter()

    def fail(self, invariant: str, told: str) -> None:
        self.world.say(f"*** {invariant}: {told}")
        violation = Violation(invariant, told)
        # Whoever catches it on its way up: the simulation ends with it.
        self.world.broken = self.world.broken or violation
        raise violation

    @property
    def now(self) -> int:
        return EPOCH + self.world.now

    # --- after every commit

    def committed(self, label: str, args: tuple[Any, ...]) -> bool:
        """Look at what a transaction has changed. Returns whether it was an object or a job."""
        execute = shared().connection.execute
        rows = {row[0]: row for row in execute(OBJECTS)}
        job_rows = {(row[0], row[1]): row for row in execute(JOBS)}
        dead = list(execute(DEAD, (self.dead[-1][0] if self.dead else 0,)))
        changed = {key for key in rows.keys() | self.rows.keys() if rows.get(key) != self.rows.get(key)}
        touched = {
            key[0] for key in job_rows.keys() | self.job_rows.keys() if job_rows.get(key) != self.job_rows.get(key)
        }
        for key in sorted(changed | touched):
            before, after = self.things.get(key), None
            if key in rows:
                state = object_of(rows[key])
                jobs = {row[1]: job_of(state.ref, row[1:]) for row in job_rows.values() if row[0] == key}
                after = Thing(state, jobs)
            mine = [one for one in dead if after is None or (one[1], one[2]) == (after.state.kind, after.state.name)]
            self._told(label, args, before, after, mine)
            if after is None:
                self.things.pop(key, None)
            else:
                self.things[key] = after
            self._changed(label, args, before, after, mine, key in changed)
        orphans = {key[0] for key in job_rows} - rows.keys()
        if orphans:
            self.fail("no job without its object", f"{label} left jobs of objects {sorted(orphans)}")
        self.rows, self.job_rows = rows, job_rows
        self.dead += dead
        if changed or touched:
            self.last_change = self.world.now
        return bool(changed or touched)

    def _told(self, label: str, args: Any, before: Thing | None, after: Thing | None, dead: list[Any]) -> None:
        if self.world.trace is None:
            return
        ref = after.state.ref if after else before.state.ref if before else "?"
        if after is None:
            self.world.say(f"{label} {ref}: gone")
            return
        state = after.state
        jobs = ", ".join(
            f"{job.id[:12]} v{job.version} {(job.effective_ms - self.now) / 1000:+g}s"
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
        wake = f" wake {(state.wake_at - self.now) / 1000:+g}s" if state.wake_at is not None else ""
        more = f" {state.paused}" if state.paused else ""
        more += f" not before {(state.not_before - self.now) / 1000:+g}s" if state.not_before else ""
        gone = "".join(f"; dead {one[3][:12]} ({one[4]})" for one in dead)
        self.world.say(f"{label} {ref}:{wake}{sent}{run}{more} [{jobs}]{gone}")

    def _changed(
        self, label: str, args: Any, before: Thing | None, after: Thing | None, dead: list[Any], row: bool
    ) -> None:
        old, new = before.state if before else None, after.state if after else None
        if after is not None:
            self._check_wake(label, before, after, row)
            self._check_versions(label, before, after)
        if old is not None and old.token is not None and (new is None or new.token != old.token):
            self.ended.setdefault(old.token, label)
        if new is not None and new.token is not None and new.token in self.ended:
            self.fail("a run that was ended stays ended", f"{label} brought token {new.token} back")
        if new is not None and new.doubt and not (old and old.doubt):
            self.doubted[new.token or ""] = self.world.now
        if label == "Workers._renew" and new is not None:
            self._check_renewal(new, args)
        if label == "Jobs.push_in" and after is not None:
            self._check_sealed(args[0], args[1], after)
        if label == "Runs._begin":
            self._check_begin(args[0], args[2], before, after)
        elif label in ("Runs._finish", "Runs._alarm_failed"):
            self._check_finish(label, args, before, after)
        elif label in ("Ends._end", "Ends._rescue", "Ends.struck_inside"):
            self._check_end(label, before, after, dead)
        self._check_gone(label, args, before, after, dead)
        if label == "Runs.enter" and old is not None:
            self.line_deaths.pop((old.id, START, START), None)
        if label in ("Objects.destroy", "Objects.resume", "DeadJobs.replay"):
            self._forgive(old or new)
        if after is not None and new is not None:
            self._check_sending(label, old, new)
            self._remember_shipment(label, old, after)
        self._check_punctual(label, old, after)

    # --- the alarm

    def _check_wake(self, label: str, before: Thing | None, after: Thing, row: bool) -> None:
        state, jobs = after.state, after.jobs
        if state.token is not None:
            if not row or state.wake_at == state.lease_until:
                return
            renewed = label == "Workers._renew"
            if renewed and before is not None and state.wake_at == before.state.wake_at:
                return
            self.fail("wake_at is what its definition says", f"{label}: {state.wake_at} and lease {state.lease_until}")
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
            due = {job.id: self.effective(state, job) for job in live}
            exclusive = [due[job.id] for job in live if job.exclusive and due[job.id] <= self.now]
            wanted = min(exclusive or due.values())
        if state.wake_at != wanted or (state.queue is None) != (wanted is None):
            self.fail("wake_at is what its definition says", f"{label} {state.ref}: {state.wake_at}, not {wanted}")

    def effective(self, state: ObjectState, job: Job) -> int:
        due = max(job.due_ms, job.not_before_ms or 0)
        return due if job.id.startswith(HOOK_PREFIX) else max(due, state.not_before or 0)

    def _check_versions(self, label: str, before: Thing | None, after: Thing) -> None:
        old = before.jobs if before else {}
        most = self.versions[after.state.id]
        for job in after.jobs.values():
            if job.id in old and old[job.id].version == job.version:
                continue
            if job.version <= most:
                self.fail("a version is never used twice", f"{label}: {job.id} has version {job.version} again")
            self.versions[after.state.id] = max(self.versions[after.state.id], job.version)

    # --- links

    def _check_begin(self, link: Any, worker: Any, before: Thing | None, after: Thing | None) -> None:
        old, new = before.state if before else None, after.state if after else None
        if old is None or before is None:
            self.fail("a refused writer changes nothing", "a begin made an object")
            return
        if old.token is not None:
            late = link.token != old.token or link.position != old.step or old.in_flight is not None
            known = old.in_flight is not None and old.in_flight.task_id == link.task_id
            resumed = known and (old.worker, old.worker_pid) == (worker.instance, worker.pid)
            if late and not resumed:
                self.fail("a refused writer changes nothing", f"link {link.task_id} is not the next of {old.token}")
        opened = new is not None and new.token is not None and old.token is None
        if opened and (old.paused or old.disabled) and not link.job.startswith(HOOK_PREFIX):
            self.fail("a paused object opens no run", f"{old.ref} by {link.task_id}")
        if opened and not any(self.effective(old, job) <= self.now for job in before.jobs.values()):
            self.fail("a run is opened for something that is due", f"{old.ref} by {link.task_id}")
        flight = new.in_flight if new is not None else None
        if new is None or flight is None or new.token is None:
            return
        self.begun[flight.task_id, worker.pid] = new.token
        if link.job.startswith(HOOK_PREFIX):
            self.hooks_begun[new.id, link.job] += 1
            if self.hooks_begun[new.id, link.job] > 1 and not self.simulation.plan.may_repeat:
                self.fail("a memory hook is tried once", f"{link.job} of {new.ref}")
        if flight.suspect:
            others = [
                thing.state for thing in self.things.values()
                if thing.state.worker == worker.instance and thing.state.in_flight and thing.state.in_flight.suspect
            ]  # fmt: skip
            if len(others) > 1:
                self.fail("one suspect per worker", f"{[str(one.ref) for one in others]} on {worker.instance}")
        if link.job != ALARM:
            job = before.jobs.get(link.job)
            if job is None or self.effective(old, job) > self.now:
                self.fail("only what is due is run", f"{link.job} of {old.ref}")

    def _check_finish(self, label: str, args: Any, before: Thing | None, after: Thing | None) -> None:
        link, token = args[0], args[1]
        old = before.state if before else None
        if old is None or old.token != token or old.in_flight is None or old.in_flight.task_id != link.task_id:
            self.fail("a refused writer changes nothing", f"{label} of {link.task_id} was accepted")
            return
        key = (token, link.position)
        if key in self.applied:
            self.fail("an outcome is applied at most once", f"{link.task_id}")
        self.applied.add(key)
        flight = old.in_flight
        if flight.job in (ALARM, START) or flight.job.startswith(HOOK_PREFIX):
            if label == "Runs._finish":
                self.line_deaths.pop((old.id, flight.line, flight.job), None)
            return
        job = before.jobs.get(flight.job) if before else None
        kept = after.jobs.get(flight.job) if after else None
        if job is not None and job.version != flight.version:
            if kept is None or (kept.version, kept.due_ms) != (job.version, job.due_ms):
                self.fail("a newer change of a job wins", f"{flight.job} of {old.ref}")
            self.stats["discarded"] += 1
        body = self._body_of(token, link.task_id)
        if body is None or body.ended is None:
            self.fail("an outcome comes from a body that has ended", f"{link.task_id}")
            return
        clean = body.end in ("ok", "again") and job is not None and job.version == flight.version
        if clean and kept is not None and (kept.strikes or kept.suspect_on or kept.not_before_ms):
            self.fail("a clean end clears strikes and suspicion", f"{kept.id} of {old.ref}")
        if body.end == "ok":
            self.held.pop((old.id, flight.job), None)
            self.line_deaths.pop((old.id, flight.line, flight.job), None)
            self.culprits.pop((str(old.ref), flight.line, flight.job), None)
            if job is not None and job.version == flight.version:
                self.completed.add((old.id, flight.job, flight.version))
        if body.end == "again" and kept is not None and kept.not_before_ms is None:
            self.held.pop((old.id, flight.job), None)
            self.line_deaths.pop((old.id, flight.line, flight.job), None)
            self.culprits.pop((str(old.ref), flight.line, flight.job), None)

    def _body_of(self, token: str, task_id: str) -> Body | None:
        return next((one for one in reversed(self.bodies) if (one.token, one.task_id) == (token, task_id)), None)

    def _check_sealed(self, draft: Any, pusher: Any, after: Thing) -> None:
        """What was sealed is brought back from outside only."""
        known = self.sealed[str(draft.ref)]
        if pusher is None:
            known.discard(draft.id)
        elif draft.id in known and draft.id in after.jobs:
            self.fail("what was sealed stays away", f"{draft.id} of {after.state.ref}")

    # --- ends that are not good

    def _check_end(self, label: str, before: Thing | None, after: Thing | None, dead: list[Any]) -> None:
        old, new = before.state if before else None, after.state if after else None
        if old is None or before is None or old.token is None or (new is not None and new.token == old.token):
            return
        if old.in_flight is None:
            self.fail("only what is in flight is ended", f"{label} {old.ref}")
            return
        flight, token = old.in_flight, old.token
        death = self.deaths.get(token)
        hook = flight.job.startswith(HOOK_PREFIX)
        struck = (new is not None and new.lines != old.lines) or any(one[4] == "sealed" for one in dead)
        struck = struck and not hook and not any(one[4] in ("hung", "timed out", "revoked") for one in dead)
        if label == "Ends._rescue":
            self._check_rescue(old, death)
            self._check_aboard(old, after, death, struck)
        if death is not None and death.killed_by in ("hung", "limit", "revoked") and struck:
            self.fail("a job that was stopped is not struck", f"{flight.job} of {old.ref}: {death.killed_by}")
        if label == "Ends.struck_inside":
            self.culprits[str(old.ref), flight.line, flight.job].add(f"{old.ref}#{flight.line}")
        if not struck or new is None:
            return
        self.stats["strikes"] += 1
        if death is None and label == "Ends._end":
            self.fail("a death with nothing in flight changes nothing", f"{flight.job} of {old.ref}")
        if death is not None:
            if death.worker.draining_stored if label == "Ends._rescue" else death.draining:
                self.fail("a deploy is no strike", f"{flight.job} of {old.ref}")
            if death.counted:
                self.fail("a death is counted once", f"{flight.job} of {old.ref}")
            death.counted = True
        sealed = {one[3] for one in dead if one[4] == "sealed"}
        self.sealed[str(old.ref)] |= sealed
        self._count_for_root(old, before.jobs.get(flight.job), flight.limit)
        key = (old.id, flight.line, flight.job)
        self.line_deaths[key] += 1
        if flight.job in (START, ALARM):
            self._check_object_struck(old, new, flight, self.line_deaths[key])
            return
        count = sum(n for (oid, line, _), n in self.line_deaths.items() if (oid, line) == (old.id, flight.line))
        if count >= flight.limit and not sealed and flight.job in before.jobs:
            self.fail("a loop is sealed at its limit", f"{flight.job} of {old.ref} after {count} deaths")
        if sealed:
            self._check_seal(old, before, flight, sealed, count)
            for one in list(self.line_deaths):
                if one[:2] == (old.id, flight.line):
                    del self.line_deaths[one]
            return
        wait = min(self.config.strike_delay, self.config.strike_delay_max) * 1000
        for job in before.jobs.values():
            if job.id != flight.job and not job.recovery_loop:
                continue
            kept = after.jobs.get(job.id) if after else None
            if kept is None or (kept.not_before_ms or 0) < self.now + wait:
                self.fail("a struck loop is slowed", f"{job.id} of {old.ref}")
            self.held[old.id, job.id] = self.now + round(wait)

    def _count_for_root(self, old: ObjectState, job: Job | None, limit: int) -> None:
        """A loop that pushes a new id of itself each time dies no more often than any other."""
        root = job.payload.get("root") if job is not None and isinstance(job.payload, dict) else None
        if root is None:
            return
        self.root_deaths[str(old.ref), root] += 1
        if self.root_deaths[str(old.ref), root] > limit:
            self.fail("a loop is sealed at its limit", f"{root} of {old.ref} under new ids")

    def _check_object_struck(self, old: ObjectState, new: ObjectState, flight: Any, count: int) -> None:
        """`on_start` or `on_alarm` has died: the object waits, and is paused at the limit."""
        if (new.not_before or 0) < self.now + self.config.strike_delay * 1000:
            self.fail("a struck loop is slowed", f"{flight.job} of {old.ref}")
        if (count >= flight.limit) != (new.paused == SEALED) and old.paused != SEALED:
            self.fail("a loop is sealed at its limit", f"{flight.job} of {old.ref} after {count} deaths")

    def _check_renewal(self, new: ObjectState, args: Any) -> None:
        self.doubted.pop(new.token or "", None)
        running = {(one.object_id, one.task_id, one.pid) for one in args[1]}
        flight = new.in_flight
        if flight is None or (new.id, flight.task_id, new.worker_pid) not in running:
            self.fail("only what runs is renewed", f"{new.ref} by {args[0]}")

    def _check_rescue(self, old: ObjectState, death: Death | None) -> None:
        looked = self.doubted.get(old.token or "")
        if looked is None or self.world.now - looked < self.config.doubt_ms:
            self.fail("a worker is given up after two looks", f"{old.ref}")
        if death is not None:
            return
        worker = next((one for one in self.simulation.workers.values() if one.life.instance == old.worker), None)
        if worker is None or not worker.alive:
            return
        running = any(child.pid == old.worker_pid and child.request is not None for child in worker.children)
        if not running:
            self.fail("no link is left in flight", f"{old.in_flight and old.in_flight.job} of {old.ref}, {worker.name}")
        if not self.blocked_since(worker, self.doubted.get(old.token or "", self.world.now)):
            self.fail("a live worker is not given up", f"{old.ref} runs in {worker.name}")

    def _check_aboard(self, old: ObjectState, after: Thing | None, death: Death | None, struck: bool) -> None:
        """Who is blamed for the loss of a whole worker."""
        flight = old.in_flight
        if death is None or flight is None or not death.whole or flight.job.startswith(HOOK_PREFIX):
            return
        if death.worker.draining_stored or death.instance in self.returned_from_loss:
            return
        aboard = self.aboard[death.instance]
        suspects = [one[:2] for one in aboard if one[2]]
        mine = (old.id, flight.job)
        job = after.jobs.get(flight.job) if after else None
        marked = job is None or job.suspect_on is not None or flight.job in (START, ALARM)
        if suspects and mine not in suspects:
            if struck or not marked:
                self.fail("a suspect is struck for its neighbours", f"{flight.job} of {old.ref}")
        elif not struck:
            self.fail("a death is counted", f"{flight.job} of {old.ref}")
        elif len(aboard) > 1 and not suspects and not marked:
            self.fail("what is lost together is suspected", f"{flight.job} of {old.ref}")

    def blocked_since(self, process: Any, since: int) -> bool:
        """Whether a process could not reach the database at some time from `since` on."""
        until = max(process.stalled_until, process.cut_until, self.simulation.away_until)
        return until >= since and until > 0

    def _check_seal(self, old: ObjectState, before: Thing, flight: Any, sealed: set[str], count: int) -> None:
        self.stats["sealed"] += 1
        if count < flight.limit:
            self.fail("nothing is sealed before its limit", f"{flight.job} of {old.ref} after {count} deaths")
        doomed = {job.id for job in before.jobs.values() if job.line == flight.line or job.recovery_loop}
        doomed.add(flight.job)
        if sealed != doomed & before.jobs.keys():
            self.fail("a seal takes its line and all recovery loops", f"{sorted(sealed)}, not {sorted(doomed)}")
        mine = (str(old.ref), flight.line)
        guilty = {one for key, found in self.culprits.items() if key[:2] == mine for one in found}
        own = f"{old.ref}#{flight.line}"
        if own not in guilty and len(guilty) < flight.limit:
            self.fail("no innocent is sealed", f"{flight.job} of {old.ref}: {sorted(guilty)}")

    def _forgive(self, state: ObjectState | None) -> None:
        if state is None:
            return
        for table in (self.held, self.line_deaths):
            for key in [key for key in table if key[0] == state.id]:
                del table[key]  # type: ignore[attr-defined]
        self.sealed.pop(str(state.ref), None)
        for key in [key for key in self.culprits if key[0] == str(state.ref)]:
            del self.culprits[key]

    # --- nothing vanishes

    def _check_gone(self, label: str, args: Any, before: Thing | None, after: Thing | None, dead: list[Any]) -> None:
        kept = after.jobs if after else {}
        buried = {one[3] for one in dead}
        for job in before.jobs.values() if before else ():
            if job.id in kept:
                if kept[job.id].version != job.version and label in ("Jobs.push_in", "Jobs.push_many_in"):
                    self._let_go(before, job, replaced=True)
                continue
            flight = before.state.in_flight if before else None
            mine = flight is not None and flight.job == job.id and flight.version == job.version
            if label in CLIENTS or job.id in buried:
                self._let_go(before, job)
            elif label == "Runs._finish" and (mine or job.id == ALIVE):
                self._check_completed(args, job)
            elif (label == "Runs._alarm_failed" and job.id == ALIVE) or (
                job.id.startswith(HOOK_PREFIX) and label in STRIKES
            ):
                pass
            else:
                self.fail("no job vanishes", f"{label}: {job.id} v{job.version} of {job.object}")

    def _check_completed(self, args: Any, job: Job) -> None:
        body = self._body_of(args[1], args[0].task_id)
        if job.id in (ALARM, ALIVE) or job.id.startswith(HOOK_PREFIX):
            return
        if body is None or body.end not in ("ok", "fail", "error"):
            self.fail("no job vanishes", f"{job.id} whose body ended with {body and body.end}")

    def _let_go(self, before: Thing | None, job: Job, replaced: bool = False) -> None:
        if before is None or replaced:
            return
        self.held.pop((before.state.id, job.id), None)

    # --- chains

    def _check_sending(self, label: str, old: ObjectState | None, new: ObjectState) -> None:
        """Patience doubles with each sending, and is twice the last wait in the queue."""
        sent = new.dispatch is not None and (old is None or old.dispatch != new.dispatch)
        closed = label == "Claims._claim" and old is not None and old.token is not None and new.token is None
        if closed:
            self.sendings[new.id] = 0
        revived = label == "Claims._claim" and new.token is not None and new.lease_until != (old and old.lease_until)
        over = sent or (old is not None and old.token is not None) or new.sent_count == 0
        if label in CLOSERS and new.token is None and new.sent_count <= 1 and over:
            self.sendings[new.id] = 0
        if label == "Claims._release":
            self.sendings[new.id] = max(0, self.sendings[new.id] - 1)
            until = new.lease_until if new.token is not None else new.sent_until
            if until is None or until > self.now + 1000:
                self.fail("a chain that could not be sent is soon sent again", f"{new.ref}")
        if new.token is not None and old is not None and old.token is None and new.id in self.dispatched:
            self.waits[new.id] = self.world.now - self.dispatched[new.id]
        if label == "Objects.destroy":
            self.sendings[new.id] = 0
        if new.token is not None and new.dispatch is not None:
            self.fail("a chain on its way or an open run, not both", f"{label} {new.ref}")
        if not sent and not revived:
            return
        waits = old is not None and old.dispatch is not None and (old.sent_until or 0) > self.now
        if sent and waits and label not in CLOSERS:
            self.fail("what is on its way is not sent again before its time", f"{label} {new.ref}")
        self.dispatched[new.id] = self.world.now
        self.sendings[new.id] += 1
        self.stats["sendings"] += 1
        doublings = min(self.sendings[new.id] - 1, 20)
        least = max(min(self.config.backup_ms << doublings, self.config.patience_max_ms), 2 * new.queue_wait)
        until = new.lease_until if revived else new.sent_until
        if until is None or until < self.now + least:
            self.fail("patience doubles with each sending", f"{new.ref}: {until} for sending {self.sendings[new.id]}")
        self._check_window(label, new)

    def _check_window(self, label: str, new: ObjectState) -> None:
        if label not in ("Claims._claim", "Jobs.push_in", "Claims.claim_one") or new.token is not None:
            return
        sent = [
            thing.state for thing in self.things.values() if thing.state.dispatch and thing.state.queue == new.queue
        ]
        # Each process counts for itself, and looks again after a second.
        counting = self.simulation.plan.beats + 2
        self.stats["most sent"] = max(self.stats["most sent"], len(sent))
        if (
            len(sent)
            > self.config.dispatch_window * counting + self.simulation.plan.slots * self.simulation.plan.workers
        ):
            self.fail("the dispatch window holds", f"{len(sent)} chains on their way in {new.queue}")

    def _check_punctual(self, label: str, old: ObjectState | None, after: Thing | None) -> None:
        """How long an object whose jobs are due waits for its run, where nothing fails and a process is free."""
        if not self.simulation.plan.bound:
            return
        state = after.state if after else None
        key = state.id if state else old.id if old else 0
        if state is not None and state.token is not None and (old is None or old.token is None):
            began = self.ready.pop(key, None)
            back = self.simulation.broker.back_at
            if began is not None and self.world.now - max(began, back) > self.simulation.plan.bound:
                late = (self.world.now - max(began, back)) / 1000
                self.fail("what is due runs on time", f"{state.ref} is {late:g} s late")
        if after is None or state is None or state.token is not None or state.paused or state.disabled:
            self.ready.pop(key, None)
            return
        due = min((self.effective(state, job) for job in after.jobs.values()), default=None)
        if due is None:
            self.ready.pop(key, None)
        elif due - EPOCH > self.world.now or key not in self.ready:
            self.ready[key] = max(due - EPOCH, self.world.now)
        else:
            self.ready[key] = min(self.ready[key], max(due - EPOCH, self.world.now))

    def _remember_shipment(self, label: str, old: ObjectState | None, after: Thing) -> None:
        state = after.state
        if state.dispatch is not None and (old is None or old.dispatch != state.dispatch):
            self.expected[state.dispatch] = self._due(after)
        if label == "Claims._claim" and state.token is not None and state.in_flight is None:
            self.expected[state.token] = self._due(after)

    def _due(self, thing: Thing) -> tuple[tuple[str, ...], bool]:
        state = thing.state
        live = [job for job in thing.jobs.values() if not state.paused or job.id.startswith(HOOK_PREFIX)]
        due = sorted((job.due_ms, job.id) for job in live if self.effective(state, job) <= self.now)
        ids = [one for _, one in due]
        exclusive = [one for one in ids if thing.jobs[one].exclusive]
        links = [one for one in exclusive or ids if one not in (ALARM, ALIVE)]
        if not links:
            return (ALARM,) if ids else (), bool(ids)
        alone = all(one.startswith(HOOK_PREFIX) for one in links)
        return tuple(links), not alone and len(links) <= self.config.chain_length

    def sent(self, shipment: Shipment) -> None:
        links = tuple(job.id for job in shipment.jobs), shipment.all_due
        wanted = self.expected.get(shipment.token or shipment.dispatch, ((), False))
        if len(wanted[0]) <= self.config.chain_length:
            right = links == wanted
        else:  # which of them come first is a matter of the delays that strikes brought
            length = self.config.chain_length
            order = [wanted[0].index(one) for one in links[0] if one in wanted[0]]
            right = not links[1] and len(order) == len(links[0]) == length and order == sorted(order)
        if not right:
            self.fail("a chain holds what is due, in due order", f"{shipment.ref}: {links}, not {wanted}")
        self.all_due[shipment.dispatch] = shipment.all_due

    def published(self, header: dict[str, Any]) -> None:
        self.stats["messages"] += 1

    def returned(self, label: str, args: Any, result: Any) -> None:
        """A verb has come back to its caller."""
        if label in ("Runs._begin", "Runs.enter", "Runs.attempted"):
            self.contact[self.world.process] = self.world.now
        if label == "Claims._claim":
            self._check_claimed(args, result)
        if label != "Runs._begin" or result.refused is None:
            return
        link, thing = args[0], self.things.get(args[0].object_id)
        self.stats["refused"] += 1
        if link.token is None and thing is not None and thing.state.dispatch == link.dispatch:
            self.fail("a chain that ends quietly is not waited for", f"{thing.state.ref}: {result.refused.value}")

    def _check_claimed(self, args: Any, result: Any) -> None:
        """What was due in that queue and phase is dealt with: none of it is claimed again by the next tick."""
        queue, phase, limit = args
        if result.rows >= limit:
            return
        for thing in self.things.values():
            state = thing.state
            there = (state.queue, state.phase) == (queue, phase) and state.id not in result.lost
            if there and state.wake_at is not None and state.wake_at <= self.now:
                self.fail("a claim moves the alarm on", f"{state.ref}")

    # --- bodies

    def body_begins(self, child: Child, ctx: Any, payload: Any) -> dict[str, Any]:
        header: dict[str, Any] = child.header or {}
        request: Any = child.request
        key = (request.id, child.pid)
        token = self.begun.get(key, "?")
        job, ref = header["job"], header["name"]
        thing = self.things.get(header["object"])
        flight = thing.state.in_flight if thing is not None and thing.state.token == token else None
        if ctx is not None:
            version, line = ctx.job.version, ctx.job.line
        else:
            version, line = (flight.version, flight.line) if flight is not None else (0, job)
        script = payload["s"]
        number = (ref, job, payload.get("n", 0))
        act = script[min(self.calls[number], len(script) - 1)]
        self.calls[number] += 1
        body = Body(
            header["object"], ref, job, version, line, token, request.id, header["position"], child, self.world.now,
            act=act,
        )  # fmt: skip
        self.world.say(f"body of {ref}#{job} v{version} begins, token {token[:6]}: {act}")
        self.stats["bodies"] += 1
        for other in self.active.values():
            if other.ref == ref and other.process is not child:
                self._check_overlap(body, other)
        if version and (body.object_id, job, version) in self.completed:
            self.fail("what is complete does not run again", f"{ref}#{job} v{version}")
        self._check_again(body)
        until = self.held.get((body.object_id, job), 0)
        fenced = token in self.ended
        if until > self.now and not fenced:
            self.fail("a struck job waits", f"{ref}#{job} {(until - self.now) / 1000:g} s too early")
        retried = self._body_of(token, request.id)
        if retried is None:
            if self.positions.get(token, -1) >= body.position:
                self.fail("links of a run go in order", f"{ref}#{job} at {body.position}")
            self.positions[token] = body.position
            self.starts[body.object_id, job, version] += 1
        self.bodies.append(body)
        self.active[child.pid] = body
        return dict(act)

    def _check_again(self, body: Body) -> None:
        for other in self.bodies:
            if (other.object_id, other.job, other.version) != (body.object_id, body.job, body.version):
                continue
            if (other.token, other.task_id) == (body.token, body.task_id) or not body.version:
                continue
            reason = other.end == "died" or self.ended.get(other.token) in STRIKES
            if not reason:
                told = f"{body.ref}#{body.job} v{body.version}, whose earlier run ended with {other.end!r}"
                self.fail("a job that has run is not run again", told)

    def _check_overlap(self, body: Body, other: Body) -> None:
        ended = self.ended.get(other.token)
        if self.ended.get(body.token) in FENCES:
            # Its own run was given up in the moment between the last look and the body.
            looked = self.contact.get(body.process, 0)
            if max(looked, body.process.stalled_until) + 20 >= self.world.now:
                return
        if ended not in FENCES:
            told = f"{body.ref}#{body.job} and #{other.job}, whose run was ended by {ended}"
            self.fail("jobs of an object never overlap", told)
        self.stats["fenced overlaps"] += 1

    def body_ends(self, child: Any, end: str) -> None:
        body = self.active.pop(child.pid, None)
        if body is None:
            return
        body.ended, body.end = self.world.now, end
        self.world.say(f"body of {body.ref}#{body.job} ends: {end}")

    def alarm_begins(self, child: Any, ref: ObjectRef, info: Any) -> None:
        header = child.header
        token = self.begun.get((child.request.id, child.pid), "?")
        body = Body(
            header["object"], str(ref), ALARM, 0, ALARM, token, child.request.id, header["position"], child,
            self.world.now,
        )  # fmt: skip
        for other in self.active.values():
            if other.ref == body.ref and other.process is not child:
                self._check_overlap(body, other)
        if not self.all_due.get(header["dispatch"]):
            self.fail("on_alarm comes after all that was due", f"{ref}")
        self.stats["alarms"] += 1
        self.active[child.pid] = body

    def alarm_ends(self, child: Any) -> None:
        self.active.pop(child.pid, None)

    def hooked(self, ref: ObjectRef, which: str) -> int:
        key = (str(ref), which)
        self.hook_calls[key] += 1
        self.world.say(f"{which} of {ref}")
        return self.hook_calls[key] - 1

    # --- deaths

    def child_died(self, child: Any, whole: bool = False, culprit: str | None = None) -> None:
        body = self.active.pop(child.pid, None)
        if body is not None and body.ended is None:
            body.end = "died"
        guilty = culprit
        if body is not None and guilty is None:
            dies = body.act.get("end") in ("die",)
            guilty = f"{body.ref}#{body.line}" if dies else f"kill {self.world.now} {child.name}"
        for thing in self.things.values():
            state = thing.state
            if (state.worker, state.worker_pid) != (child.life.instance, child.pid) or state.in_flight is None:
                continue
            flight, token = state.in_flight, state.token or ""
            draining = child.life.draining
            self.deaths[token] = Death(
                token, state.id, flight.job, flight.line, guilty or "?", whole, draining, self.world.now,
                child.life.instance, child.worker, getattr(child, "killed_by", None),
            )  # fmt: skip
            self.culprits[str(state.ref), flight.line, flight.job].add(guilty or f"kill {self.world.now} {child.name}")
            self.stats["deaths"] += 1

    def worker_died(self, worker: WorkerProcess) -> None:
        if lost_on_record(worker.life.instance):  # given up once, and dead before it was heard of again
            self.returned_from_loss.add(worker.life.instance)
        self.aboard[worker.life.instance] = [
            (thing.state.id, thing.state.in_flight.job, thing.state.in_flight.suspect)
            for thing in self.things.values()
            if thing.state.worker == worker.life.instance and thing.state.in_flight is not None
        ]
        guilty = None
        for child in worker.children:
            body = self.active.get(child.pid)
            if body is not None and body.act.get("end") == "lost" and body.ended is None:
                guilty = f"{body.ref}#{body.line}"
        for child in worker.children:
            self.child_died(child, True, guilty or f"kill {self.world.now} {worker.name}")

    def touched(self, what: str, which: str) -> None:
        self.faulted.add(which)

    # --- the end

    def is_quiet(self) -> bool:
        """Nothing is due, nothing runs, nothing is on its way."""
        return all(self._rests(thing) for thing in self.things.values()) and not self.simulation.broker.on_its_way

    def _rests(self, thing: Thing) -> bool:
        state = thing.state
        if state.token is not None or state.dispatch is not None:
            return False
        return state.wake_at is None or state.wake_at > self.now

    def at_horizon(self) -> None:
        """What was promised for the time in which faults were still possible."""
        for queue in self.simulation.plan.served:
            for thing in self.things.values():
                if not self._rests(thing) and thing.state.queue == queue:
                    self.fail("a queue that is served is not held up by others", f"{thing.state.ref}")

    def at_end(self) -> None:
        late = [thing for thing in self.things.values() if not self._rests(thing)]
        for thing in late:
            told = f"{thing.state.ref} {thing.state.phase.name} with {sorted(thing.jobs)}"
            self.fail("once faults stop, what is due is run", told)
        for death in self.deaths.values():
            drained = death.draining or death.worker.draining_stored
            uncounted = not (death.counted or drained or death.killed_by or death.job.startswith(HOOK_PREFIX))
            if uncounted and not death.whole and self.ended.get(death.token) in FENCES:
                self.fail("a death is counted", f"{death.job} of object {death.object_id}")
        for thing in self.things.values():
            state = thing.state
            runnable = thing.jobs and not state.paused and not state.disabled
            if runnable and state.wake_at is None:
                self.fail("once faults stop, what is due is run", f"{state.ref} has jobs and no alarm")
