"""Memory that runs out for real: the strike is counted, the memory is given back, the next job runs at once."""

import time
from collections.abc import Callable

import pytest

from celery_lifecycle import Lifecycle
from tests.acceptance.ledger import Ledger
from tests.acceptance.nodes import BeatNode, WorkerNode
from tests.support import wait_until

StartWorker = Callable[..., WorkerNode]
StartBeat = Callable[..., BeatNode]


@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"), ("sqlite", "filesystem"))
def test_a_job_beyond_its_memory_limit_is_struck_and_the_process_goes_on_as_small_as_before(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """Case C02, with a real ``RLIMIT_DATA``, on a worker with one process."""
    start_worker(concurrency=1)
    start_beat()
    lifecycle.object("thing", "before").jobs.push("work", id="job")
    (before,) = wait_until(lambda: ledger.ends("job", "thing/before"))
    greedy = lifecycle.object("thing", "greedy")
    greedy.jobs.push("limited", payload={"do": "grow"}, id="job")
    for strike in range(1, 4):
        wait_until(lambda n=strike: len(ledger.starts("job", "thing/greedy")) == n, 15)
        name = f"after-{strike}"
        pushed = time.monotonic()
        lifecycle.object("thing", name).jobs.push("work", id="job")
        (after,) = wait_until(lambda n=name: ledger.ends("job", f"thing/{n}"), 10)
        assert after.started - pushed < 2
        assert after.pid == before.pid
        assert after.data["rss"] < before.data["rss"] + 60
    wait_until(greedy.dead_jobs, 10)
    (dead,) = greedy.dead_jobs()
    assert (dead.reason, dead.details["cause"]) == ("sealed", "memory_limit")
    assert dead.details["peak_rss_kib"] > 250 * 1024
    wait_until(lambda: len(ledger.records("struck")) == 3, 10)
    assert len(ledger.starts("job", "thing/greedy")) == 3
