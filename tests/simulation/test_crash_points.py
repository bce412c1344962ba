"""What docs/design.md says that a crash costs, point by point: each is played, and is held against the same story without it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from celery_lifecycle.config import Config
from tests.simulation.crash_points import CASES, CrashWorld
from tests.simulation.plans.profiles import plan_of
from tests.simulation.test_simulation import MOVES_SEEN_IN
from tests.support.crash_costs import AFTER_ON_A_DATABASE, NOTHING, ON_A_DATABASE, costs, terms, told_terms
from tests.support.design import DESIGN

COSTS = costs()
#: How much beat's poll, the notice of a death and the restart of a process may add (s).
SLACK = 1.5
#: The defaults, and others that no two terms have in common.
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "others": {"backup_alarm": 12, "strike_delay": 50, "strike_delay_max": 120},
}
HOOKS_BESIDE = ("on_start", "on_memory_limit")


def test_each_row_is_played_and_each_point_that_is_played_has_a_row() -> None:
    assert not CASES.keys() & set(ON_A_DATABASE)
    assert COSTS.keys() == CASES.keys() | set(ON_A_DATABASE)


def test_the_terms_of_the_delays_follow_from_the_settings() -> None:
    told = {
        term: f"{low:g} s" if low == high else f"{low:g} to {high:g} s" for term, (low, high) in terms(Config()).items()
    }
    assert told_terms() == {term: text for term, text in told.items() if term != NOTHING}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("label", CASES)
def test_a_crash_costs_what_its_row_says(label: str, settings: str) -> None:
    case, cost = CASES[label], COSTS[label]
    calm, crashed = (CrashWorld(case.plan(crashes, SETTINGS[settings])).run() for crashes in (False, True))
    for kind, nth, _ in case.faults:
        assert crashed.faults._seen[kind] > nth, f"nothing was lost at {kind}"
    deaths = [kind for kind, _, _ in case.faults if kind.startswith("crash ")]
    assert len(crashed.crashes) - len(calm.crashes) == len(deaths) + (case.event is not None), "it crashes exactly once"

    at = max(crashed.crashes, default=0)
    delays = {
        key: (began - max(calm.bodies.began.get(key, 0), at)) / 1000 for key, began in crashed.bodies.began.items()
    }
    late = {key: delay for key, delay in delays.items() if delay > SLACK and key not in HOOKS_BESIDE}
    before, after = calm.checker.facts.stats, crashed.checker.facts.stats
    assert after["strikes"] - before["strikes"] == cost.strikes
    assert after[case.counts] - before[case.counts] == cost.runs
    assert len(late) == (0 if cost.delay == NOTHING else case.late), delays
    low, high = cost.seconds(crashed.config)
    assert low - SLACK <= max(late.values(), default=0) <= high + SLACK, delays


def test_after_each_commit_there_is_a_crash_point_or_nothing_left_to_do() -> None:
    worlds = [CrashWorld(case.plan(False, {})).run() for case in CASES.values()]
    worlds += [CrashWorld(plan_of(seed)).run() for seed in MOVES_SEEN_IN]
    seen = set().union(*(world.commits for world in worlds))
    steps = {kind for case in CASES.values() for kind, _, _ in case.faults}
    steps = {re.sub(r"(?<=\.)_|_in$", "", kind).lower() for kind in steps}
    rest = {(role, verb) for role, verb in seen if f"crash {role} at after {verb}" not in steps}
    told = re.search(r"^After any other commit (?:.|\n)*?:\n((?:.|\n)*?)\.\n", DESIGN, re.MULTILINE)
    assert told is not None
    assert {verb for _, verb in rest} - AFTER_ON_A_DATABASE == set(re.findall(r"`([\w.]+)`", told[1]))
