"""Broker and database are taken away for a while: nothing is lost, nothing runs twice, nobody is blamed."""

import sqlite3
import time
from collections.abc import Callable

import pytest

from celery_lifecycle import Lifecycle
from tests.acceptance.ledger import Ledger
from tests.acceptance.looks import waiting_messages
from tests.acceptance.nodes import BeatNode, BrokerNode, DatabaseNode, WorkerNode
from tests.support import Database, wait_until

StartWorker = Callable[..., WorkerNode]
StartBeat = Callable[..., BeatNode]

#: Celery's workers wait 2, 4, 6 … s between their tries to reach the broker.
RECONNECTS = 7.0


@pytest.mark.outages
@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_one_shots_due_while_the_broker_is_away_run_once_when_it_is_back(
    start_worker: StartWorker,
    start_beat: StartBeat,
    lifecycle: Lifecycle,
    ledger: Ledger,
    broker_node: BrokerNode,
) -> None:
    """Case C11."""
    start_worker()
    start_beat()
    began = time.monotonic()
    due = {f"job-{number}": began + 1 + number * 0.5 for number in range(10)}
    for name, at in due.items():
        lifecycle.object("thing", name).jobs.push("work", delay=at - began, id=name)
    wait_until(lambda: len(ledger.ends()) == 2, 10)
    broker_node.kill()
    wait_until(lambda: time.monotonic() > due["job-8"], 10)
    broker_node.restart()
    back = time.monotonic()
    wait_until(lambda: len(ledger.ends()) == 10, 30, lambda: str([run.job for run in ledger.runs()]))
    assert len(ledger.starts()) == 10
    for run in ledger.runs():
        assert run.started >= due[run.job] - 0.05
        assert run.started <= max(due[run.job], back + RECONNECTS) + 1


@pytest.mark.outages
@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_beat_outlives_an_outage_of_the_database_and_the_job_that_ran_through_it_is_stored(
    start_worker: StartWorker,
    start_beat: StartBeat,
    lifecycle: Lifecycle,
    ledger: Ledger,
    database_node: DatabaseNode,
) -> None:
    """Case C12, with the worker in the middle of a job, and with one that is to begin."""
    start_worker(concurrency=2)
    beat = start_beat()
    running = lifecycle.object("thing", "running")
    running.jobs.push("work", payload={"seconds": 1.5}, id="job")
    lifecycle.object("thing", "due").jobs.push("work", delay=1, id="job")
    wait_until(lambda: ledger.starts("job", "thing/running"))
    database_node.kill()
    wait_until(lambda: ledger.ends("job", "thing/running"), 10)
    beat.wait_for_log("Beat could not do its work")
    assert ledger.starts("job", "thing/due") == []
    database_node.restart()
    back = time.monotonic()
    (due,) = wait_until(lambda: ledger.ends("job", "thing/due"), 10)
    assert due.started - back < 3
    wait_until(lambda: running.jobs.get("job") is None, 10)
    assert len(ledger.starts()) == 2
    assert beat.status == "running"


@pytest.mark.outages
@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_a_database_away_for_longer_than_the_lease_of_running_jobs_is_neither_a_loss_nor_a_strike(
    start_worker: StartWorker,
    start_beat: StartBeat,
    lifecycle: Lifecycle,
    ledger: Ledger,
    database: Database,
    database_node: DatabaseNode,
) -> None:
    """Case D07: the first thing that beat sees when the database is back are leases that are over."""
    start_worker("first")
    start_worker("second")
    start_beat()
    for name in ("one", "two"):
        lifecycle.object("thing", name).jobs.push("work", payload={"seconds": 6}, id="job")
    wait_until(lambda: len(ledger.starts()) == 2)
    # One of the two says nothing any more, the other refuses connections.
    database_node.pause() if database.kind == "postgresql" else database_node.kill()
    gone = time.monotonic()
    wait_until(lambda: time.monotonic() > gone + 4, 10)
    database_node.proxy.restore()
    wait_until(lambda: len(ledger.ends()) == 2, 20)
    wait_until(lambda: lifecycle.store.objects.find_many() == [], 10)
    assert len(ledger.starts()) == 2
    assert ledger.records("struck") == []


