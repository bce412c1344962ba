"""Checks of what becomes of jobs: what each verb of the store may make, change and take out, and of which jobs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from celery_lifecycle.model import ALARM, ALIVE, HOOK_PREFIX, START, InFlight, Job
from tests.simulation.checks.breaker import BreakerChecks
from tests.simulation.checks.facts import STRIKES, Facts, Thing
from tests.simulation.world.calls import Call

ALL = frozenset(Job._fields)
STRUCK = frozenset(("not_before_ms", "strikes", "suspect_on"))
"""What a strike leaves on a job: a push in its place keeps it, and only a clean end or a person takes it away."""
PUSHED = ALL - STRUCK - {"owner"}
MOVED = frozenset(("version", "due_ms", "attempt", "unknown_since_ms"))
NEXT = MOVED | {"schedule_json"}
MARK = frozenset(("suspect_on",))
NONE: frozenset[str] = frozenset()

Fields = frozenset[str]


@dataclass(frozen=True, slots=True)
class Rule:
    """What one verb may do to the jobs of an object that it changes.

    Attributes:
        which: the jobs that it is about, and what it may change of each of them.
        takes: those that it may take out with neither an outcome nor a dead job.
        makes: beginnings of ids of jobs that it may make besides those that it is about.
    """

    which: Callable[[Call, Thing], dict[str, Fields]] = lambda call, before: {}
    takes: Callable[[Call, Thing], Collection[str]] = lambda call, before: ()
    makes: tuple[str, ...] = ()


def _flight(before: Thing) -> InFlight | None:
    return before.state.in_flight


def _recurs(before: Thing, job_id: str) -> bool:
    job = before.jobs.get(job_id)
    return job is not None and job.schedule_json is not None


def _pushed(call: Call, before: Thing) -> dict[str, Fields]:
    drafts = [call["draft"]] if call.label == "Jobs.push_in" else call["drafts"]
    stored = [call.result.job] if call.label == "Jobs.push_in" else call.result
    return {
        job.id if draft.id is None or draft.alike else draft.id: PUSHED
        for draft, job in zip(drafts, stored, strict=True)
        if draft.ref == before.state.ref
    }


def _named(fields: Fields) -> Callable[[Call, Thing], dict[str, Fields]]:
    """The job that the verb's caller names."""
    return lambda call, before: {call["job_id"]: fields} if call["ref"] == before.state.ref else {}


def _revoked(call: Call, before: Thing) -> dict[str, Fields]:
    mine = before.state.kind in call["kinds"] and before.state.name == call["task_id"]
    return {call["task_id"]: NONE} if mine else {}


def _resumed(call: Call, before: Thing) -> dict[str, Fields]:
    if call["ref"] != before.state.ref:
        return {}
    return {key: STRUCK | (NEXT if _recurs(before, key) else NONE) for key in before.jobs}


def _begun(call: Call, before: Thing) -> dict[str, Fields]:
    """A suspect that finds another one aboard is put back a little; the rest is a matter of schedules."""
    key = call["link"].job
    job = before.jobs.get(key)
    fields = MARK | {"not_before_ms"} if job is not None and job.suspect_on is not None else NONE
    return {key: fields | (NEXT if _recurs(before, key) else NONE)}


def _of_link(fields: Fields) -> Callable[[Call, Thing], dict[str, Fields]]:
    return lambda call, before: {call["link"].job: fields}


def _attempted(call: Call, before: Thing) -> dict[str, Fields]:
    tried, job = call["job"], before.jobs.get(call["job"].id)
    return {tried.id: frozenset({"attempt"}) if job is not None and job.version == tried.version else NONE}


def _answered(before: Thing) -> Collection[str]:
    """The keep-alive that an `on_alarm` link stands for, unless another one came meanwhile."""
    flight, alive = _flight(before), before.jobs.get(ALIVE)
    return (ALIVE,) if flight is not None and alive is not None and alive.version == flight.alive else ()


def _skipped(call: Call, before: Thing) -> dict[str, Fields]:
    key = call["link"].job
    fields = MARK | {"due_ms", "unknown_since_ms"}
    found = {key: fields | (NEXT if _recurs(before, key) else NONE)}
    return {**found, ALIVE: fields} if key == ALARM else found


