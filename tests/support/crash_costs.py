"""The table of crash points in docs/design.md, as data: what each costs, in terms that follow from the settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from celery_lifecycle.beat import LOOK_AT_HOLDS_EVERY
from celery_lifecycle.config import Config
from tests.support.design import DESIGN

NOTHING = "none"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a crash adds to the same story without it.

    Attributes:
        delay: a sum of terms, each of them a row of the second table.
        strikes, runs: how many more strikes, and how many more runs of the body.
    """

    delay: str
    strikes: int
    runs: int

    def seconds(self, config: Config) -> tuple[float, float]:
        """The shortest and the longest delay under these settings."""
        known = terms(config)
        spans = [known[term] for term in self.delay.split(" + ")]
        return sum(low for low, _ in spans), sum(high for _, high in spans)


def terms(config: Config) -> dict[str, tuple[float, float]]:
    """What delays are made of: the shortest and the longest time (s) that each comes to."""
    patience, strike, longest = config.backup_ms / 1000, config.strike_delay, config.strike_delay_max
    lease, doubt = config.lease_ms / 1000, config.doubt_ms / 1000
    return {
        NOTHING: (0, 0),
        "patience": (patience, patience),
        "second patience": (2 * patience, 2 * patience),
        "lease": (lease - config.renew_every, lease),
        "doubt": (doubt, doubt),
        "strike": (min(strike, longest), min(strike, longest)),
        "lost strike": (min(strike, longest), min(3 * strike, longest)),
        "claim": (patience, patience),
        "keep-alive": (config.keep_alive, config.keep_alive),
        "two looks": (LOOK_AT_HOLDS_EVERY, 2 * LOOK_AT_HOLDS_EVERY),
    }


def costs() -> dict[str, Cost]:
    """The rows of the table, by their labels."""
    found: dict[str, Cost] = {}
    for label, delay, strikes, runs in _rows():
        assert label not in found, f"two rows are called {label}"
        found[label] = Cost(delay, int(strikes), int(runs))
    section = DESIGN.partition("## The order of commits and sends")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `.*$", section, re.MULTILINE)
    assert len(lines) == len(found), "a row that can't be read is a row that is not played"
    return found


def _rows() -> Iterator[tuple[str, str, str, str]]:
    row = r"^\| `([a-z-]+)` \| [^|]+ \| [^|]+ \| ([a-z+ -]+) \| (\d) \| ([+-]?\d) \|$"
    yield from re.findall(row, DESIGN, re.MULTILINE)


def told_terms() -> dict[str, str]:
    """The table of the terms: each with the time that it comes to by default."""
    return dict(re.findall(r"^\| ([a-z-]+(?: [a-z-]+)?) \| (\d+(?: to \d+)? s) \| [^|]+ \|$", DESIGN, re.MULTILINE))


#: The rows that the simulation can't play: tests/integration plays them on real databases.
ON_A_DATABASE = (
    "session-claim", "session-send", "entry-publish", "entry-record", "hold-send", "tracked-back", "tracked-lost", "holder-back",
)  # fmt: skip
#: The verbs after whose commit those rows lie that the simulation comes to all the same.
AFTER_ON_A_DATABASE = {"holds.hold"}
