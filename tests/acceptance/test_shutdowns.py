"""What a deployment does to running jobs: nothing is lost, nothing is counted, nothing runs twice at a time."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_lifecycle import Lifecycle
from tests.acceptance.ledger import Ledger
from tests.acceptance.nodes import BeatNode, WorkerNode
from tests.support import wait_until

StartWorker = Callable[..., WorkerNode]
StartBeat = Callable[..., BeatNode]


def uncounted(ledger: Ledger, job: str) -> bool:
    """Whether every run of a job was its first attempt, without a strike."""
    return {(run.data["attempt"], run.data["strikes"]) for run in ledger.starts(job)} == {(1, 0)}


@pytest.mark.combinations(("postgresql", "redis"), ("sqlite", "filesystem"))
def test_a_warm_shutdown_ends_the_running_job_however_long_it_takes_and_leaves_the_rest_to_others(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, tmp_path: Path
) -> None:
    first = start_worker("first")
    start_beat()
    thing = lifecycle.object("thing", "one")
    thing.jobs.push("work", payload={"until": str(tmp_path / "enough")}, id="long")
    (long,) = wait_until(lambda: ledger.starts("long"))
    after = [f"after-{number}" for number in range(4)]
    for job in after:
        thing.jobs.push("work", id=job)
    second = start_worker("second")
    first.kill(signal.SIGTERM)
    first.wait_for_log("Warm shutdown")
    # Longer than a lease and a second look: the worker must go on renewing while it shuts down.
    time.sleep(lifecycle.config.backup_alarm + 1)
    (tmp_path / "enough").touch()
    assert first.wait(20) == 0
    wait_until(lambda: len(ledger.ends()) == 5, 20, lambda: str(ledger.runs()))
    assert [run.job for run in ledger.runs()] == ["long", *after]
    assert ledger.ends("long")[0].pid == long.pid
    # Without an event loop Celery can take two more messages while it shuts down: it ends the wait for one in which
    # the signal came, and then waits once more.
    taken = [run for run in ledger.runs()[1:] if run.pid not in second.children()]
    assert len(taken) <= (0 if "redis" in str(lifecycle.app.conf.broker_url) else 2)
    assert all(uncounted(ledger, run.job) for run in ledger.runs())


@pytest.mark.combinations(("mariadb", "rabbitmq"), ("sqlite", "redis"))
def test_a_job_longer_than_the_grace_of_three_deployments_is_put_back_without_a_strike(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, tmp_path: Path
) -> None:
    """Case D08: SIGTERM, then SIGKILL of everything while the job still runs."""
    worker = start_worker()
    start_beat()
    thing = lifecycle.object("thing", "one")
    thing.jobs.push("work", payload={"until": str(tmp_path / "enough")}, id="long")
    for deploys in range(1, 4):
        wait_until(lambda n=deploys: len(ledger.starts("long")) == n, 20, lambda: str(ledger.runs()))
        worker.kill(signal.SIGTERM)
        worker.wait_for_log("Warm shutdown")
        wait_until(lambda n=deploys: sum(one["draining"] for one in lifecycle.store.workers.list()) == n, 5)
        worker.kill(method="everything")
        worker.restart()
    (tmp_path / "enough").touch()
    wait_until(lambda: ledger.ends("long"), 20)
    assert len(ledger.starts("long")) == 4
    assert uncounted(ledger, "long")
    assert thing.dead_jobs() == []
    assert ledger.records("struck") == []


@pytest.mark.combinations(("postgresql", "rabbitmq"))
def test_a_cold_shutdown_puts_the_running_job_back_at_once(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, tmp_path: Path
) -> None:
    worker = start_worker(concurrency=2)
    start_beat()
    for name in ("one", "two"):
        lifecycle.object("thing", name).jobs.push("work", payload={"until": str(tmp_path / "enough")}, id="long")
    wait_until(lambda: len(ledger.starts("long")) == 2)
    worker.kill(signal.SIGQUIT)
    worker.wait(20)
    idle = wait_until(lambda: [state for state in lifecycle.store.objects.find_many() if state.token is None], 1)
    assert len(idle) == 2
    (tmp_path / "enough").touch()
    worker.restart()
    wait_until(lambda: len(ledger.ends("long")) == 2, 20)
    assert len(ledger.starts("long")) == 4
    assert uncounted(ledger, "long")


@pytest.mark.parametrize("settings", [{"worker_soft_shutdown_timeout": 2}])
@pytest.mark.combinations(("postgresql", "redis"))
def test_a_soft_shutdown_lets_short_jobs_end_and_puts_long_ones_back(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, tmp_path: Path
) -> None:
    worker = start_worker(concurrency=2)
    start_beat()
    lifecycle.object("thing", "one").jobs.push("work", payload={"seconds": 1}, id="short")
    lifecycle.object("thing", "two").jobs.push("work", payload={"until": str(tmp_path / "enough")}, id="long")
    wait_until(lambda: len(ledger.starts()) == 2)
    worker.kill(signal.SIGQUIT)
    worker.wait(20)
    assert len(ledger.ends("short")) == 1
    (tmp_path / "enough").touch()
    worker.restart()
    wait_until(lambda: ledger.ends("long"), 20)
    assert len(ledger.starts("short")) == 1
    assert len(ledger.starts("long")) == 2
    assert uncounted(ledger, "long")
