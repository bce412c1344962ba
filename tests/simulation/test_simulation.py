"""The protocol under a simulated world: many seeds, each of which replays exactly."""

from __future__ import annotations

import os

import pytest

from tests.simulation.plan import plan_of
from tests.simulation.story import play, report

SEEDS = int(os.environ.get("LIFECYCLE_SIMULATION_SEEDS", "1500"))
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_no_invariant_breaks_in_any_seed(part: int) -> None:
    for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS):
        plan = plan_of(seed)
        error, _ = play(plan)
        if error is not None:
            pytest.fail(report(plan, error), pytrace=False)


@pytest.mark.parametrize("seed", [1, 3, 4, 6, 10])
def test_a_seed_replays_exactly(seed: int) -> None:
    first, second = (play(plan_of(seed), trace=True)[1].world.trace for _ in range(2))

    assert first == second
