"""What schedules do as time passes: real store and runner on every database, under a test clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from celery_lifecycle import YIELD, Capability, LifecycleObject, Reschedule, RetryPolicy, lifecycle_job, signals
from celery_lifecycle.errors import ScheduleInvalid
from celery_lifecycle.model import Cause, DeadJob, Why
from celery_lifecycle.store.ends import End
from tests.support.bench import Bench, bench
from tests.support.protocol import links_of

ONCE = RetryPolicy(max_attempts=1)
START = "2026-03-01T12:00:00+00:00"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


class Diary:
    """What the jobs saw: when they ran, for which time, whether to catch up."""

    def __init__(self, shop: Bench) -> None:
        self.shop = shop
        self.entries: list[tuple[str, str, bool]] = []
        self.does: Callable[[Any], Any] = lambda ctx: None
        self.starts: Callable[[Any], Any] = lambda cart: None

    def ran(self, ctx: Any) -> Any:
        told = [f"{moment.astimezone(timezone.utc):%d %H:%M:%S}" for moment in (self.shop.now, ctx.scheduled_for)]
        self.entries.append((told[0], told[1], ctx.is_catch_up))
        return self.does(ctx)

    @property
    def times(self) -> list[str]:
        return [entry[0] for entry in self.entries]


@pytest.fixture
def shop(database_url: str) -> Iterator[Bench]:
    with bench(database_url, START) as made:
        yield made


@pytest.fixture
def diary(shop: Bench) -> Diary:
    return Diary(shop)


@pytest.fixture
def cart(shop: Bench, diary: Diary) -> Any:
    class Cart(LifecycleObject, lifecycle=shop):
        @lifecycle_job(retry=ONCE)
        def poll(self, ctx: Any) -> Any:
            return diary.ran(ctx)

    return Cart("user-42")


def misfires(shop: Bench) -> list[DeadJob]:
    return [dead for dead in shop.dead("cart", "user-42") if dead.reason == "misfired"]


# --- one-shots


def test_a_delay_runs_once_at_its_time_and_leaves_no_row(shop: Bench, cart: Any, diary: Diary) -> None:
    cart.schedule(60, "poll")
    shop.run_until("2026-03-01T13:00:00+00:00")
    assert diary.entries == [("01 12:01:00", "01 12:01:00", False)]
    assert shop.store.objects.find(cart.ref) is None


def test_a_date_in_the_past_and_no_delay_run_at_once(shop: Bench, cart: Any, diary: Diary) -> None:
    cart.schedule(at("2026-03-01T11:59:30"), "poll")
    cart.schedule(0, "poll")
    assert len(shop.sent) == 1, "what is due at once is sent by its own process"
    shop.run_due()
    assert diary.times == ["01 12:00:00"] * 2


def test_a_date_that_was_missed_with_skip_is_a_dead_job(shop: Bench, cart: Any, diary: Diary) -> None:
    cart.schedule(60, "poll", {"n": 1}, misfire="skip", misfire_grace=30, id="once")
    shop.to("2026-03-01T12:02:00+00:00")
    shop.run_due()
    assert diary.entries == []
    (dead,) = misfires(shop)
    assert (dead.job.id, dead.job.payload, dead.details["count"]) == ("once", {"n": 1}, 1)
    assert shop.store.objects.find(cart.ref) is None
    assert shop.store.dead.replay(dead.key) is not None
    shop.run_due()
    assert diary.entries == [("01 12:02:00", "01 12:01:00", False)]


# --- intervals


def test_an_interval_counts_from_the_end_of_each_run(shop: Bench, cart: Any, diary: Diary) -> None:
    diary.does = lambda ctx: shop.clock.forward(4) and None
    cart.schedule_every(30, "poll")
    shop.run_until("2026-03-01T12:01:50+00:00")
    assert diary.times == ["01 12:00:30", "01 12:01:04", "01 12:01:38"]


def test_a_fixed_rate_does_not_drift_after_a_hundred_late_wakes(shop: Bench, cart: Any, diary: Diary) -> None:
    cart.schedule_every(10, "poll", fixed_rate=True)
    for _ in range(100):
        job = shop.store.jobs.list(cart.ref, None)[0]
        shop.clock.to(job.due_ms + 3_700)
        shop.run_due()
    assert len(diary.entries) == 100
    assert diary.entries[-1][1] == "01 12:16:40"
    assert cart.list_schedules()[0].time == at("2026-03-01T12:16:50")


def test_a_run_that_outlasts_its_interval_is_logged_and_never_overlaps_itself(
    shop: Bench, cart: Any, diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []

    def hear(intervals: int, **_: Any) -> None:
        heard.append(intervals)

    signals.job_skipped.connect(hear)
    diary.does = lambda ctx: shop.clock.forward(35) and None
    cart.schedule_every(10, "poll", id="grid", fixed_rate=True)
    with caplog.at_level(logging.WARNING, "celery_lifecycle"):
        shop.run_until("2026-03-01T12:01:00+00:00")
    signals.job_skipped.disconnect(hear)
    assert diary.times == ["01 12:00:10", "01 12:00:50"]
    assert heard == [3, 3]
    assert caplog.text.count("Skipping interval schedule cart/user-42#grid") == 2
    assert misfires(shop) == [], "intervals that a run outlasts are passed over, not missed"


@pytest.mark.parametrize("fixed_rate", [False, True])
def test_an_interval_goes_on_after_a_run_that_failed_for_good(
    shop: Bench, cart: Any, diary: Diary, fixed_rate: bool
) -> None:
    diary.does = lambda ctx: 1 / 0
    cart.schedule_every(10, "poll", {"n": 1}, fixed_rate=fixed_rate, id="p")
    shop.run_until("2026-03-01T12:00:35+00:00")
    assert diary.times == ["01 12:00:10", "01 12:00:20", "01 12:00:30"]
    dead = shop.dead("cart", "user-42")
    assert [(one.reason, one.job.id) for one in dead] == [("failed", "p")] * 3
    assert "ZeroDivisionError" in str(dead[0].traceback)
    assert cart.get_schedule("p").time == at("2026-03-01T12:00:40")
    job = shop.store.jobs.get(cart.ref, "p", None)
    assert job is not None
    assert job.attempt == 0


def test_a_run_that_failed_is_replayed_as_that_one_run_beside_its_schedule(
    shop: Bench, cart: Any, diary: Diary
) -> None:
    diary.does = lambda ctx: 1 / 0
    cart.schedule_every(10, "poll", id="p")
    shop.run_until("2026-03-01T12:00:10+00:00")
    (dead,) = shop.dead("cart", "user-42")
    diary.does = lambda ctx: None
    assert shop.store.dead.replay(dead.key) is not None
    shop.run_due()
    assert [one.type for one in cart.list_schedules()] == ["interval"]
    assert diary.entries[-1] == ("01 12:00:10", "01 12:00:10", False)
    cart.cancel_schedule("p")
    assert shop.store.objects.find(cart.ref) is None


@pytest.mark.parametrize(("end", "why"), [(End.TIMED_OUT, "timed out"), (End.HUNG, "hung"), (End.REVOKED, "revoked")])
def test_a_run_that_was_stopped_is_given_up_and_its_schedule_goes_on(
    shop: Bench, cart: Any, end: End, why: str
) -> None:
    cart.schedule_every(10, "poll", id="p", retry=ONCE)
    shop.to("2026-03-01T12:00:10+00:00")
    (chain,) = shop.store.claims.claim("celery", *_idle(), 10).shipments
    (link,) = links_of(chain)
    begun = shop.store.runs.begin(link, _calling(), shop.runner.worker)
    shop.clock.forward(5)
    assert shop.store.ends.end(replace(link, token=begun.token), shop.runner.worker, end) is not None
    assert [one.reason for one in shop.dead("cart", "user-42")] == [why]
    assert cart.get_schedule("p").time == at("2026-03-01T12:00:25")
    job = shop.store.jobs.get(cart.ref, "p", None)
    assert job is not None
    assert (job.attempt, shop.store.objects.find(cart.ref).token) == (0, None)  # type: ignore[union-attr]


def test_a_link_that_was_revoked_while_it_waited_leaves_its_schedule(shop: Bench, cart: Any) -> None:
    cart.schedule("0 * * * *", "poll", id="hourly")
    shop.to("2026-03-01T13:00:01+00:00")
    (chain,) = shop.store.claims.claim("celery", *_idle(), 10).shipments
    shop.store.ends.skip(links_of(chain)[0], Why.REVOKED)
    assert [one.reason for one in shop.dead("cart", "user-42")] == ["revoked"]
    assert cart.get_schedule("hourly").time == at("2026-03-01T14:00:00")


def begin_one(shop: Bench) -> Any:
    """A worker takes the chain that is due and begins its first link."""
    (chain,) = shop.store.claims.claim("celery", *_idle(), 10).shipments
    (link,) = links_of(chain)
    begun = shop.store.runs.begin(link, _calling(), shop.runner.worker)
    return replace(link, token=begun.token)


@pytest.mark.parametrize("end", [End.PUT_BACK, End.DIED])
def test_the_occurrence_that_a_deploy_or_a_death_interrupts_is_run_again_for_its_own_time(
    shop: Bench, cart: Any, diary: Diary, end: End
) -> None:
    cart.schedule("0 * * * *", "poll", id="hourly")
    shop.to("2026-03-01T13:00:00+00:00")
    link = begin_one(shop)
    shop.to("2026-03-01T14:05:00+00:00")
    shop.store.ends.end(link, shop.runner.worker, end, Cause.CRASH)
    shop.run_until("2026-03-01T14:30:00+00:00")
    assert [entry[1] for entry in diary.entries] == ["01 13:00:00", "01 14:00:00"]
    assert misfires(shop) == []


def test_a_strike_that_is_left_over_does_not_excuse_later_occurrences(shop: Bench, cart: Any, diary: Diary) -> None:
    cart.schedule("0 * * * *", "poll", id="hourly", misfire="skip")
    shop.to("2026-03-01T13:00:00+00:00")
    shop.store.ends.end(begin_one(shop), shop.runner.worker, End.DIED, Cause.CRASH)

    def fail(ctx: Any) -> None:
        raise ValueError

    diary.does = fail
    shop.run_until("2026-03-01T13:30:00+00:00")
    shop.to("2026-03-01T18:35:00+00:00")
    shop.run_until("2026-03-01T19:10:00+00:00")
    assert [entry[1] for entry in diary.entries] == ["01 13:00:00", "01 19:00:00"]


def test_a_schedule_whose_task_was_unknown_for_a_while_keeps_to_its_misfire_rule(
    shop: Bench, cart: Any, diary: Diary
) -> None:
    cart.schedule("*/5 * * * *", "poll", id="often", misfire="skip")
    shop.to("2026-03-01T12:05:00+00:00")
    while shop.now < at("2026-03-01T12:09:40"):
        for chain in shop.store.claims.claim("celery", *_idle(), 10).shipments:
            shop.store.ends.skip(links_of(chain)[0], Why.UNKNOWN_TASK)
        shop.clock.forward(1)
    shop.run_until("2026-03-01T12:12:00+00:00")
    assert [entry[1] for entry in diary.entries] == ["01 12:10:00"]
    assert [dead.details["count"] for dead in misfires(shop)] == [1]


def test_a_job_that_was_moved_has_its_grace_anew(shop: Bench, cart: Any) -> None:
    cart.jobs.push("poll", id="job", delay=1)
    shop.clock.forward(1)
    (chain,) = shop.store.claims.claim("celery", *_idle(), 10).shipments
    shop.store.ends.skip(links_of(chain)[0], Why.UNKNOWN_TASK)
    cart.jobs.reschedule("job", delay=3600)
    shop.clock.forward(3600)
    (chain,) = shop.store.claims.claim("celery", *_idle(), 10).shipments
    dead, _ = shop.store.ends.skip(links_of(chain)[0], Why.UNKNOWN_TASK)
    assert dead is None
    assert cart.jobs.get("job") is not None


def test_a_schedule_whose_zone_a_worker_does_not_know_holds_up_nobody(
    shop: Bench, cart: Any, diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image with the new tz data lacks a name of old: as with a task that a worker does not know."""
    cart.schedule("0 * * * *", "poll", id="hourly", timezone="US/Pacific")
    cart.jobs.push("poll", id="healthy", delay=3601)

    def unknown(spec: Any) -> Any:
        raise ScheduleInvalid("no time zone 'US/Pacific' here")

    with monkeypatch.context() as patched:
        patched.setattr("celery_lifecycle.timing.spec.ScheduleSpec.parsed", unknown)
        shop.run_until("2026-03-01T13:05:00+00:00")
        assert [entry[0] for entry in diary.entries] == ["01 13:00:01"]
        cart.pause()
        cart.resume()
        assert cart.get_schedule("hourly") is not None
    shop.run_until("2026-03-01T13:09:00+00:00")
    assert diary.entries[1][1] == "01 13:00:00"
    with monkeypatch.context() as patched:
        patched.setattr("celery_lifecycle.timing.spec.ScheduleSpec.parsed", unknown)
        shop.run_until("2026-03-01T14:30:00+00:00")
    (dead,) = shop.dead("cart", "user-42")
    assert (dead.reason, dead.error) == ("failed", "no time zone 'US/Pacific' here")
    assert shop.store.objects.find(cart.ref) is None


