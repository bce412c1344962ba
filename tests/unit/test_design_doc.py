"""Holds docs/design.md against the code: the diagram's edges are those that the pure functions make, every name exists."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args, get_type_hints

from celery_lifecycle import breaker, transitions
from celery_lifecycle.config import Config
from celery_lifecycle.model import Brief, Cause, InFlight, Link, ObjectState, Phase, Shipment
from celery_lifecycle.transitions import run
from celery_lifecycle.transitions.derive import Agenda
from tests.support.design import DESIGN

CONFIG = Config()
NOW = 1_000_000
FLIGHT = InFlight("a", 1, "task", "a", "host", "t", "q", 3)


def _drawn() -> set[tuple[str, str, str]]:
    edges = re.findall(r"^    (\w+) --> (\w+): ([\w, ]+)$", DESIGN, re.MULTILINE)
    return {
        (before, after, by)
        for before, after, names in edges
        if before in Phase.__members__ and after in Phase.__members__
        for by in names.split(", ")
    }


def _transitions() -> dict[str, Callable[..., Any]]:
    """Every pure function that makes a state of a state, by the annotations of the modules that hold them."""
    found: dict[str, Callable[..., Any]] = {}
    homes = [
        importlib.import_module(f"{transitions.__name__}.{one.name}")
        for one in pkgutil.iter_modules(transitions.__path__)
    ]
    for module in (*homes, breaker):
        for name, function in vars(module).items():
            if not inspect.isfunction(function) or function.__module__ != module.__name__ or name.startswith("_"):
                continue
            hints = get_type_hints(function)
            result = hints.pop("return")
            if ObjectState in hints.values() and _holds_state(result):
                assert name not in found, name
                found[name] = function
    return found


def _holds_state(hint: Any) -> bool:
    """Whether a result is a state, or has one in it."""
    parts = [hint, *get_args(hint)]
    return ObjectState in parts or any(
        ObjectState in get_type_hints(part).values() for part in parts if inspect.isclass(part)
    )


def _state_in(result: Any) -> ObjectState | None:
    if result is None or isinstance(result, ObjectState):
        return result
    found: ObjectState = result.state if hasattr(result, "state") else result[0]
    return found


def _states() -> Iterator[ObjectState]:
    idle = ObjectState(1, "k", "n", "q", NOW)
    yield idle
    yield idle.but(paused="p")
    yield idle.but(dispatch="d", sent_until=NOW, sent_count=1)
    opened = idle.but(token="t", lease_until=NOW, step=1)
    yield opened
    yield opened.but(lease_until=NOW + 1)
    yield opened.but(in_flight=FLIGHT, worker="w", worker_pid=1)
    yield opened.but(in_flight=replace(FLIGHT, final=True), worker="w", worker_pid=1)
    yield opened.but(paused="p")


def _shipment(state: ObjectState, agenda: Agenda) -> Shipment:
    return Shipment(1, state.ref, state.dispatch or "x", state.token, state.step, agenda.jobs, True, NOW)


def _not_sent(state: ObjectState) -> bool:
    return state.phase is not Phase.SENT


def _idle_or_sent(state: ObjectState) -> bool:
    return state.token is None


def _between_links(state: ObjectState) -> bool:
    return state.token is not None and state.in_flight is None


def _in_flight(state: ObjectState) -> bool:
    return state.in_flight is not None


def _any(state: ObjectState) -> bool:
    return True


LINK = Link("db", 1, "d", 0, None, "a", "task", NOW, True, True)
#: For each pure function: the states for which the store calls it, and its arguments behind the state.
CALLS: dict[str, tuple[Callable[[ObjectState], bool], Callable[[ObjectState, Agenda], tuple[Any, ...]]]] = {
    "dispatch": (_idle_or_sent, lambda state, agenda: (agenda, NOW, CONFIG, "new")),
    "claim": (_any, lambda state, agenda: (agenda, NOW, CONFIG, "new")),
    "revive": (_between_links, lambda state, agenda: (agenda, NOW, CONFIG, "new")),
    "release": (_any, lambda state, agenda: (agenda, _shipment(state, agenda), NOW, 100)),
    "ended": (_in_flight, lambda state, agenda: ()),
    "destroyed": (_any, lambda state, agenda: ()),
    "close": (_not_sent, lambda state, agenda: (agenda, NOW, CONFIG, "new")),
    "derive": (_any, lambda state, agenda: (agenda, NOW)),
    "open_run": (_idle_or_sent, lambda state, agenda: (LINK, bool(agenda.jobs), NOW, "token")),
    "started": (_between_links, lambda state, agenda: (FLIGHT, run.Worker("w", 1), NOW, CONFIG)),
    "waiting": (_in_flight, lambda state, agenda: (NOW, CONFIG)),
    "passed": (_between_links, lambda state, agenda: (NOW, CONFIG)),
    "entered": (_in_flight, lambda state, agenda: (FLIGHT, CONFIG, NOW)),
    "start_failed": (_in_flight, lambda state, agenda: (NOW, CONFIG)),
    "finish": (_in_flight, lambda state, agenda: (None, run.Verdict(run.Action.COMPLETE), NOW, CONFIG)),
    "strike": (_any, lambda state, agenda: (FLIGHT, (), NOW, Cause.CRASH, CONFIG)),
}


def test_the_diagram_knows_every_pure_function_that_makes_a_state() -> None:
    assert _transitions().keys() == CALLS.keys()
    assert {by for _, _, by in _drawn()} == CALLS.keys()


def test_the_diagram_has_just_the_edges_that_the_pure_functions_make() -> None:
    found = set()
    for name, function in _transitions().items():
        fits, arguments = CALLS[name]
        for state in filter(fits, _states()):
            for agenda in (
                Agenda(),
                Agenda((Brief("a", 1, "t", "q", NOW),)),
                Agenda((Brief("a", 1, "t", "q", NOW + 9),)),
            ):
                after = _state_in(function(state, *arguments(state, agenda)))
                if after is not None and after != state:
                    found.add((state.phase.name, after.phase.name, name))
    assert found == _drawn()
