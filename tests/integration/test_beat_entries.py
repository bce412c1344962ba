"""Ordinary `beat_schedule` entries under `-S lifecycle`: real databases and brokers, real ticks, a clock for the entries."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import BaseSchedule, crontab, schedstate, schedule, solar

from celery_lifecycle import Lifecycle
from celery_lifecycle.beat import LifecycleScheduler
from celery_lifecycle.errors import DatabaseUnavailable
from celery_lifecycle.store.entries import EntryRun
from tests.support.brokers import Broker
from tests.support.proxy import Proxy
from tests.support.tables import make_tables
from tests.support.waiting import wait_until

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


class Wall:
    """The clock on the wall of every beat of a test."""

    def __init__(self) -> None:
        self.time = NOON

    def now(self) -> datetime:
        return self.time

    def to(self, hour: int, minute: int = 0, second: float = 0, day: int = 1) -> None:
        whole = int(second)
        self.time = datetime(2026, 3, day, hour, minute, whole, int((second - whole) * 1e6), tzinfo=timezone.utc)

    def forward(self, **more: float) -> None:
        self.time += timedelta(**more)

    def every(self, seconds: float, **more: Any) -> schedule:
        return schedule(timedelta(seconds=seconds), nowfun=self.now, **more)

    def cron(self, *fields: str) -> crontab:
        minute, hour, *rest = [*fields, *"*****"][:5]
        return crontab(minute, hour, *rest[::-1], nowfun=self.now)


class Deployment:
    """One database and one broker; each beat has an app of its own, as if it were another process."""

    def __init__(self, database_url: str, broker: Broker) -> None:
        self.wall = Wall()
        self.broker = broker
        self.database_url = database_url
        self.beats: list[LifecycleScheduler] = []
        make_tables(self.app({}).lifecycle.store.database)

    def app(self, entries: dict[str, Any], broker_url: str | None = None, name: str = "shop") -> Any:
        app = Celery(name, set_as_current=False)
        app.conf.update(self.broker.conf(), beat_schedule=entries, result_expires=None)
        app.conf.broker_url = broker_url or self.broker.url
        Lifecycle(app, database_url=self.database_url, poll_interval=0.01)
        return app

    def beat(self, entries: dict[str, Any], **more: Any) -> LifecycleScheduler:
        return self.beat_of(self.app(entries, **more))

    def beat_of(self, app: Any) -> LifecycleScheduler:
        """A beat that looks at the wall in every tick."""
        made = LifecycleScheduler(app, max_interval=0.001)
        self.beats.append(made)
        return made

    def close(self) -> None:
        for beat in self.beats:
            beat.close()
            beat.app.lifecycle.close()

    def messages(self) -> list[Any]:
        """What has arrived at the workers' queue since the last look."""
        found: list[Any] = []
        with self.app({}).connection_for_read() as connection:
            queue = connection.SimpleQueue(self.broker.default_queue)
            try:
                while True:
                    message = queue.get(block=self.broker.kind == "rabbitmq", timeout=0.2)
                    message.ack()
                    found.append(message)
            except queue.Empty:
                return found
            finally:
                queue.close()

    def tasks(self) -> list[str]:
        return sorted(message.headers["task"] for message in self.messages())


@pytest.fixture
def shop(database_url: str, broker: Broker) -> Iterator[Deployment]:
    made = Deployment(database_url, broker)
    yield made
    made.close()


def entry(of: Any, task: str = "shop.digest", **more: Any) -> dict[str, Any]:
    return {"task": task, "schedule": of, **more}


# --- each occurrence once


def test_an_occurrence_is_sent_once_however_many_beats_there_are(shop: Deployment) -> None:
    beats = [
        shop.beat({"a": entry(shop.wall.every(60)), "b": entry(shop.wall.cron("*"), "shop.poll")}) for _ in range(3)
    ]
    for _ in range(4):
        shop.wall.forward(seconds=60)
        for beat in beats * 2:
            assert beat.tick() == 0.0
    assert shop.tasks() == ["shop.digest"] * 4 + ["shop.poll"] * 4


def test_beats_that_tick_at_the_same_moment_send_an_occurrence_once(shop: Deployment) -> None:
    beats = [shop.beat({f"e{n}": entry(shop.wall.every(60)) for n in range(10)}) for _ in range(3)]
    for _ in range(3):
        shop.wall.forward(seconds=61)
        threads = [threading.Thread(target=lambda beat=beat: [beat.tick() for _ in range(4)]) for beat in beats]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(shop.messages()) == 30


