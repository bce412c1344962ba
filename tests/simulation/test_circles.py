"""A world that goes round in circles comes to an end, and is told."""

import pytest

from tests.simulation.checks import checker
from tests.simulation.checks.facts import Violation
from tests.simulation.plans.plan import Plan
from tests.simulation.world.simulation import Simulation


def test_a_world_that_goes_round_in_circles_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "MOST_COMMITS", 200)
    for_ever = {"at": 1000, "do": "push", "on": "plain/a", "script": [{"end": "yield"}]}
    world = Simulation(Plan(1, "circles", horizon=10_000, events=[for_ever]))
    with pytest.raises(Violation) as found:
        world.run()
    assert found.value.invariant == "nobody goes round in circles"
    assert world.checker.commits == 201