def _idle() -> tuple[Any]:
    from celery_lifecycle.model import Phase

    return (Phase.IDLE,)


def _calling() -> Any:
    from celery_lifecycle.store.runs import Calling

    return Calling("cart.poll", 3)


def test_reschedule_and_yield_move_one_run_and_the_schedule_goes_on_from_its_end(
    shop: Bench, cart: Any, diary: Diary
) -> None:
    answers = iter([Reschedule(delay=3), YIELD, None, None])
    diary.does = lambda ctx: next(answers)
    cart.schedule("0 * * * *", "poll")
    shop.run_until("2026-03-01T14:30:00+00:00")
    assert diary.entries == [
        ("01 13:00:00", "01 13:00:00", False),
        ("01 13:00:03", "01 13:00:00", False),
        ("01 13:00:03", "01 13:00:00", False),
        ("01 14:00:00", "01 14:00:00", False),
    ]


def test_a_retry_after_a_long_delay_stands_for_the_same_time(shop: Bench, diary: Diary) -> None:
    class Slow(LifecycleObject, lifecycle=shop):
        @lifecycle_job(retry=RetryPolicy(max_attempts=2, base_delay=600, max_delay=600))
        def poll(self, ctx: Any) -> None:
            diary.ran(ctx)
            if len(diary.entries) == 1:
                raise ValueError

    Slow("x").schedule("0 * * * *", "poll", misfire="skip")
    shop.run_until("2026-03-01T14:00:00+00:00")
    assert [entry[1:] for entry in diary.entries] == [
        ("01 13:00:00", False),
        ("01 13:00:00", False),
        ("01 14:00:00", False),
    ]