@pytest.mark.outages
@pytest.mark.combinations(("postgresql", "redis"))
def test_a_death_while_the_database_says_nothing_does_not_hold_up_the_worker(
    start_worker: StartWorker,
    start_beat: StartBeat,
    lifecycle: Lifecycle,
    ledger: Ledger,
    database_node: DatabaseNode,
) -> None:
    worker = start_worker(concurrency=1)
    start_beat()
    lifecycle.object("thing", "dies").jobs.push("work", payload={"seconds": 4}, id="job")
    (run,) = wait_until(lambda: ledger.starts("job"))
    database_node.pause()
    worker.kill_pid(run.pid)
    worker.wait_for_log("could not be recorded; its lease will tell", timeout=15)
    assert worker.answers(timeout=2)
    database_node.restart()
    wait_until(lambda: len(ledger.starts("job")) == 2, 40)
    wait_until(lambda: ledger.ends("job"), 20)


@pytest.mark.outages
@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_a_job_that_asks_for_its_storage_in_an_outage_is_put_back_and_uses_up_no_attempt(
    start_worker: StartWorker,
    start_beat: StartBeat,
    lifecycle: Lifecycle,
    ledger: Ledger,
    database_node: DatabaseNode,
) -> None:
    start_worker()
    start_beat()
    thing = lifecycle.object("thing", "one")
    thing.jobs.push("work", payload={"seconds": 0.5, "reads": True}, id="job")
    wait_until(lambda: ledger.starts("job"))
    database_node.kill()
    wait_until(lambda: ledger.ends("job"))
    gone = time.monotonic()
    wait_until(lambda: time.monotonic() > gone + 2)
    assert len(ledger.starts("job")) == 1
    database_node.restart()
    wait_until(lambda: thing.jobs.get("job") is None, 10)
    assert [run.data["attempt"] for run in ledger.starts("job")] == [1, 1]
    assert thing.dead_jobs() == []


@pytest.mark.outages
@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "redis"))
def test_a_process_that_has_never_seen_the_database_waits_for_it_with_its_first_message(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, database_node: DatabaseNode
) -> None:
    worker = start_worker()
    worker.pause()
    start_beat()
    result = lifecycle.app.tasks["plain"].apply_async(kwargs={"job": "first"}, countdown=0.1)
    wait_until(lambda: waiting_messages(lifecycle) == 1)
    database_node.kill()
    worker.unpause()
    worker.wait_for_log("can't begin; trying again")
    database_node.restart()
    assert result.get(timeout=2.5) == "first"


@pytest.mark.combinations(("sqlite", "redis"))
def test_sqlite_locked_for_ten_seconds_delays_jobs_and_loses_none(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, database: Database
) -> None:
    """Case C12."""
    start_worker(concurrency=2)
    beat = start_beat()
    lifecycle.object("thing", "running").jobs.push("work", payload={"seconds": 2}, id="job")
    for number in range(3):
        lifecycle.object("thing", f"due-{number}").jobs.push("work", delay=1, id="job")
    wait_until(lambda: ledger.starts("job", "thing/running"))
    locked = sqlite3.connect(database.name, isolation_level=None)
    locked.execute("BEGIN IMMEDIATE")
    since = time.monotonic()
    wait_until(lambda: time.monotonic() > since + 10, 15)
    locked.execute("ROLLBACK")
    locked.close()
    wait_until(lambda: len(ledger.ends()) == 4, 15, lambda: str(ledger.runs()))
    wait_until(lambda: lifecycle.store.objects.find_many() == [], 10)
    assert len(ledger.starts()) == 4
    assert beat.status == "running"
