"""What tests through the public API share: an application of their own, and a harness that runs it on each database."""

from collections.abc import Iterator
from datetime import datetime, timezone

import pytest
from celery import Celery

from celery_lifecycle import Lifecycle
from celery_lifecycle.testing import Harness
from tests.support.tables import tables_at

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


@pytest.fixture
def lifecycle() -> Lifecycle:
    """An application of this test alone; object classes join it with ``lifecycle=lifecycle``."""
    return Lifecycle(Celery("rules", set_as_current=False), backup_alarm=30)


@pytest.fixture
def harness(lifecycle: Lifecycle, database_url: str) -> Iterator[Harness]:
    """The application on a private database, on a clock that starts at noon."""
    with Harness(lifecycle, database_url=tables_at(database_url), start=NOON) as running:
        yield running