# --- misfire: downtime, pause, first save, a run that lasts


@pytest.mark.parametrize(
    ("misfire", "resumed", "expected", "dropped"),
    [
        ("skip", "01:55", [("02 02:00:00", "02 02:00:00", False)], 1),
        ("run_once", "01:55", [("02 01:55:00", "02 01:00:00", True), ("02 02:00:00", "02 02:00:00", False)], 0),
        ("all", "01:55", [("02 01:55:00", "02 01:00:00", True), ("02 02:00:00", "02 02:00:00", False)], 0),
        ("skip", "04:30", [], 4),
        ("run_once", "04:30", [("02 04:30:00", "02 04:00:00", True)], 3),
        ("all", "04:30", [("02 04:30:00", f"02 0{n}:00:00", True) for n in (1, 2, 3, 4)], 0),
    ],
)
def test_an_hourly_job_paused_at_0055_follows_its_misfire_rule_when_it_is_resumed(
    shop: Bench, cart: Any, diary: Diary, misfire: Any, resumed: str, expected: Any, dropped: int
) -> None:
    """C14."""
    shop.run_until("2026-03-02T00:55:00+00:00")
    cart.schedule("0 * * * *", "poll", misfire=misfire)
    cart.pause()
    shop.run_until(f"2026-03-02T{resumed}:00+00:00")
    cart.resume()
    if misfire == "skip":
        found = shop.store.objects.find(cart.ref)
        assert found is not None
        assert found.wake_at is not None
        assert found.wake_at > shop.clock.ms, "it does not wake for nothing"
    shop.run_until(f"2026-03-02T{resumed[:2]}:59:00+00:00" if resumed == "04:30" else "2026-03-02T02:00:00+00:00")
    assert diary.entries == expected
    assert sum(one.details["count"] for one in misfires(shop)) == dropped


