"""One small world for each crash point that the simulation can play: it crashes there, exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.simulation.checks.checker import verb_of
from tests.simulation.plans.plan import Plan
from tests.simulation.world.bodies import Bodies
from tests.simulation.world.calls import Call
from tests.simulation.world.engine import Killed, Process
from tests.simulation.world.simulation import Simulation

FIRST, SECOND = 0, 1
JOB = {"at": 1000, "do": "push", "on": "plain/a", "id": "j", "n": "j", "script": [{"ms": 100}]}
LONG = {**JOB, "script": [{"ms": 12_000}]}
LATER = {**JOB, "delay": 1}
TWO = {"at": 1000, "do": "push_many", "on": "plain/a", "ids": [["a", None], ["b", None]], "script": [{"ms": 100}]}
FULL = {**JOB, "on": "full/f"}
HUNG = {**JOB, "task": "single", "script": [{"ms": 60_000}, {"ms": 100}]}
FAILS = {**JOB, "script": [{"end": "fail"}], "retry": [2, 0.1, 0.1]}
GOES_ON = {**JOB, "script": [{"end": "yield"}, {}]}
#: Two jobs in one chain, of which the first is of a task that no worker knows yet.
STRANGE = [
    {"at": 900, "do": "pause", "on": "plain/a"},
    {**JOB, "task": "single", "id": "s", "n": "s"},
    {**JOB, "at": 1500},
    {"at": 2000, "do": "resume", "on": "plain/a"},
]
UNKNOWN = [["plain.single", 0, 2500]]
#: Another job comes due, and the one that was sent is cancelled, while the chain waits for a worker.
PASSED = [
    LATER,
    {"at": 1900, "do": "stall", "who": "worker", "for": 1000},
    {**JOB, "at": 2400, "id": "k", "n": "k"},
    {"at": 2500, "do": "cancel", "on": "plain/a", "id": "j"},
]
MOVED = [{**JOB, "delay": 60}, {"at": 2000, "do": "reschedule", "on": "plain/a", "id": "j", "delay": 0}]
INSIDE = {**JOB, "script": [{"first": [{"do": "push", "on": "plain/b", "id": "k", "n": "k", "script": [{}]}]}, {}]}
LOST = {"horizon": 180_000}
WORKER_DIES = {"at": 1500, "do": "kill", "who": "worker"}


@dataclass(frozen=True, slots=True)
class Case:
    """A crash point in a world.

    Attributes:
        events: what happens in any case.
        faults: the crash: `(kind, nth occasion, extra)`.
        event: the crash, where it is one that has a time.
        more: of the plan.
        counts: the code whose runs are counted: the jobs' bodies, or `on_alarm`.
        late: how many jobs are late, if any is.
    """

    events: list[dict[str, Any]]
    faults: list[tuple[str, int, Any]] = field(default_factory=list)
    event: dict[str, Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    counts: str = "bodies"
    late: int = 1

    def plan(self, crashes: bool, settings: dict[str, Any]) -> Plan:
        events = [*self.events, self.event] if crashes and self.event else self.events
        more = {**self.more, "settings": {**settings, **self.more.get("settings", {})}}
        plan = Plan(7, "crash point", restart=300, poll=50, events=events, **{"horizon": 100_000, **more})
        plan.faults = [list(fault) for fault in self.faults] if crashes else []
        return plan


def crash(role: str, step: str, nth: int = FIRST) -> tuple[str, int, Any]:
    return (f"crash {role} at {step}", nth, True)


CASES: dict[str, Case] = {
    # a push
    "push-commit": Case([JOB], [crash("client", "before Jobs.push_in")]),
    "push-send": Case([JOB], [crash("client", "after Jobs.push_in")]),
    "push-answer": Case([JOB], [("unheard client at Jobs.push_in", FIRST, 0)]),
    "pushed-sent": Case([JOB], [crash("client", "sent")]),
    "inside-push": Case([INSIDE], [crash("child", "after Jobs.push_in")], late=2),
    "move-claim": Case(MOVED, [crash("client", "after Jobs.reschedule_in")]),
    "moved-send": Case(MOVED, [crash("client", "after Claims.claim_one")]),
    # beat
    "due-claim": Case([LATER], [crash("beat", "before Claims._claim")]),
    "claim-send": Case([LATER], [crash("beat", "after Claims._claim")]),
    "claim-claim": Case(
        [LATER, {**LATER, "on": "plain/b", "n": "other"}], [crash("beat", "after Claims._claim", SECOND)],
        more={"settings": {"claim_batch": 1}}, late=2,
    ),
    "claim-answer": Case([LATER], [("unheard beat at Claims._claim", FIRST, 0)]),
    "claimed-sent": Case([LATER], [crash("beat", "sent")]),
    "unsent-release": Case(
        [LATER, {"at": 1500, "do": "broker_away", "for": 1000}], [crash("beat", "before Claims._release")]
    ),
    "release-send": Case(
        [LATER, {"at": 1500, "do": "broker_away", "for": 1000}], [crash("beat", "after Claims._release")]
    ),
    "revive-send": Case(
        [TWO, {"at": 1090, "do": "broker_away", "for": 3000}], [crash("beat", "after Claims._claim", SECOND)]
    ),
    # messages
    "message-lost": Case([JOB], [("lose", FIRST, True)]),
    "message-doubled": Case([JOB], [("double", FIRST, 5)]),
    "link-lost": Case([TWO], [("lose", SECOND, True)]),
    "link-doubled": Case([TWO], [("double", SECOND, 5)]),
    # a link
    "receive-begin": Case([JOB], [crash("child", "before Runs._begin")]),
    "received-begin": Case([TWO], [crash("child", "before Runs._begin", SECOND)]),
    "begin-answer": Case([JOB], [("unheard child at Runs._begin", FIRST, 0)]),
    "begin-start": Case([FULL], [crash("child", "after Runs._begin")], late=2),
    "start-enter": Case([FULL], [crash("child", "before Runs.enter")], late=2),
    "enter-body": Case([FULL], [crash("child", "after Runs.enter")], late=2),
    "begin-body": Case([JOB], [crash("child", "after Runs._begin")]),
    "body-finish": Case([JOB], [crash("child", "before Runs._finish")]),
    "failed-attempted": Case([FAILS], [crash("child", "before Runs.attempted")]),
    "attempted-attempt": Case([FAILS], [crash("child", "after Runs.attempted")]),
    "finish-answer": Case([TWO], [("unheard child at Runs._finish", FIRST, 0)]),
    "finish-link": Case([TWO], [crash("child", "after Runs._finish")]),
    "link-sent": Case([TWO], [crash("child", "sent")]),
    "close-send": Case([GOES_ON], [crash("child", "after Runs._finish")]),
    "close-answer": Case([GOES_ON], [("unheard child at Runs._finish", FIRST, 0)]),
    "follow-sent": Case([GOES_ON], [crash("child", "sent")]),
    "pass-send": Case(PASSED, [crash("child", "after Runs._begin")]),
    "close-end": Case([JOB], [crash("child", "after Runs._finish")]),
    "throw-failed": Case(
        [FULL], [crash("child", "before Runs.start_failed")], more={"hooks": {"f on_start": ["fail", "ok"]}}, late=2
    ),
    "start-failed": Case([FULL], [crash("child", "after Runs.start_failed")], more={"hooks": {"f on_start": ["fail", "ok"]}}),
    "alarm-finish": Case([FULL], [crash("child", "before Runs._finish", SECOND)], counts="alarms"),
    "alarm-failed": Case([FULL], [crash("child", "after Runs._alarm_failed")], more={"hooks": {"f on_alarm": ["fail", "ok"]}}),
    # deaths
    "memory-strike": Case([{**JOB, "script": [{"end": "memory"}, {}]}], [crash("child", "before Ends.struck_inside")]),
    "memory-told": Case([{**JOB, "script": [{"end": "memory"}, {}]}], [crash("child", "after Ends.struck_inside")]),
    "death-strike": Case([JOB], [crash("child", "before Runs._finish"), crash("worker", "before Ends._end")], more=LOST),
    "strike-told": Case([JOB], [crash("child", "before Runs._finish"), crash("worker", "after Ends._end")]),
    "worker-body": Case([LONG], event={"at": 4000, "do": "kill", "who": "worker"}, more=LOST),
    "body-renew": Case([LONG], [crash("worker", "before Workers._renew", SECOND)], more=LOST),
    "renew-body": Case([LONG], [crash("worker", "after Workers._renew", SECOND)], more=LOST),
    "hung-write": Case([HUNG], [crash("worker", "before Ends._end")], more=LOST),
    "hung-kill": Case([HUNG], [crash("worker", "after Ends._end")], more=LOST),
    "lost-look": Case([LONG, WORKER_DIES], [crash("beat", "before Ends._rescue")], more=LOST),
    "doubt-look": Case([LONG, WORKER_DIES], [crash("beat", "after Ends._rescue")], more=LOST),
    "rescue-told": Case([LONG, WORKER_DIES], [crash("beat", "after Ends._rescue", SECOND)], more=LOST),
    # links that never run
    "receive-skip": Case(STRANGE, [crash("worker", "before Ends._skip")], more={"unknown": UNKNOWN}, late=2),
    "skip-send": Case(STRANGE, [crash("worker", "after Ends._skip")], more={"unknown": UNKNOWN}, late=2),
}  # fmt: skip


class TimedBodies(Bodies):
    """Remembers when each job, or hook of an object, began last."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.began: dict[str, int] = {}

    def _play(self, ctx: Any, job: Any, payload: Any, handle: Any) -> Any:
        self.began[str(payload["n"])] = self.simulation.world.now
        return super()._play(ctx, job, payload, handle)

    def _hooked(self, ref: Any, which: str, script: Any) -> Any:
        self.began[which] = self.simulation.world.now
        return super()._hooked(ref, which, script)


