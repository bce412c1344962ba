"""States of one object in which transitions meet, and the verbs that can meet in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from celery_lifecycle.model import ALARM, Cause, Link, ObjectRef, Phase, Shipment, Why
from celery_lifecycle.store.ends import End
from celery_lifecycle.store.runs import Begun
from celery_lifecycle.store.workers import Running
from celery_lifecycle.transitions.run import Worker
from tests.support.protocol import AGAIN_LATER, TASK, WORKER, Table, link, links_of


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
        return f"queue of {self.ref}"


Verb = Callable[[Table, Scene], Any]


def twins(what: str) -> tuple[Scene, Scene]:
    """Two objects of one name, so that what becomes of them can be compared."""
    return Scene(ObjectRef("raced", what)), Scene(ObjectRef("apart", what))


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


def alarm_running(t: Table, scene: Scene) -> None:
    """`on_alarm` of an object that was woken by its bare alarm, with a job that is not due yet."""
    t.store.objects.set_alarm(scene.ref, TASK, scene.queue, None, 0)
    t.push("a", scene.ref, queue=scene.queue, delay=60)
    [scene.chain] = t.claim(queue=scene.queue).shipments
    own = {"object_id": scene.chain.object_id, "dispatch": scene.chain.dispatch, "task_id": f"{scene.chain.dispatch}-0"}
    first = link(ALARM, **own, last=True)
    scene.begun = t.begin(first)
    scene.links = (replace(first, token=scene.begun.token),)


def promised(t: Table, scene: Scene) -> None:
    """A chain on its way for a job born of an `apply_async`: its id is the name of its object."""
    t.push(scene.ref.name, scene.ref, queue=scene.queue)
    [scene.chain] = t.claim(queue=scene.queue).shipments
    scene.links = tuple(links_of(scene.chain))


def kept(t: Table, scene: Scene) -> None:
    """An object that is kept alive, and has handed work off to a tracked task, which its job waits for."""
    t.push("a", scene.ref, queue=scene.queue, delay=60)
    wakes = {"wake": [TASK, scene.queue]}
    for kind in ("alive", "track"):
        t.store.holds.hold(scene.ref, kind, str(scene.ref), "a", wakes, 30_000)


def kept_by_a_run(t: Table, scene: Scene) -> None:
    """The same, where the job that has handed the work off is running: a death of the work strikes it."""
    running(t, scene)
    t.store.holds.hold(scene.ref, "track", str(scene.ref), "a", {"wake": [TASK, scene.queue]}, 30_000)


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
#: They leave alone what another transaction holds.
SKIPPING = ("claim", "renew")

#: What anyone may do besides; each of these meets the others of a scene, not its own kind.
SELDOM: dict[str, Verb] = {
    "push many": lambda t, s: t.store.jobs.push_many([t.draft("many", s.ref, queue=s.queue)]),
    "set alarm": lambda t, s: t.store.objects.set_alarm(s.ref, TASK, s.queue, None, 0),
    "store": lambda t, s: t.store.objects.put_values(s.ref, {"key": "1"}),
    "disable": lambda t, s: t.store.objects.disable(s.ref),
    "resume": lambda t, s: t.store.objects.resume(s.ref),
    "rearm": lambda t, s: t.store.jobs.rearm(s.ref),
    "hold": lambda t, s: t.store.holds.hold(s.ref, "alive", f"more {s.ref}", None, {}, 60_000) is not None,
}


def begin(position: int, worker: Worker = WORKER) -> Verb:
    return lambda t, s: t.begin(s.links[position], worker)


def finish(verdict: Any = None, position: int = 0) -> Verb:
    return lambda t, s: t.finish(s.links[position], s.begun, *([verdict] if verdict else []))


def end(how: End) -> Verb:
    return lambda t, s: t.die(s.links[0], end=how)


def revoke(running: bool) -> Verb:
    return lambda t, s: t.store.jobs.revoke([s.ref.kind], s.ref.name, running)


def let_go(kind: str) -> Verb:
    return lambda t, s: t.store.holds.let_go(s.ref, kind, str(s.ref))


def lost(kind: str, cause: Cause | None = None) -> Verb:
    return lambda t, s: t.store.holds.lost(kind, str(s.ref), cause)


def claim_named(t: Table, s: Scene) -> Any:
    return t.store.claims.claim_named(s.ref)


def alarm_failed(t: Table, s: Scene) -> Any:
    return t.store.runs.alarm_failed(s.links[0], s.begun.token, s.queue, TASK, "boom", "traceback")


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

    def pairs(self, one_lock: bool) -> Iterator[tuple[str, str]]:
        """Who comes first, who second. Where there is one lock for all rows, those that meet often stand for the others."""
        often, seldom = self.verbs, {} if one_lock else self.seldom
        for pair in (*product(often, often), *product(seldom, often), *product(often, seldom)):
            if pair != ("renew", "renew"):  # the same leases, to the same time
                yield pair

    def neighbours(self) -> Iterator[tuple[str, str]]:
        """Each verb once as the first, and once as the second, unless that would skip the row."""
        names = [*self.verbs, *self.seldom]
        for first, second in zip(names, [*names[1:], names[0]], strict=True):
            yield first, second if second not in SKIPPING else names[0]


SCENES: dict[str, Play] = {
    "idle": Play(idle, {**ANYONE, "claim": claim(Phase.IDLE), "claim named": claim_named}, SELDOM),
    "promised": Play(
        promised,
        {
            "revoke": revoke(running=True),
            "revoke what waits": revoke(running=False),
            "cancel": lambda t, s: t.store.jobs.cancel(s.ref, s.ref.name, "host"),
            "begin": begin(0),
            "skip": lambda t, s: t.store.ends.skip(s.links[0], Why.REVOKED),
            "claim named": claim_named,
        },
    ),
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
    "on_alarm": Play(
        alarm_running,
        {
            "set alarm": SELDOM["set alarm"],
            "push": ANYONE["push"],
            "destroy": ANYONE["destroy"],
            "finish": finish(),
            "fail": alarm_failed,
            "die": end(End.DIED),
            "timed out": end(End.TIMED_OUT),
        },
    ),
    "kept": Play(
        kept,
        {
            "let go": let_go("alive"),
            "let go of work": let_go("track"),
            "lose": lost("alive"),
            "lose work": lost("track", Cause.CRASH),
            "hold more": SELDOM["hold"],
            "destroy": ANYONE["destroy"],
        },
    ),
    "kept by a run": Play(
        kept_by_a_run,
        {
            "let go of work": let_go("track"),
            "lose work": lost("track", Cause.CRASH),
            "finish": finish(AGAIN_LATER),
            "die": end(End.DIED),
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
