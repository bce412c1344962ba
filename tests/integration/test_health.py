"""`health` tells whether a deployment dispatches, whatever is locked, hung or gone, and never hangs itself (C13)."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy
from celery import Celery

from celery_lifecycle import Lifecycle
from celery_lifecycle.beat import LifecycleScheduler
from celery_lifecycle.health import GIVES_UP_AFTER, Health, measure
from celery_lifecycle.model import ObjectRef
from tests.support import wait_until
from tests.support.protocol import Clock, Table, table
from tests.support.tables import make_tables

OTHER = ObjectRef("cart", "user-1")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def t(database_url: str, clock: Clock) -> Iterator[Table]:
    with table(database_url, clock=clock) as made:
        yield made


def look(t: Table, **given: float | None) -> Health:
    return measure(t.config, clock=t.clock, **given)


def told(health: Health) -> str:
    return "\n".join([*health.problems, *(f"{name}: {value}" for name, value in health.lines())])


@contextmanager
def locked(url: str, name: str) -> Iterator[None]:
    """Hold a whole table as a migration or a careless administrator would."""
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
        else:
            connection.exec_driver_sql(f"LOCK TABLES {name} WRITE")
        yield
        connection.rollback()
        if engine.dialect.name != "postgresql":
            connection.exec_driver_sql("UNLOCK TABLES")
    engine.dispose()


@contextmanager
def ticking(app: Celery) -> Iterator[None]:
    """A real beat in a thread of this process."""
    scheduler = LifecycleScheduler(app, lazy=False)
    scheduler.setup_schedule()
    going = threading.Event()
    going.set()

    def tick() -> None:
        while going.is_set():
            scheduler.tick()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        going.clear()
        scheduler.close()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def lifecycle(database_url: str) -> Iterator[Lifecycle]:
    app = Celery("health", broker="memory://", set_as_current=False)
    app.conf.beat_schedule = {}
    made = Lifecycle(app, database_url=database_url, poll_interval=0.05)
    make_tables(made.store.database)
    yield made
    made.close()


def test_a_deployment_whose_beat_ticks_and_has_nothing_overdue_is_healthy(t, clock):
    t.push("soon", delay=60)
    t.store.beats.ticked("b1", {})
    clock.forward(1)
    health = look(t)
    assert health.problems == []
    assert (health.beats, health.tick_age, health.oldest, health.lateness) == (1, 1000, None, 0)


def test_without_any_beat_it_is_unhealthy_and_says_what_to_start(t):
    health = look(t)
    assert not health.healthy
    assert "celery beat -S lifecycle" in told(health)
    assert "last tick: unknown" in told(health)


def test_a_beat_that_ticked_too_long_ago_is_unhealthy_however_little_is_due(t, clock):
    t.store.beats.ticked("b1", {})
    clock.forward(5.1)
    health = look(t)
    assert len(health.problems) == 1
    assert "last tick of any beat was 5.1 s ago" in health.problems[0]
    assert look(t, max_tick_age=10).healthy


def test_the_youngest_tick_of_several_beats_counts(t, clock):
    t.store.beats.ticked("b1", {})
    clock.forward(100)
    t.store.beats.ticked("b2", {})
    clock.forward(1)
    health = look(t)
    assert health.healthy
    assert health.beats == 1


def test_an_overdue_job_is_named_with_its_lateness(t, clock):
    t.push("remind")
    t.push("later", OTHER, delay=30)
    clock.forward(61)
    t.store.beats.ticked("b1", {})
    health = look(t)
    assert not health.healthy
    assert health.lateness == 61_000
    assert health.overdue == 1
    assert "cart/user-42#remind (task cart.remind, queue celery)" in told(health)
    assert look(t, max_lateness=62).healthy
    assert look(t, max_lateness=62).lateness == 61_000
    assert look(t, max_lateness=None).healthy, "a liveness probe of beat looks at its ticks only"


def test_what_beat_has_sent_is_not_overdue_until_it_should_have_been_sent_again(t, clock):
    t.push("remind")
    assert t.claim().shipments
    clock.forward(20)
    t.store.beats.ticked("b1", {})
    health = look(t, max_lateness=5)
    assert health.healthy
    assert health.sent == 1
    clock.forward(20)
    t.store.beats.ticked("b1", {})
    assert look(t, max_lateness=5).lateness == 10_000


def test_paused_and_disabled_objects_are_not_overdue(t, clock):
    t.push("remind")
    t.store.objects.pause(ObjectRef("cart", "user-42"), "holiday")
    t.push("remind", OTHER)
    t.store.objects.disable(OTHER)
    clock.forward(1000)
    t.store.beats.ticked("b1", {})
    assert look(t).healthy


def test_a_full_dispatch_window_is_told_as_the_reason(database_url, clock):
    with table(database_url, clock=clock, dispatch_window=1) as t:
        t.push("first")
        assert t.claim().shipments
        t.push("second", OTHER)
        clock.forward(61)
        t.store.beats.ticked("b1", {})
        assert "dispatch window is full" in told(look(t, max_lateness=45))


def test_without_tables_it_is_unhealthy_and_says_what_to_type(database_url, clock):
    with table(database_url, clock=clock, migrates=False) as t:
        assert "lifecycle migrate" in told(look(t))


def test_an_unreachable_database_is_unhealthy_at_once():
    config = replace(Table("sqlite://", clock=Clock()).config, database_url="postgresql+psycopg://nobody@127.0.0.1:1/x")
    began = time.monotonic()
    health = measure(config)
    assert time.monotonic() - began < GIVES_UP_AFTER
    assert "could not be reached" in told(health)


@pytest.mark.databases("postgresql", "mariadb")
def test_a_database_that_fell_silent_is_unhealthy_within_the_limit(t, database_url, proxy):
    way = proxy(database_url)
    config = replace(t.config, database_url=way.url)
    t.store.beats.ticked("b1", {})
    assert measure(config, clock=t.clock).healthy
    way.stall()
    began = time.monotonic()
    health = measure(config, clock=t.clock)
    assert time.monotonic() - began < GIVES_UP_AFTER + 1
    assert not health.healthy


@pytest.mark.databases("postgresql", "mariadb")
def test_a_locked_table_of_objects_is_unhealthy_at_once_and_the_oldest_job_is_told_as_far_as_known(
    t, clock, database_url
):
    t.push("remind", delay=2)
    t.store.beats.ticked("b1", {})
    with locked(database_url, "lifecycle_objects"):
        clock.forward(4)
        began = time.monotonic()
        health = look(t)
        assert time.monotonic() - began < 4
    assert not health.healthy
    assert "last tick: 2027-01-15T08:00:00.000+00:00 (4.0 s ago)" in told(health)
    assert "cart/user-42#remind (task cart.remind, queue celery)" in told(health)
    assert health.lateness == 2000
    assert health.as_of == health.last_tick


@pytest.mark.databases("postgresql", "mariadb")
def test_a_job_that_beat_had_not_seen_before_the_lock_is_found_among_the_jobs(t, clock, database_url):
    t.store.beats.ticked("b1", {})
    t.push("remind", delay=2)
    with locked(database_url, "lifecycle_objects"):
        clock.forward(4)
        health = look(t)
    assert "#remind (task cart.remind, queue celery)" in told(health)


@pytest.mark.databases("sqlite")
def test_a_locked_sqlite_file_hides_nothing_from_it(t, clock, database):
    t.push("remind")
    t.store.beats.ticked("b1", {})
    clock.forward(6)
    engine = sqlalchemy.create_engine(database.url)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN EXCLUSIVE")
        health = look(t)
    engine.dispose()
    assert "last tick of any beat was 6.0 s ago" in told(health)
    assert "cart/user-42#remind" in told(health)


@pytest.mark.databases("postgresql", "mariadb")
def test_a_real_beat_whose_query_hangs_is_told_by_the_command_and_so_is_its_recovery(
    lifecycle, database_url, tmp_path: Path
):
    (tmp_path / "probed.py").write_text(
        "from celery import Celery\nfrom celery_lifecycle import Lifecycle\n"
        f"app = Celery('probed', broker='memory://')\nlifecycle = Lifecycle(app, database_url={database_url!r})\n"
    )
    command = [sys.executable, "-m", "celery", "-A", "probed", "lifecycle", "health"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}

    def health(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=30)

    with ticking(lifecycle.app):
        wait_until(lambda: measure(lifecycle.config).healthy, 20, "a healthy deployment")
        done = health()
        assert (done.returncode, done.stdout.splitlines()[0]) == (0, "healthy"), done.stdout + done.stderr
        lifecycle.object("cart", "user-42").jobs.push("cart.remind", delay=3, id="remind")
        before = measure(lifecycle.config).last_tick
        wait_until(lambda: measure(lifecycle.config).last_tick != before, 20, "a tick that has seen the job")
        with locked(database_url, "lifecycle_objects"):
            wait_until(lambda: measure(lifecycle.config).oldest is not None, 20, "an overdue job")
            done = health()
            assert done.returncode == 1
            assert "last tick" in done.stdout
            assert "cart/user-42#remind (task cart.remind" in done.stdout
            assert health("--quiet").stdout == ""
            wait_until(lambda: (measure(lifecycle.config, 5, None).tick_age or 0) > 5000, 30, "a tick too old")
            assert health("--ticks-only").returncode == 1
        wait_until(lambda: measure(lifecycle.config).healthy, 30, "health after the lock")
