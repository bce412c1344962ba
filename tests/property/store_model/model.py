"""One object as the design describes it: its jobs, the chain on its way, the open run, the one alarm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.property.store_model.plan import Plan

SECOND = 1000
BACKUP, PATIENCE_MAX, QUEUED_MAX = 30 * SECOND, 300 * SECOND, 3600 * SECOND
LEASE, DOUBT = 20 * SECOND, 5 * SECOND
SUSPECT_DELAY, UNKNOWN_GRACE = 5 * SECOND, 600 * SECOND
RETRIES = 6
LENGTH = 2
AGENDA = LENGTH + 4
ALARM, ALIVE, START, HOOK = "#alarm", "#alive", "#start", "#hook-"
HOST = "host"
WAITING = "?"
"""The mark of a suspect that does not run; while one runs, its mark is the worker instance."""


@dataclass
class Job:
    id: str
    task: str
    owner: str
    queue: str
    due: int
    version: int
    line: str
    created: int
    payload: str = "null"
    exclusive: bool = False
    recovery: bool = False
    most_attempts: int = 3
    expires: int | None = None
    plan: Plan | None = None
    attempt: int = 0
    strikes: int = 0
    not_before: int | None = None
    suspect: str | None = None
    unknown_since: int | None = None

    @property
    def is_hook(self) -> bool:
        return self.id.startswith(HOOK)

    @property
    def own_time(self) -> int:
        return self.due if self.not_before is None else max(self.due, self.not_before)

    def unmark(self) -> None:
        """It no longer runs: still a suspect, but it holds no worker's place."""
        if self.suspect is not None:
            self.suspect = WAITING

    def acquit(self) -> None:
        self.strikes, self.suspect, self.not_before = 0, None, None


@dataclass
class Flight:
    """The link that runs: what is durable of it, and in which process."""

    job: str
    version: int
    task_id: str
    line: str
    owner: str
    task: str
    queue: str
    limit: int
    hook: str | None
    worker: str
    pid: int
    alive: int | None = None
    recovery: bool = False
    suspect: bool = False
    final: bool = False
    carrier: str | None = None

    @property
    def marked(self) -> str:
        return self.carrier or self.job


@dataclass
class Run:
    token: str
    lease: int
    step: int = 0
    doubt: bool = False
    flight: Flight | None = None


@dataclass(frozen=True)
class Chain:
    """What is sent: the jobs of the links, whether they are all that is due, and from which step of which run."""

    jobs: tuple[str, ...]
    all_due: bool
    first: int = 0
    token: str | None = None