def test_a_5_second_job_and_14_days_of_downtime_are_one_run_and_one_record(
    shop: Bench, cart: Any, diary: Diary
) -> None:
    """C15."""
    cart.schedule_every(5, "poll", fixed_rate=True)
    shop.to("2026-03-15T12:00:02+00:00")
    shop.run_until("2026-03-15T12:00:07+00:00")
    assert diary.entries == [("15 12:00:02", "15 12:00:00", True), ("15 12:00:05", "15 12:00:05", False)]
    (record,) = misfires(shop)
    assert record.details == {
        "count": 241_919,
        "first": "2026-03-01T12:00:05+00:00",
        "last": "2026-03-15T11:59:55+00:00",
    }


def test_a_weekly_job_runs_once_a_week_however_often_all_is_restarted(shop: Bench, cart: Any, diary: Diary) -> None:
    """C15. The class's start-up code schedules it at each restart."""
    for day in range(2, 30):
        shop.to(f"2026-03-{day:02}T07:00:00+00:00")
        cart.schedule("0 8 * * 1", "poll")
        shop.run_until(f"2026-03-{day:02}T09:00:00+00:00")
    assert diary.times == ["02 08:00:00", "09 08:00:00", "16 08:00:00", "23 08:00:00"]


def test_downtimes_of_one_schedule_are_one_record_that_counts_up(shop: Bench, cart: Any, diary: Diary) -> None:
    cart.schedule("* * * * *", "poll")
    for minute in (10, 20, 30):
        shop.to(f"2026-03-01T12:{minute}:30+00:00")
        shop.run_due()
    (record,) = misfires(shop)
    assert record.details == {"count": 27, "first": "2026-03-01T12:01:00+00:00", "last": "2026-03-01T12:29:00+00:00"}
    assert len(diary.entries) == 3


