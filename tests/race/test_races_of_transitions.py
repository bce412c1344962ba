"""Every pair of transitions that can meet, on two connections: the loser waits for the row lock, then finds what the winner left.

What comes out must be what comes out when the loser begins after the winner's commit; that is tried beside it, on an object
of its own. Claims and renewals skip a row that is held, and change nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from celery_lifecycle.model import Job, Link, ObjectRef, Phase, Shipment, Why
from celery_lifecycle.store.claims import Claimed
from celery_lifecycle.store.ends import Ended
from celery_lifecycle.store.jobs import Pushed
from celery_lifecycle.store.runs import Begun, Finished
from celery_lifecycle.store.workers import Running
from celery_lifecycle.transitions.run import Worker
from tests.support.databases import Database
from tests.support.protocol import AGAIN_LATER, WORKER, Clock, Table, links_of
from tests.support.races import race, waits_for_a_lock


@dataclass
class Scene:
    """One object in a certain state, in a queue of its own."""

    ref: ObjectRef
    chain: Shipment | None = None
    links: tuple[Link, ...] = ()
    begun: Begun | None = None
    other: Shipment | None = None

    @property
    def queue(self) -> str:
        return f"queue-{self.ref.name}"


Verb = Callable[[Table, Scene], Any]


# --- scenes


def idle(t: Table, scene: Scene) -> None:
    for name in "ab":
        t.push(name, scene.ref, queue=scene.queue)


def sent(t: Table, scene: Scene) -> None:
    idle(t, scene)
    [scene.chain] = t.claim(queue=scene.queue).shipments
    scene.links = tuple(links_of(scene.chain))


def running(t: Table, scene: Scene) -> None:
    sent(t, scene)
    scene.begun = t.begin(scene.links[0])
    scene.links = tuple(replace(link, token=scene.begun.token) for link in scene.links)


def between(t: Table, scene: Scene) -> None:
    running(t, scene)
    assert scene.begun is not None
    t.finish(scene.links[0], scene.begun)


def doubted(t: Table, scene: Scene) -> None:
    running(t, scene)
    t.clock.forward(21)
    [object_id] = t.claim(Phase.OPEN, queue=scene.queue).lost
    t.store.ends.rescue(object_id)
    t.clock.forward(6)


def overdue_between(t: Table, scene: Scene) -> None:
    between(t, scene)
    t.clock.forward(31)


# --- verbs

ANYONE: dict[str, Verb] = {
    "push": lambda t, s: t.push("new", s.ref, queue=s.queue, claims=True),
    "replace": lambda t, s: t.push("a", s.ref, queue=s.queue, delay=60),
    "cancel": lambda t, s: t.store.jobs.cancel(s.ref, "a", "host"),
    "reschedule": lambda t, s: t.store.jobs.reschedule(s.ref, "b", "host", None, 5_000),
    "pause": lambda t, s: t.store.objects.pause(s.ref, "holiday"),
    "destroy": lambda t, s: t.store.objects.destroy(s.ref),
}
SKIPPING = ("claim", "renew")


def begin(position: int, worker: Worker = WORKER) -> Verb:
    return lambda t, s: t.begin(s.links[position], worker)


def finish(verdict: Any = None) -> Verb:
    return lambda t, s: t.finish(s.links[0], s.begun, *([verdict] if verdict else []))


def claim(phase: Phase) -> Verb:
    return lambda t, s: t.claim(phase, queue=s.queue)


def rescue(t: Table, s: Scene) -> Any:
    return t.store.ends.rescue(s.links[0].object_id)


def renew(t: Table, s: Scene) -> int:
    link = s.links[0]
    return t.store.workers.renew(WORKER.instance, [Running(link.object_id, link.task_id, WORKER.pid)])


SCENES: dict[str, tuple[Callable[[Table, Scene], None], dict[str, Verb]]] = {
    "idle": (idle, {**ANYONE, "claim": claim(Phase.IDLE), "resume": lambda t, s: t.store.objects.resume(s.ref)}),
    "sent": (
        sent,
        {
            **ANYONE,
            "begin": begin(0),
            "begin a copy": begin(0, Worker("w2", 7)),
            "release": lambda t, s: t.store.claims.release([s.chain], 100),
            "skip": lambda t, s: t.store.ends.skip(s.links[0], Why.UNKNOWN_TASK),
        },
    ),
    "running": (
        running,
        {
            **ANYONE,
            "finish": finish(),
            "finish with reschedule": finish(AGAIN_LATER),
            "die": lambda t, s: t.die(s.links[0]),
            "begin the next": begin(1),
            "attempted": lambda t, s: t.store.runs.attempted(s.links[0], s.begun.token, s.begun.job, 1),
            "renew": renew,
        },
    ),
    "between two links": (
        between,
        {**ANYONE, "begin": begin(1), "begin a copy": begin(1, Worker("w2", 7))},
    ),
    "overdue between two links": (
        overdue_between,
        {"push": ANYONE["push"], "pause": ANYONE["pause"], "claim": claim(Phase.OPEN), "begin": begin(1)},
    ),
    "doubted": (
        doubted,
        {
            "destroy": ANYONE["destroy"],
            "replace": ANYONE["replace"],
            "finish": finish(),
            "die": lambda t, s: t.die(s.links[0]),
            "rescue": rescue,
            "claim": claim(Phase.OPEN),
            "renew": renew,
        },
    ),
}


# --- what came out, without what is random


def told(result: Any) -> Any:
    match result:
        case Pushed():
            return (result.job.id, result.job.version, told(result.shipment))
        case Shipment():
            return ([one.id for one in result.jobs], result.first_position, result.token is None)
        case Claimed():
            return (told(result.shipments), len(result.lost), result.rows)
        case Begun():
            return (result.refused, result.job and result.job.id, result.closed, told(result.shipment))
        case Finished():
            return (result.accepted, result.discarded, result.closed, told(result.shipment))
        case Ended():
            return (result.cause, result.put_back, result.context and result.context.strikes)
        case Job():
            return result.id
        case list() | tuple():
            return [told(one) for one in result]
        case _:
            return result


def left(t: Table, scene: Scene) -> Any:
    found = t.store.objects.find(scene.ref)
    row = found and found.but(
        id=0, name="", queue=None if found.queue is None else "q", dispatch=found.dispatch and "d",
        token=found.token and "t", in_flight=found.in_flight and replace(found.in_flight, task_id="", queue=""),
    )  # fmt: skip
    jobs = [
        job._replace(object=ObjectRef("", ""), queue="", not_before_ms=job.not_before_ms and 1, suspect_on=None)
        for job in t.store.jobs.list(scene.ref, None)
    ]
    # Delays after a loss are spread at random, and so are what follows from them.
    if any(job.not_before_ms for job in jobs):
        row = row and row.but(wake_at=row.wake_at and 1)
        jobs.sort(key=lambda job: job.id)
    dead = [(one.reason, one.job.id) for one in t.store.dead.list(scene.ref)]
    return row, jobs, dead


@pytest.fixture
def tables(database: Database):
    clock = Clock()
    one = Table(database.url, clock=clock, lock_timeout=20)
    two = Table(database.url, clock=clock, migrates=False, lock_timeout=20)
    watcher = Table(database.url, clock=clock, migrates=False)
    yield one, two, watcher
    for table in (one, two, watcher):
        table.close()


@pytest.mark.parametrize("name", SCENES)
def test_the_loser_of_two_transitions_does_what_it_does_after_the_winner(name, tables, database):
    one, two, watcher = tables
    prepare, verbs = SCENES[name]
    one_clock = one.clock
    for first in verbs:
        for second in verbs:
            if first in SKIPPING and second in SKIPPING and first == second == "renew":
                continue
            begin_at = one_clock.ms
            raced, apart = (Scene(ObjectRef("cart", f"{kind} {first} {second}")) for kind in ("raced", "apart"))
            prepare(one, raced)
            one_clock.ms = begin_at
            prepare(one, apart)
            skips = second in SKIPPING
            came = race(
                one,
                lambda scene=raced, verb=first: verbs[verb](one, scene),
                lambda scene=raced, verb=second: verbs[verb](two, scene),
                _blocked(database, watcher, skips),
            )
            due = verbs[first](one, apart), None if skips else verbs[second](two, apart)
            what = f"{name}: {first}, then {second}"
            assert told(came[0]) == told(due[0]), what
            if skips and database.kind != "sqlite":
                assert told(came[1]) in (0, ([], 0, 0)), f"{what}: it took a row that is held"
            elif not skips:
                assert told(came[1]) == told(due[1]), what
            if not (skips and database.kind == "sqlite"):
                assert left(one, raced) == left(one, apart), what
            one.check()
            for scene in (raced, apart):
                one.store.objects.destroy(scene.ref)
            one_clock.ms = begin_at + 60_000


def _blocked(database: Database, watcher: Table, skips: bool) -> Callable[[], bool] | None:
    if database.kind == "sqlite":
        return lambda: True  # one writer at a time: the loser waits for the file, and nobody can see that
    return None if skips else lambda: waits_for_a_lock(database, watcher)
