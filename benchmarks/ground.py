"""The ground of a run: an empty database schema, an empty broker, and processes that end with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import create_engine, make_url, text


@dataclass(frozen=True)
class Ground:
    """Where one benchmark runs."""

    database: str
    broker: str
    environment: dict[str, str]

    @property
    def is_redis(self) -> bool:
        return self.broker.startswith("redis")


@contextlib.contextmanager
def ground(database: str, broker: str) -> Iterator[Ground]:
    """A private schema (PostgreSQL), database (MariaDB) or file (SQLite), and a queue of its own; gone afterwards."""
    name = f"bench_{secrets.token_hex(4)}"
    url = make_url(database)
    admin = None
    if url.get_backend_name() == "postgresql":
        admin = create_engine(url, isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            connection.execute(text(f"CREATE SCHEMA {name}"))
        url = url.update_query_dict({"options": f"-csearch_path={name}"})
    elif url.get_backend_name() in ("mysql", "mariadb"):
        admin = create_engine(url)
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        url = url.set(database=name)
    environment = {
        **os.environ,
        "BENCH_DATABASE": url.render_as_string(hide_password=False),
        "BENCH_BROKER": broker,
        "BENCH_QUEUE": name,
        "C_FORCE_ROOT": "1",
    }
    os.environ.update(environment)
    try:
        yield Ground(environment["BENCH_DATABASE"], broker, environment)
    finally:
        if admin is not None:
            what = "SCHEMA" if url.get_backend_name() == "postgresql" else "DATABASE"
            cascade = " CASCADE" if what == "SCHEMA" else ""
            with admin.connect() as connection:
                connection.execute(text(f"DROP {what} {name}{cascade}"))
            admin.dispose()


def analyze(database: str) -> None:
    """Let the planner know what is there, as autovacuum would after a while."""
    if not database.startswith("postgresql"):
        return
    engine = create_engine(database, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("ANALYZE bench_objects"))
        connection.execute(text("ANALYZE bench_jobs"))
    engine.dispose()


def empty(database: str) -> None:
    """No objects and no jobs: nothing of one round is sent again in the next."""
    engine = create_engine(database)
    with engine.begin() as connection:
        for table in ("bench_jobs", "bench_objects"):
            connection.execute(text(f"DELETE FROM {table}"))
    engine.dispose()


@contextlib.contextmanager
def celery(where: Ground, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A real `celery` process on `benchmarks.app`."""
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.app", *arguments, "--loglevel", "ERROR"]
    process = subprocess.Popen(
        command, env=where.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(condition: Callable[[], Any], timeout: float, every: float = 0.02) -> Any:
    """Wait for a condition; its value."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(every)
    raise TimeoutError(f"waited {timeout} s for {condition}")


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