def test_an_hourly_run_that_lasts_long_runs_once_for_its_hour_beside_one_shots(
    shop: Bench, cart: Any, diary: Diary
) -> None:
    """C27."""
    shop.run_until("2026-03-02T07:30:00+00:00")
    cart.schedule("0 * * * *", "poll", id="hourly")
    for minute, moment in ((59, "07:59"), (0, "08:00"), (1, "08:01")):
        cart.schedule(at(f"2026-03-02T{moment}:00"), "poll", id=f"at-{minute}")
    diary.does = lambda ctx: shop.clock.forward(600) and None if ctx.job.id == "hourly" else None
    shop.run_until("2026-03-02T09:05:00+00:00")
    assert sorted(entry[1] for entry in diary.entries) == [
        "02 07:59:00", "02 08:00:00", "02 08:00:00", "02 08:01:00", "02 09:00:00",
    ]  # fmt: skip


def test_a_minutely_job_whose_run_lasts_longer_says_what_it_drops(
    shop: Bench, cart: Any, diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    diary.does = lambda ctx: shop.clock.forward(200) and None
    cart.schedule("* * * * *", "poll")
    with caplog.at_level(logging.WARNING, "celery_lifecycle"):
        shop.run_until("2026-03-01T12:05:00+00:00")
    assert diary.entries[:2] == [("01 12:01:00", "01 12:01:00", False), ("01 12:04:20", "01 12:04:00", True)]
    (record,) = misfires(shop)
    assert record.details["count"] >= 2
    assert shop.store.dead.replay(record.key) is not None
    (replayed,) = cart.list_schedules(type="scheduled")
    assert replayed.scheduled_for == at("2026-03-01T12:02:00"), "the first time that was dropped"
    assert "2 missed time(s) of its schedule are not run" in caplog.text


def test_a_missed_occurrence_that_is_dropped_is_no_error_in_the_log(
    shop: Bench, cart: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cart.schedule("0 * * * *", "poll", misfire="skip")
    shop.to("2026-03-01T13:30:00+00:00")
    with caplog.at_level(logging.WARNING, "celery_lifecycle"):
        shop.run_due()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "1 missed time(s)" in caplog.text


def test_a_long_day_has_25_hourly_runs_and_a_time_of_day_comes_once(shop: Bench, cart: Any, diary: Diary) -> None:
    """C16 and C17."""
    shop.run_until("2026-11-01T04:30:00+00:00")
    cart.schedule("0 * * * *", "poll", timezone="US/Pacific", id="hourly")
    cart.schedule("30 1 * * *", "poll", timezone="America/New_York", id="night")
    shop.run_until("2026-11-02T07:59:00+00:00")
    nights = [time for time in diary.times if time.endswith(":30:00")]
    hours = [time for time in diary.times if time.endswith(":00:00") and "01 07:00:00" <= time <= "02 07:00:00"]
    assert nights == ["01 05:30:00", "02 06:30:00"]
    assert len(hours) == 25
    assert "01 09:00:00" in hours


def test_a_worker_that_is_lost_in_mid_run_does_not_make_a_misfire_of_it(shop: Bench, cart: Any, diary: Diary) -> None:
    cart.schedule("0 * * * *", "poll", misfire="skip")
    shop.to("2026-03-01T13:00:00+00:00")
    (chain,) = shop.store.claims.claim("celery", *_idle(), 10).shipments
    (link,) = links_of(chain)
    begun = shop.store.runs.begin(link, _calling(), shop.runner.worker)
    given = replace(link, token=begun.token)
    assert shop.store.ends.end(given, shop.runner.worker, End.DIED, Cause.CRASH) is not None
    shop.to("2026-03-01T13:20:00+00:00")
    shop.run_due()
    assert diary.entries == [("01 13:20:00", "01 13:00:00", False)]
    assert cart.list_schedules()[0].time == at("2026-03-01T14:00:00")


def test_a_begin_that_was_committed_but_not_heard_of_knows_what_its_run_stands_for(shop: Bench, cart: Any) -> None:
    cart.schedule("0 * * * *", "poll")
    shop.to("2026-03-01T15:10:00+00:00")
    (chain,) = shop.store.claims.claim("celery", *_idle(), 10).shipments
    (link,) = links_of(chain)
    first = shop.store.runs.begin(link, _calling(), shop.runner.worker)
    again = shop.store.runs.begin(link, _calling(), shop.runner.worker, again=True)
    assert first.waking is not None
    assert again.waking is not None
    assert (again.waking.scheduled_for, again.waking.is_catch_up) == (first.waking.scheduled_for, True)
    assert again.token == first.token


# --- from inside a run


def test_an_on_start_that_schedules_leaves_one_row_and_one_run_after_200_crashes(shop: Bench, diary: Diary) -> None:
    """C04."""
    crashes = iter(range(200))

    class Agent(LifecycleObject, lifecycle=shop):
        max_memory_strikes = 1000

        def on_start(self) -> None:
            self.schedule(60, "maintenance")
            self.schedule(shop.now.replace(microsecond=0), "maintenance", {"kind": "date"})
            self.schedule("0 0 1 1 *", "maintenance", {"kind": "cron"})
            self.schedule_every(86_400, "maintenance", {"kind": "interval"})
            if next(crashes, None) is not None:
                raise RuntimeError

        @lifecycle_job
        def maintenance(self, ctx: Any) -> None:
            if ctx.payload is None:
                diary.ran(ctx)

        @lifecycle_job
        def wake(self, ctx: Any) -> None: ...

    agent = Agent("a")
    agent.jobs.push("wake")
    for _ in range(220):  # MariaDB's claims pass over a row now and then that nobody holds any more
        assert len(agent.list_schedules()) <= 4
        shop.run_due()
        shop.clock.forward(301)
        if diary.entries:
            break
    assert len(diary.entries) == 1
    assert {one.type for one in agent.list_schedules()} >= {"cron", "interval"}


def test_a_sealed_interval_is_not_brought_back_from_inside_and_is_by_a_call_from_outside(
    shop: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    class Agent(LifecycleObject, lifecycle=shop):
        max_memory_strikes = 1

        @lifecycle_job
        def loop(self, ctx: Any) -> None:
            raise MemoryError

        @lifecycle_job
        def look(self, ctx: Any) -> None:
            seen.append(self.schedule_every(10, "loop"))
            seen.append(self.schedule(10, "loop"))

    agent = Agent("a")
    agent.schedule_every(10, "loop")
    shop.run_until("2026-03-01T12:00:10+00:00")
    assert agent.list_schedules() == []
    agent.jobs.push("look")
    shop.run_due()
    assert [one.sealed for one in seen] == [True, True]
    assert agent.list_schedules() == []
    assert "is sealed" in caplog.text
    assert not agent.schedule_every(10, "loop").sealed
    assert len(agent.list_schedules()) == 1


def test_a_job_can_schedule_itself_anew_or_end_its_schedule(shop: Bench, cart: Any, diary: Diary) -> None:
    def change(ctx: Any) -> None:
        if len(diary.entries) == 1:
            ctx.object.schedule_every(60, "poll", id="p")
        elif len(diary.entries) == 2:
            ctx.object.cancel_schedule("p")

    diary.does = change
    cart.schedule_every(10, "poll", id="p")
    shop.run_until("2026-03-01T12:10:00+00:00")
    assert diary.times == ["01 12:00:10", "01 12:01:10"]
    assert shop.store.objects.find(cart.ref) is None


def test_the_jobs_of_a_scheduled_run_are_those_of_the_object_or_of_the_capability(shop: Bench) -> None:
    seen: list[tuple[str, list[str]]] = []

    class Outbox(Capability):
        @lifecycle_job
        def flush(self, ctx: Any) -> None:
            seen.append(("outbox", [job.id for job in ctx.jobs.list()]))

    class Basket(LifecycleObject, lifecycle=shop):
        outbox = Outbox()

        @lifecycle_job
        def look(self, ctx: Any) -> None:
            ctx.jobs.push("look", delay=60, id="mine")
            seen.append(("host", [job.id for job in ctx.jobs.list()]))

    basket = Basket("b")
    basket.schedule(1, "look")
    basket.outbox.jobs.push("flush", delay=60, id="theirs")
    basket.schedule(2, basket.outbox.flush)
    shop.run_until("2026-03-01T12:00:02+00:00")
    assert seen == [("host", ["mine"]), ("outbox", ["theirs"])]


def test_a_function_keeps_its_schedule_and_an_ordinary_task_can_have_one(shop: Bench) -> None:
    from celery_lifecycle import LifecycleTask

    seen: list[Any] = []

    @lifecycle_job(name="billing.charge", app=shop.app)
    def charge(ctx: Any) -> None:
        seen.append((ctx.payload, ctx.object.ref.kind, ctx.scheduled_for.minute))

    @shop.app.task(base=LifecycleTask, name="shop.plain", shared=False)
    def plain(n: int) -> int:
        seen.append(n)
        return n

    charge.schedule("*/20 * * * *", {"plan": "gold"})
    plain.schedule_every(1800, {"n": 7})
    shop.run_until("2026-03-01T13:00:00+00:00")
    gold = ({"plan": "gold"}, "billing.charge")
    assert seen.count(7) == 2
    assert [one for one in seen if one != 7] == [(*gold, 20), (*gold, 40), (*gold, 0)]
    assert len(charge.list_schedules()) == 1
