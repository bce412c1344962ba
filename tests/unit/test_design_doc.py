"""Holds docs/design.md against the code: the diagram's edges are those that the pure functions make, every name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_lifecycle import breaker
from celery_lifecycle.config import Config
from celery_lifecycle.model import Brief, InFlight, Link, ObjectState, Phase, Shipment
from celery_lifecycle.store.claims import Claims
from celery_lifecycle.store.ends import Ends
from celery_lifecycle.store.jobs import Jobs
from celery_lifecycle.store.runs import Runs
from celery_lifecycle.store.workers import Workers
from celery_lifecycle.transitions import chain, derive, run
from celery_lifecycle.transitions.derive import Agenda

TEXT = (Path(__file__).parents[2] / "docs" / "design.md").read_text(encoding="utf-8")
STORES = {"jobs": Jobs, "claims": Claims, "runs": Runs, "ends": Ends, "workers": Workers}
CONFIG = Config()
NOW = 1_000_000
FLIGHT = InFlight("a", 1, "task", "a", "host", "t", "q", 3)


def _drawn() -> set[tuple[str, str, str]]:
    edges = re.findall(r"^    (\w+) --> (\w+): (\w+)$", TEXT, re.MULTILINE)
    return {(before, after, by) for before, after, by in edges if before in Phase.__members__}


def _states() -> Iterator[ObjectState]:
    idle = ObjectState(1, "k", "n", "q", NOW)
    yield idle
    yield idle.but(paused="p")
    yield idle.but(dispatch="d", sent_until=NOW, sent_count=1)
    opened = idle.but(token="t", lease_until=NOW, step=1)
    yield opened
    yield opened.but(in_flight=FLIGHT, worker="w", worker_pid=1)
    yield opened.but(paused="p")


def _made(state: ObjectState, agenda: Agenda) -> Iterator[tuple[str, ObjectState]]:
    """Every state that a pure function makes of a state for which the store would call it."""
    if state.token is None:
        yield "dispatch", chain.dispatch(state, agenda, NOW, CONFIG, "new").state
        link = Link("db", 1, "d", 0, None, "a", "task", NOW, True, True)
        yield "open_run", run.open_run(state, link, bool(agenda.jobs), NOW, "token")[0]
    elif state.in_flight is None:
        yield "revive", chain.revive(state, agenda, NOW, CONFIG, "new").state
        yield "started", run.started(state, FLIGHT, run.Worker("w", 1), NOW, CONFIG)
        yield "passed", run.passed(state, NOW, CONFIG)
        yield "close", chain.close(state, agenda, NOW, CONFIG, "new").state
    else:
        yield "entered", run.entered(state, FLIGHT, CONFIG, NOW)
        yield "finish", run.finish(state, None, run.Verdict(run.Action.COMPLETE), NOW, CONFIG).state
        yield "ended", chain.ended(state)
    shipment = Shipment(1, state.ref, state.dispatch or "x", state.token, state.step, agenda.jobs, True, NOW)
    released = chain.release(state, agenda, shipment, NOW, 100)
    if released is not None:
        yield "release", released


def test_the_diagram_has_just_the_edges_that_the_pure_functions_make() -> None:
    found = set()
    for state in _states():
        for agenda in (Agenda(), Agenda((Brief("a", 1, "t", "q", NOW),))):
            for by, after in _made(state, agenda):
                if by == "open_run" and state.phase is after.phase is Phase.IDLE:
                    continue  # a refusal that has nothing to forget changes nothing
                if by == "dispatch" and state.phase is after.phase is Phase.IDLE:
                    continue
                found.add((state.phase.name, after.phase.name, by))
    assert found == _drawn()


def test_every_verb_of_the_table_is_one_of_the_store() -> None:
    verbs = re.findall(r"`(jobs|claims|runs|ends|workers)\.(\w+)`", TEXT)
    assert len(verbs) > 10
    for store, verb in verbs:
        assert callable(getattr(STORES[store], verb)), f"{store}.{verb}"


@pytest.mark.parametrize("row", re.findall(r"^\| `[a-z]+\.\w+`.*$", TEXT, re.MULTILINE))
def test_every_pure_function_of_the_table_exists(row: str) -> None:
    for name in re.findall(r"`(\w+)`", row.split("|")[3]):
        homes = [module for module in (chain, derive, run, breaker) if hasattr(module, name)]
        assert homes, name
