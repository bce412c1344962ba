"""Two apps in one process, each with a job database of its own: a handle made without `lifecycle=` belongs to the right one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_lifecycle import Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.testing import Harness


class Parcel(LifecycleObject, kind="two-apps.parcel"):
    def on_start(self) -> None:
        Parcel("of-on-start").jobs.push("later", delay=60, id="later")

    @lifecycle_job
    def go(self, ctx: Any) -> None:
        Parcel("of-job").jobs.push("later", delay=60)

    @lifecycle_job
    def later(self, ctx: Any) -> None: ...


@pytest.fixture
def apps(tmp_path: Path) -> Iterator[tuple[Lifecycle, Lifecycle]]:
    made = [
        Lifecycle(Celery(name, broker="memory://"), database_url=f"sqlite:///{tmp_path}/{name}.db", auto_migrate=True)
        for name in ("one", "two")
    ]
    yield made[0], made[1]
    for lifecycle in made:
        lifecycle.close()


def names(lifecycle: Lifecycle) -> list[str]:
    return [state.name for state in lifecycle.store.objects.find_many()]


def test_inside_a_run_an_object_class_belongs_to_the_app_that_runs(apps: tuple[Lifecycle, Lifecycle]) -> None:
    one, two = apps
    with Harness(one) as harness:
        one.object("two-apps.parcel", "a").jobs.push("go")
        harness.run_due()
        assert sorted(names(one)) == ["of-job", "of-on-start"]
    assert names(two) == []


def test_outside_of_a_run_an_object_class_belongs_to_the_current_app(apps: tuple[Lifecycle, Lifecycle]) -> None:
    """As in a worker, which makes its own app the current one, whatever others its modules make."""
    one, two = apps
    Parcel("a").jobs.push("later", delay=60)
    one.app.set_current()
    Parcel("b").jobs.push("later", delay=60)
    assert (names(one), names(two)) == (["b"], ["a"])
