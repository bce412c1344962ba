"""Checks of what ends a job otherwise than by its outcome: time limits, expiry, strangers; and of what brings it back."""

from __future__ import annotations

import json
from typing import Any

from celery_lifecycle.model import ALARM, HOOK_PREFIX, START, Job, ObjectRef
from celery_lifecycle.store.ends import End
from tests.simulation.checks.facts import Body, Facts, Thing
from tests.simulation.checks.lines import LineChecks
from tests.simulation.world.database import PREFIX, shared

DEAD = f"SELECT id, kind, name, job_id, reason, job FROM {PREFIX}dead_jobs"
STRANGERS = ("unknown task", "unknown owner")
GONE = "gone"
"""An owner that no process has installed."""


class DeadChecks:
    """Attempts that are used up, jobs that are dead, and dead jobs that run again."""

    def __init__(self, facts: Facts, lines: LineChecks) -> None:
        self.facts = facts
        self.lines = lines
        self.dead: dict[int, tuple[Any, ...]] = {}
        self.unknown: dict[tuple[int, str, int], int] = {}
        """When a job was first found to be a stranger's."""
        self.replayed: list[Job] = []

    def changed(self, label: str, args: Any, before: Thing | None, after: Thing | None, dead: list[Any]) -> None:
        if label == "DeadJobs.replay":
            self._check_replayed(before, after)
        if before is None:
            return
        if label == "Runs._begin":
            self._check_begun(before, after, dead)
        elif label == "Ends._end" and args[2] in (End.TIMED_OUT, End.HUNG, End.REVOKED):
            self._check_stopped(args[2], before, after, dead)
        elif label in ("Ends._skip", "Ends.unknown"):
            self._check_stranger(label, before, after, dead)
        elif label == "Runs._finish":
            self._check_retried(args, before, after)

    # --- what ends

    def _check_begun(self, before: Thing, after: Thing | None, dead: list[Any]) -> None:
        flight = after.state.in_flight if after else None
        job = before.jobs.get(flight.job) if flight is not None and before.state.in_flight is None else None
        expires = job.options.get("expires_ms") if job is not None else None
        if expires is not None and expires <= self.facts.now:
            self.facts.fail("an expired job never begins", f"{before.state.ref}")
        for one in dead:
            expires = json.loads(json.loads(one[5])["options_json"] or "{}").get("expires_ms")
            if one[4] == "expired" and (expires is None or expires > self.facts.now):
                self.facts.fail("only what has expired is taken out for it", f"{one[3]} of {before.state.ref}")

    def _check_stopped(self, end: End, before: Thing, after: Thing | None, dead: list[Any]) -> None:
        flight = before.state.in_flight
        job = before.jobs.get(flight.job) if flight is not None else None
        if flight is None or job is None or job.id in (START, ALARM) or job.id.startswith(HOOK_PREFIX):
            return
        kept = after.jobs.get(job.id) if after else None
        buried = [one[4] for one in dead if one[3] == job.id]
        self.facts.stats[f"stopped: {end.value}"] += 1
        if job.version != flight.version:
            if kept is None or (kept.version, kept.attempt) != (job.version, job.attempt):
                self.facts.fail("a newer change of a job wins", f"{job.id} of {before.state.ref}: {end.value}")
            return
        is_last = end is End.REVOKED or job.attempt + 1 >= job.retry.max_attempts
        wanted = [end.value] if is_last else []
        used = job.schedule_json is not None or (kept is None if is_last else kept and kept.attempt == job.attempt + 1)
        if buried != wanted or not used:
            told = f"{job.id} of {before.state.ref} in attempt {job.attempt + 1}: {buried}, {kept}"
            self.facts.fail("being stopped uses up an attempt", told)

    def _check_stranger(self, label: str, before: Thing, after: Thing | None, dead: list[Any]) -> None:
        state, process = before.state, self.facts.world.process
        if label == "Ends.unknown":
            child: Any = process
            token = self.facts.begun.get((child.request.id, child.runner.worker))
            if token != state.token or state.in_flight is None or state.in_flight.task_id != child.request.id:
                self.facts.fail("a refused writer changes nothing", f"{child.request.id} of {state.ref}: unknown owner")
        buried = {one[3] for one in dead if one[4] in STRANGERS}
        for job in before.jobs.values():
            kept = after.jobs.get(job.id) if after else None
            key = (state.id, job.id, job.version)
            waited = self.facts.now - self.unknown.get(key, self.facts.now)
            if job.id in buried:
                self.facts.stats["strangers dead"] += 1
                if waited < self.facts.config.unknown_grace_ms:
                    self.facts.fail("a stranger has its grace", f"{job.id} of {state.ref} after {waited / 1000:g} s")
            elif kept is not None and kept.due_ms != job.due_ms:
                self.unknown.setdefault(key, self.facts.now)
                wait = kept.due_ms - self.facts.now
                if waited >= self.facts.config.unknown_grace_ms or not 1000 <= wait <= 60_000:
                    told = f"{job.id} of {state.ref} after {waited / 1000:g} s: {wait / 1000:g} s more"
                    self.facts.fail("a stranger has its grace, and no more", told)
                if (kept.version, kept.attempt, kept.strikes) != (job.version, job.attempt, job.strikes):
                    self.facts.fail("nothing of a stranger is used up", f"{job.id} of {state.ref}")

    def body_begins(self, body: Body, owner: str) -> None:
        if owner == GONE:
            self.facts.fail("what nobody here owns is not run", f"{body.ref}#{body.job}")

    def _check_retried(self, args: Any, before: Thing, after: Thing | None) -> None:
        """What asks to be tried again is, when it wants to be, with its attempts."""
        flight, body = before.state.in_flight, self.facts.body_of(args[1], args[0].task_id)
        if flight is None or body is None or body.end != "retry" or flight.job != body.job:
            return
        job, kept = before.jobs.get(flight.job), after.jobs.get(flight.job) if after else None
        self.facts.stats["retried"] += 1
        if job is None or job.version != flight.version:
            return
        due = self.facts.now + round(body.act["delay"] * 1000)
        if kept is None or (kept.due_ms, kept.attempt) != (due, body.attempt):
            self.facts.fail("a retry comes when it was asked for", f"{flight.job} of {before.state.ref}: {kept}")

    # --- what comes back

    def _check_replayed(self, before: Thing | None, after: Thing | None) -> None:
        old = before.jobs if before else {}
        made = [job for job in after.jobs.values() if job != old.get(job.id)] if after else []
        self.replayed += made
        if after is not None and made and after.state.disabled:
            self.facts.fail("nothing of a disabled object is replayed", f"{after.state.ref}")
        for job in made:
            if job.id in old and job.id != ALARM:
                self.facts.fail("a replay replaces no pending job", f"{job.id} of {job.object}")
        missing = [job_id for job_id in old if after is None or job_id not in after.jobs]
        if missing:
            self.facts.fail("a replay replaces no pending job", f"{missing}")

    def committed(self, label: str, args: Any) -> None:
        if label not in ("DeadJobs.replay", "DeadJobs.purge"):
            return
        self._learn()
        there = {row[0] for row in shared().connection.execute(DEAD)}
        gone = [self.dead.pop(key) for key in sorted(self.dead.keys() - there)]
        made, self.replayed = self.replayed, []
        if label == "DeadJobs.purge":
            for row in gone:
                if row[4] == "sealed":
                    self.lines.begins_anew(ObjectRef(row[1], row[2]), json.loads(row[5]))
            return
        if len(gone) != len(made) or len(made) > 1:
            self.facts.fail("a dead job is replayed once", f"{len(made)} of {len(gone)}")
        for job, row in zip(made, gone, strict=True):
            self._check_as_new(job, row)

    def _check_as_new(self, job: Job, row: tuple[Any, ...]) -> None:
        was = json.loads(row[5])
        self.facts.stats[f"replayed: {row[4]}"] += 1
        same = (job.task, job.owner, job.payload_json) == (was["task"], was["owner"], was["payload_json"])
        fresh = (job.due_ms, job.attempt, job.strikes, job.suspect_on, job.not_before_ms, job.line)
        if not same or fresh != (self.facts.now, 0, 0, None, None, was["id"]) or "expires_ms" in job.options:
            self.facts.fail("a replayed job is as good as new", f"{job} of {was}")
        self.lines.lifted(job.object, was)

    def _learn(self) -> None:
        for row in self.facts.buried:
            self.dead[row[0]] = row
        self.facts.buried.clear()

    def at_end(self) -> None:
        """Nothing is left to be looked at."""
