"""All objects, dead jobs, holds and workers of the model, and what happens to more than one row at once."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from typing import Any

from tests.property.store_model.breaker import Struck
from tests.property.store_model.model import ALARM, ALIVE, SUSPECT_DELAY, UNKNOWN_GRACE, Flight, Job, Thing
from tests.property.store_model.plan import Plan, Woken

RETENTION = 7200_000
DAY = 86_400_000


@dataclass
class Dead:
    """A dead job; `key` is told by the database, `died` and `dropped` may be brought up to date."""

    name: str
    job: Job
    reason: str
    died: int
    key: int | None = None
    dropped: int = 0


@dataclass
class Hold:
    name: str
    job: str | None
    expires: int
    flight: Flight | None
    worker: str | None
    wakes: bool


@dataclass
class Lost:
    """Who was aboard a lost worker, as its first rescue found it."""

    count: int
    suspect: tuple[int, str] | None
    until: int


@dataclass(frozen=True)
class Draft:
    """A job as a caller wants it."""

    id: str | None
    task: str = "cart.remind"
    owner: str = "host"
    queue: str = "celery"
    delay: int = 0
    payload: str = "null"
    exclusive: bool = False
    recovery: bool = False
    most_attempts: int = 3
    expires: int | None = None
    plan: Plan | None = None
    keep: bool = False
    alike: bool = False


@dataclass(frozen=True)
class Inside:
    """The running job that pushes."""

    name: str
    task: str
    line: str


class Refused(Exception):
    """The store must refuse this; the argument is the name of its error."""


@dataclass
class World:
    now: int
    things: dict[str, Thing] = field(default_factory=dict)
    dead: list[Dead] = field(default_factory=list)
    holds: dict[tuple[str, str], Hold] = field(default_factory=dict)
    lost: dict[str, Lost] = field(default_factory=dict)
    draining: dict[str, bool] = field(default_factory=dict)
    heard: dict[str, int] = field(default_factory=dict)

    def saved(self, thing: Thing) -> None:
        """The row is written with its alarm: gone if it has nothing to remember."""
        thing.settle(self.now)
        thing.seen = None
        if thing.is_forgettable:
            self.things.pop(thing.name, None)
        else:
            self.things[thing.name] = thing

    def copied(self) -> World:
        return copy.deepcopy(self)

    # --- dead jobs

    def bury(self, thing: Thing, job: Job, reason: str, dropped: int = 0) -> None:
        self.dead.append(Dead(thing.name, replace(job), reason, self.now, dropped=dropped))

    def misfired(self, thing: Thing, job: Job, dropped: tuple[int, int, int]) -> None:
        """One record per schedule, which counts up."""
        count, first, _ = dropped
        found = [one for one in self.dead if (one.name, one.job.id, one.reason) == (thing.name, job.id, "misfired")]
        if found:
            found[-1].dropped += count
            found[-1].died = self.now
            return
        assert job.plan is not None
        self.bury(thing, replace(job, plan=job.plan.occurrence(first)), "misfired", count)

    def seals(self, name: str) -> list[Dead]:
        """In the order in which the store wrote them: those of one strike may come in any."""
        found = [one for one in self.dead if (one.name, one.reason) == (name, "sealed")]
        return sorted(found, key=lambda one: one.key or 0)

    def lift_all(self, name: str) -> None:
        for one in self.seals(name):
            one.reason = "lifted"

    def give_up(self, thing: Thing, job: Job, reason: str) -> bool:
        """A job that is not tried again; of a recurring one this run only. Whether it goes on."""
        after = job.plan.after(self.now) if job.plan else None
        if after is None:
            self.bury(thing, job, reason)
            del thing.jobs[job.id]
            return False
        assert job.plan is not None
        self.bury(thing, replace(job, plan=job.plan.occurrence()), reason)
        job.unmark()
        job.plan, job.due, job.attempt, job.unknown_since = after, after.nominal, 0, None
        job.version = thing.next_version()
        return True

    def not_run(self, thing: Thing, job: Job, reason: str) -> bool:
        """A link that no worker runs: its job is put back with a doubling delay, or dead. Whether it is dead."""
        if reason not in ("unknown task", "unknown owner"):
            self.give_up(thing, job, reason)
            return True
        since = self.now if job.unknown_since is None else job.unknown_since
        if self.now - since >= UNKNOWN_GRACE:
            self.bury(thing, job, reason)
            del thing.jobs[job.id]
            return True
        job.unknown_since = since
        job.due = self.now + min(max(1000, self.now - since), 60_000)
        job.unmark()
        return False

    def skipped(self, thing: Thing, job_id: str, reason: str) -> bool:
        """All that a dropped link stood for is put back or dead. Whether something died."""
        named = [job_id, ALIVE] if job_id == ALARM else [job_id]
        jobs = [thing.jobs[one] for one in named if one in thing.jobs]
        dead = [self.not_run(thing, job, reason) for job in jobs]
        return any(dead)

    # --- suspects

    def boards(self, thing: Thing, job: Job, instance: str) -> bool:
        """At most one suspect runs per worker instance: a further one comes back a little later."""
        if job.suspect is None or job.suspect == instance:
            return True
        if any(other.suspect == instance for one in self.things.values() for other in one.jobs.values()):
            job.not_before = self.now + SUSPECT_DELAY
            return False
        job.suspect = instance
        return True

    def aboard(self, instance: str) -> dict[tuple[int, str], Flight]:
        """What runs in a worker instance, as far as the table knows."""
        return {
            (thing.id or 0, thing.run.flight.job): thing.run.flight
            for thing in self.things.values()
            if thing.run is not None and thing.run.flight is not None and thing.run.flight.worker == instance
        }

    def buried(self, thing: Thing, struck: Struck | None) -> None:
        for job in struck.doomed if struck is not None else ():
            self.bury(thing, job, "sealed")

    # --- pushes

    def push(self, name: str, draft: Draft, inside: Inside | None, new_id: str) -> tuple[Job, str]:
        """The job that comes back, and what it is: `new`, `kept` or `sealed`."""
        thing = self.things.get(name) or Thing(name)
        job_id = draft.id or new_id
        existing = thing.jobs.get(job_id)
        if thing.disabled:
            raise Refused("ObjectDisabled")
        if existing is not None and existing.owner != draft.owner:
            raise Refused("OwnerConflict")
        thing.look(job_id)
        kept = self._kept(thing, draft, existing) if draft.keep else None
        if kept is not None:
            self._renew(kept, draft)
            self.saved(thing)
            return kept, "kept"
        same = [one for one in self.seals(name) if self._is_sealed(one, draft)]
        if same and thing.sealed and inside is not None:
            return same[-1].job, "sealed"
        for one in same:
            one.reason = "lifted"
        if thing.sealed:
            thing.sealed = bool(self.seals(name))
        follows = inside is not None and inside.task == draft.task and inside.name == name
        plan = draft.plan.saved(self.now) if draft.plan else None
        thing.jobs[job_id] = Job(
            job_id, draft.task, draft.owner, draft.queue, plan.nominal if plan else self.now + draft.delay,
            thing.next_version(), inside.line if follows and inside else job_id, self.now, draft.payload, draft.exclusive,
            draft.recovery, draft.most_attempts, draft.expires, plan,
            strikes=existing.strikes if existing else 0, not_before=existing.not_before if existing else None,
            suspect=existing.suspect if existing else None,
        )  # fmt: skip
        self.things[name] = thing
        return thing.jobs[job_id], "new"

    def _kept(self, thing: Thing, draft: Draft, existing: Job | None) -> Job | None:
        if draft.plan is None:
            return existing

        def is_same(job: Job) -> bool:
            mine = (job.owner, job.task, job.payload) == (draft.owner, draft.task, draft.payload)
            return mine and job.plan is not None and draft.plan is not None and job.plan.is_same(draft.plan)

        if existing is not None and is_same(existing):
            return existing
        same = [job for job in thing.jobs.values() if is_same(job)] if draft.alike else []
        return min(same, key=lambda job: (job.created, job.id), default=None)

    def _renew(self, job: Job, draft: Draft) -> None:
        """A schedule that stands takes on the policy of the call that found it."""
        if job.plan is None or draft.plan is None:
            return
        job.plan = replace(job.plan, misfire=draft.plan.misfire)
        job.queue, job.exclusive, job.recovery = draft.queue, draft.exclusive, draft.recovery
        job.most_attempts, job.expires = draft.most_attempts, draft.expires

    @staticmethod
    def _is_sealed(dead: Dead, draft: Draft) -> bool:
        if draft.id is not None and dead.job.id == draft.id:
            return True
        alike = (dead.job.owner, dead.job.task, dead.job.payload) == (draft.owner, draft.task, draft.payload)
        return alike and (draft.id is None or draft.keep)

    # --- schedules

    def woken(self, thing: Thing, job: Job, found: Woken) -> None:
        """A schedule whose occurrence is not run goes on with its next one, or is over."""
        if found.over:
            assert found.dropped is not None
            self.bury(thing, job, "misfired", found.dropped[0])
            del thing.jobs[job.id]
            return
        if found.dropped is not None:
            self.misfired(thing, job, found.dropped)
        job.plan, job.due, job.attempt = found.plan, found.plan.nominal, 0
        job.unknown_since, job.version = None, thing.next_version()


def lines_in(text: str | None) -> dict[str, Any]:
    """Strikes as a row holds them, in the model's words."""
    return {line: {"deaths": known["n"], "at": known["t"]} for line, known in json.loads(text or "{}").items()}