@pytest.mark.parametrize("verb", ["claim", "record"])
def test_a_rollback_in_one_of_two_beats_with_equal_host_names_neither_doubles_nor_loses_an_occurrence(
    shop: Deployment, verb: str
) -> None:
    """C26."""
    entries = {"a": entry(shop.wall.cron("*/5"))}
    one, other = shop.beat(entries), shop.beat(entries)
    shop.wall.to(12, 5, 0.1)
    with rolled_back(one, verb):
        one.tick()
    for beat in (other, one, other, one):
        beat.tick()
    assert shop.tasks() == ["shop.digest"]
    shop.wall.to(12, 10, 0.1)
    for beat in (other, one):
        beat.tick()
    assert shop.tasks() == ["shop.digest"]


@contextmanager
def rolled_back(beat: LifecycleScheduler, verb: str) -> Iterator[None]:
    """The transaction of a verb reaches its end and is then rolled back, once."""
    database = beat.app.lifecycle.store.database
    run, statement = database.run, getattr(database.sql, f"{verb}_entry")

    def undone(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def worked(tx: Any) -> Any:
            seen: list[str] = []
            execute = tx._execute
            tx._execute = lambda given, params: (seen.append(given), execute(given, params))[1]
            result = work(tx, *args, **kwargs)
            if statement in seen:
                raise DatabaseUnavailable("forced")
            return result

        return run(worked)

    database.run = undone
    try:
        yield
    finally:
        database.run = run


def test_a_beat_that_dies_between_claim_and_publish_costs_time_and_no_occurrence(shop: Deployment) -> None:
    entries = {"a": entry(shop.wall.every(60))}
    dying, other = shop.beat(entries), shop.beat(entries)
    shop.wall.forward(seconds=61)
    store = dying.app.lifecycle.store
    assert store.entries.claim("shop", "a", store.entries.all("shop")["a"], "a beat that is gone")
    other.tick()
    assert shop.tasks() == []
    with store.database.transaction() as tx:
        tx.run(f"UPDATE {store.config.table_prefix}beat_entries SET claimed_until = 0")
    wait_until(
        lambda: other.tick() or shop.tasks() == ["shop.digest"], message="the occurrence is sent by another beat"
    )


# --- restarts


def test_a_restart_neither_bursts_nor_loses(shop: Deployment) -> None:
    entries = {
        "seconds": entry(shop.wall.every(5)),
        "hourly": entry(shop.wall.cron("0"), "shop.hourly"),
        "daily": entry(shop.wall.every(86_400), "shop.daily"),
    }
    shop.beat(entries).tick()
    shop.wall.to(18, 30, day=14)
    beat = shop.beat(entries)
    for _ in range(5):
        beat.tick()
    assert shop.tasks() == ["shop.daily", "shop.digest", "shop.hourly"]
    shop.wall.to(19, 0, 0.5, day=14)
    for _ in range(3):
        beat.tick()
    assert shop.tasks() == ["shop.digest", "shop.hourly"]


def test_a_daily_entry_runs_though_beat_is_restarted_every_hour(shop: Deployment) -> None:
    for hour in range(60):
        shop.wall.time = NOON + timedelta(hours=hour)
        shop.beat({"daily": entry(shop.wall.every(86_400))}).tick()
        shop.close()
        shop.beats.clear()
    assert len(shop.messages()) == 2


def test_an_entry_that_is_new_begins_now_and_one_that_comes_back_begins_anew(shop: Deployment) -> None:
    both = {"a": entry(shop.wall.cron("0", "4")), "b": entry(shop.wall.cron("0", "4"), "shop.other")}
    shop.beat(both).tick()
    assert shop.tasks() == []
    shop.wall.to(5, day=2)
    shop.beat({"a": both["a"]}).tick()
    assert shop.tasks() == ["shop.digest"]
    shop.wall.to(12, day=9)
    shop.beat(both).tick()
    assert shop.tasks() == ["shop.digest"], "b was not scheduled for a week: that is no downtime"


def test_a_beat_whose_entry_a_newer_beat_has_forgotten_goes_on_with_it(shop: Deployment) -> None:
    old = shop.beat({"a": entry(shop.wall.every(60))})
    shop.beat({})
    for _ in range(2):
        shop.wall.forward(seconds=61)
        for _ in range(3):
            old.tick()
    assert shop.tasks() == ["shop.digest"] * 2


def test_what_is_changed_between_restarts_is_taken_over(shop: Deployment) -> None:
    shop.beat({"a": entry(shop.wall.every(3600), args=(1,))}).tick()
    shop.wall.forward(seconds=61)
    shop.beat({"a": entry(shop.wall.every(60), "shop.other", args=(2,))}).tick()
    (message,) = shop.messages()
    assert (message.headers["task"], message.payload[0]) == ("shop.other", [2])


def test_two_apps_on_one_database_do_not_share_an_entry(shop: Deployment) -> None:
    entries = {"a": entry(shop.wall.every(60))}
    beats = [shop.beat(entries, name=name) for name in ("shop", "billing")]
    shop.wall.forward(seconds=61)
    for beat in beats:
        beat.tick()
    shop.beat({}, name="billing")
    assert shop.tasks() == ["shop.digest"] * 2
    assert set(beats[0].app.lifecycle.store.entries.all("shop")) == {"a"}
    assert beats[0].app.lifecycle.store.entries.all("billing") == {}


# --- the broker is down


@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_what_is_due_while_the_broker_is_down_is_sent_once_it_is_back(
    shop: Deployment, proxy: Callable[[str], Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    gate = proxy(shop.broker.url)
    entries = {f"e{n}": entry(shop.wall.every(3600), f"shop.t{n}") for n in range(5)}
    beat = shop.beat(entries, broker_url=gate.url)
    shop.wall.forward(seconds=3601)
    beat.tick()
    assert len(shop.messages()) == 5
    gate.cut()
    shop.wall.forward(seconds=3601)
    for _ in range(3):
        beat.tick()
    assert shop.messages() == []
    assert all(run.total == 1 for run in beat.app.lifecycle.store.entries.all("shop").values())
    gate.restore()
    found: list[str] = []
    wait_until(lambda: beat.tick() or found.extend(shop.tasks()) or len(found) >= 5, 20, "all five are sent")
    assert sorted(found) == [f"shop.t{n}" for n in range(5)]
    assert "waits for the broker" in caplog.text
    assert "CRITICAL" not in caplog.text


# --- one entry does not stop the others


class Broken(BaseSchedule):
    def is_due(self, last_run_at: datetime) -> Any:
        raise ZeroDivisionError("no time can be told")


def test_an_entry_whose_time_cannot_be_told_or_which_cannot_be_sent_stops_no_other(
    shop: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    beat = shop.beat({
        "a-broken": entry(Broken()),
        "b-unsendable": entry(shop.wall.every(60), args=(object(),)),
        "c-good": entry(shop.wall.every(60), "shop.good"),
    })  # fmt: skip
    for _ in range(3):
        shop.wall.forward(seconds=61)
        for _ in range(3):
            beat.tick()
    assert shop.tasks() == ["shop.good"] * 3
    assert "no time can be told" in caplog.text
    assert "'b-unsendable'" in caplog.text


def test_an_entry_name_that_no_column_would_take_works(shop: Deployment) -> None:
    names = ["x" * 500, "ä" * 120, "#hash", "nul\0", "", "Same", "same", "same "]
    beat = shop.beat({name: entry(shop.wall.every(60)) for name in names})
    shop.wall.forward(seconds=61)
    for _ in range(2):
        beat.tick()
    assert len(shop.messages()) == len(names)
    again = shop.beat({name: entry(shop.wall.every(60)) for name in names})
    again.tick()
    assert shop.messages() == []
    assert {run.total for run in again.app.lifecycle.store.entries.all("shop").values()} == {1}


# --- what an entry may hold


def test_a_message_is_as_celerys_own_beat_would_send_it(shop: Deployment) -> None:
    headers = {"tenant": "t1"}
    options = {"priority": 3, "headers": headers, "expires": 600}
    lazy = BeatLazyFunc(lambda: "lazy")
    beat = shop.beat({"a": entry(shop.wall.every(60), args=(1, lazy), kwargs={"to": "x"}, options=options)})
    shop.wall.forward(seconds=61)
    beat.tick()
    (message,) = shop.messages()
    args, kwargs, _ = message.payload
    assert (args, kwargs) == ([1, "lazy"], {"to": "x"})
    assert (message.headers["tenant"], message.headers["celery_beat_task"]) == ("t1", True)
    assert message.headers["expires"] is not None
    assert headers == {"tenant": "t1"}, "what the user wrote is not changed"


def test_an_entry_for_a_durable_task_with_a_countdown_becomes_a_job(shop: Deployment) -> None:
    from celery_lifecycle import LifecycleTask

    beat = shop.beat({"a": entry(shop.wall.every(60), "shop.later", options={"countdown": 3600})})

    @beat.app.task(base=LifecycleTask, name="shop.later", shared=False)
    def later() -> None: ...

    shop.wall.forward(seconds=61)
    for _ in range(2):
        beat.tick()
    assert shop.messages() == []
    assert [state.kind for state in beat.app.lifecycle.store.objects.find_many()] == ["shop.later"]


class EveryOther(BaseSchedule):
    """A schedule of a user's own that works with naive times, as `nowfun` gives them."""

    def __init__(self, wall: Wall) -> None:
        super().__init__(nowfun=lambda: wall.now().replace(tzinfo=None))
        self.asked: list[datetime] = []

    def is_due(self, last_run_at: datetime) -> Any:
        self.asked.append(last_run_at)
        left = (last_run_at + timedelta(seconds=60) - self.now()).total_seconds()
        return schedstate(left <= 0, max(left, 0.01))


def test_a_schedule_of_the_users_own_gets_its_last_run_as_its_own_clock_has_it(shop: Deployment) -> None:
    own = EveryOther(shop.wall)
    beat = shop.beat({"own": entry(own)})
    for _ in range(3):
        shop.wall.forward(seconds=61)
        wait_until(lambda: beat.tick() or own.asked[-1] == shop.wall.now().replace(tzinfo=None))
    assert len(shop.messages()) == 3
    assert {asked.tzinfo for asked in own.asked} == {None}


def test_a_solar_entry_runs_at_its_event(shop: Deployment) -> None:
    beat = shop.beat({"sunset": entry(solar("sunset", 52.5, 13.4, nowfun=shop.wall.now))})
    wait_until(lambda: shop.wall.forward(minutes=10) or beat.tick() or shop.wall.time.hour >= 20)
    assert shop.tasks() == ["shop.digest"]


def test_crontabs_go_by_the_zone_of_the_app(shop: Deployment) -> None:
    app = shop.app({"a": entry(shop.wall.cron("0", "8"))})
    app.conf.timezone = "Asia/Tokyo"
    beat = shop.beat_of(app)
    shop.wall.to(22, 59)
    beat.tick()
    assert shop.tasks() == []
    shop.wall.to(23, 0, 1)
    wait_until(lambda: beat.tick() or shop.tasks() == ["shop.digest"])
    run = beat.app.lifecycle.store.entries.all("shop")["a"]
    assert run.last_run_ms == shop.wall.time.timestamp() * 1000
    assert beat.schedule["a"].last_run_at.tzinfo == ZoneInfo("Asia/Tokyo")


# --- changes while beat runs


def test_an_entry_that_can_not_be_made_keeps_no_other_out_and_is_made_when_it_is_right(
    shop: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    beat = shop.beat({"a": entry(shop.wall.every(60)), "b": entry(shop.wall.every(60), "shop.b")})
    wrong = entry(shop.wall.every(60), "shop.wrong", nonsense=2)
    good = entry(shop.wall.every(60), "shop.good")
    beat.app.conf.beat_schedule = {"bad": wrong, "a": wrong, "none": None, "good": good}
    for _ in range(5):
        beat.tick()
    assert sorted(beat.schedule) == ["a", "good"], "what stood in its place stays"
    for name in ("bad", "a", "none"):
        assert caplog.text.count(f"Beat entry {name!r} could not be run") == 1
    shop.wall.forward(seconds=61)
    beat.tick()
    assert shop.tasks() == ["shop.digest", "shop.good"]
    beat.app.conf.beat_schedule = {"bad": entry(shop.wall.every(60), "shop.bad"), "good": good}
    beat.tick()
    assert sorted(beat.schedule) == ["bad", "good"]
    shop.wall.forward(seconds=61)
    beat.tick()
    assert shop.tasks() == ["shop.bad", "shop.good"]


def test_a_beat_schedule_that_is_none_changes_nothing_and_is_reported_once(
    shop: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    beat = shop.beat({"a": entry(shop.wall.every(60))})
    beat.app.conf.beat_schedule = None
    shop.wall.forward(seconds=61)
    for _ in range(3):
        beat.tick()
    assert shop.tasks() == ["shop.digest"]
    assert caplog.text.count("could not be run") == 1


def test_an_entry_that_can_not_be_made_stops_beat_when_it_starts(shop: Deployment) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        shop.beat({"bad": entry(shop.wall.every(60), nonsense=2)})


def test_a_name_that_is_no_text_is_taken_as_one(shop: Deployment) -> None:
    entries = {1: entry(shop.wall.every(60)), None: entry(shop.wall.every(60), "shop.none")}
    beat = shop.beat(entries)
    beat.schedule[2] = beat.Entry(name=2, task="shop.mine", schedule=shop.wall.every(60), app=beat.app)
    beat.tick()
    shop.wall.forward(seconds=61)
    for _ in range(2):
        beat.tick()
    assert shop.tasks() == ["shop.digest", "shop.mine", "shop.none"]
    assert set(beat.app.lifecycle.store.entries.all("shop")) == {"1", "2", "None"}


def test_entries_are_added_changed_and_removed_while_beat_runs(shop: Deployment) -> None:
    beat = shop.beat({"a": entry(shop.wall.every(60))})
    beat.add(name="mine", task="shop.mine", schedule=shop.wall.every(60))
    beat.app.conf.beat_schedule = {"b": entry(shop.wall.every(60), "shop.b")}
    beat.tick()
    shop.wall.forward(seconds=61)
    for _ in range(2):
        beat.tick()
    assert shop.tasks() == ["shop.b", "shop.mine"]
    beat.app.add_periodic_task(shop.wall.every(60), beat.app.signature("shop.c"), name="c")
    beat.tick()
    shop.wall.forward(seconds=61)
    beat.tick()
    assert shop.tasks() == ["shop.b", "shop.c", "shop.mine"]


def test_periodic_tasks_that_are_added_when_the_app_is_configured_run(shop: Deployment) -> None:
    app = shop.app({})

    @app.on_after_finalize.connect
    def add(sender: Celery, **_: Any) -> None:
        sender.add_periodic_task(shop.wall.every(60), sender.signature("shop.periodic"), name="p")

    app.finalize()
    beat = shop.beat_of(app)
    shop.wall.forward(seconds=61)
    beat.tick()
    assert shop.tasks() == ["shop.periodic"]


@pytest.mark.combinations(("sqlite", "filesystem"))
def test_the_cleanup_of_results_is_among_the_entries_as_with_celerys_own_beat(shop: Deployment) -> None:
    app = shop.app({"a": entry(shop.wall.every(60))})
    app.conf.update(result_backend=f"file://{shop.broker.transport_options['data_folder_in']}", result_expires=60)
    beat = shop.beat_of(app)
    assert set(beat.schedule) == {"a", "celery.backend_cleanup"}


# --- when


@pytest.mark.combinations(("sqlite", "filesystem"))
def test_a_beat_does_not_wake_late_for_an_entry(shop: Deployment) -> None:
    app = shop.app({"a": entry(0.35)})
    app.lifecycle._given["poll_interval"] = 5
    app.lifecycle._config = None
    beat = LifecycleScheduler(app)
    shop.beats.append(beat)
    store = app.lifecycle.store.entries
    runs: list[EntryRun] = [store.all("shop")["a"]]
    while len(runs) < 6:
        beat.tick()
        run = store.all("shop")["a"]
        if run != runs[-1]:
            runs.append(run)
    gaps = [(after.last_run_ms - before.last_run_ms) / 1000 for before, after in itertools.pairwise(runs)]
    assert all(0.35 <= gap < 0.35 + 1 for gap in gaps), "with a poll interval of 5 s"


@pytest.mark.combinations(("sqlite", "filesystem"))
def test_the_lazy_instance_for_the_banner_touches_nothing(shop: Deployment) -> None:
    app = shop.app({"a": entry(shop.wall.every(60))})
    lazy = LifecycleScheduler(app, lazy=True)
    assert "lifecycle" in lazy.info
    assert app.lifecycle.store.entries.all("shop") == {}
