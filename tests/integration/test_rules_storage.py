"""Rules of storage: small durable JSON values per object, written with the finish of the job that writes them."""

from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore

from celery_lifecycle import Lifecycle, LifecycleObject, RetryPolicy, lifecycle_job
from celery_lifecycle.errors import NameInvalid, PayloadError
from celery_lifecycle.testing import Harness
from tests.support import Database


class World:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self.does: Any = lambda ctx: None
        world = self

        class Work(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                return world.does(ctx)

        self.Work = Work


@pytest.fixture
def world(lifecycle: Lifecycle) -> World:
    return World(lifecycle)


def test_storage_is_a_mapping_of_json_values_that_is_written_at_once_outside_a_run(
    harness: Harness, world: World
) -> None:
    storage = world.Work("a").storage
    storage["import:pending"] = True
    storage["import:rows"] = [1, {"a": None}]
    storage["other"] = "ü"
    again = world.Work("a").storage
    assert again["import:rows"] == [1, {"a": None}]
    assert again.get("nothing") is None
    assert again.list("import:") == {"import:pending": True, "import:rows": [1, {"a": None}]}
    assert list(again) == ["import:pending", "import:rows", "other"]
    assert len(again) == 3
    assert "other" in again
    del again["other"]
    with pytest.raises(KeyError):
        _ = storage["other"]
    with pytest.raises(KeyError):
        del storage["other"]
    assert storage.delete("other") is False
    assert storage.delete("import:rows") is True
    assert world.Work("b").storage.list() == {}


@pytest.mark.parametrize("bad", ["\ud800", "a\0", "#", "x" * 201, None, 5], ids=ascii)
def test_a_prefix_that_no_key_can_have_is_refused(harness: Harness, world: World, bad: Any) -> None:
    with pytest.raises(NameInvalid, match="storage prefix"):
        world.Work("a").storage.list(bad)


def test_an_object_with_nothing_but_values_stays_and_goes_with_the_last_one(harness: Harness, world: World) -> None:
    work = world.Work("a")
    work.storage["key"] = 1
    harness.advance(86_400)
    assert work.storage["key"] == 1
    del work.storage["key"]
    assert harness.lifecycle.store.objects.find(work.ref) is None


def test_values_and_keys_that_are_not_allowed_are_refused(harness: Harness, world: World) -> None:
    storage = world.Work("a").storage
    for value in ({1, 2}, float("nan"), b"x", {1: 2}, "x" * (2 * 1024 * 1024)):
        with pytest.raises(PayloadError):
            storage["key"] = value
    for key in ("", "#key", "x" * 201, "a\nb"):
        with pytest.raises(NameInvalid):
            storage[key] = 1


def test_writes_through_ctx_are_stored_with_the_finish_and_seen_by_the_job_itself(
    harness: Harness, world: World
) -> None:
    work = world.Work("a")
    work.storage["old"] = 1

    def does(ctx: Any) -> None:
        ctx.storage["new"] = 2
        del ctx.storage["old"]
        assert ctx.storage.list() == {"new": 2}
        assert work.storage.list() == {"old": 1}

    world.does = does
    work.jobs.push("go")
    harness.run_due()
    assert work.storage.list() == {"new": 2}


def test_writes_of_a_failed_attempt_are_dropped(harness: Harness, world: World) -> None:
    work = world.Work("a")

    def does(ctx: Any) -> None:
        assert ctx.storage.list() == {}
        ctx.storage[f"attempt-{ctx.attempt}"] = True
        if ctx.attempt < 3:
            raise ValueError("x")

    world.does = does
    work.jobs.push("go", id="g")
    harness.run_due()
    assert work.storage.list() == {"attempt-3": True}


def test_writes_of_a_job_that_gave_up_are_dropped(harness: Harness, world: World) -> None:
    work = world.Work("a")

    def does(ctx: Any) -> None:
        ctx.storage["key"] = True
        raise ValueError("x")

    world.does = does
    work.jobs.push("go", id="g", retry=RetryPolicy(max_attempts=1))
    harness.run_due()
    harness.assert_dead(work, "g")
    assert work.storage.list() == {}


def test_writes_of_a_job_that_ends_by_ignore_are_stored(harness: Harness, world: World) -> None:
    work = world.Work("a")

    def does(ctx: Any) -> None:
        ctx.storage["key"] = True
        raise Ignore

    world.does = does
    work.jobs.push("go", id="g")
    harness.run_due()
    assert work.storage.list() == {"key": True}


@pytest.mark.parametrize("cause", ["oom", "lost"])
def test_writes_of_a_job_that_died_are_dropped(harness: Harness, world: World, cause: str) -> None:
    work = world.Work("a")
    deaths = iter([True])

    def does(ctx: Any) -> None:
        assert ctx.storage.list() == {}
        ctx.storage["key"] = ctx.strikes
        if next(deaths, False):
            harness.die(cause)

    world.does = does
    work.jobs.push("go")
    harness.advance(300)
    assert work.storage.list() == {"key": 1}


def test_writes_of_a_job_whose_outcome_is_discarded_are_stored(harness: Harness, world: World) -> None:
    """D35: a job that writes and pushes its own id."""
    work = world.Work("a")

    def does(ctx: Any) -> None:
        ctx.storage["key"] = ctx.payload
        if ctx.payload == 1:
            ctx.jobs.push("go", id="g", payload=2, delay=60)

    world.does = does
    work.jobs.push("go", id="g", payload=1)
    harness.run_due()
    assert harness.sent("job_discarded")
    assert work.storage.list() == {"key": 1}


def test_writes_of_a_job_whose_finish_is_refused_are_not_stored(harness: Harness, world: World) -> None:
    """The worker was lost for beat, its run was ended; the late result and what it wrote are refused."""
    work = world.Work("a")

    def does(ctx: Any) -> None:
        if ctx.strikes == 0:
            ctx.storage["key"] = "late"
            harness.stall(60)

    world.does = does
    work.jobs.push("go", id="g")
    harness.run_due()
    assert type(harness.ran[0].error).__name__ == "Fenced"
    assert work.storage.list() == {}
    harness.advance(300)
    assert work.storage.list() == {}
    assert work.jobs.list() == []


def test_jobs_of_one_run_see_what_the_earlier_ones_wrote(harness: Harness, world: World) -> None:
    work = world.Work("a")

    def does(ctx: Any) -> None:
        ctx.storage["count"] = ctx.storage.get("count", 0) + 1

    world.does = does
    for _ in range(3):
        work.jobs.push("go", delay=1)
    harness.advance(1)
    assert work.storage["count"] == 3


def test_keys_compare_byte_by_byte(harness: Harness, world: World) -> None:
    storage = world.Work("a").storage
    keys = ["key", "KEY", "key ", "kéy", "ke\u0301y"]
    for number, key in enumerate(keys):
        storage[key] = number
    assert [storage[key] for key in keys] == [0, 1, 2, 3, 4]


REFUSES = {
    "sqlite": "CREATE TRIGGER no BEFORE INSERT ON lifecycle_storage WHEN NEW.value = '\"bad\"' BEGIN SELECT RAISE(ABORT, 'no'); END",
    "postgresql": "ALTER TABLE lifecycle_storage ADD CONSTRAINT no CHECK (value <> '\"bad\"')",
    "mariadb": "ALTER TABLE lifecycle_storage ADD CONSTRAINT no CHECK (value <> '\"bad\"')",
}


def test_a_job_whose_writes_the_database_refuses_fails_and_holds_no_process(database: Database) -> None:
    lifecycle = Lifecycle(Celery("refused", set_as_current=False), backup_alarm=1)
    world = World(lifecycle)

    def writes_what_is_refused(ctx: Any) -> None:
        ctx.storage["key"] = "bad"

    world.does = writes_what_is_refused
    with Harness(lifecycle, database_url=database.url) as harness:
        with lifecycle.store.database.transaction() as tx:
            tx.run(REFUSES[database.kind])
        work = world.Work("a")
        work.go.push(id="job", retry=RetryPolicy(max_attempts=2, base_delay=10))
        harness.advance(60)
        assert [fact["attempt"] for fact in harness.started("job")] == [1, 2]
        (dead,) = work.dead_jobs()
        assert "refused a statement" in dead.error
        assert work.storage.list() == {}
