"""Looks for seeds that catch the mutants whose names hold one of the given words, or all of them."""

from __future__ import annotations

import json
import sys
import time

from tests.simulation.mutants import MUTANTS, SEEDS
from tests.simulation.mutants.mutation import seed_for


def main() -> int:
    wanted = sys.argv[1:]
    for mutant in MUTANTS:
        if wanted and not any(word in mutant.name for word in wanted):
            continue
        began = time.monotonic()
        found = seed_for(mutant, range(SEEDS))
        took = time.monotonic() - began
        if found is None:
            sys.stdout.write(f"    NOT CAUGHT {mutant.name!r} ({took:.0f} s)\n")
        else:
            sys.stdout.write(f"    {json.dumps(mutant.name)}: {found[0]},\n")
            sys.stderr.write(f"{mutant.name}: seed {found[0]}: {found[1]}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
