"""Checks of runs: which links begin, which bodies run beside and after which, what their outcomes do."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from celery_lifecycle.model import ALARM, HOOK_PREFIX, START, InFlight, ObjectRef, ObjectState
from tests.simulation.checks.breaker import BreakerChecks
from tests.simulation.checks.chains import ChainChecks
from tests.simulation.checks.dead import DeadChecks
from tests.simulation.checks.delays import DelayChecks
from tests.simulation.checks.facts import FENCES, STRIKES, Body, Facts, Thing
from tests.simulation.checks.holds import HoldChecks

if TYPE_CHECKING:
    from tests.simulation.world.processes import Child


def deaths_of(state: ObjectState, flight: InFlight) -> int:
    """The deaths of a job that its line remembers."""
    lines = json.loads(state.lines) if state.lines else {}
    return int(lines.get(flight.line, {}).get("n", {}).get(flight.job, 0))


class RunChecks:
    """Links and bodies."""

    def __init__(
        self, facts: Facts, chains: ChainChecks, breaker: BreakerChecks, delays: DelayChecks, holds: HoldChecks,
        dead_jobs: DeadChecks,
    ) -> None:  # fmt: skip
        self.facts = facts
        self.delays = delays
        self.chains = chains
        self.breaker = breaker
        self.holds = holds
        self.dead_jobs = dead_jobs
        self.calls: Counter[Any] = Counter()
        self.hook_calls: Counter[Any] = Counter()
        self.hooks_begun: Counter[Any] = Counter()
        self.applied: set[Any] = set()
        self.completed: set[Any] = set()
        self.positions: dict[str, int] = {}
        self.started: set[tuple[str, str]] = set()
        """Runs, and the processes in which `on_start` was called for them."""
        self.contact: dict[Any, int] = {}
        """When a process last heard that its run still stands."""

    def check_begin(self, link: Any, worker: Any, before: Thing | None, after: Thing | None) -> None:
        old, new = before.state if before else None, after.state if after else None
        if old is None or before is None:
            self.facts.fail("a refused writer changes nothing", "a begin made an object")
            return
        if old.token is not None:
            late = link.token != old.token or link.position != old.step or old.in_flight is not None
            known = old.in_flight is not None and old.in_flight.task_id == link.task_id
            resumed = known and (old.worker, old.worker_pid) == (worker.instance, worker.pid)
            if late and not resumed:
                self.facts.fail(
                    "a refused writer changes nothing", f"link {link.task_id} is not the next of {old.token}"
                )
        opened = new is not None and new.token is not None and old.token is None
        if opened and (old.paused or old.disabled) and not link.job.startswith(HOOK_PREFIX):
            self.facts.fail("a paused object opens no run", f"{old.ref} by {link.task_id}")
        if opened and not any(self.facts.effective(old, job) <= self.facts.now for job in before.jobs.values()):
            self.facts.fail("a run is opened for something that is due", f"{old.ref} by {link.task_id}")
        flight = new.in_flight if new is not None else None
        if new is None or flight is None or new.token is None:
            return
        self.facts.begun[flight.task_id, worker] = new.token
        if link.job.startswith(HOOK_PREFIX):
            self.hooks_begun[new.id, link.job] += 1
            if self.hooks_begun[new.id, link.job] > 1:
                self.facts.fail("a memory hook is tried once", f"{link.job} of {new.ref}")
        if flight.suspect:
            others = [
                thing.state for thing in self.facts.things.values()
                if thing.state.worker == worker.instance and thing.state.in_flight and thing.state.in_flight.suspect
            ]  # fmt: skip
            if len(others) > 1:
                self.facts.fail("one suspect per worker", f"{[str(one.ref) for one in others]} on {worker.instance}")
        if link.job != ALARM:
            job = before.jobs.get(link.job)
            if job is None or self.facts.effective(old, job) > self.facts.now:
                self.facts.fail("only what is due is run", f"{link.job} of {old.ref}")

    def check_finish(self, label: str, args: Any, before: Thing | None, after: Thing | None) -> None:
        link, token = args[0], args[1]
        old = before.state if before else None
        if old is None or old.token != token or old.in_flight is None or old.in_flight.task_id != link.task_id:
            self.facts.fail("a refused writer changes nothing", f"{label} of {link.task_id} was accepted")
            return
        key = (token, link.position)
        if key in self.applied:
            self.facts.fail("an outcome is applied at most once", f"{link.task_id}")
        self.applied.add(key)
        flight = old.in_flight
        if flight.job in (ALARM, START) or flight.job.startswith(HOOK_PREFIX):
            if label == "Runs._finish":
                self.breaker.line_deaths.pop((old.id, flight.line, flight.job), None)
            return
        job = before.jobs.get(flight.job) if before else None
        kept = after.jobs.get(flight.job) if after else None
        if job is not None and job.version != flight.version:
            if kept is None or (kept.version, kept.due_ms) != (job.version, job.due_ms):
                self.facts.fail("a newer change of a job wins", f"{flight.job} of {old.ref}")
            self.facts.stats["discarded"] += 1
        body = self.facts.body_of(token, link.task_id)
        if body is None or body.ended is None:
            self.facts.fail("an outcome comes from a body that has ended", f"{link.task_id}")
            return
        left = deaths_of(old, flight) if after is None else deaths_of(old, flight) - deaths_of(after.state, flight)
        if left > 0 and body.end not in ("ok", "again") and not flight.final:
            self.facts.fail("only a clean end clears strikes", f"{flight.job} of {old.ref}: {body.end}")
        clean = body.end in ("ok", "again") and job is not None and job.version == flight.version
        works = body.end == "again" and self.holds.has_work(old.id, flight.job)
        if clean and job is not None and job.strikes and (works or job.strikes > body.strikes):
            clean = False  # what it has handed off goes on, or has died meanwhile
            self.facts.stats["not clean"] += 1
            if kept is not None and kept.strikes < job.strikes:
                self.facts.fail("an end is not clean before what was handed off has ended", f"{kept.id} of {old.ref}")
        if clean and kept is not None and (kept.strikes or kept.suspect_on or kept.not_before_ms):
            self.facts.fail("a clean end clears strikes and suspicion", f"{kept.id} of {old.ref}")
        if body.end == "ok":
            if clean or job is None or job.version != flight.version:
                self.breaker.acquit(old, flight)
            if job is not None and job.version == flight.version:
                self.completed.add((old.id, flight.job, flight.version))
        if clean and body.end == "again" and kept is not None and kept.not_before_ms is None:
            self.breaker.acquit(old, flight)

    def body_begins(self, child: Child, ctx: Any, payload: Any) -> dict[str, Any]:
        header: dict[str, Any] = child.header or {}
        request: Any = child.request
        token = self.facts.begun.get((request.id, child.runner.worker), "?")
        job, ref = header["job"], header["name"]
        thing = self.facts.things.get(header["object"])
        flight = thing.state.in_flight if thing is not None and thing.state.token == token else None
        if ctx is not None:
            version, line = ctx.job.version, ctx.job.line
            attempt, strikes = ctx.attempt, ctx.job.strikes
        else:
            version, line = (flight.version, flight.line) if flight is not None else (0, job)
            attempt = strikes = 0
        script = payload["s"]
        number = (ref, job, payload.get("n", 0))
        act = script[min(self.calls[number], len(script) - 1)]
        self.calls[number] += 1
        body = Body(
            header["object"], ref, job, version, line, token, request.id, header["position"], child, self.facts.world.now,
            act=act, attempt=attempt, strikes=strikes,
        )  # fmt: skip
        self.facts.world.say(f"body of {ref}#{job} v{version} begins, token {token[:6]}: {act}")
        self.facts.stats["bodies"] += 1
        self.dead_jobs.body_begins(body, ctx.job.owner if ctx is not None else "")
        for other in self.facts.active.values():
            if other.ref == ref and other.process is not child:
                self._check_overlap(body, other)
        if version and (body.object_id, job, version) in self.completed:
            self.facts.fail("what is complete does not run again", f"{ref}#{job} v{version}")
        self._check_again(body)
        self._check_started(child, ref, token, job)
        until = self.breaker.held.get((body.object_id, job), 0)
        fenced = token in self.facts.ended
        if until > self.facts.now and not fenced:
            self.facts.fail("a struck job waits", f"{ref}#{job} {(until - self.facts.now) / 1000:g} s too early")
        retried = self.facts.body_of(token, request.id)
        if retried is None:
            if self.positions.get(token, -1) >= body.position:
                self.facts.fail("links of a run go in order", f"{ref}#{job} at {body.position}")
            self.positions[token] = body.position
        else:
            ended = retried.ended or 0
            held = self.facts.simulation.holds.get(body.object_id, 0) > ended
            self.delays.attempt_begins(retried, held or self.breaker.blocked_since(child, ended))
        self.facts.bodies.append(body)
        self.facts.active[child] = body
        return dict(act)

    def _check_started(self, child: Any, ref: str, token: str, job: str) -> None:
        """`on_start` comes before the first job of a run, and in each further process that gets a link of it."""
        has = ref.startswith("full/") and not job.startswith(HOOK_PREFIX)
        if has and (token, child.name) not in self.started:
            self.facts.fail("on_start is called once for a run in each process", f"{ref}#{job} began without it")

    def _check_again(self, body: Body) -> None:
        for other in self.facts.bodies:
            if (other.object_id, other.job, other.version) != (body.object_id, body.job, body.version):
                continue
            if (other.token, other.task_id) == (body.token, body.task_id) or not body.version:
                continue
            reason = other.end == "died" or self.facts.ended.get(other.token) in STRIKES
            if not reason:
                told = f"{body.ref}#{body.job} v{body.version}, whose earlier run ended with {other.end!r}"
                self.facts.fail("a job that has run is not run again", told)

    def _check_overlap(self, body: Body, other: Body) -> None:
        ended = self.facts.ended.get(other.token)
        if self.facts.ended.get(body.token) in FENCES:
            # Its own run was given up in the moment between the last look and the body.
            looked = self.contact.get(body.process, 0)
            if max(looked, body.process.stalled_until) + 20 >= self.facts.world.now:
                return
        if ended not in FENCES:
            told = f"{body.ref}#{body.job} and #{other.job}, whose run was ended by {ended}"
            self.facts.fail("jobs of an object never overlap", told)
        self.facts.stats["fenced overlaps"] += 1

    def body_ends(self, child: Any, end: str) -> None:
        body = self.facts.active.pop(child, None)
        if body is None:
            return
        body.ended, body.end = self.facts.world.now, end
        self.delays.body_ended(body)
        self.facts.world.say(f"body of {body.ref}#{body.job} ends: {end}")

    def alarm_begins(self, child: Any, ref: ObjectRef, info: Any) -> None:
        header = child.header
        token = self.facts.begun.get((child.request.id, child.runner.worker), "?")
        body = Body(
            header["object"], str(ref), ALARM, 0, ALARM, token, child.request.id, header["position"], child,
            self.facts.world.now,
        )  # fmt: skip
        for other in self.facts.active.values():
            if other.ref == body.ref and other.process is not child:
                self._check_overlap(body, other)
        if not self.chains.all_due.get(header["dispatch"]):
            self.facts.fail("on_alarm comes after all that was due", f"{ref}")
        self._check_started(child, str(ref), token, ALARM)
        self.facts.stats["alarms"] += 1
        self.facts.active[child] = body

    def alarm_ends(self, child: Any) -> None:
        self.facts.active.pop(child, None)

    def hooked(self, ref: ObjectRef, which: str) -> int:
        key = (str(ref), which)
        self.hook_calls[key] += 1
        self.facts.world.say(f"{which} of {ref}")
        if which == "on_start":
            child: Any = self.facts.world.process
            token = self.facts.begun.get((child.request.id, child.runner.worker), "?")
            if (token, child.name) in self.started:
                self.facts.fail("on_start is called once for a run in each process", f"{ref} in {child.name}")
            self.started.add((token, child.name))
        return self.hook_calls[key] - 1
