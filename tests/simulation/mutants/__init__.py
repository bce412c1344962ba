"""The protocol with a guard taken out, or with a time that is wrong: each must be caught, or the simulation proves nothing.

`python -m tests.simulation.mutants [WORD …]` looks for seeds that catch them and prints the tables `CAUGHT_BY`.
"""

from tests.simulation.mutants import features, guards, protocol, timing

SEEDS = 2000
"""How many seeds CI plays: 0 and those that follow."""
MUTANTS = (*protocol.MUTANTS, *guards.MUTANTS, *timing.MUTANTS, *features.MUTANTS)
CAUGHT_BY = protocol.CAUGHT_BY | guards.CAUGHT_BY | timing.CAUGHT_BY | features.CAUGHT_BY
"""A seed that catches each."""
