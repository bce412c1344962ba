"""Checks of deaths and of the memory breaker: what is struck, slowed, suspected, sealed and cleared."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from celery_lifecycle.model import ALARM, HOOK_PREFIX, SEALED, START, Job, ObjectState
from celery_lifecycle.store.lines import is_own_object
from tests.simulation.checks.facts import Death, Facts, Thing
from tests.simulation.world.database import lost_on_record

if TYPE_CHECKING:
    from tests.simulation.world.processes import WorkerProcess


def scope_of(state: ObjectState, task: str, job_id: str) -> Any:
    """Over what the deaths of a line are counted: its object, or all objects where each job of a task has its own."""
    return task if is_own_object(state.ref, task, job_id) else state.id


class BreakerChecks:
    """Deaths as they were, against what is made of them."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.held: dict[tuple[int, str], int] = {}
        """Until when a struck job must wait."""
        self.line_deaths: Counter[Any] = Counter()
        self.job_deaths: Counter[Any] = Counter()
        self.root_deaths: Counter[Any] = Counter()
        self.sealed: dict[str, set[str]] = defaultdict(set)
        self.culprits: dict[Any, set[str]] = defaultdict(set)
        self.doubted: dict[str, int] = {}
        self.aboard: dict[str, list[tuple[int, str, bool]]] = {}
        self.given_up: set[str] = set()
        """Worker instances that were taken for lost, and have not been heard of since."""
        self.returned_from_loss: set[str] = set()

    def check_end(self, label: str, before: Thing | None, after: Thing | None, dead: list[Any]) -> None:
        old, new = before.state if before else None, after.state if after else None
        if old is None or before is None or old.token is None or (new is not None and new.token == old.token):
            return
        if old.in_flight is None:
            self.facts.fail("only what is in flight is ended", f"{label} {old.ref}")
            return
        flight, token = old.in_flight, old.token
        death = self.facts.deaths.get(token)
        hook = flight.job.startswith(HOOK_PREFIX)
        struck = (new is not None and new.lines != old.lines) or any(one[4] == "sealed" for one in dead)
        struck = struck and not hook and not any(one[4] in ("hung", "timed out", "revoked") for one in dead)
        if label == "Ends._rescue":
            self.given_up.add(old.worker or "")
            self._check_rescue(old, death)
            self._check_aboard(old, after, death, struck)
        told = label == "Ends._end"  # or its parent could not tell the database why it died
        if death is not None and told and death.killed_by in ("hung", "limit", "revoked") and struck:
            self.facts.fail("a job that was stopped is not struck", f"{flight.job} of {old.ref}: {death.killed_by}")
        if label == "Ends.struck_inside":
            self.culprits[str(old.ref), flight.line, flight.job].add(f"{old.ref}#{flight.line}")
        if not struck or new is None:
            return
        if label == "Ends._rescue" and death is None:  # its worker lived, and could not say so
            self.culprits[str(old.ref), flight.line, flight.job].add(f"given up {self.facts.world.now}")
        self.facts.stats["strikes"] += 1
        if death is None and label == "Ends._end":
            self.facts.fail("a death with nothing in flight changes nothing", f"{flight.job} of {old.ref}")
        if death is not None:
            if death.worker.draining_stored if label == "Ends._rescue" else death.draining:
                self.facts.fail("a deploy is no strike", f"{flight.job} of {old.ref}")
            if death.counted:
                self.facts.fail("a death is counted once", f"{flight.job} of {old.ref}")
            death.counted = True
        self.count_strike(label, before, after, flight, dead)

    def count_strike(self, label: str, before: Thing, after: Thing | None, flight: Any, dead: list[Any]) -> None:
        """What a strike must come to, of whatever has died."""
        old, new = before.state, after.state if after else None
        sealed = {one[3] for one in dead if one[4] == "sealed"}
        self.sealed[str(old.ref)] |= sealed
        self._count_for_root(old, before.jobs.get(flight.job), flight.limit)
        scope = scope_of(old, flight.task, flight.job)
        key = (scope, flight.line, flight.job)
        self.line_deaths[key] += 1
        if flight.job in (START, ALARM):
            if new is not None:
                self._check_object_struck(label, old, new, flight, self.line_deaths[key])
            return
        self.job_deaths[old.id, flight.job] += 1
        count = sum(n for (oid, line, _), n in self.line_deaths.items() if (oid, line) == (scope, flight.line))
        count = max(count, self.job_deaths[old.id, flight.job])
        if count >= flight.limit and not sealed and flight.job in before.jobs:
            self.facts.fail("a loop is sealed at its limit", f"{flight.job} of {old.ref} after {count} deaths")
        if sealed:
            self._check_seal(old, before, flight, sealed, count)
            for one in list(self.line_deaths):
                if one[:2] == (scope, flight.line):
                    del self.line_deaths[one]
            for job_id in sealed:
                self.job_deaths.pop((old.id, job_id), None)
            return
        for job in before.jobs.values():
            if job.id != flight.job and not job.recovery_loop:
                continue
            kept = after.jobs.get(job.id) if after else None
            until = kept.not_before_ms if kept is not None else None
            self._check_slowed(f"{job.id} of {old.ref}", label, count, job.not_before_ms, until)
            self.held[old.id, job.id] = self.facts.now + self.facts.times.strike(count)

    def _check_slowed(self, told: str, label: str, count: int, before: int | None, until: int | None) -> None:
        """It waits as long as its deaths say: up to three times that after the loss of a whole worker, or as it did anyway."""
        now, times = self.facts.now, self.facts.times
        least = now + times.strike(count)
        most = max(before or 0, now + times.strike(count, 3 if label in ("Ends._rescue", "Holds._lost") else 1))
        if until is None or not least <= until <= most:
            seconds = "at all" if until is None else f"for {(until - now) / 1000:g} s"
            self.facts.fail("a struck loop is slowed", f"{told} after {count} deaths, {seconds}")

    def _count_for_root(self, old: ObjectState, job: Job | None, limit: int) -> None:
        """A loop that pushes a new id of itself each time dies no more often than any other."""
        root = job.payload.get("root") if job is not None and isinstance(job.payload, dict) else None
        if root is None:
            return
        self.root_deaths[str(old.ref), root] += 1
        if self.root_deaths[str(old.ref), root] > limit:
            self.facts.fail("a loop is sealed at its limit", f"{root} of {old.ref} under new ids")

    def _check_object_struck(self, label: str, old: ObjectState, new: ObjectState, flight: Any, count: int) -> None:
        """`on_start` or `on_alarm` has died: the object waits, and is paused at the limit."""
        if not flight.final:
            self._check_slowed(f"{flight.job} of {old.ref}", label, count, old.not_before, new.not_before)
        if (count >= flight.limit) != (new.paused == SEALED) and old.paused != SEALED:
            self.facts.fail("a loop is sealed at its limit", f"{flight.job} of {old.ref} after {count} deaths")

    def heard_of(self, instance: str) -> None:
        """A worker instance has written its heartbeat: who was aboard when it was taken for lost says nothing any more."""
        self.given_up.discard(instance)
        if lost_on_record(instance):
            self.facts.fail("who is heard of is not lost", instance)

    def check_marks(self, label: str, after: Thing) -> None:
        """A suspect takes its worker's one place for as long as it runs there."""
        state = after.state
        for job in after.jobs.values():
            if job.suspect_on is None or job.suspect_on.startswith("?"):
                continue
            runs = state.in_flight is not None and (state.in_flight.marked, state.worker) == (job.id, job.suspect_on)
            if not runs:
                self.facts.fail("a suspect that does not run holds no place", f"{label}: {job.id} of {state.ref}")

    def check_renewal(self, new: ObjectState, args: Any) -> None:
        self.doubted.pop(new.token or "", None)
        running = {(one.object_id, one.task_id, one.pid) for one in args[1]}
        flight = new.in_flight
        mine = flight is not None and (new.id, flight.task_id, new.worker_pid) in running
        if not mine or new.worker != args[0]:
            self.facts.fail("only what runs is renewed", f"{new.ref} by {args[0]}")

    def _check_rescue(self, old: ObjectState, death: Death | None) -> None:
        looked = self.doubted.get(old.token or "")
        if looked is None or self.facts.world.now - looked < self.facts.config.doubt_ms:
            self.facts.fail("a worker is given up after two looks", f"{old.ref}")
        if death is not None:
            return
        worker = next((one for one in self.facts.simulation.workers.values() if one.life.instance == old.worker), None)
        if worker is None or not worker.alive:
            return
        running = any(child.pid == old.worker_pid and child.request is not None for child in worker.children)
        if not running:
            self.facts.fail(
                "no link is left in flight", f"{old.in_flight and old.in_flight.job} of {old.ref}, {worker.name}"
            )
        if self.facts.simulation.holds.get(old.id, 0) >= looked:
            return
        if not self.blocked_since(worker, self.doubted.get(old.token or "", self.facts.world.now)):
            self.facts.fail("a live worker is not given up", f"{old.ref} runs in {worker.name}")

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
                self.facts.fail("a suspect is struck for its neighbours", f"{flight.job} of {old.ref}")
        elif not struck:
            self.facts.fail("a death is counted", f"{flight.job} of {old.ref}")
        elif len(aboard) > 1 and not suspects and not marked:
            self.facts.fail("what is lost together is suspected", f"{flight.job} of {old.ref}")

    def blocked_since(self, process: Any, since: int) -> bool:
        """Whether a process could not reach the database at some time from `since` on."""
        until = max(process.stalled_until, process.cut_until, self.facts.simulation.away_until)
        return until >= since and until > 0

    def _check_seal(self, old: ObjectState, before: Thing, flight: Any, sealed: set[str], count: int) -> None:
        self.facts.stats["sealed"] += 1
        alone = scope_of(old, flight.task, flight.job) == old.id
        # What was under way as its line was sealed may die once more, and remembers its own deaths.
        if count < flight.limit and (alone or flight.line not in self.facts.sealed_lines):
            self.facts.fail("nothing is sealed before its limit", f"{flight.job} of {old.ref} after {count} deaths")
        doomed = {job.id for job in before.jobs.values() if job.line == flight.line or job.recovery_loop}
        doomed.add(flight.job)
        if sealed != doomed & before.jobs.keys():
            self.facts.fail("a seal takes its line and all recovery loops", f"{sorted(sealed)}, not {sorted(doomed)}")
        mine = (str(old.ref), flight.line)
        guilty = {
            one
            for key, found in self.culprits.items()
            if (key[:2] == mine if alone else key[1] == flight.line)
            for one in found
        }
        own = f"{old.ref}#{flight.line}"
        if not alone:
            guilty = {own if one.rpartition("#")[2] == flight.line else one for one in guilty}
        if own not in guilty and len(guilty) < flight.limit:
            self.facts.fail("no innocent is sealed", f"{flight.job} of {old.ref}: {sorted(guilty)}")

    def check_sealed(self, draft: Any, pusher: Any, after: Thing) -> None:
        """What was sealed is brought back from outside only."""
        known = self.sealed[str(draft.ref)]
        if pusher is None:
            known.discard(draft.id)
        elif draft.id in known and draft.id in after.jobs:
            self.facts.fail("what was sealed stays away", f"{draft.id} of {after.state.ref}")

    def acquit(self, old: ObjectState, flight: Any) -> None:
        """A clean end clears the job's own strikes."""
        self.held.pop((old.id, flight.job), None)
        self.job_deaths.pop((old.id, flight.job), None)
        scope = scope_of(old, flight.task, flight.job)
        self.line_deaths.pop((scope, flight.line, flight.job), None)
        self.culprits.pop((str(old.ref), flight.line, flight.job), None)

    def let_go(self, object_id: int, job_id: str) -> None:
        """A job that is gone leaves its deaths to its line."""
        self.held.pop((object_id, job_id), None)
        self.job_deaths.pop((object_id, job_id), None)

    def forgive(self, state: ObjectState | None) -> None:
        if state is None:
            return
        for table in (self.held, self.line_deaths, self.job_deaths):
            for key in [key for key in table if key[0] == state.id]:
                del table[key]  # type: ignore[attr-defined]
        self.sealed.pop(str(state.ref), None)
        for key in [key for key in self.culprits if key[0] == str(state.ref)]:
            del self.culprits[key]

    def child_died(self, child: Any, whole: bool = False, culprit: str | None = None) -> None:
        body = self.facts.active.pop(child, None)
        if body is not None and body.ended is None:
            body.end = "died"
        guilty = culprit
        if body is not None and guilty is None:
            dies = body.act.get("end") in ("die",)
            guilty = f"{body.ref}#{body.line}" if dies else f"kill {self.facts.world.now} {child.name}"
        for thing in self.facts.things.values():
            state = thing.state
            if (state.worker, state.worker_pid) != (child.life.instance, child.pid) or state.in_flight is None:
                continue
            flight, token = state.in_flight, state.token or ""
            draining = child.life.draining
            self.facts.deaths[token] = Death(
                token, state.id, flight.job, flight.line, guilty or "?", whole, draining, self.facts.world.now,
                child.life.instance, child.worker, getattr(child, "killed_by", None),
            )  # fmt: skip
            self.culprits[str(state.ref), flight.line, flight.job].add(
                guilty or f"kill {self.facts.world.now} {child.name}"
            )
            self.facts.stats["deaths"] += 1

    def worker_died(self, worker: WorkerProcess) -> None:
        if worker.life.instance in self.given_up:  # dead before it was heard of again
            self.returned_from_loss.add(worker.life.instance)
        self.aboard[worker.life.instance] = [
            (thing.state.id, thing.state.in_flight.job, thing.state.in_flight.suspect)
            for thing in self.facts.things.values()
            if thing.state.worker == worker.life.instance and thing.state.in_flight is not None
        ]
        guilty = None
        for child in worker.children:
            body = self.facts.active.get(child)
            if body is not None and body.act.get("end") == "lost" and body.ended is None:
                guilty = f"{body.ref}#{body.line}"
        for child in worker.children:
            self.child_died(child, True, guilty or f"kill {self.facts.world.now} {worker.name}")
