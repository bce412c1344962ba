"""Makes a failing plan short, and tells what happens in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.plans.plan import Plan
from tests.simulation.world.simulation import Simulation


def play(plan: Plan, trace: bool = False) -> tuple[Exception | None, Simulation]:
    simulation = Simulation(plan, trace)
    try:
        simulation.run()
    except Exception as error:
        return error, simulation
    return None, simulation


def same_kind(first: Exception, second: Exception | None) -> bool:
    return type(first) is type(second) and getattr(first, "invariant", None) == getattr(second, "invariant", None)


def shortened(plan: Plan, error: Exception, budget: int = 400) -> Plan:
    """Drop events and faults for as long as the same invariant breaks."""
    tries = 0

    def fails(candidate: Plan) -> bool:
        nonlocal tries
        tries += 1
        return same_kind(error, play(candidate)[0])

    for name in ("events", "faults", "unknown"):
        items: list[Any] = list(getattr(plan, name))
        size = max(1, len(items) // 2)
        while size and tries < budget:
            index = 0
            while index < len(items) and tries < budget:
                fewer = items[:index] + items[index + size :]
                if fails(replace(plan, **{name: fewer})):
                    items = fewer
                    plan = replace(plan, **{name: items})
                else:
                    index += size
            size //= 2
    for change in ({"beats": 1}, {"workers": 1}, {"slots": 1}, {"hooks": {}}, {"settings": {}}):
        candidate = replace(plan, **change)  # type: ignore[arg-type]
        if tries < budget and candidate != plan and fails(candidate):
            plan = candidate
    return plan


def report(plan: Plan, error: Exception) -> str:
    """The story of the shortest plan that fails in the same way."""
    again, _ = play(plan)
    note = "" if same_kind(error, again) else "THIS SEED DOES NOT REPLAY.\n"
    short = shortened(plan, error)
    found, simulation = play(short, trace=True)
    lines = "\n".join(simulation.world.trace or ())
    return (
        f"\nseed {plan.seed} ({plan.profile}): {type(error).__name__}: {error}\n{note}"
        f"shortened to {len(short.events)} events and {len(short.faults)} faults; it fails with: {found!r}\n\n"
        f"{lines}\n\nplan: {short.to_json()}\n"
    )
