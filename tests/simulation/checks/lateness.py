"""How late at most: once nothing fails any more, every wait has a bound, which follows from what is stored.

docs/design.md, "How late at most", has the same terms in words. From the end of the faults on this looks between any two events
at what each object waits for:

| waits for | until at most |
|---|---|
| beat, as something is due | its look; for a place in the window a count of it too, and as much for each windowful before it |
| a chain on its way | `sent_until` and a look; if it was sent since nothing fails, as soon as a process is free |
| the next link of a run | `lease_until` and a look, or as soon as a process is free |
| the end of a run whose process is gone | its parent's notice, or `lease_until`, the second look, and a look each |
| the next attempt in the same process | the longest delay of the policy that a process is held for |
| the end of a singleflight job that hangs | `hung_timeout` and one round of the renewal |

Each of these waits may come once for a run, so a due job begins within what its object waits for now, and for each run that
comes before its own a look and the way of each link. Time in which all processes are busy, or the window is full, or another job
of the object runs, is the work's own and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_lifecycle.model import ALARM, ALIVE, HOOK_PREFIX, SEALED, Job, ObjectState, Phase
from tests.simulation.checks.facts import Facts, Thing

WAY = 150
"""From a link's publishing to its begin, where a process is free: some steps of a few milliseconds each."""
TICK = 300
"""What beat does between two looks."""
BACK_OFF = 1000
"""The longest that any process leaves the database or the broker alone after a failure."""
COUNT = 1100
"""A process counts the chains on their way once a second."""
NOTICE = 400
"""A worker's parent sees that a child has died, and says so."""


@dataclass(slots=True)
class Wait:
    """What an object or a job waits for, for how long (ms) at most, and for how long it has."""

    why: Any
    most: int
    waited: int = 0
    counts: bool = True
    token: str | None = None
    passed: int = 0
    """The run of its object that was last looked at, and how many began with a job that is due later."""


def place_of(job: Job) -> tuple[bool, bool, int, str]:
    """The order of jobs that are due: exclusive ones first, and what `on_alarm` answers last."""
    return not job.exclusive, job.id in (ALARM, ALIVE), job.due_ms, job.id


