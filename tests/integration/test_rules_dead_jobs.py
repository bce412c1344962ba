"""Rules of dead jobs: kept for people to look at, to replay, to purge; never in the way of the queue."""

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_lifecycle import Lifecycle, LifecycleObject, RetryPolicy, lifecycle_job
from celery_lifecycle.testing import Harness

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


class World:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self.fails = True
        self.payloads: list[Any] = []
        world = self

        class Work(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job(retry=RetryPolicy(max_attempts=1))
            def go(self, ctx: Any) -> None:
                world.payloads.append(ctx.payload)
                if world.fails:
                    raise ValueError("no stock")

        self.Work = Work


@pytest.fixture
def world(lifecycle: Lifecycle) -> World:
    return World(lifecycle)


def died(harness: Harness, world: World, id: str = "g", name: str = "a") -> Any:
    work = world.Work(name)
    work.jobs.push("go", id=id, payload={"number": 7}, delay=10)
    harness.advance(10)
    return work


def test_a_dead_job_keeps_reason_error_traceback_times_and_the_job_as_it_was(harness: Harness, world: World) -> None:
    work = died(harness, world)
    [dead] = work.dead_jobs()
    assert dead.reason == "failed"
    assert dead.error == "ValueError('no stock')"
    assert "Traceback" in (dead.traceback or "")
    assert dead.died_at == NOON + timedelta(seconds=10)
    assert dead.job.object == work.ref
    assert (dead.job.id, dead.job.task, dead.job.owner) == ("g", "work.go", "host")
    assert dead.job.payload == {"number": 7}
    assert dead.job.due_at == NOON + timedelta(seconds=10)
    assert dead.job.created_at == NOON


def test_a_dead_job_is_never_in_the_way_of_the_queue(harness: Harness, world: World) -> None:
    work = died(harness, world)
    assert work.jobs.list() == []
    assert harness.lifecycle.store.objects.find(work.ref) is None
    world.fails = False
    work.jobs.push("go", id="g", payload="anew")
    harness.run_due()
    assert world.payloads[-1] == "anew"


def test_replay_pushes_the_job_again_due_now_with_nothing_counted(harness: Harness, world: World) -> None:
    work = died(harness, world)
    world.fails = False
    [dead] = work.dead_jobs()
    job = harness.lifecycle.store.dead.replay(dead.key)
    assert job is not None
    assert (job.id, job.attempt, job.strikes, job.due_at) == ("g", 0, 0, harness.now)
    harness.run_due()
    assert world.payloads == [{"number": 7}, {"number": 7}]
    assert work.dead_jobs() == []
    assert harness.lifecycle.store.dead.replay(dead.key) is None


def test_replay_beside_a_pending_job_of_its_id_gets_another_id(harness: Harness, world: World) -> None:
    work = died(harness, world)
    work.jobs.push("go", id="g", payload="newer", delay=60)
    world.fails = False
    [dead] = work.dead_jobs()
    job = harness.lifecycle.store.dead.replay(dead.key)
    assert job is not None
    assert job.id != "g"
    harness.advance(60)
    assert world.payloads[1:] == [{"number": 7}, "newer"]


@pytest.mark.parametrize("id", ["x" * 200, "é" * 100, "€" * 66, "😀" * 50])
def test_the_other_id_of_a_replayed_job_is_one_that_jobs_takes(harness: Harness, world: World, id: str) -> None:
    work = died(harness, world, id)
    work.jobs.push("go", id=id, delay=60)
    [dead] = work.dead_jobs()
    job = harness.lifecycle.store.dead.replay(dead.key)
    assert job is not None
    assert job.id.endswith(f"-replay-{dead.key}")
    assert job.id.startswith(id[:40])
    assert work.jobs.get(job.id) == job
    work.jobs.reschedule(job.id, delay=60)
    assert work.jobs.cancel(job.id)


def test_purge_forgets_a_dead_job_and_says_whether_there_was_one(harness: Harness, world: World) -> None:
    work = died(harness, world)
    [dead] = work.dead_jobs()
    assert harness.lifecycle.store.dead.purge(dead.key) is True
    assert harness.lifecycle.store.dead.purge(dead.key) is False
    assert work.dead_jobs() == []


def test_dead_jobs_are_kept_for_the_retention_and_forgotten_then(harness: Harness, world: World) -> None:
    work = died(harness, world)
    harness.advance(29 * 86_400)
    assert harness.lifecycle.store.dead.purge_old() == 0
    harness.advance(2 * 86_400)
    assert harness.lifecycle.store.dead.purge_old() == 1
    assert work.dead_jobs() == []


def test_dead_jobs_of_all_objects_are_listed_in_the_order_in_which_they_died(harness: Harness, world: World) -> None:
    died(harness, world, "1", "b")
    died(harness, world, "2", "a")
    assert [(dead.job.object.name, dead.job.id) for dead in harness.lifecycle.store.dead.list()] == [
        ("b", "1"),
        ("a", "2"),
    ]
    assert harness.lifecycle.store.dead.count() == {"failed": 2}


def test_destroy_leaves_the_dead_jobs(harness: Harness, world: World) -> None:
    work = died(harness, world)
    work.destroy()
    assert len(work.dead_jobs()) == 1


def test_a_sealed_job_is_a_dead_job_with_what_is_known_of_its_deaths(harness: Harness, world: World) -> None:
    world.fails = False
    work = world.Work("a")
    work.jobs.push("go", id="g")
    harness.kill_next("g", times=3)
    harness.advance(600)
    dead = harness.assert_dead(work, "g", reason="sealed")
    assert dead.details["cause"] == "oom"
    assert dead.details["strikes"] == 3
    assert "SIGKILL" in dead.details["told"]
