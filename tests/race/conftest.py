"""What races share: two connections' tables on one database, and what sees which of them waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.databases import Database
from tests.support.eyes import Eyes
from tests.support.protocol import Clock, Table


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tables(database: Database, clock: Clock) -> Iterator[tuple[Table, Table, Eyes]]:
    """The first one, the second one, and the eyes on the second one. At the end what the tables hold must be right."""
    one = Table(database.url, clock=clock, lock_timeout=20)
    two = Table(database.url, clock=clock, migrates=False, lock_timeout=20)
    watcher = Table(database.url, clock=clock, migrates=False)
    yield one, two, Eyes(database, two, watcher)
    watcher.check()
    for table in (one, two, watcher):
        table.close()
