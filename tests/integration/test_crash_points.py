"""The crash points of docs/design.md that the simulation can't play, on real databases: sessions, beat entries, what is held."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy
from celery import Celery
from celery.schedules import schedule
from sqlalchemy.orm import Session

from celery_lifecycle import Lifecycle, LifecycleObject, Reschedule, entries, lifecycle_job
from celery_lifecycle.beat import LifecycleScheduler
from celery_lifecycle.config import Config
from celery_lifecycle.migrations.schema import migrate
from celery_lifecycle.model import Phase
from celery_lifecycle.store import Store
from celery_lifecycle.testing import Harness
from celery_lifecycle.timing.instants import from_millis
from tests.support.crash_costs import NOTHING, ON_A_DATABASE, costs
from tests.support.protocol import Clock

COSTS = costs()
#: Other than the defaults, and no two terms have a time in common.
SETTINGS: dict[str, Any] = {"backup_alarm": 12, "strike_delay": 50, "keep_alive": 15}
SLACK = 1.0
DAY = 86_400
START = 1_767_268_800_000


class Gone(BaseException):
    """The process of a caller, or of a beat, has died: nothing of it is used any more."""


class Story:
    """What happened, and when (s): with the crash, or in the same world without it."""

    def __init__(self, crashes: bool, now: Callable[[], float]) -> None:
        self.crashes = crashes
        self.now = now
        self.crashed = 0
        self.began: list[tuple[str, float]] = []
        self.strikes = 0

    def dies(self) -> bool:
        """Whether the process dies here: the first one that comes by, if any does."""
        if not self.crashes or self.crashed:
            return False
        self.crashed += 1
        return True

    def begins(self, what: str) -> None:
        self.began.append((what, self.now()))

    def last(self) -> float:
        return max((at for _, at in self.began), default=0.0)

    def runs(self) -> int:
        return sum(what == "body" for what, _ in self.began)


def check(label: str, calm: Story, crashed: Story, config: Config) -> None:
    cost = COSTS[label]
    assert (calm.crashed, crashed.crashed) == (0, 1), "it crashes exactly once"
    assert crashed.strikes - calm.strikes == cost.strikes
    assert crashed.runs() - calm.runs() == cost.runs
    low, high = cost.seconds(config)
    assert low - SLACK <= crashed.last() - calm.last() <= high + SLACK
    assert (crashed.last() - calm.last() > SLACK) == (cost.delay != NOTHING)


# --- an application in a harness


class World:
    """An application whose processes die on cue: no code of theirs runs any more, and they tell the database nothing."""

    def __init__(self, url: str, crashes: bool) -> None:
        lifecycle = Lifecycle(Celery("crashes", set_as_current=False), **SETTINGS)
        self.lifecycle = lifecycle
        self.harness = Harness(lifecycle, database_url=url, start=from_millis(START))
        story = self.story = Story(crashes, lambda: (self.harness._now_ms - START) / 1000)
        self.does: Any = lambda ctx: None
        world = self

        class Thing(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                story.begins("body")
                return world.does(ctx)

            def on_alarm(self, info: Any) -> None:
                story.begins("on_alarm")

        @lifecycle.app.task(name="careful", shared=False)
        def careful() -> None:
            story.begins("careful")

        self.thing = Thing
        self.careful = careful

    def dies_at(self, owner: Any, name: str, cause: str, when: Callable[..., bool] = lambda *_: True) -> None:
        """The process that comes to this call dies before it, and what it would do as it is unwound does not happen."""
        database, worker = self.lifecycle.store.database, self.harness._worker
        call, bury = getattr(owner, name), worker._bury

        def gone(*args: Any, **kwargs: Any) -> Any:
            self.harness.die(cause)

        def instead(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs) and self.story.dies():
                database.run = gone  # type: ignore[method-assign]
                self.harness.die(cause)
            return call(*args, **kwargs)

        def buried(request: Any, why: Any) -> Any:
            database.__dict__.pop("run", None)
            return bury(request, why)

        setattr(owner, name, instead)
        worker._bury = buried  # type: ignore[method-assign]

    def plays(self, seconds: float = 120) -> None:
        self.harness.advance(seconds)
        self.story.strikes = len(self.harness.sent("alarm_memory_limit_reset"))

    # the worlds

    def session(self, url: str, owner: Any, name: str, left: Phase) -> None:
        """A caller commits a push of his own."""
        thing = self.thing("a")
        call = getattr(owner, name)

        def instead(*args: Any) -> Any:
            if self.story.dies():
                raise Gone
            return call(*args)

        setattr(owner, name, instead)
        engine = sqlalchemy.create_engine(url)
        try:
            with Session(engine) as session:
                thing.jobs.push("go", id="g", session=session)
                session.commit()
        except Gone:
            found = self.lifecycle.store.objects.find(thing.ref)
            assert found is not None
            assert found.phase is left
        finally:
            delattr(owner, name)
            engine.dispose()
        self.plays()

    def session_claim(self, url: str) -> None:
        self.session(url, self.lifecycle.store.claims, "claim_several", Phase.IDLE)

    def session_send(self, url: str) -> None:
        self.session(url, self.lifecycle, "send", Phase.SENT)

    def hands_off(self, ctx: Any) -> Any:
        ctx.track(self.careful.si())
        return Reschedule(delay=3 * DAY)

    def hold_send(self, url: str) -> None:
        self.does = self.hands_off
        self.dies_at(self.harness._producer, "publish", "crash", lambda *_, headers, **__: headers["task"] == "careful")
        self.thing("a").jobs.push("go", id="g")
        self.plays()
        assert len(self.lifecycle.store.holds.of(self.thing("a").ref)) == int(self.story.crashes)
        before = len(self.story.began)
        self.harness.advance(DAY)
        woken, self.story.began[before:] = [what for what, _ in self.story.began[before:]], []
        assert woken == ["on_alarm"] * self.story.crashes
        assert len(self.harness.sent("alarm_memory_limit_reset")) == self.story.strikes, "nobody is struck for it"

    def tracked(self, cause: str) -> None:
        self.does = self.hands_off
        self.dies_at(self.lifecycle.store.holds, "let_go_by_key", cause)
        self.thing("a").jobs.push("go", id="g")
        self.plays()
        assert self.lifecycle.store.holds.of(self.thing("a").ref) == []

    def tracked_back(self, url: str) -> None:
        self.tracked("crash")

    def tracked_lost(self, url: str) -> None:
        self.tracked("lost")

    def holder_back(self, url: str) -> None:
        thing = self.thing("a")
        held = thing.keep_alive()
        if self.story.dies():
            self.harness.lose(held)
        self.plays()
        held.release()
        assert self.lifecycle.store.objects.find(thing.ref) is None


IN_A_HARNESS = {
    name.replace("_", "-"): getattr(World, name)
    for name in ("session_claim", "session_send", "hold_send", "tracked_back", "tracked_lost", "holder_back")
}


@pytest.mark.parametrize("label", IN_A_HARNESS)
def test_a_crash_costs_what_its_row_says(label: str, database_url: str) -> None:
    stories = []
    for crashes in (False, True):
        world = World(database_url, crashes)
        with world.harness:
            IN_A_HARNESS[label](world, database_url)
            config = world.lifecycle.config
        stories.append(world.story)
    check(label, *stories, config)


# --- ordinary entries of beat


class Beats:
    """Beats with one entry that is due once an hour, on one clock; the second one is another process."""

    def __init__(self, url: str, crashes: bool, published: bool) -> None:
        self.clock = Clock(START)
        self.story = Story(crashes, lambda: (self.clock.ms - START) / 1000)
        self.published = published
        self.url = url
        self.app_name = f"crash-{uuid.uuid4().hex}"
        self.beats: list[LifecycleScheduler] = []
        store = Store(Config(database_url=url))
        migrate(store.database)
        store.close()

    def beat(self) -> LifecycleScheduler:
        hourly = schedule(timedelta(hours=1), nowfun=lambda: from_millis(self.clock.ms))
        app = Celery(self.app_name, broker="memory://", set_as_current=False)
        app.conf.update(
            task_default_queue=self.app_name, result_expires=None,
            beat_schedule={"digest": {"task": "shop.digest", "schedule": hourly}},
        )  # fmt: skip
        lifecycle = Lifecycle(app, database_url=self.url, poll_interval=0.01, **SETTINGS)
        lifecycle._store = Store(lifecycle.config, self.clock)
        made = LifecycleScheduler(app, max_interval=0.001)
        assert made._entries is not None
        publish = made._entries._publish

        def instead(entry: Any) -> None:
            if not self.published and self.story.dies():
                raise Gone
            publish(entry)
            self.story.begins("body")
            if self.published and self.story.dies():
                raise Gone

        made._entries._publish = instead  # type: ignore[method-assign]
        self.beats.append(made)
        return made

    def plays(self) -> Config:
        beat = self.beat()
        config: Config = beat.app.lifecycle.config
        beat.tick()
        self.clock.forward(3600)
        for _ in range(40):
            try:
                beat.tick()
            except Gone:
                beat = self.beat()
            self.clock.forward(0.5)
        for one in self.beats:
            one.close()
            one.app.lifecycle.close()
        return config


@pytest.mark.parametrize(("label", "published"), [("entry-publish", False), ("entry-record", True)])
def test_a_crash_of_a_beat_with_an_entry_costs_what_its_row_says(
    label: str, published: bool, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stories = []
    for crashes in (False, True):
        world = Beats(database_url, crashes, published)
        monkeypatch.setattr(entries, "time", SimpleNamespace(monotonic=world.story.now))
        config = world.plays()
        monkeypatch.undo()
        stories.append(world.story)
    check(label, *stories, config)


def test_each_row_that_the_simulation_leaves_out_is_played_here() -> None:
    assert {*IN_A_HARNESS, "entry-publish", "entry-record"} == set(ON_A_DATABASE)