@dataclass
class Thing:
    """A logical object."""

    name: str
    id: int | None = None
    jobs: dict[str, Job] = field(default_factory=dict)
    versions: int = 0
    paused: str | None = None
    disabled: bool = False
    not_before: int | None = None
    failures: int = 0
    queue: str | None = None
    wake: int | None = None
    sent: str | None = None
    sent_until: int | None = None
    sent_count: int = 0
    queue_wait: int = 0
    run: Run | None = None
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    storage: dict[str, str] = field(default_factory=dict)
    holds: int = 0
    sealed: bool = False
    seen: set[str] | None = None

    # --- what is due

    def look(self, *changed: str) -> None:
        """The agenda is read now, before jobs are changed; those that are, it knows too."""
        self.seen = {job.id for job in self.agenda()} | set(changed)

    def agenda(self) -> list[Job]:
        """The jobs that are looked at: the first ones that may run, the first exclusive ones, the protocol's own."""
        if self.seen is not None:
            return [job for job in self.jobs.values() if job.id in self.seen or job.id.startswith("#")]
        in_order = sorted(self.jobs.values(), key=lambda job: (job.own_time, job.id))
        exclusive = [job for job in in_order if job.exclusive][:AGENDA]
        return [job for job in in_order if job in in_order[:AGENDA] or job in exclusive or job.id.startswith("#")]

    def when(self, job: Job) -> int:
        if self.not_before is None or job.is_hook:
            return job.own_time
        return max(job.own_time, self.not_before)

    def is_due(self, job: Job | None, now: int) -> bool:
        return job is not None and self.when(job) <= now

    def awake(self) -> list[Job]:
        """The jobs that may wake it: none if disabled or paused, but for the hooks of a sealed one."""
        if self.disabled or (self.paused and self.paused != "sealed"):
            return []
        return [job for job in self.agenda() if not self.paused or job.is_hook]

    def chain(self, now: int) -> tuple[tuple[str, ...], bool] | None:
        """The links sent now: exclusive jobs alone if one is due; the bare alarm only where nothing else is."""
        due = sorted((job for job in self.awake() if self.when(job) <= now), key=lambda job: (job.due, job.id))
        if not due:
            return None
        some = [job for job in due if job.exclusive] or due
        links = [job for job in some if job.id not in (ALARM, ALIVE)]
        if not links:
            return (ALARM,), True
        only_hooks = all(job.is_hook for job in links)
        return tuple(job.id for job in links[:LENGTH]), len(links) <= LENGTH and not only_hooks

    def patience(self) -> int:
        doubled = BACKUP * 2 ** min(max(self.sent_count - 1, 0), 10)
        return max(min(doubled, PATIENCE_MAX), min(2 * self.queue_wait, QUEUED_MAX))

    # --- the alarm

    def settle(self, now: int) -> None:
        """The one alarm: of a run its lease, of a chain its patience, else of the first job that counts."""
        if self.run is not None:
            self.wake = self.run.lease
            return
        jobs = self.awake()
        if not jobs:
            self.sent = self.sent_until = self.wake = self.queue = None
        elif self.sent is not None:
            self.wake = self.sent_until
        else:
            exclusive = [job for job in jobs if job.exclusive and self.when(job) <= now]
            first = min(exclusive or jobs, key=lambda job: (self.when(job), job.id))
            self.wake, self.queue = self.when(first), first.queue

    @property
    def is_forgettable(self) -> bool:
        remembers = self.jobs or self.run or self.paused or self.disabled or self.lines or self.holds
        return not (remembers or self.storage or self.sealed or self.not_before is not None)

    def next_version(self) -> int:
        self.versions += 1
        return self.versions

    # --- chains

    def dispatch(self, now: int) -> Chain | None:
        """Send what is due. What the chain is called is not for the model to say."""
        assert self.run is None
        links = self.chain(now)
        if links is None:
            self.sent = self.sent_until = None
            return None
        self.sent, self.sent_count = "?", self.sent_count + 1
        self.sent_until = now + self.patience()
        self.queue = self._queue_of(links[0][0])
        return Chain(*links)

    def _queue_of(self, job_id: str) -> str:
        job = self.jobs.get(job_id) or self.jobs[ALIVE]
        return job.queue

    def forget_chain(self) -> None:
        self.sent = self.sent_until = None

    def close(self, now: int) -> Chain | None:
        self.run, self.sent_count = None, 0
        return self.dispatch(now)

    def revive(self, now: int) -> Chain | None:
        """Go on with a run whose next link was lost; with nothing due it is closed."""
        assert self.run is not None
        links = self.chain(now)
        if links is None:
            self.run, self.sent_count = None, 0
            return None
        self.sent_count += 1
        self.run.lease = now + self.patience()
        return Chain(*links, self.run.step, self.run.token)

    def released(self, now: int, back_off: int) -> None:
        if self.run is not None:
            self.run.lease = now + back_off
        else:
            self.sent_until = now + back_off
        self.sent_count = max(self.sent_count - 1, 0)

    # --- runs

    def wait(self, now: int) -> None:
        """Nothing in flight: the lease covers the way of the next link."""
        assert self.run is not None
        self.run.flight, self.run.doubt, self.run.lease = None, False, now + self.patience()

    def passed(self, now: int, last: bool) -> Chain | None:
        """A link with nothing to run."""
        assert self.run is not None
        if last:
            return self.close(now)
        self.run.step += 1
        self.wait(now)
        return None

    def in_flight(self) -> Flight:
        assert self.run is not None
        assert self.run.flight is not None
        return self.run.flight

    def start_failed(self, now: int) -> None:
        """`on_start` did not end well: the object is held back, twice as long each time."""
        final = self.in_flight().final
        self.run = None
        if not final:
            self.failures += 1
            self.not_before = now + min(SECOND * 2 ** (self.failures - 1), 300 * SECOND)

    def started_well(self) -> None:
        self.not_before, self.failures = None, 0
        self.clear_deaths(START, START)

    def clear_deaths(self, line: str, job_id: str) -> None:
        """A clean end takes back the deaths of its own job and of no other."""
        known = self.lines.get(line)
        if known is not None and job_id in known["deaths"]:
            del known["deaths"][job_id]
            if not known["deaths"]:
                del self.lines[line]

    def own_job(self, job_id: str, task: str, queue: str, now: int, due: int | None = None) -> Job:
        """A job of the protocol's own."""
        at = now if due is None else due
        self.jobs[job_id] = Job(job_id, task, HOST, queue, at, self.next_version(), job_id, at)
        return self.jobs[job_id]

    def answer(self, version: int | None) -> None:
        """`on_alarm` has answered a keep-alive whose holder died, unless another one died meanwhile."""
        alive = self.jobs.get(ALIVE)
        if alive is not None and alive.version == version:
            del self.jobs[ALIVE]

    def destroy(self) -> Thing:
        """All is forgotten but a link in flight, whose end is that of its run."""
        kept = self.run if self.run is not None and self.run.flight is not None else None
        if kept is not None and kept.flight is not None:
            kept.flight.final = True
        return Thing(self.name, self.id, versions=self.versions, queue_wait=self.queue_wait, run=kept, queue=self.queue)

    def user_jobs(self) -> Iterator[Job]:
        return (job for job in self.jobs.values() if not job.id.startswith("#"))


def begun_again(job: Job, flight: Flight) -> None:
    """The run was ended with this job in flight: its occurrence has begun, so it is run, and for the same time."""
    if job.plan is not None and (job.id, job.version) == (flight.job, flight.version):
        job.plan = replace(job.plan, begun=True)
