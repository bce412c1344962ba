"""What moves an object from one state to another and is rare in simulated worlds: each played on the real store.

A play puts an object into the state before, yields, and then calls the verb.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import cache
from typing import Any

from celery_lifecycle.model import Cause, Link, Why
from celery_lifecycle.store.runs import Begun
from celery_lifecycle.timing.spec import ScheduleSpec
from tests.support.design import DESIGN
from tests.support.protocol import CART, QUEUE, TASK, Table, links_of

Move = tuple[str, str, str]
Play = Callable[[Table], Generator[None, None, None]]
PLAYS: dict[Move, Play] = {}


@cache
def told_moves() -> set[Move]:
    """The table of the verbs that move an object between its states."""
    rows = re.findall(r"^\| (\w+) \| (\w+) \| (`.*`) \|$", DESIGN, re.MULTILINE)
    return {(before, after, verb) for before, after, verbs in rows for verb in re.findall(r"`([\w.]+)`", verbs)}


def play(before: str, after: str, verb: str) -> Callable[[Play], Play]:
    def add(made: Play) -> Play:
        assert (before, after, verb) not in PLAYS
        PLAYS[before, after, verb] = made
        return made

    return add


def _begun(t: Table, **calling: Any) -> tuple[Link, Begun]:
    """A run whose only link is in flight."""
    shipment = t.push("a", claims=True).shipment
    assert shipment is not None
    [link] = links_of(shipment)
    return link, t.begin(link, **calling)


def _second_of_two(t: Table) -> Link:
    """A run whose second link is on its way."""
    t.push("a")
    t.push("b")
    first, second = links_of(t.shipped())
    begun, _ = t.run_link(first)
    return replace(second, token=begun.token)


def _stores(t: Table) -> None:
    t.store.objects.put_values(CART, {"k": "1"})


def _seals(t: Table) -> int:
    link, _ = _begun(t, limit=1)
    t.die(link)
    [dead] = t.store.dead.list(CART)
    return dead.key


# --- runs


@play("OPEN", "nothing", "runs.alarm_failed")
def _(t: Table) -> Generator[None, None, None]:
    t.store.objects.set_alarm(CART, TASK, QUEUE, None, 0)
    [link] = links_of(t.shipped())
    begun = t.begin(link)
    t.store.objects.destroy(CART)
    yield
    t.store.runs.alarm_failed(link, begun.token, QUEUE, TASK, "boom", "trace")


# --- jobs


@play("nothing", "IDLE", "jobs.push_many")
def _(t: Table) -> Generator[None, None, None]:
    yield
    t.store.jobs.push_many([t.draft("a")])


@play("SENT", "IDLE", "jobs.cancel")
def _(t: Table) -> Generator[None, None, None]:
    _stores(t)
    t.push("a", claims=True)
    yield
    t.store.jobs.cancel(CART, "a", None)


@play("SENT", "IDLE", "jobs.revoke")
def _(t: Table) -> Generator[None, None, None]:
    _stores(t)
    t.push(CART.name, claims=True)
    yield
    t.store.jobs.revoke([CART.kind], CART.name)


# --- begin and enter


def _expired(t: Table) -> Link:
    shipment = t.push("a", claims=True, options_json=f'{{"expires_ms": {t.clock.ms}}}').shipment
    assert shipment is not None
    [link] = links_of(shipment)
    return link


@play("SENT", "nothing", "runs.begin")
def _(t: Table) -> Generator[None, None, None]:
    link = _expired(t)
    yield
    t.begin(link)


@play("IDLE", "nothing", "runs.begin")
def _(t: Table) -> Generator[None, None, None]:
    link = _expired(t)
    t.store.objects.pause(CART, "for now")
    t.store.objects.resume(CART)
    yield
    t.begin(link)


def _enters(t: Table, delay: float | None) -> Generator[None, None, None]:
    """`on_start` has cancelled the job, and pushed another one or none."""
    link, begun = _begun(t, starts=True)
    t.store.jobs.cancel(CART, "a", None)
    if delay is not None:
        t.push("b", delay=delay)
    yield
    t.store.runs.enter(link, begun.token, begun)


@play("OPEN", "nothing", "runs.enter")
def _(t: Table) -> Generator[None, None, None]:
    return _enters(t, None)


@play("OPEN", "IDLE", "runs.enter")
def _(t: Table) -> Generator[None, None, None]:
    return _enters(t, 60)


@play("OPEN", "SENT", "runs.enter")
def _(t: Table) -> Generator[None, None, None]:
    return _enters(t, 0)


@play("OPEN", "nothing", "runs.start_failed")
def _(t: Table) -> Generator[None, None, None]:
    link, begun = _begun(t, starts=True)
    t.store.objects.destroy(CART)
    yield
    t.store.runs.start_failed(link, begun.token)


# --- ends


def _skips(t: Table, why: Why, more: bool) -> Generator[None, None, None]:
    link = _second_of_two(t)
    if more:
        t.push("c")
    yield
    t.store.ends.skip(link, why)


@play("OPEN", "SENT", "ends.skip")
def _(t: Table) -> Generator[None, None, None]:
    return _skips(t, Why.UNKNOWN_TASK, True)


@play("OPEN", "IDLE", "ends.skip")
def _(t: Table) -> Generator[None, None, None]:
    return _skips(t, Why.UNKNOWN_TASK, False)


@play("OPEN", "nothing", "ends.skip")
def _(t: Table) -> Generator[None, None, None]:
    return _skips(t, Why.REVOKED, False)


def _unknown(t: Table, *, more: bool = False, gone: bool = False) -> Generator[None, None, None]:
    link, begun = _begun(t)
    if more:
        t.push("c")
    if gone:
        t.store.jobs.cancel(CART, "a", None)
    yield
    t.store.ends.unknown(link, begun.token, Why.UNKNOWN_OWNER)


@play("OPEN", "IDLE", "ends.unknown")
def _(t: Table) -> Generator[None, None, None]:
    return _unknown(t)


@play("OPEN", "SENT", "ends.unknown")
def _(t: Table) -> Generator[None, None, None]:
    return _unknown(t, more=True)


@play("OPEN", "nothing", "ends.unknown")
def _(t: Table) -> Generator[None, None, None]:
    return _unknown(t, gone=True)


@play("OPEN", "nothing", "ends.struck_inside")
def _(t: Table) -> Generator[None, None, None]:
    link, begun = _begun(t, limit=1)
    t.store.jobs.cancel(CART, "a", None)
    yield
    t.store.ends.struck_inside(link, begun.token, Cause.MEMORY_ERROR, {})


# --- objects


@play("IDLE", "nothing", "objects.put_values")
def _(t: Table) -> Generator[None, None, None]:
    _stores(t)
    yield
    t.store.objects.put_values(CART, {"k": None})


def _resumes(t: Table, stores: bool) -> Generator[None, None, None]:
    """An object that is not paused, whose one schedule was sent, but has missed its time by now."""
    if stores:
        _stores(t)
    spec = ScheduleSpec("scheduled", nominal=t.clock.ms + 1000, misfire="skip", misfire_grace_ms=5000)
    t.push("a", schedule=spec)
    t.clock.forward(1)
    t.shipped()
    t.clock.forward(20)
    yield
    t.store.objects.resume(CART)


@play("SENT", "nothing", "objects.resume")
def _(t: Table) -> Generator[None, None, None]:
    return _resumes(t, False)


@play("SENT", "IDLE", "objects.resume")
def _(t: Table) -> Generator[None, None, None]:
    return _resumes(t, True)


# --- what is held, dead jobs


def _hold(t: Table) -> None:
    t.store.holds.hold(CART, "alive", "key", None, {"wake": None}, 30_000)


@play("IDLE", "nothing", "holds.lost")
def _(t: Table) -> Generator[None, None, None]:
    _hold(t)
    yield
    t.store.holds.lost("alive", "key")


@play("nothing", "IDLE", "dead.replay")
def _(t: Table) -> Generator[None, None, None]:
    t.push("a")
    t.store.jobs.cancel(CART, "a", None, Why.REVOKED)
    [dead] = t.store.dead.list(CART)
    yield
    t.store.dead.replay(dead.key)


@play("IDLE", "nothing", "dead.purge")
def _(t: Table) -> Generator[None, None, None]:
    key = _seals(t)
    yield
    t.store.dead.purge(key)


@play("IDLE", "nothing", "dead.purge_old")
def _(t: Table) -> Generator[None, None, None]:
    _seals(t)
    t.clock.forward(t.config.dead_job_retention + 1)
    yield
    t.store.dead.purge_old()
