"""A short chaos on each pair of database and broker; `make chaos MINUTES=…` is the long one."""

from pathlib import Path

import pytest

from tests.chaos.run import run


@pytest.mark.parametrize(
    ("tables", "messages", "seed"),
    [("postgresql", "redis", 3), ("mariadb", "rabbitmq", 4)],
    ids=["postgresql-redis", "mariadb-rabbitmq"],
)
@pytest.mark.timeout(240)
def test_nothing_is_lost_and_nothing_overlaps_while_processes_die_at_random(
    tables: str, messages: str, seed: int, tmp_path: Path
) -> None:
    found = run(database=tables, broker=messages, seconds=15, seed=seed, directory=tmp_path, rate=2, every=1.5)
    assert found.wrong == [], "\n".join(found.wrong)
    assert found.figures["runs"]
