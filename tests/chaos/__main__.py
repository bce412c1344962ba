"""``python -m tests.chaos --minutes 5 --combination postgresql-redis --seed 7``"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import run
from tests.support import brokers, databases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="how long faults go on (default 5)")
    parser.add_argument("--combination", default="postgresql-redis", help="database-broker; also mariadb-rabbitmq …")
    parser.add_argument("--seed", type=int, default=None, help="of the choices; default a random one, which is printed")
    parser.add_argument("--rate", type=float, default=4, help="objects pushed a second (default 4)")
    parser.add_argument("--every", type=float, default=2, help="seconds between faults, on average (default 2)")
    given = parser.parse_args()
    database, _, broker = given.combination.partition("-")
    if database not in databases.DATABASES[1:] or broker not in brokers.DEFAULT_BROKERS:
        parser.error(f"--combination {given.combination}: give postgresql or mariadb, a hyphen, redis or rabbitmq")
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    say(f"chaos on {given.combination} for {given.minutes:g} min, seed {seed}, logs and ledger in {directory}")
    found = run(
        database=database,
        broker=broker,
        seconds=given.minutes * 60,
        seed=seed,
        directory=directory,
        rate=given.rate,
        every=given.every,
        say=say,
    )
    for name, value in found.figures.items():
        say(f"{name}: {value}")
    for one in found.wrong:
        say(f"WRONG: {one}")
    say(
        f"{len(found.wrong)} things are wrong (seed {seed})"
        if found.wrong
        else f"nothing lost, nothing overlapped (seed {seed})"
    )
    return 1 if found.wrong else 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
