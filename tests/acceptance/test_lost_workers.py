"""Whole workers and beats that are killed: every job runs again within the time that the design gives."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from celery_lifecycle import Lifecycle
from tests.acceptance.ledger import Ledger
from tests.acceptance.nodes import BeatNode, ProcessNode, WorkerNode
from tests.support import wait_until

T = TypeVar("T")
StartWorker = Callable[..., WorkerNode]
StartBeat = Callable[..., BeatNode]

#: Seconds of ``QUICK``: a lease, the second look, the longest delay of a first strike; and a tick with the machine's noise.
LEASE, SECOND_LOOK, FIRST_DELAY, NOISE = 2.0, 0.5, 1.5, 3.0


def with_restarts(node: ProcessNode, condition: Callable[[], T | None], timeout: float, message: str = "") -> T:
    """Wait as ``wait_until`` does, and start the node again whenever it has ended, as a supervisor does."""

    def look() -> T | None:
        if node.status == "exited":
            node.restart()
        return condition()

    return wait_until(look, timeout, message)


@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"), ("sqlite", "filesystem"))
def test_the_job_of_a_killed_worker_runs_again_even_if_beat_is_killed_between_its_two_looks(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """Case C05."""
    worker = start_worker()
    beat = start_beat()
    thing = lifecycle.object("thing", "one")
    thing.jobs.push("work", payload={"do": "kill_worker", "times": 1}, id="job")
    (first,) = wait_until(lambda: ledger.starts("job"))
    worker.wait(10)
    killed = time.monotonic()
    ledger.gone([first.pid], killed)
    wait_until(lambda: lifecycle.store.objects.find(thing.ref).doubt, 20)
    beat.kill()
    worker.restart()
    beat.restart()
    restarted = time.monotonic()
    wait_until(lambda: ledger.ends("job"), 20)
    again = ledger.starts("job")[1]
    assert again.started - restarted < SECOND_LOOK + FIRST_DELAY + NOISE
    assert (again.data["attempt"], again.data["strikes"]) == (1, 1)
    assert len(ledger.starts("job")) == 2
    assert [(one["cause"], one["strikes"]) for one in ledger.records("struck")] == [("lost", 1)]
    assert thing.dead_jobs() == []


@pytest.mark.combinations(("postgresql", "redis"))
def test_the_late_result_of_a_worker_that_hung_is_refused_though_its_replacement_has_its_name(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """Case C06: ownership is the token, not the host. On RabbitMQ a hung worker's control queue keeps its name's successor
    from starting at all."""
    old = start_worker("worker")
    start_beat()
    thing = lifecycle.object("thing", "one")
    thing.jobs.push("work", payload={"seconds": 3, "stamp": "by"}, id="job")
    (first,) = wait_until(lambda: ledger.starts("job"))
    old.pause()
    ledger.gone([first.pid], time.monotonic())
    new = start_worker("worker")
    assert new.hostname() == old.hostname()
    wait_until(lambda: len(ledger.starts("job")) == 2, LEASE + SECOND_LOOK + FIRST_DELAY + NOISE)
    old.unpause()
    old.wait_for_log("refused")
    wait_until(lambda: ledger.ends("job"), 10)
    second = ledger.ends("job")[0]
    assert second.pid in new.children()
    wait_until(lambda: thing.jobs.get("job") is None, 5)
    assert thing.storage["by"] == second.pid
    assert len(ledger.starts("job")) == 2
    del thing.storage["by"]


@pytest.mark.parametrize("settings", [{"lifecycle_strike_delay": 0}])
@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"), ("sqlite", "redis"))
def test_a_failure_and_a_death_keep_the_order_of_an_objects_jobs(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """Case C07; a struck job that has not to wait is still before those that were due after it."""
    start_beat()
    thing = lifecycle.object("thing", "one")
    thing.jobs.push("work", payload={"do": "fail", "times": 1}, id="1")
    thing.jobs.push("work", payload={"do": "sigkill", "times": 1}, id="2")
    thing.jobs.push("work", id="3")
    start_worker(concurrency=2)
    wait_until(lambda: ledger.ends("3") and ledger.ends("2"), 20, lambda: str(ledger.runs()))
    assert [run.job for run in ledger.runs()] == ["1", "1", "2", "2", "3"]
    assert [run.data["attempt"] for run in ledger.starts("1")] == [1, 2]


@pytest.mark.combinations(("postgresql", "rabbitmq"), ("sqlite", "redis"))
def test_a_recovery_that_makes_progress_and_pushes_itself_before_it_kills_its_worker_is_sealed_after_three_deaths(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """Cases C03 and D04."""
    worker = start_worker()
    start_beat()
    thing = lifecycle.object("thing", "one")
    doomed = {"push_self": True, "progress": True, "do": "kill_worker"}
    thing.jobs.push("recover", payload=doomed, id="replay")
    thing.jobs.push("recover", delay=600, id="other recovery")
    thing.jobs.push("work", delay=600, id="innocent")
    with_restarts(worker, thing.dead_jobs, 60)
    assert len(ledger.starts("replay")) == 3
    assert {dead.job.id: dead.reason for dead in thing.dead_jobs()} == {"replay": "sealed", "other recovery": "sealed"}
    assert [job.id for job in thing.jobs.list()] == ["innocent"]
    assert thing.storage["progress"] == 3
    wait_until(lambda: len(ledger.records("struck")) == 3, 10)
    assert {record["cause"] for record in ledger.records("struck")} == {"lost"}
    thing.jobs.cancel("innocent")


@pytest.mark.combinations(("mariadb", "rabbitmq"))
def test_the_one_of_eight_that_always_kills_the_worker_is_sealed_and_the_seven_get_done(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """Case D09."""
    worker = start_worker(concurrency=8)
    start_beat()
    innocents = [f"innocent-{number}" for number in range(7)]
    for name in innocents:
        lifecycle.object("thing", name).jobs.push("work", payload={"seconds": 1}, id="job")
    culprit = lifecycle.object("thing", "culprit")
    culprit.jobs.push("work", payload={"seconds": 0.5, "do": "kill_worker"}, id="job")
    with_restarts(worker, lambda: len(ledger.ends("job")) == 7 and culprit.dead_jobs(), 90)
    assert len(ledger.starts("job", "thing/culprit")) == 3
    assert [dead.reason for dead in culprit.dead_jobs()] == ["sealed"]
    for name in innocents:
        thing = lifecycle.object("thing", name)
        assert thing.dead_jobs() == []
        assert len(ledger.ends("job", str(thing))) == 1


@pytest.mark.combinations(("postgresql", "redis"), ("sqlite", "redis"))
def test_an_on_start_that_kills_its_process_pauses_its_object_after_three_deaths_until_it_is_resumed(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """Case D12."""
    start_worker()
    start_beat()
    starting = lifecycle.object("starting", "one")
    starting.storage["deadly"] = True
    starting.jobs.push("work", id="job")
    wait_until(lambda: starting.paused, 30)
    assert starting.paused == "sealed"
    assert len(ledger.starts("#start")) == 3
    assert ledger.starts("job") == []
    del starting.storage["deadly"]
    starting.resume()
    wait_until(lambda: ledger.ends("#alarm"), 10)
    assert len(ledger.ends("job")) == 1
    assert len(ledger.starts("#start")) == 4


@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_a_job_runs_once_if_beat_is_killed_right_after_its_publish(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """Case C10: beat kills itself as soon as its sender has sent."""
    beat = start_beat(environment={"DIE_AFTER_SENDING": "1"})
    thing = lifecycle.object("thing", "one")
    thing.jobs.push("work", delay=0.3, id="job")
    assert beat.wait(10) == -9
    start_beat("second")
    start_worker()
    wait_until(lambda: ledger.ends("job"), 10)
    wait_until(lambda: thing.jobs.get("job") is None, 5)
    start_worker("another").terminate()
    assert len(ledger.starts("job")) == 1
