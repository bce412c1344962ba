"""Checks of every time that is stored: none is nearer or further than the design says, also while faults go on.

What follows from them, how late a job may begin, is `checks.lateness`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from celery_lifecycle.model import ALARM, Job, ObjectState, Phase
from celery_lifecycle.store.ends import End
from tests.simulation.checks.facts import CLOSERS, STRIKES, Body, Facts, Thing
from tests.simulation.checks.times import OUTAGE

FAILURES = ("fail", "error", "retry")
"""How bodies end that use up an attempt, besides those that are stopped."""


class DelayChecks:
    """What is written into the columns that hold a time."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.times = facts.times
        self.queues: dict[int, set[str]] = {}
        """The queues of all jobs that an object has had."""
        self.starts: Counter[int] = Counter()
        """Failures of `on_start` in a row, by object."""
        self.failures: Counter[tuple[int, str]] = Counter()
        """Failed bodies of a job since its attempts were last forgotten."""

    def changed(self, label: str, args: Any, before: Thing | None, after: Thing | None) -> None:
        if after is None:
            return
        old, new = before.state if before else None, after.state
        if label == "Ends._end" and before is not None:
            self._check_stopped(args[2], before)
        self._check_queue(label, after)
        if new.token is not None and (old is None or old.lease_until != new.lease_until):
            self._check_lease(label, new)
        self._check_object_held(label, old, new)
        closes = label in CLOSERS and old is not None and old.token is not None and new.phase is Phase.IDLE
        if closes and new.wake_at is not None and new.wake_at <= self.facts.now:
            self.facts.fail("a run that closes sends on what is due", f"{label} {new.ref}")
        for job in after.jobs.values():
            earlier = before.jobs.get(job.id) if before else None
            if earlier != job:
                self._check_job(label, args, old, new, earlier, job)

    def attempt_begins(self, before: Body, blocked: bool) -> None:
        """The next attempt in the same process: one that is further away is made by another message."""
        waited = self.facts.world.now - (before.ended or self.facts.world.now)
        if waited > self.times.hold + 2 * OUTAGE and not blocked:
            self.facts.fail("no process is held for long", f"{before.ref}#{before.job} for {waited / 1000:g} s")

    def body_ended(self, body: Body) -> None:
        if body.end in FAILURES:
            self.failures[body.object_id, body.job] += 1

    def _exactly(self, invariant: str, told: str, found: int | None, wanted: int) -> None:
        if found != wanted:
            late = "never" if found is None else f"in {(found - self.facts.now) / 1000:g} s"
            self.facts.fail(invariant, f"{told}: {late}, not in {(wanted - self.facts.now) / 1000:g} s")

    # --- objects

    def _check_queue(self, label: str, after: Thing) -> None:
        state = after.state
        wanted = {self.facts.queue_of(state.kind, job.task) for job in after.jobs.values()}
        # A chain on its way, or an open run, stays where it was: in the queue of a job that may be gone by now.
        known = self.queues.setdefault(state.id, {self.facts.queue_of(state.kind)})
        known |= wanted
        if state.queue is not None and state.queue not in known:
            self.facts.fail("each queue has its own", f"{label}: {state.ref} waits in {state.queue}")

    def _check_lease(self, label: str, new: ObjectState) -> None:
        now = self.facts.now
        if new.in_flight is not None:
            lasts = self.times.doubt if new.doubt else self.times.lease
            self._exactly("a lease lasts as long as is said", f"{label} {new.ref}", new.lease_until, now + lasts)
        elif label not in ("Claims._claim", "Claims._release"):  # which `checks.chains` looks at
            lasts = self.times.patience(new.sent_count, new.queue_wait)
            self._exactly("a link is waited for as a chain is", f"{label} {new.ref}", new.lease_until, now + lasts)

    def _check_object_held(self, label: str, old: ObjectState | None, new: ObjectState) -> None:
        if new.not_before_count == 0:
            self.starts.pop(new.id, None)
        elif old is None or new.not_before_count != old.not_before_count:
            self.starts[new.id] += 1
            wait = self.times.start(self.starts[new.id])
            self._exactly("on_start is tried again, doubling", f"{new.ref}", new.not_before, self.facts.now + wait)
            return
        changed = new.not_before is not None and (old is None or old.not_before != new.not_before)
        if changed and label not in (*STRIKES, "Holds._lost"):  # which `checks.breaker` looks at
            self.facts.fail("what is held back has a reason", f"{label} {new.ref}")

    def _check_stopped(self, end: End, before: Thing) -> None:
        """A job that hangs is stopped, not before its time; like a time limit that uses up an attempt."""
        state = before.state
        flight, child = state.in_flight, self.facts.process_of(state)
        if flight is None or end not in (End.HUNG, End.TIMED_OUT):
            return
        self.failures[state.id, flight.job] += 1
        request: Any = getattr(child, "request", None)
        if end is not End.HUNG or child is None or request is None:
            return
        least = child.header.get("hung", self.times.hung)  # type: ignore[attr-defined]
        if self.facts.world.now - request.taken_at < least:
            self.facts.fail("what hangs is stopped in its time", f"{flight.job} of {state.ref}")

    # --- jobs

    def _check_job(
        self, label: str, args: Any, old: ObjectState | None, new: ObjectState, earlier: Job | None, job: Job
    ) -> None:
        told, now = f"{label}: {job.id} of {new.ref}", self.facts.now
        delayed = job.not_before_ms is not None and (earlier is None or earlier.not_before_ms != job.not_before_ms)
        if delayed and label == "Runs._begin":
            self._exactly("a suspect waits for a moment", told, job.not_before_ms, now + self.times.suspect)
            self._check_other_suspect(told, new, args[2].instance)
        elif delayed and label not in (*STRIKES, "Holds._lost"):  # which `checks.breaker` looks at
            self.facts.fail("what is held back has a reason", told)
        if job.attempt == 0:
            self.failures.pop((new.id, job.id), None)
        elif job.id != ALARM and job.attempt > self.failures[new.id, job.id]:
            failed = self.failures[new.id, job.id]
            self.facts.fail("only a failure uses up an attempt", f"{told} has {job.attempt} of {failed} failures")
        if job.unknown_since_ms is not None and label in ("Ends._skip", "Ends.unknown"):
            self._check_unknown(told, job)
        elif job.id == ALARM and job.attempt and (earlier is None or earlier.attempt != job.attempt):
            self._exactly("on_alarm is tried again, doubling", told, job.due_ms, now + self.times.alarm(job.attempt))
        elif label == "Runs._finish" and old is not None and old.in_flight is not None and earlier is not None:
            ran = old.in_flight.job == job.id and old.in_flight.version == earlier.version != job.version
            body = self.facts.body_of(args[1], args[0].task_id)
            if ran and body is not None and not job.schedule_json:
                self._check_outcome(told, body, earlier, job)

    def _check_outcome(self, told: str, body: Body, earlier: Job, job: Job) -> None:
        """When a job runs again that has ended so."""
        now, exactly = self.facts.now, None
        if body.end == "yield":
            exactly = now
        elif body.end in ("again", "retry"):
            exactly = now + round(body.act["delay"] * 1000)
        elif body.end == "outage":
            exactly = now + OUTAGE
            if job.attempt != earlier.attempt:
                self.facts.fail("an outage uses up no attempt", told)
        elif body.end == "fail":
            most = self.times.retry(job.retry, job.attempt)
            if not now + self.times.hold < job.due_ms <= now + most + 1:  # for a shorter one its process waits
                self.facts.fail("a failed job is tried again as its policy says", f"{told}: {job.due_ms - now} ms")
        if exactly is not None:
            self._exactly("a job runs again when it said", told, job.due_ms, exactly)

    def _check_other_suspect(self, told: str, new: ObjectState, instance: str) -> None:
        for thing in self.facts.things.values():
            flight = thing.state.in_flight
            if thing.state.worker == instance and flight is not None and flight.suspect and thing.state.id != new.id:
                return
        self.facts.fail("a suspect waits only for one that runs", f"{told} on {instance}")

    def _check_unknown(self, told: str, job: Job) -> None:
        now, since = self.facts.now, job.unknown_since_ms or 0
        if now - since >= self.times.grace:
            self.facts.fail("an unknown task is dead after its grace", told)
        self._exactly("an unknown task is looked at again", told, job.due_ms, now + self.times.unknown(since, now))

    def buried(self, label: str, before: Thing | None, dead: list[Any]) -> None:
        """Nothing of an unknown task is given up before its grace is over."""
        for one in dead:
            job = before.jobs.get(one[3]) if before is not None else None
            if one[4] not in ("unknown task", "unknown owner") or job is None:
                continue
            since = job.unknown_since_ms
            if since is None or self.facts.now - since < self.times.grace:
                self.facts.fail("an unknown task is dead after its grace", f"{label}: {job.id} of {job.object}, before")
