"""`python -m tests.simulation --seeds 1000 [--seed 42]`: play many seeds, or tell the story of one."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.plans.profiles import PROFILES, plan_of
from tests.simulation.world.simulation import Simulation
from tests.simulation.world.story import report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to play")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this seed only, and tell its story if it fails")
    parser.add_argument("--profile", choices=sorted(PROFILES), help="play this profile only")
    parser.add_argument("--story", action="store_true", help="tell the story also if nothing fails")
    parser.add_argument("--keep-going", action="store_true", help="list all seeds that fail instead of one story")
    given = parser.parse_args()
    seeds = [given.seed] if given.seed is not None else range(given.first, given.first + given.seeds)
    began, stats, failed = time.monotonic(), Counter[str](), Counter[str]()
    for count, seed in enumerate(seeds, 1):
        simulation = Simulation(plan_of(seed, given.profile), trace=given.story)
        try:
            simulation.run()
        except Exception as error:
            if given.keep_going:
                failed[f"{type(error).__name__} {error}"[:70]] += 1
                sys.stdout.write(f"seed {seed} ({simulation.plan.profile}): {type(error).__name__}: {error}\n")
                continue
            sys.stdout.write(report(simulation.plan, error))
            return 1
        if given.story:
            sys.stdout.write("\n".join(simulation.world.trace or ()) + "\n")
        stats.update(simulation.checker.facts.stats)
        if sys.stdout.isatty() and count % 100 == 0:
            sys.stdout.write(f"\r{count} seeds, {count / (time.monotonic() - began):.0f}/s ")
    took = time.monotonic() - began
    told = ", ".join(f"{name} {number}" for name, number in sorted(stats.items()))
    sys.stdout.write(f"{len(seeds)} seeds in {took:.1f} s ({len(seeds) / took:.0f}/s); {told}\n")
    for what, number in failed.most_common():
        sys.stdout.write(f"{number:6} x {what}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
