"""Jobs that kill the process which runs them: slowed, then sealed; nobody else is harmed."""

import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from celery_lifecycle import Lifecycle
from tests.acceptance.ledger import Ledger, Run
from tests.acceptance.nodes import BeatNode, WorkerNode
from tests.support import wait_until

StartWorker = Callable[..., WorkerNode]
StartBeat = Callable[..., BeatNode]

#: How a job may end its process, the cause that is stored, and whether the process itself lives on.
DEATHS = {
    "sigkill": ("suspected", False),
    "segfault": ("crash", False),
    "abort": ("crash", False),
    "exit": ("crash", False),
    "system_exit": ("crash", False),
    "memory_error": ("memory_error", True),
}

EVERYWHERE = pytest.mark.combinations(
    ("postgresql", "redis"), ("mariadb", "rabbitmq"), ("sqlite", "filesystem"), ("sqlite", "redis")
)


def gaps(runs: list[Run]) -> list[float]:
    """The time from the end of each run to the start of the next."""
    return [after.started - (before.ended or before.started) for before, after in pairwise(runs)]


def sealed(lifecycle: Lifecycle, kind: str, name: str) -> bool:
    return [dead.reason for dead in lifecycle.object(kind, name).dead_jobs()] == ["sealed"]


@EVERYWHERE
def test_a_job_that_kills_its_process_starts_three_times_with_growing_gaps_and_is_sealed_while_others_run(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, database_node: object
) -> None:
    """Case C01, for each way to die."""
    worker = start_worker(concurrency=2)
    start_beat()
    threads_only = "filesystem" in str(lifecycle.app.conf.broker_url)
    for deed in DEATHS:
        lifecycle.object("thing", deed).jobs.push("work", payload={"do": deed}, id="job")
        lifecycle.object("thing", deed).jobs.push("work", id="neighbour")
    wait_until(lambda: len({run.object for run in ledger.starts("job")}) == len(DEATHS), 30, "a start of each")
    lifecycle.object("thing", "healthy").jobs.push("work", id="job")
    pushed = time.monotonic()
    (healthy,) = wait_until(lambda: ledger.ends("job", "thing/healthy"), 15)
    assert healthy.started - pushed < (15 if threads_only else 2)
    wait_until(lambda: all(sealed(lifecycle, "thing", deed) for deed in DEATHS), 60, "all sealed")
    wait_until(lambda: len(ledger.records("struck")) == 3 * len(DEATHS), 20, "every hook")
    for deed, (cause, lives) in DEATHS.items():
        runs = ledger.starts("job", f"thing/{deed}")
        assert len(runs) == 3, deed
        first, second = gaps(runs)
        assert first >= 0.5, deed
        assert second >= 1.0, deed
        (dead,) = lifecycle.object("thing", deed).dead_jobs()
        assert dead.job.id == "job"
        assert dead.details["cause"] == cause, deed
        strikes = [record for record in ledger.records("struck") if record["object"] == f"thing/{deed}"]
        assert [(record["strikes"], record["sealed"]) for record in strikes] == [(1, False), (2, False), (3, True)]
        assert {record["cause"] for record in strikes} == {cause}
        assert strikes[-1]["purged"] == ["job"]
        assert len(ledger.ends("neighbour", f"thing/{deed}")) == 1, deed
        assert len(ledger.starts("neighbour", f"thing/{deed}")) == 1, deed
        assert lives or {run.pid for run in runs}.isdisjoint(worker.children())
    assert worker.status == "running"


@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_a_process_that_dies_between_its_outcome_and_the_next_link_is_no_strike_and_its_run_goes_on(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """Case D05."""
    start_beat()
    thing = lifecycle.object("thing", "one")
    thing.pause()
    for number in range(1, 4):
        thing.jobs.push("work", id=f"{number}")
    thing.resume()
    start_worker(environment={"DIE_AFTER_FINISH": "1"})
    wait_until(lambda: ledger.records("gone"), 10)
    token = lifecycle.store.objects.find(thing.ref).token
    assert token
    wait_until(lambda: ledger.starts("2"), 15)
    assert lifecycle.store.objects.find(thing.ref).token in (token, None)
    wait_until(lambda: ledger.ends("3"), 10)
    assert [run.job for run in ledger.runs()] == ["1", "2", "3"]
    assert {run.data["strikes"] for run in ledger.runs()} == {0}
    assert ledger.records("struck") == []