def _struck(call: Call, before: Thing) -> dict[str, Fields]:
    """The job in flight and every recovery loop; a job that was put back keeps what it had but for its mark."""
    flight = _flight(before)
    if flight is None:
        return {}
    found = {key: frozenset({"not_before_ms"}) for key, job in before.jobs.items() if job.recovery_loop}
    used_up = call.label == "Ends._end" and call["end"].value in ("hung", "timed out", "revoked")
    own = frozenset({"attempt"}) | MARK if used_up else STRUCK
    for key in {flight.job, flight.marked} & before.jobs.keys():
        fields = own if key == flight.job else MARK
        if before.jobs[key].version == flight.version:
            if key == ALARM:
                fields = ALL
            elif _recurs(before, key):
                fields |= NEXT if used_up else {"schedule_json"}
        found[key] = found.get(key, NONE) | fields
    return found


def _of_strike(call: Call, before: Thing) -> Collection[str]:
    """A memory hook is tried once, and an `on_alarm` link answers its keep-alive."""
    flight = _flight(before)
    hook = [flight.job] if flight is not None and flight.job.startswith(HOOK_PREFIX) else []
    return [*hook, *_answered(before)]


def _alarm_again(call: Call, before: Thing) -> dict[str, Fields]:
    """One that was set while `on_alarm` ran stands."""
    flight, job = _flight(before), before.jobs.get(ALARM)
    stands = flight is not None and job is not None and job.version != flight.version
    return {ALARM: NONE if stands else ALL}


def _replayed(call: Call, before: Thing) -> dict[str, Fields]:
    """A new job, or the bare alarm set anew."""
    if call.result is None or call.result.object != before.state.ref:
        return {}
    return {call.result.id: ALL if call.result.id == ALARM else NONE}


def _lost(call: Call, before: Thing) -> dict[str, Fields]:
    """Tracked work strikes the job that handed it off."""
    if call.result is None:
        return {}
    found = {key: frozenset({"not_before_ms"}) for key, job in before.jobs.items() if job.recovery_loop}
    return {**found, call.result.job or "": STRUCK, ALIVE: ALL}


_STRIKE = Rule(_struck, _of_strike, (HOOK_PREFIX, ALARM))
_SKIP = Rule(_skipped)

RULES: dict[str, Rule] = {
    "Jobs.push_in": Rule(_pushed),
    "Jobs.push_many_in": Rule(_pushed),
    "Jobs.cancel_in": Rule(_named(NONE), lambda call, before: () if call["why"] else (call["job_id"],)),
    "Jobs.reschedule_in": Rule(_named(MOVED)),
    "Jobs.revoke": Rule(_revoked),
    "Objects.set_alarm": Rule(
        lambda call, before: {ALARM: ALL - MARK} if call["ref"] == before.state.ref else {},
    ),
    "Objects.resume": Rule(_resumed),
    "Objects.destroy": Rule(takes=lambda call, before: before.jobs if call["ref"] == before.state.ref else ()),
    "DeadJobs.replay": Rule(_replayed),
    "Runs._begin": Rule(_begun),
    "Runs.enter": Rule(_of_link(MARK)),
    "Runs.attempted": Rule(_attempted),
    "Runs.start_failed": Rule(_of_link(MARK)),
    "Runs._alarm_failed": Rule(_alarm_again, lambda call, before: _answered(before)),
    "Ends._end": _STRIKE,
    "Ends._rescue": _STRIKE,
    "Ends.struck_inside": _STRIKE,
    "Ends._skip": _SKIP,
    "Ends.unknown": _SKIP,
    "Holds._lost": Rule(_lost, makes=(HOOK_PREFIX, ALARM)),
}
"""What each verb may do. One that is not here may touch no job at all; a finish has a check of its own."""


