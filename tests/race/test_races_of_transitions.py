"""Every pair of transitions that can meet, on two connections: the loser waits for the row lock, then finds what the winner left.

What comes out must be what comes out when the loser begins after the winner's commit; that is tried beside it, on an object
of its own. Claims and renewals skip a row that is held, and change nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

from celery_lifecycle.errors import ObjectDisabled
from celery_lifecycle.model import Cause, Job, Link, ObjectRef, Phase, Shipment, Why
from celery_lifecycle.store.claims import Claimed
from celery_lifecycle.store.ends import End, Ended
from celery_lifecycle.store.jobs import Pushed
from celery_lifecycle.store.runs import Begun, Finished
from celery_lifecycle.store.workers import Running
from celery_lifecycle.transitions.run import Worker
from tests.support.databases import Database
from tests.support.protocol import AGAIN_LATER, TASK, WORKER, Clock, Table, links_of
from tests.support.races import race, waits_for_a_lock


@dataclass
class Scene:
    """One object in a certain state, in a queue of its own."""

    ref: ObjectRef
    chain: Shipment | None = None
    links: tuple[Link, ...] = ()
    begun: Begun | None = None
    dead: int = 0

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


def lease_over(t: Table, scene: Scene) -> None:
    running(t, scene)
    t.clock.forward(21)


def overdue_between(t: Table, scene: Scene) -> None:
    between(t, scene)
    t.clock.forward(31)


def revived(t: Table, scene: Scene) -> None:
    overdue_between(t, scene)
    [scene.chain] = t.claim(Phase.OPEN, queue=scene.queue).shipments
    scene.links = (scene.links[0], *links_of(scene.chain))


def overdue_sent(t: Table, scene: Scene) -> None:
    sent(t, scene)
    t.clock.forward(31)


def running_the_last(t: Table, scene: Scene) -> None:
    between(t, scene)
    scene.begun = t.begin(scene.links[1])


def starting(t: Table, scene: Scene) -> None:
    sent(t, scene)
    scene.begun = t.begin(scene.links[0], starts=True)
    scene.links = tuple(replace(link, token=scene.begun.token) for link in scene.links)


def sealed(t: Table, scene: Scene) -> None:
    sent(t, scene)
    t.begin(scene.links[0], limit=1)
    t.die(scene.links[0])
    [dead] = t.store.dead.list(scene.ref)
    scene.dead = dead.key


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

#: What anyone may do besides; each of these meets the others of a scene, not its own kind.
SELDOM: dict[str, Verb] = {
    "push many": lambda t, s: t.store.jobs.push_many([t.draft("many", s.ref, queue=s.queue)]),
    "set alarm": lambda t, s: t.store.objects.set_alarm(s.ref, TASK, s.queue, None, 0),
    "store": lambda t, s: t.store.objects.put_values(s.ref, {"key": "1"}),
    "disable": lambda t, s: t.store.objects.disable(s.ref),
    "resume": lambda t, s: t.store.objects.resume(s.ref),
    "rearm": lambda t, s: t.store.jobs.rearm(s.ref),
    "hold": lambda t, s: t.store.holds.hold(s.ref, "keep", s.ref.name, None, {}, 60_000) is not None,
}


def begin(position: int, worker: Worker = WORKER) -> Verb:
    return lambda t, s: t.begin(s.links[position], worker)


def finish(verdict: Any = None, position: int = 0) -> Verb:
    return lambda t, s: t.finish(s.links[position], s.begun, *([verdict] if verdict else []))


def end(how: End) -> Verb:
    return lambda t, s: t.die(s.links[0], end=how)


def claim(phase: Phase) -> Verb:
    return lambda t, s: t.claim(phase, queue=s.queue)


def rescue(t: Table, s: Scene) -> Any:
    return t.store.ends.rescue(s.links[0].object_id)


def renew(t: Table, s: Scene) -> int:
    link = s.links[0]
    return t.store.workers.renew(WORKER.instance, [Running(link.object_id, link.task_id, WORKER.pid)])


@dataclass(frozen=True)
class Play:
    """A scene, the verbs that meet each other in it, and those that meet these only."""

    prepare: Callable[[Table, Scene], None]
    verbs: dict[str, Verb]
    seldom: dict[str, Verb] = field(default_factory=dict)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Who comes first, who second."""
        often, seldom = self.verbs, self.seldom
        for pair in (*product(often, often), *product(seldom, often), *product(often, seldom)):
            if pair != ("renew", "renew"):  # the same leases, to the same time
                yield pair


