"""Revocation, time limits, hung jobs, unknown tasks: how single jobs are stopped, and what becomes of the others."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_lifecycle import Lifecycle
from tests.acceptance.ledger import Ledger
from tests.acceptance.nodes import BeatNode, WorkerNode
from tests.acceptance.process import is_gone
from tests.support import wait_until

StartWorker = Callable[..., WorkerNode]
StartBeat = Callable[..., BeatNode]


def dead(lifecycle: Lifecycle, name: str) -> dict[str, str]:
    return {one.job.id: one.reason for one in lifecycle.object("thing", name).dead_jobs()}


def killed_by_worker(ledger: Ledger, object: str) -> None:
    """The first run of an object was killed by its worker, which does not say when: it must be gone by now."""
    first, *later = wait_until(lambda: ledger.runs(object))
    wait_until(lambda: is_gone(first.pid), 5)
    ledger.gone([first.pid], later[0].started if later else time.monotonic())


@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_a_revoked_link_and_a_terminated_job_are_dead_and_the_rest_of_their_chains_runs(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, tmp_path: Path
) -> None:
    """Case D33."""
    start_beat()
    go = str(tmp_path / "go")
    for name in ("waits", "stopped"):
        thing = lifecycle.object("thing", name)
        thing.pause()
        thing.jobs.push("work", id="1", payload={"until": go})
        thing.jobs.push("work", id="2")
        thing.jobs.push("work", id="3")
        thing.resume()
    start_worker(concurrency=2)
    wait_until(lambda: len(ledger.starts("1")) == 2, 10)
    task_id = {run.object: run.data["task"] for run in ledger.starts("1")}
    waiting = task_id["thing/waits"].removesuffix("-0") + "-1"
    lifecycle.app.control.revoke(waiting, reply=True)
    lifecycle.app.control.revoke(task_id["thing/stopped"], terminate=True, signal="SIGKILL", reply=True)
    wait_until(lambda: dead(lifecycle, "stopped"), 10)
    killed_by_worker(ledger, "thing/stopped")
    Path(go).touch()
    wait_until(lambda: len(ledger.ends("3")) == 2, 10)
    assert dead(lifecycle, "waits") == {"2": "revoked"}
    assert dead(lifecycle, "stopped") == {"1": "revoked"}
    assert [run.job for run in ledger.runs("thing/waits")] == ["1", "3"]
    assert [run.job for run in ledger.runs("thing/stopped")] == ["1", "2", "3"]
    assert ledger.records("struck") == []


@pytest.mark.combinations(("postgresql", "rabbitmq"), ("sqlite", "redis"))
def test_time_limits_use_up_attempts_and_a_hung_singleflight_job_is_stopped_and_run_again(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    start_worker(concurrency=3)
    start_beat()
    lifecycle.object("thing", "hard").jobs.push("hardly", payload={"seconds": 60}, id="job")
    lifecycle.object("thing", "soft").jobs.push("softly", payload={"seconds": 60}, id="job")
    lifecycle.object("thing", "hung").jobs.push("single", payload={"do": "hang", "times": 1}, id="job")
    wait_until(lambda: dead(lifecycle, "hard") and dead(lifecycle, "soft") and ledger.ends("job", "thing/hung"), 40)
    assert dead(lifecycle, "hard") == {"job": "timed out"}
    assert dead(lifecycle, "soft") == {"job": "failed"}
    for name in ("hard", "soft"):
        assert [run.data["attempt"] for run in ledger.starts("job", f"thing/{name}")] == [1, 2, 3]
    soft = ledger.runs("thing/soft")
    assert all(run.ended and run.ended - run.started < 3 for run in soft), "each attempt has a limit of its own"
    killed_by_worker(ledger, "thing/hung")
    hung, again = ledger.starts("job", "thing/hung")
    assert (again.data["attempt"], again.data["strikes"]) == (2, 0)
    assert again.pid != hung.pid
    assert ledger.records("struck") == []


@pytest.mark.parametrize("settings", [{"lifecycle_unknown_task_grace": 0}, {"lifecycle_unknown_task_grace": 2}])
@pytest.mark.combinations(("mariadb", "rabbitmq"), ("sqlite", "filesystem"))
def test_a_job_of_an_unknown_task_is_dead_after_its_grace_and_the_objects_other_jobs_run_at_once(
    start_worker: StartWorker,
    start_beat: StartBeat,
    lifecycle: Lifecycle,
    ledger: Ledger,
    settings: dict[str, object],
) -> None:
    """Cases C08 and D33."""
    start_beat()
    thing = lifecycle.object("thing", "one")
    thing.pause()
    thing.jobs.push("work", id="1")
    thing.jobs.push("thing.vanished", id="2")
    thing.jobs.push("work", id="3")
    thing.resume()
    lifecycle.object("thing", "alone").jobs.push("thing.vanished", id="1")
    # A task that the worker knows, but that this package must not run.
    lifecycle.object("thing", "foreign").jobs.push("no.such.task", id="1")
    worker = start_worker()
    wait_until(lambda: ledger.ends("3"), 10)
    worker.wait_for_log("thing.vanished")
    names = ("one", "alone", "foreign")
    if settings["lifecycle_unknown_task_grace"]:
        assert all(dead(lifecycle, name) == {} for name in names)
    wait_until(lambda: all(dead(lifecycle, name) for name in names), 20)
    assert dead(lifecycle, "one") == {"2": "unknown task"}
    assert [run.job for run in ledger.runs()] == ["1", "3"]
    before, after = ledger.runs()
    assert after.started - before.started < 3