class CrashWorld(Simulation):
    """A simulation that remembers when code began, when a process crashed, and after which commits one could have."""

    def __init__(self, plan: Plan, trace: bool = False) -> None:
        super().__init__(plan, trace)
        self.bodies: TimedBodies = TimedBodies(self)
        self.crashes: list[int] = []
        self.commits: set[tuple[str, str]] = set()
        """Who has changed an object or a job, and by which verb."""

    def _crash(self, process: Process, what: str) -> None:
        was_alive = process.alive
        try:
            super()._crash(process, what)
        except Killed:
            if was_alive:
                self.crashes.append(self.world.now)
            raise

    def _do_kill(self, event: dict[str, Any]) -> None:
        self.crashes.append(self.world.now)
        super()._do_kill(event)

    def lost_answer(self) -> Any:
        process = self.world.process
        if process is not None:
            cut = self.faults.hits(f"unheard {process.role} at {process.lifecycle.store.database.call.label}")
            if cut is not None:
                return cut
        return super().lost_answer()

    def committed(self, call: Call) -> None:
        before = self.checker.rows, self.checker.job_rows
        super().committed(call)
        if before != (self.checker.rows, self.checker.job_rows) and self.world.process is not None:
            self.commits.add((self.world.process.role, verb_of(call.label)))
