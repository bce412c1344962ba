"""The protocol under a simulated world: many seeds, each of which replays exactly; and what they notice."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.simulation.checks import lateness
from tests.simulation.checks.facts import Violation
from tests.simulation.checks.played import Gathered, played, too_seldom
from tests.simulation.mutants import CAUGHT_BY, MUTANTS, SEEDS
from tests.simulation.mutants.mutation import Mutant, catches, mutated, seed_for
from tests.simulation.plans.plan import Plan
from tests.simulation.plans.profiles import PROFILES, plan_of
from tests.simulation.world.story import play, report
from tests.support.design import DESIGN
from tests.support.moves import PLAYS, told_moves

PARTS = 10
#: Seeds in which, taken together, everything happens that moves an object from one state to another, but for what is rare.
MOVES_SEEN_IN = (
    1, 2, 5, 12, 14, 23, 25, 26, 27, 31, 57, 59, 83, 91, 100, 148, 225, 230, 239, 254, 257, 261, 275, 295, 344, 350, 435,
    611, 680, 733, 859,
)  # fmt: skip


@pytest.mark.parametrize("part", range(PARTS))
def test_no_invariant_breaks_in_any_seed_and_they_play_all_there_is(
    part: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found: Counter[str] = Counter()
    for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS):
        plan = plan_of(seed)
        error, simulation = play(plan)
        if error is not None:
            pytest.fail(report(plan, error), pytrace=False)
        assert simulation.checker.moves <= told_moves(), f"seed {seed}: not in docs/design.md"
        found.update(played(simulation))
    base = tmp_path_factory.getbasetemp()
    total = Gathered(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base, PARTS).add(part, found)
    if total is not None:  # whichever part is the last one
        edges = {(before, after) for before, after, _ in told_moves()}
        assert too_seldom(total, edges) == {}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_seed_replays_exactly_also_from_its_printed_plan(profile: str) -> None:
    plan = plan_of(1, profile)
    stories = [play(one, trace=True)[1].world.trace for one in (plan, plan, Plan.from_json(plan.to_json()))]

    assert stories[0]
    assert stories[0] == stories[1] == stories[2]


def test_the_verbs_that_move_an_object_between_its_states_are_those_of_the_design() -> None:
    seen = set().union(*(play(plan_of(seed))[1].checker.moves for seed in MOVES_SEEN_IN))
    assert not seen & PLAYS.keys(), "what a world shows need not be played"
    assert seen | PLAYS.keys() == told_moves()


def test_the_bounds_of_lateness_are_those_of_the_design() -> None:
    section = DESIGN.partition("## How late at most")[2].partition("\n\n*Due*")[0]
    told, checked = ([line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| ")] for text in (
        section, lateness.__doc__ or ""
    ))  # fmt: skip
    checked = [[what, until.removesuffix(" |")] for what, until in checked]
    assert len(told) == 7
    assert told == checked


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_protocol_without_this_guard_is_caught(mutant: Mutant) -> None:
    known = CAUGHT_BY[mutant.name]
    assert known < SEEDS, "CI plays no such seed"
    if catches(mutant, known) is None:
        # A change of the protocol shifts what happens in a seed; then another one of those that CI plays must do.
        found = seed_for(mutant, range(SEEDS))
        assert found is not None, f"No seed below {SEEDS} notices: {mutant.name}"
        pytest.fail(
            f"Seed {known} does not notice {mutant.name!r} any more, seed {found[0]} does: write it into CAUGHT_BY"
        )


def test_a_failing_plan_is_shortened_to_a_story_that_fails_in_the_same_way() -> None:
    mutant = next(one for one in MUTANTS if one.name == "begin runs what is not due")
    seed = CAUGHT_BY[mutant.name]
    plan = plan_of(seed)
    with mutated(mutant):
        error, _ = play(plan)
        assert isinstance(error, Violation)
        told = report(plan, error)
        short = Plan.from_json(told.rpartition("plan: ")[2])
        again, _ = play(short)

    assert "THIS SEED DOES NOT REPLAY" not in told
    assert isinstance(again, Violation)
    assert again.invariant == error.invariant
    assert f"*** {error.invariant}: " in told
    assert len(short.events) + len(short.faults) < len(plan.events) + len(plan.faults)
    assert len(told.splitlines()) < 80
