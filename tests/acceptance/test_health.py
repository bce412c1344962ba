"""C13 with real processes: beat's query hangs on a locked table; `lifecycle health` fails at once and says what it knows."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy

from tests.acceptance.nodes import APP
from tests.support import wait_until

pytestmark = pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
ROOT = Path(__file__).parents[2]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(environment: dict[str, str]) -> Command:
    """Runs `celery -A … lifecycle …` on the deployment under test."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "celery", "-A", APP, "lifecycle", *arguments],
            env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


@contextmanager
def locked(url: str) -> Iterator[None]:
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("LOCK TABLE lifecycle_objects IN ACCESS EXCLUSIVE MODE")
        else:
            connection.exec_driver_sql("LOCK TABLES lifecycle_objects WRITE")
        yield
        connection.rollback()
        if engine.dialect.name != "postgresql":
            connection.exec_driver_sql("UNLOCK TABLES")
    engine.dispose()


@pytest.mark.combinations(("mariadb", "redis"))
def test_c13_health_fails_while_the_due_query_hangs_and_recovers_with_it(
    lifecycle, start_worker, start_beat, command, environment, ledger
):
    start_beat()
    start_worker()
    wait_until(lambda: command("health", "--quiet").returncode == 0, 60, "a healthy deployment")
    doctor = command("doctor")
    assert doctor.returncode == 0, doctor.stdout
    assert command("push", "thing/one", "work", "--delay", "4", "--id", "late", "--payload", "{}").returncode == 0
    wait_until(lambda: "thing/one" in str(lifecycle.store.watch.beats()), 10, "a tick that has seen the job")
    with locked(environment["DATABASE_URL"]):
        last = lifecycle.store.watch.beats()[1][0]["seen"]
        time_of_lock = time.monotonic()
        found = command("health", "--json")
        assert found.returncode == 1, found.stdout
        assert time.monotonic() - time_of_lock < 10
        wait_until(lambda: "thing/one#late" in command("health").stdout, 30, "the overdue job")
        told = command("health").stdout
        assert "last tick" in told
        assert "oldest overdue job   thing/one#late (task thing.work" in told
        assert lifecycle.store.watch.beats()[1][0]["seen"] - last < 2000, "a beat that hangs does not tick"
    wait_until(lambda: command("health", "--quiet").returncode == 0, 60, "health after the lock")
    wait_until(lambda: len(ledger.starts("late")) == 1, 30, "the job's run after the lock")
