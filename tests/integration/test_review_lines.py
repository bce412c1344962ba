"""Lines over several objects: a task whose jobs are objects of their own pushes the next one, and dies."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_lifecycle import Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.task import LifecycleTask
from celery_lifecycle.testing import Harness
from tests.support.tables import tables_at


class Loop:
    """A task that does `does` and counts its starts: as a lifecycle function, or as an ordinary task with eta."""

    def __init__(self, lifecycle: Lifecycle, kind: str) -> None:
        self.started: list[str] = []
        self.does: Callable[[], Any] = lambda: None
        self.task: Any
        if kind == "function":

            @lifecycle_job(name="loop", app=lifecycle.app)
            def loop(ctx: Any) -> None:
                self.started.append(ctx.job.id)
                self.does()

            self.task = loop
            return

        @lifecycle.app.task(base=LifecycleTask, name="loop", shared=False, bind=True)
        def eta(task: Any) -> None:
            self.started.append(task.request.id)
            self.does()

        self.task = eta

    def push(self, id: str | None = None) -> None:
        if self.task.lifecycle_target is None:
            self.task.apply_async(countdown=1, task_id=id)
        else:
            self.task.push(id=id)


@pytest.fixture(params=["function", "eta"])
def loop(request: pytest.FixtureRequest, lifecycle: Lifecycle) -> Loop:
    return Loop(lifecycle, request.param)


def test_a_task_that_pushes_the_next_and_dies_is_sealed_with_its_line(harness: Harness, loop: Loop) -> None:
    """D30 where each job is an object of its own."""

    def dies() -> None:
        loop.push()
        harness.die()

    loop.does = dies
    loop.push("root")
    harness.advance(7200)
    assert len(loop.started) == 3
    assert {dead.reason for dead in harness.lifecycle.store.dead.list()} == {"sealed"}
    assert all(state.wake_at is None for state in harness.lifecycle.store.objects.find_many())


def test_a_task_that_pushes_many_and_dies_is_sealed_with_its_line(harness: Harness, lifecycle: Lifecycle) -> None:
    loop = Loop(lifecycle, "function")

    def dies() -> None:
        loop.task.push_many([{}, {}])
        harness.die()

    loop.does = dies
    loop.push("root")
    harness.advance(7200)
    assert len(loop.started) == 3


def test_a_task_that_pushes_the_next_and_works_goes_on(harness: Harness, loop: Loop) -> None:
    def works() -> None:
        if len(loop.started) < 20:
            loop.push()

    loop.does = works
    loop.push("root")
    harness.advance(600)
    assert len(loop.started) == 20
    assert harness.lifecycle.store.objects.find_many() == []


def test_a_line_whose_every_job_dies_once_and_then_works_is_not_sealed(harness: Harness, loop: Loop) -> None:
    def unlucky() -> None:
        if loop.started.count(loop.started[-1]) == 1:
            harness.die()
        if len(set(loop.started)) < 6:
            loop.push()

    loop.does = unlucky
    loop.push("root")
    harness.advance(3600)
    assert len(loop.started) == 12
    assert harness.lifecycle.store.dead.list() == []


def test_a_sealed_line_begins_anew_when_it_is_pushed_from_outside(harness: Harness, loop: Loop) -> None:
    def dies() -> None:
        loop.push()
        harness.die()

    loop.does = dies
    loop.push("root")
    harness.advance(7200)
    for times in (2, 3):
        loop.push("root")
        harness.advance(7200)
        assert len(loop.started) == 3 * times


def test_two_lines_of_one_task_are_sealed_each_for_itself(harness: Harness, loop: Loop) -> None:
    def dies() -> None:
        if loop.started[-1] != "good":
            loop.push()
            harness.die()

    loop.does = dies
    loop.push("bad")
    harness.advance(7200)
    loop.push("good")
    harness.advance(60)
    assert loop.started.count("good") == 1


def test_a_run_of_another_object_does_not_bring_a_sealed_job_back(harness: Harness, lifecycle: Lifecycle) -> None:
    started = []

    class Import(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def go(self, ctx: Any) -> None:
            started.append(harness.now)
            harness.die()

    class Watch(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def look(self, ctx: Any) -> None:
            Import("a").jobs.push("go", id="go")

    Watch("w").schedule_every(60, "look")
    harness.advance(3 * 3600)
    assert len(started) == 3
    Import("a").jobs.push("go", id="go")
    harness.run_due()
    assert len(started) == 4


@pytest.mark.parametrize(("pause", "sealed"), [(10, True), (20, False)])
def test_the_deaths_of_a_line_are_remembered_for_the_strike_window(
    database_url: str, pause: float, sealed: bool
) -> None:
    """A job that gives way to a new one of its line has no strikes of its own to be sealed for."""
    lifecycle = Lifecycle(Celery("window", set_as_current=False), strike_window=15)

    class Work(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def go(self, ctx: Any) -> None:
            number = ctx.payload
            ctx.jobs.cancel(str(number - 1))
            ctx.jobs.push("go", id=str(number + 1), payload=number + 1, delay=pause)
            harness.die()

    with Harness(lifecycle, database_url=tables_at(database_url)) as harness:
        work = Work("a")
        work.go.push(id="0", payload=0)
        harness.advance(10 * pause)
        assert len(harness.started()) == (3 if sealed else 11)
        assert {dead.reason for dead in work.dead_jobs()} == ({"sealed"} if sealed else set())


@pytest.mark.parametrize("how", ["replay", "purge"])
def test_a_job_that_was_sealed_with_its_line_may_die_as_often_as_a_new_one_once_that_is_lifted(
    harness: Harness, loop: Loop, how: str
) -> None:
    def dies() -> None:
        if len(loop.started) < 3:
            loop.push(f"next{len(loop.started)}")
        harness.die()

    loop.does = dies
    loop.push("root")
    harness.advance(900)  # what is counted of a line is remembered for an hour
    dead = harness.lifecycle.store.dead
    [mine] = [one for one in dead.list() if one.job.id == "root"]
    before = loop.started.count("root")
    if how == "replay":
        dead.replay(mine.key)
    else:
        dead.purge(mine.key)
        loop.push("root")
    harness.advance(900)
    assert loop.started.count("root") - before == 3
