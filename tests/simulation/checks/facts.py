"""What the checks know: objects and jobs as they are stored, bodies and deaths as they happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from celery_lifecycle.model import HOOK_PREFIX, Job, ObjectState
from celery_lifecycle.transitions.run import Worker
from tests.simulation.checks.times import Times
from tests.simulation.world.engine import EPOCH

if TYPE_CHECKING:
    from tests.simulation.world.simulation import Simulation

FENCES = ("Ends._rescue", "Ends._end")
"""What may end a run whose body still goes on."""
STRIKES = (*FENCES, "Ends.struck_inside")
CLOSERS = ("Runs._finish", "Runs._alarm_failed", "Runs._begin", "Ends._skip", "Ends.unknown")


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


Changes: TypeAlias = "dict[int, tuple[Thing | None, Thing | None]]"
"""Objects that a transaction has changed, by their ids: as they were, and as they are."""


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
    attempt: int = 0
    strikes: int = 0
    writes: dict[str, Any] = field(default_factory=dict)


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


class Facts:
    """What all checks share."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.config = simulation.config
        self.times = Times(simulation.config)
        self.things: dict[int, Thing] = {}
        self.ended: dict[str, str] = {}
        """By which verb each run was ended, by its token."""
        self.bodies: list[Body] = []
        self.active: dict[Any, Body] = {}
        """The body that each process runs."""
        self.begun: dict[tuple[str, Worker], str] = {}
        """The token under which a task id began in a process."""
        self.deaths: dict[str, Death] = {}
        self.sealed_lines: set[str] = set()
        """Lines over several objects of which nothing may begin."""
        self.buried: list[tuple[Any, ...]] = []
        """Dead jobs that nobody has looked at yet."""
        self.stats: Counter[str] = Counter()

    def fail(self, invariant: str, told: str) -> None:
        self.world.say(f"*** {invariant}: {told}")
        violation = Violation(invariant, told)
        # Whoever catches it on its way up: the simulation ends with it.
        self.world.broken = self.world.broken or violation
        raise violation

    @property
    def now(self) -> int:
        return EPOCH + self.world.now

    def queue_of(self, kind: str, task: str = "") -> str:
        """Where the messages of a task, or of a kind of objects, go (`application`)."""
        return "side" if kind == "side" or task == "plain.aside" else "celery"

    def process_of(self, state: ObjectState) -> Any:
        """The process that runs what is in flight, dead or alive."""
        for process in reversed(self.world.processes):
            mine = process.role == "child" and (process.life.instance, process.pid) == (state.worker, state.worker_pid)
            if mine:
                return process
        return None

    def effective(self, state: ObjectState, job: Job) -> int:
        due = max(job.due_ms, job.not_before_ms or 0)
        return due if job.id.startswith(HOOK_PREFIX) else max(due, state.not_before or 0)

    def body_of(self, token: str, task_id: str) -> Body | None:
        return next((one for one in reversed(self.bodies) if (one.token, one.task_id) == (token, task_id)), None)