class Lateness:
    """Looks between any two events, once nothing fails any more."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.times = facts.times
        self.began: int | None = None
        self.looked = 0
        self.objects: dict[int, Wait] = {}
        self.ways: dict[int, Wait] = {}
        self.jobs: dict[tuple[int, str], Wait] = {}
        self.published: set[tuple[str, int]] = set()

    def heal(self) -> None:
        self.began = self.looked = self.facts.world.now

    def sent(self, header: dict[str, Any]) -> None:
        """A message is on its way: from here on none gets lost."""
        if self.began is not None:
            self.published.add((header.get("token") or header["dispatch"], header["position"]))

    @property
    def look(self) -> int:
        """How long it may take beat to see what is due."""
        return self.facts.simulation.plan.poll + TICK + self._settling

    @property
    def _settling(self) -> int:
        """What is left of the longest back-off that began while things failed."""
        assert self.began is not None
        return max(0, self.began + BACK_OFF - self.facts.world.now)

    def watch(self) -> None:
        """Count the time since the last event as waited by those who waited then; find out who waits now."""
        passed, self.looked = self.facts.world.now - self.looked, self.facts.world.now
        if passed:
            self._count(passed)
        free = self._is_free()
        for table in (self.objects, self.ways):
            for key in table.keys() - self.facts.things.keys():
                del table[key]
        for thing in self.facts.things.values():
            state = thing.state
            why, most, counts = self._waits(thing)
            self._note(self.objects, state.id, why, most, counts)
            self._note(self.ways, state.id, self._on_its_way(state), WAY, free)
        self._watch_jobs(free)

    def _count(self, passed: int) -> None:
        for table in (self.objects, self.ways, self.jobs):
            for key, wait in table.items():
                if not wait.counts:
                    continue
                wait.waited += passed
                if wait.waited > wait.most:
                    told = (
                        f"object {key} waits for {wait.why} since {wait.waited / 1000:g} s, not {wait.most / 1000:g} s"
                    )
                    self.facts.fail("once faults stop, what is due is run in time", told)

    def _note(self, table: dict[Any, Wait], key: Any, why: Any, most: int, counts: bool) -> None:
        """Go on with the same wait, begin another one, or none."""
        if why is None:
            table.pop(key, None)
            return
        known = table.get(key)
        if known is None or known.why != why:
            known = table[key] = Wait(why, most)
        known.counts = counts

    # --- what an object waits for

    def _waits(self, thing: Thing) -> tuple[Any, int, bool]:
        state, now = thing.state, self.facts.now
        if state.phase is Phase.IDLE:
            if state.wake_at is None or state.wake_at > now:
                return None, 0, False
            most, has_room = self._until_claimed(state)
            return ("beat",), most, has_room
        if state.phase is Phase.SENT:
            return ("chain", state.dispatch, state.sent_until), self._until(state.sent_until), True
        if state.in_flight is None:
            return ("link", state.token, state.step, state.lease_until), self._until(state.lease_until), True
        return self._until_ended(thing)

    def _until_claimed(self, state: ObjectState) -> tuple[int, bool]:
        """Whoever waits for a place has those before it that have waited longer."""
        window = self.facts.config.dispatch_window
        if window >= 1000:
            return self.look, True
        others = [thing.state for thing in self.facts.things.values() if thing.state.queue == state.queue]
        sent = sum(one.phase is Phase.SENT for one in others)
        idle = [one for one in others if one.phase is Phase.IDLE and one.wake_at is not None]
        before = sum((one.wake_at or 0, one.id) < (state.wake_at or 0, state.id) for one in idle)
        return (1 + before // window) * (self.look + COUNT), sent < window

    def _until_ended(self, thing: Thing) -> tuple[Any, int, bool]:
        """A link in flight: its process runs it, or is gone."""
        state = thing.state
        flight, child = state.in_flight, self.facts.process_of(state)
        assert flight is not None
        request = getattr(child, "request", None)
        if child is not None and child.alive and request is not None and request.id == flight.task_id:
            return self._until_next(thing, child, flight.marked)
        death = self.facts.deaths.get(state.token or "")
        if death is not None and not death.whole and death.worker.alive and death.at >= (self.began or 0):
            return ("notice", state.token, state.step), NOTICE + self._settling, True
        return ("lease", state.token, state.step, state.doubt), self._until(state.lease_until), True

    def _until(self, when: int | None) -> int:
        """A time of the table, which may have passed while nobody could look, and beat's look."""
        return max(0, (when or 0) - self.facts.now) + self.look

    def _until_next(self, thing: Thing, child: Any, job_id: str) -> tuple[Any, int, bool]:
        body, job = self.facts.active.get(child), thing.jobs.get(job_id)
        if body is None:
            ran = job is not None and thing.state.in_flight is not None and job.version == thing.state.in_flight.version
            longest = self.times.retry(job.retry, job.attempt + 1) if job is not None and ran else self.times.hold
            held = min(longest, self.times.hold)
            return ("attempt", len(self.facts.bodies)), held + WAY + self._settling, True
        if child.header.get("single"):
            hung = child.header.get("hung", self.times.hung)
            return ("hung", body.began), hung + self.times.renewal + TICK + 2 * WAY + self._settling, True
        return None, 0, False

    # --- what a message waits for

    def _is_free(self) -> bool:
        workers = self.facts.simulation.workers.values()
        return any(one.alive and one.free and not one.life.draining for one in workers)

    def _on_its_way(self, state: ObjectState) -> Any:
        """The message that an object waits for, where it was sent since nothing fails any more."""
        key = None
        if state.phase is Phase.SENT:
            key = (state.dispatch, 0)
        elif state.phase is Phase.OPEN and state.in_flight is None:
            key = (state.token, state.step)
        return ("process", *key) if key in self.published else None

    # --- what a job waits for

    def _watch_jobs(self, free: bool) -> None:
        waiting = {}
        for thing in self.facts.things.values():
            state, wait = thing.state, self.objects.get(thing.state.id)
            due = self._due(thing)
            running = state.in_flight is not None and (wait is None or wait.why[0] in ("attempt", "hung"))
            for job in due:
                key = (state.id, job.id)
                known = self.jobs.get(key)
                if known is None or (wait is not None and wait.why[0] in ("lease", "notice")):
                    known = self._begin_waiting(thing, due, job, wait)
                elif running and state.token != known.token:
                    self._another_runs(thing, job, known)
                known.counts = not running and free and (wait is None or wait.counts)
                waiting[key] = known
        self.jobs = waiting

    def _another_runs(self, thing: Thing, job: Job, wait: Wait) -> None:
        """A run that began with another job, while this one waits: its place is before it, or the chain was older than that."""
        state = thing.state
        other = thing.jobs.get(state.in_flight.marked) if state.in_flight is not None else None
        wait.token = state.token
        if other is None or place_of(other) < place_of(job):
            wait.most += self._until_claimed(state)[0] + WAY
            return
        wait.passed += 1
        if wait.passed > 2:  # one that was open, and one on its way
            told = f"{job.id} of {state.ref} is passed over by {other.id}"
            self.facts.fail("once faults stop, what is due is run in time", told)

    def _due(self, thing: Thing) -> list[Job]:
        """The jobs that are due and have not begun, in the order in which they run."""
        state, now = thing.state, self.facts.now
        flight = state.in_flight.marked if state.in_flight is not None else None
        if state.disabled:
            return []
        live = [job for job in thing.jobs.values() if not state.paused or job.id.startswith(HOOK_PREFIX)]
        if state.paused and state.paused != SEALED:
            live = []
        due = [job for job in live if job.id != flight and self.facts.effective(state, job) <= now]
        return sorted(due, key=place_of)

    def _begin_waiting(self, thing: Thing, due: list[Job], job: Job, wait: Wait | None) -> Wait:
        """What its object waits for, the runs before its own, and the links before it."""
        place = due.index(job)
        first = wait.most - wait.waited if wait is not None else 0
        if wait is not None and wait.why[0] == "lease" and not thing.state.doubt:
            first += self.times.doubt + self.look
        claimed, _ = self._until_claimed(thing.state)
        # One that is open, or on its way, may have been sent before the job was due.
        runs = 2 + place // self.facts.config.chain_length
        most = first + runs * (claimed + WAY) + (place + 1) * WAY
        return Wait(f"a run of {job.id}", most, token=thing.state.token)