class JobChecks:
    """Jobs as they were before a verb, and as they are after it."""

    def __init__(self, facts: Facts, breaker: BreakerChecks) -> None:
        self.facts = facts
        self.breaker = breaker

    def check(self, call: Call, before: Thing | None, after: Thing | None, dead: list[Any]) -> None:
        old, new = before.jobs if before else {}, after.jobs if after else {}
        if old == new and call.label != "Objects.resume":
            return
        thing = before or after
        assert thing is not None
        rule = self._of_finish(thing) if call.label == "Runs._finish" else RULES.get(call.label, Rule())
        which = rule.which(call, thing)
        for key in new.keys() - old.keys():
            if not (key in which or any(key.startswith(prefix) for prefix in rule.makes)):
                self._fail(call, new[key], "made")
        for key, job in old.items():
            if key in new:
                self._check_changed(call, job, new[key], which.get(key, NONE))
            else:
                self._check_gone(call, thing, job, rule, which, dead)
                self.breaker.let_go(thing.state.id, key)
        if call.label in ("Jobs.push_in", "Jobs.push_many_in"):
            self._check_pushed(call, before, new)

    def _fail(self, call: Call, job: Job, what: str) -> None:
        self.facts.fail("a verb changes only what it is about", f"{call.label} {what} {job.id} of {job.object}")

    def _check_changed(self, call: Call, old: Job, new: Job, fields: Fields) -> None:
        if call.label in ("Jobs.reschedule_in", "Objects.set_alarm") and fields and new.version == old.version:
            self._fail(call, old, "changed, but not the version of,")
        told = [name for name, was, now in zip(Job._fields, old, new, strict=True) if was != now]
        wrong = [name for name in told if name not in fields]
        if wrong:
            self._fail(call, old, f"changed {', '.join(wrong)} of")
        if call.label == "Objects.resume" and fields and (new.strikes or new.suspect_on or new.not_before_ms):
            self._fail(call, old, "did not clear")
        if call.label == "Runs.attempted" and fields and new.attempt != call["failed"]:
            self._fail(call, old, "miscounted")

    def _check_gone(
        self, call: Call, before: Thing, job: Job, rule: Rule, which: dict[str, Fields], dead: list[Any]
    ) -> None:
        if job.id in rule.takes(call, before):
            return
        buried = {one[3]: one[4] for one in dead}
        sealed = buried.get(job.id) == "sealed" and (call.label in STRIKES or call.label == "Holds._lost")
        if sealed or (job.id in buried and job.id in which):
            return
        flight = _flight(before)
        if call.label != "Runs._finish" or flight is None or (job.id, job.version) != (flight.job, flight.version):
            self.facts.fail("no job vanishes", f"{call.label}: {job.id} v{job.version} of {job.object}")
        body = self.facts.body_of(call["token"], call["link"].task_id)
        if job.id == ALARM or job.id.startswith(HOOK_PREFIX):
            return
        if body is None or body.end not in ("ok", "fail", "error"):
            self.facts.fail("no job vanishes", f"{job.id} whose body ended with {body and body.end}")

    def _of_finish(self, before: Thing) -> Rule:
        """An outcome changes the job that it is of; a newer change of that job stands, but for strikes that it clears."""
        flight = _flight(before)
        if flight is None or flight.job == START:
            return Rule()
        job = before.jobs.get(flight.job)
        fields = MARK if job is not None and job.version != flight.version else NEXT | MARK
        body = self.facts.body_of(before.state.token or "", flight.task_id)
        if flight.job == ALARM or (body is not None and body.end in ("ok", "again")):
            fields |= STRUCK
        return Rule(lambda call, thing: {flight.job: fields}, lambda call, thing: _answered(thing))

    def _check_pushed(self, call: Call, before: Thing | None, new: dict[str, Job]) -> None:
        """A push stores what it was given; of the job in whose place it is only what a strike left stays."""
        drafts = [call["draft"]] if call.label == "Jobs.push_in" else call["drafts"]
        pusher = call["pusher"]
        for draft in {(draft.ref, draft.id): draft for draft in drafts}.values():  # of two with one id the later one
            if before is not None and draft.ref == before.state.ref and before.state.disabled:
                self.facts.fail("nothing is pushed to a disabled object", f"{draft.id} of {draft.ref}")
            job, old = new.get(draft.id), before.jobs.get(draft.id) if before is not None else None
            if job is None or job.object != draft.ref or draft.schedule is not None or draft.keep:
                continue
            due = self.facts.now + draft.delay_ms if draft.at_ms is None else draft.at_ms
            follows = pusher is not None and pusher.task == draft.task and pusher.ref == draft.ref
            left = (old.not_before_ms, old.strikes, old.suspect_on) if old is not None else (None, 0, None)
            wanted = (draft.task, draft.queue, draft.owner, draft.payload_json, due, 0, *left)
            found = (
                job.task, job.queue, job.owner, job.payload_json, job.due_ms, job.attempt, job.not_before_ms,
                job.strikes, job.suspect_on,
            )  # fmt: skip
            if found != wanted:
                self.facts.fail("a push stores what it was given", f"{job.id} of {job.object}: {found}, not {wanted}")
            if follows and job.line != pusher.line:
                self.facts.fail("a push from inside goes on with its line", f"{job.id} of {job.object}: {job.line}")
            if old is not None and job.version == old.version:
                self.facts.fail("a push brings a new version", f"{job.id} of {job.object}")
