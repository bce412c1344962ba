"""Workers of every kind: embedded beat, and pools whose jobs run in the worker's own process."""

from collections.abc import Callable

import pytest

from celery_lifecycle import Lifecycle
from tests.acceptance.ledger import Ledger
from tests.acceptance.nodes import BeatNode, WorkerNode
from tests.support import wait_until

StartWorker = Callable[..., WorkerNode]
StartBeat = Callable[..., BeatNode]


@pytest.mark.combinations(("postgresql", "redis"), ("sqlite", "filesystem"))
def test_a_worker_with_an_embedded_beat_needs_nobody_else(
    start_worker: StartWorker, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    worker = start_worker(concurrency=2, arguments=["--beat", "--scheduler=lifecycle"])
    lifecycle.object("thing", "one").jobs.push("work", delay=0.5, id="job")
    killing = lifecycle.object("thing", "two")
    killing.jobs.push("work", delay=0.5, payload={"do": "sigkill", "times": 1}, id="job")
    wait_until(lambda: len(ledger.ends("job")) == 2, 20)
    assert len(ledger.starts("job", "thing/two")) == 2
    assert worker.terminate() == 0


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
@pytest.mark.combinations(("postgresql", "redis"))
def test_jobs_in_the_workers_own_process_keep_their_lease_and_may_run_out_of_memory(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, pool: str
) -> None:
    if pool == "gevent":
        pytest.importorskip("gevent")
    worker = start_worker(concurrency=2, pool=pool)
    start_beat()
    lifecycle.object("thing", "long").jobs.push("work", payload={"seconds": 4}, id="job")
    wait_until(lambda: ledger.starts("job", "thing/long"))
    lifecycle.object("thing", "short").jobs.push("work", id="job")
    lifecycle.object("thing", "poor").jobs.push("work", payload={"do": "memory_error", "times": 1}, id="job")
    chain = lifecycle.object("starting", "chain")
    for number in range(3):
        chain.jobs.push("work", id=f"job-{number}")
    wait_until(lambda: len(ledger.ends("job")) == 3 and ledger.ends("job-2"), 30, lambda: str(ledger.runs()))
    assert len(ledger.starts("job", "thing/long")) == 1
    assert len(ledger.starts("job", "thing/poor")) == 2
    wait_until(lambda: [record["cause"] for record in ledger.records("struck")] == ["memory_error"], 10)
    assert worker.terminate() == 0


@pytest.mark.combinations(("postgresql", "redis"))
def test_a_worker_of_threads_that_dies_is_lost_as_a_whole(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    worker = start_worker(concurrency=2, pool="threads")
    start_beat()
    lifecycle.object("thing", "one").jobs.push("work", payload={"do": "sigkill", "times": 1}, id="job")
    worker.wait(15)
    worker.restart()
    wait_until(lambda: ledger.ends("job"), 20)
    assert len(ledger.starts("job")) == 2
    assert [record["cause"] for record in ledger.records("struck")] == ["lost"]