SCENES: dict[str, Play] = {
    "idle": Play(idle, {**ANYONE, "claim": claim(Phase.IDLE), "resume": SELDOM["resume"]}, SELDOM),
    "sent": Play(
        sent,
        {
            **ANYONE,
            "begin": begin(0),
            "begin a copy": begin(0, Worker("w2", 7)),
            "release": lambda t, s: t.store.claims.release([s.chain], 100),
            "skip": lambda t, s: t.store.ends.skip(s.links[0], Why.UNKNOWN_TASK),
        },
    ),
    "overdue on its way": Play(
        overdue_sent,
        {
            "push": ANYONE["push"],
            "pause": ANYONE["pause"],
            "claim": claim(Phase.SENT),
            "begin": begin(0),
            "release": lambda t, s: t.store.claims.release([s.chain], 100),
        },
    ),
    "starting": Play(
        starting,
        {
            "replace": ANYONE["replace"],
            "cancel": ANYONE["cancel"],
            "destroy": ANYONE["destroy"],
            "enter": lambda t, s: t.store.runs.enter(s.links[0], s.begun.token, s.begun),
            "start failed": lambda t, s: t.store.runs.start_failed(s.links[0], s.begun.token) is not None,
            "die": end(End.DIED),
        },
    ),
    "running": Play(
        running,
        {
            **ANYONE,
            "finish": finish(),
            "finish with reschedule": finish(AGAIN_LATER),
            "die": end(End.DIED),
            "begin the next": begin(1),
            "attempted": lambda t, s: t.store.runs.attempted(s.links[0], s.begun.token, s.begun.job, 1),
            "renew": renew,
        },
        {
            **SELDOM,
            "hung": end(End.HUNG),
            "timed out": end(End.TIMED_OUT),
            "revoked": end(End.REVOKED),
            "put back": end(End.PUT_BACK),
            "struck inside": lambda t, s: t.store.ends.struck_inside(s.links[0], s.begun.token, Cause.MEMORY_ERROR, {}),
            "unknown": lambda t, s: t.store.ends.unknown(s.links[0], s.begun.token, Why.UNKNOWN_OWNER),
            "skip the next": lambda t, s: t.store.ends.skip(s.links[1], Why.UNKNOWN_TASK),
        },
    ),
    "running the last": Play(
        running_the_last,
        {
            **ANYONE,
            "finish": finish(position=1),
            "finish with reschedule": finish(AGAIN_LATER, 1),
            "die": lambda t, s: t.die(s.links[1]),
        },
    ),
    "between two links": Play(
        between,
        {**ANYONE, "begin": begin(1), "begin a copy": begin(1, Worker("w2", 7))},
    ),
    "overdue between two links": Play(
        overdue_between,
        {"push": ANYONE["push"], "pause": ANYONE["pause"], "claim": claim(Phase.OPEN), "begin": begin(1)},
    ),
    "revived": Play(
        revived,
        {
            "pause": ANYONE["pause"],
            "destroy": ANYONE["destroy"],
            "begin": begin(1),
            "begin a copy": begin(1, Worker("w2", 7)),
            "release": lambda t, s: t.store.claims.release([s.chain], 100),
        },
    ),
    "lease over": Play(
        lease_over,
        {"finish": finish(), "die": end(End.DIED), "rescue": rescue, "claim": claim(Phase.OPEN), "renew": renew},
    ),
    "doubted": Play(
        doubted,
        {
            "destroy": ANYONE["destroy"],
            "replace": ANYONE["replace"],
            "finish": finish(),
            "die": end(End.DIED),
            "rescue": rescue,
            "claim": claim(Phase.OPEN),
            "renew": renew,
        },
    ),
    "sealed": Play(
        sealed,
        {
            "push it again": lambda t, s: t.push("a", s.ref, queue=s.queue),
            "push another": ANYONE["push"],
            "resume": SELDOM["resume"],
            "destroy": ANYONE["destroy"],
            "replay": lambda t, s: t.store.dead.replay(s.dead),
            "purge": lambda t, s: t.store.dead.purge(s.dead),
        },
    ),
}


# --- what came out, without what is random


def tried(verb: Verb, t: Table, scene: Scene) -> Any:
    """What a verb says; one that is refused, as a push to a disabled object, says so."""
    try:
        return verb(t, scene)
    except ObjectDisabled as refused:
        return type(refused)


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
            return without_number(result.id)
        case list() | tuple():
            return [told(one) for one in result]
        case _:
            return result


def without_number(job_id: str) -> str:
    """What is replayed beside a pending job is called by the number of the dead one."""
    return job_id.rstrip("0123456789")


def left(t: Table, scene: Scene) -> Any:
    found = t.store.objects.find(scene.ref)
    row = found and found.but(
        id=0, name="", queue=None if found.queue is None else "q", dispatch=found.dispatch and "d",
        token=found.token and "t", in_flight=found.in_flight and replace(found.in_flight, task_id="", queue=""),
    )  # fmt: skip
    jobs = [
        job._replace(
            id=without_number(job.id),
            object=ObjectRef("", ""),
            queue="",
            not_before_ms=job.not_before_ms and 1,
            suspect_on=None,
        )
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
    play = SCENES[name]
    prepare, verbs = play.prepare, {**play.verbs, **play.seldom}
    one_clock = one.clock
    for first, second in play.pairs():
        begin_at = one_clock.ms
        raced, apart = (Scene(ObjectRef("cart", f"{kind} {first} {second}")) for kind in ("raced", "apart"))
        prepare(one, raced)
        one_clock.ms = begin_at
        prepare(one, apart)
        skips = second in SKIPPING
        came = race(
            one,
            lambda scene=raced, verb=first: tried(verbs[verb], one, scene),
            lambda scene=raced, verb=second: tried(verbs[verb], two, scene),
            _blocked(database, watcher, skips),
        )
        due = tried(verbs[first], one, apart), None if skips else tried(verbs[second], two, apart)
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
