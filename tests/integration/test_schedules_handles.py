"""Schedules through the handles, on every database: what is stored, found again, listed, cancelled."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_lifecycle import Capability, LifecycleObject, RetryPolicy, lifecycle_job
from celery_lifecycle.errors import (
    NameInvalid,
    OwnerConflict,
    PayloadError,
    PolicyInvalid,
    ScheduleInvalid,
    TimeInvalid,
    UnknownTask,
)
from celery_lifecycle.model import ObjectRef
from tests.support.bench import Bench, bench

START = "2026-03-01T12:00:00+00:00"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


@pytest.fixture
def shop(database_url: str) -> Any:
    with bench(database_url, START, timezone="Europe/Berlin") as made:
        yield made


def cart_of(shop: Bench, name: str = "user-42") -> Any:
    if "cart" in shop.kinds:
        return shop.kinds["cart"](name)

    class Outbox(Capability):
        @lifecycle_job
        def flush(self, ctx: Any) -> None: ...

    class Cart(LifecycleObject, lifecycle=shop):
        outbox = Outbox()

        @lifecycle_job
        def remind(self, ctx: Any) -> None: ...

        @lifecycle_job(name="mail.digest")
        def digest(self, ctx: Any) -> None: ...

    return Cart(name)


def function_of(shop: Bench) -> Any:
    @lifecycle_job(name="billing.charge", app=shop.app)
    def charge(ctx: Any) -> None: ...

    return charge


# --- the four types


def test_a_delay_a_date_a_cron_and_an_interval_are_told_by_what_is_given(shop: Bench) -> None:
    cart = cart_of(shop)
    delayed = cart.schedule(60, "remind", {"template": "forgot"})
    assert (delayed.type, delayed.delay, delayed.time) == ("delayed", 60.0, at("2026-03-01T12:01:00"))
    assert (delayed.callback, delayed.payload) == ("remind", {"template": "forgot"})
    assert cart.schedule(timedelta(minutes=2), "remind").time == at("2026-03-01T12:02:00")
    scheduled = cart.schedule(datetime(2026, 3, 2, 8, tzinfo=ZoneInfo("Asia/Tokyo")), "remind")
    assert (scheduled.type, scheduled.time) == ("scheduled", at("2026-03-01T23:00:00"))
    cron = cart.schedule("0 8 * * *", "digest", timezone="Asia/Tokyo", misfire="skip")
    assert (cron.type, cron.cron, cron.timezone, cron.misfire) == ("cron", "0 8 * * *", "Asia/Tokyo", "skip")
    assert cron.time == cron.scheduled_for == at("2026-03-01T23:00:00")
    assert cron.callback == "digest"
    interval = cart.schedule_every(30, "remind")
    assert (interval.type, interval.seconds, interval.time) == ("interval", 30.0, at("2026-03-01T12:00:30"))
    assert cart.schedule_every(timedelta(seconds=31), "remind", fixed_rate=True).fixed_rate


def test_a_cron_without_a_zone_goes_by_the_clocks_of_the_app(shop: Bench) -> None:
    cron = cart_of(shop).schedule("0 8 * * *", "remind")
    assert (cron.timezone, cron.time) == ("Europe/Berlin", at("2026-03-02T07:00:00"))


def test_a_zone_may_be_given_as_a_zoneinfo(shop: Bench) -> None:
    assert cart_of(shop).schedule("0 8 * * *", "remind", timezone=ZoneInfo("Asia/Tokyo")).timezone == "Asia/Tokyo"
    with pytest.raises(ScheduleInvalid, match="no name in the tz database"):
        cart_of(shop).schedule("0 8 * * *", "remind", timezone=timezone(timedelta(hours=1)))


@pytest.mark.databases("sqlite")
def test_what_is_not_allowed_is_refused_and_nothing_is_stored(shop: Bench) -> None:
    cart = cart_of(shop)
    refused: list[tuple[type[Exception], Any]] = [
        (TimeInvalid, lambda: cart.schedule(-1, "remind")),
        (TimeInvalid, lambda: cart.schedule(datetime(2026, 3, 2), "remind")),
        (ScheduleInvalid, lambda: cart.schedule("0 0 30 2 *", "remind")),
        (ScheduleInvalid, lambda: cart.schedule("@daily", "remind")),
        (ScheduleInvalid, lambda: cart.schedule("0 8 * * *", "remind", timezone="Mars/Olympus")),
        (ScheduleInvalid, lambda: cart.schedule(None, "remind")),
        (ScheduleInvalid, lambda: cart.schedule("0 8 * * *", "remind", misfire="never")),
        (ScheduleInvalid, lambda: cart.schedule("0 8 * * *", "remind", jitter=86_400)),
        (ScheduleInvalid, lambda: cart.schedule_every(0.5, "remind")),
        (PolicyInvalid, lambda: cart.schedule(1, "remind", idempotent="yes")),
        (PolicyInvalid, lambda: cart.schedule_every(5, "remind", fixed_rate=1)),
        (PolicyInvalid, lambda: cart.schedule(1, "remind", retry=3)),
        (PayloadError, lambda: cart.schedule(1, "remind", {1, 2})),
        (NameInvalid, lambda: cart.schedule(1, "remind", id="#alarm")),
        (UnknownTask, lambda: cart.schedule(1, "forget")),
        (NameInvalid, lambda: cart.get_schedule("")),
        (ScheduleInvalid, lambda: cart.list_schedules(type="weekly")),
        (TimeInvalid, lambda: cart.list_schedules(start=datetime(2026, 3, 2))),
    ]
    for error, call in refused:
        with pytest.raises(error):
            call()
    assert shop.store.objects.find(cart.ref) is None


# --- idempotent calls


def test_fifty_calls_for_a_cron_leave_one_row(shop: Bench) -> None:
    cart = cart_of(shop)
    assert len({cart.schedule("0 8 * * *", "remind", {"b": 1, "a": 2}).id for _ in range(25)}) == 1
    assert len({cart.schedule("0 8 * * *", "remind", {"a": 2, "b": 1}).id for _ in range(25)}) == 1
    assert len(cart.list_schedules()) == 1


def test_another_expression_zone_payload_or_callback_is_another_cron(shop: Bench) -> None:
    cart = cart_of(shop)
    cart.schedule("0 8 * * *", "remind")
    cart.schedule("0 9 * * *", "remind")
    cart.schedule("0 8 * * *", "remind", timezone="Asia/Tokyo")
    cart.schedule("0 8 * * *", "remind", {"a": 1})
    cart.schedule("0 8 * * *", "digest")
    assert len(cart.list_schedules(type="cron")) == 5


def test_a_cron_is_added_again_on_request_and_found_whatever_its_id(shop: Bench) -> None:
    cart = cart_of(shop)
    first = cart.schedule("0 8 * * *", "remind", id="daily")
    assert cart.schedule("0 8 * * *", "remind").id == "daily"
    again = cart.schedule("0 8 * * *", "remind", idempotent=False)
    assert again.id != first.id
    assert len(cart.list_schedules()) == 2
    assert cart.schedule("0 8 * * *", "remind").id in {first.id, again.id}


def test_an_idempotent_call_does_not_move_what_it_finds(shop: Bench) -> None:
    cart = cart_of(shop)
    first = cart.schedule_every(30, "remind")
    shop.to("2026-03-01T12:00:20+00:00")
    assert cart.schedule_every(30, "remind") == first
    version = shop.store.jobs.get(cart.ref, first.id, None)
    assert version is not None
    assert version.version == 1


def test_an_interval_of_another_length_is_another_schedule_and_replaces_the_one_of_its_id(shop: Bench) -> None:
    cart = cart_of(shop)
    cart.schedule_every(30, "remind")
    cart.schedule_every(60, "remind")
    cart.schedule_every(60, "remind", {"x": 1})
    assert [one.seconds for one in cart.list_schedules(type="interval")] == [30.0, 60.0, 60.0]
    cart.schedule_every(30, "remind", id="poll")
    shop.to("2026-03-01T12:00:10+00:00")
    assert cart.schedule_every(30, "remind", id="poll").time == at("2026-03-01T12:00:30")
    assert cart.schedule_every(45, "remind", id="poll").time == at("2026-03-01T12:00:55")
    assert [one.seconds for one in cart.list_schedules(id="poll")] == [45.0]


def test_a_delay_or_date_is_added_each_time_unless_it_is_idempotent_on_request(shop: Bench) -> None:
    cart = cart_of(shop)
    assert cart.schedule(60, "remind").id != cart.schedule(60, "remind").id
    cart = cart_of(shop, "other")
    first = cart.schedule(60, "remind", idempotent=True)
    shop.to("2026-03-01T12:00:10+00:00")
    assert cart.schedule(90, "remind", idempotent=True) == first
    date = cart.schedule(at("2026-03-02T08:00:00"), "remind", idempotent=True)
    assert cart.schedule(at("2026-03-03T08:00:00"), "remind", idempotent=True) == date
    assert len(cart.list_schedules()) == 2
    assert cart.schedule(60, "remind", {"x": 1}, idempotent=True).id != first.id


def test_an_id_replaces_and_with_idempotent_it_keeps_the_same_schedule(shop: Bench) -> None:
    cart = cart_of(shop)
    cart.schedule(60, "remind", id="r")
    assert cart.schedule(90, "remind", id="r").time == at("2026-03-01T12:01:30")
    assert cart.schedule(30, "remind", id="r", idempotent=True).time == at("2026-03-01T12:01:30")
    assert cart.schedule(30, "remind", {"x": 1}, id="r", idempotent=True).time == at("2026-03-01T12:00:30")
    assert cart.schedule("0 8 * * *", "remind", id="r").type == "cron"
    assert len(cart.list_schedules()) == 1


def test_an_idempotent_call_puts_a_lost_alarm_right(shop: Bench) -> None:
    cart = cart_of(shop)
    cart.schedule_every(30, "remind")
    table = f"{shop.config.table_prefix}objects"
    with shop.store.database.transaction() as tx:
        tx.run(f"UPDATE {table} SET wake_at = NULL, queue = NULL")
    cart.schedule_every(30, "remind")
    found = shop.store.objects.find(cart.ref)
    assert found is not None
    assert found.wake_at == shop.clock.ms + 30_000


def test_an_idempotent_call_gives_what_it_finds_its_own_policy(shop: Bench) -> None:
    cart = cart_of(shop)
    first = cart.schedule("0 8 * * *", "remind", jitter=600)
    assert first.misfire == "run_once"
    changed = cart.schedule("0 8 * * *", "remind", misfire="skip", retry=RetryPolicy(7))
    assert (changed.id, changed.misfire, changed.time) == (first.id, "skip", changed.scheduled_for)
    job = shop.store.jobs.get(cart.ref, first.id, None)
    assert job is not None
    assert job.retry.max_attempts == 7
    back = cart.schedule("0 8 * * *", "remind", jitter=600)
    assert (back.time, back.misfire) == (first.time, "run_once")


# --- look and cancel


def test_schedules_are_listed_by_id_type_and_time_in_order(shop: Bench) -> None:
    cart = cart_of(shop)
    for job_id, delay in (("b", 60), ("a", 60), ("c", 30)):
        cart.schedule(delay, "remind", id=job_id)
    cart.schedule_every(45, "remind", id="every")
    assert [one.id for one in cart.list_schedules()] == ["c", "every", "a", "b"]
    assert [one.id for one in cart.list_schedules(type="delayed")] == ["c", "a", "b"]
    assert [one.id for one in cart.list_schedules(id="a")] == ["a"]
    from_, to = at("2026-03-01T12:00:45"), at("2026-03-01T12:01:00")
    assert [one.id for one in cart.list_schedules(start=from_, end=to)] == ["every", "a", "b"]
    assert [one.id for one in cart.list_schedules(start=from_ + timedelta(milliseconds=1))] == ["a", "b"]
    assert [one.id for one in cart.list_schedules(end=to - timedelta(milliseconds=1))] == ["c", "every"]
    assert cart.list_schedules(id="d") == []
    assert cart.list_schedules(start=datetime.min.replace(tzinfo=timezone.utc)) == cart.list_schedules()


def test_a_schedule_is_got_and_cancelled_once(shop: Bench) -> None:
    cart = cart_of(shop)
    made = cart.schedule(60, "remind", {"x": [1, None]})
    assert cart.get_schedule(made.id) == made
    assert cart.cancel_schedule(made.id) is True
    assert cart.cancel_schedule(made.id) is False
    assert cart.get_schedule(made.id) is None
    assert shop.store.objects.find(cart.ref) is None


def test_schedules_and_jobs_are_not_in_each_others_lists_and_an_id_belongs_to_its_owner(shop: Bench) -> None:
    cart = cart_of(shop)
    job, made = cart.jobs.push("remind", delay=60, id="j"), cart.schedule(60, "remind", id="s")
    cart.set_alarm(60)
    with cart.keep_alive():
        assert [one.id for one in cart.list_schedules()] == [made.id]
        assert [one.id for one in cart.jobs.list()] == [job.id]
    assert cart.get_schedule("j") is None
    assert cart.cancel_schedule("j") is False
    assert cart.jobs.get("s") is None
    assert cart.jobs.cancel("s") is False
    with pytest.raises(OwnerConflict):
        cart.schedule(60, "remind", id="j")
    with pytest.raises(OwnerConflict):
        cart.jobs.push("remind", id="s")


def test_a_plain_handle_schedules_full_task_names(shop: Bench) -> None:
    handle = shop.object("import", "x")
    made = handle.schedule_every(60, "import.poll")
    assert made.callback == "poll"
    assert handle.schedule(60, "other.task").callback == "other.task"
    assert {one.callback for one in handle.list_schedules()} == {"poll", "other.task"}


# --- capabilities and bound handles


def test_a_capability_has_schedules_of_its_own(shop: Bench) -> None:
    cart = cart_of(shop)
    made = cart.outbox.schedule("*/5 * * * *", "flush", id="f")
    assert made.callback == "flush"
    assert cart.outbox.list_schedules() == [made]
    assert cart.list_schedules() == []
    with pytest.raises(OwnerConflict):
        cart.schedule(60, "remind", id="f")
    cart.outbox.jobs.push("flush", delay=60, id="job")
    assert cart.outbox.cancel_schedule("job") is False
    assert cart.outbox.list_schedules() == [made]
    assert cart.outbox.cancel_schedule("f") is True


def test_a_bound_handle_schedules_its_method(shop: Bench) -> None:
    cart = cart_of(shop)
    assert cart.remind.schedule(60, {"x": 1}).payload == {"x": 1}
    assert cart.remind.schedule_every(60).callback == "remind"
    assert cart.schedule(60, cart.remind).callback == "remind"
    assert cart.outbox.flush.schedule(60).callback == "flush"
    assert len(cart.list_schedules()) == 3
    assert len(cart.outbox.list_schedules()) == 1


# --- functions


def test_idempotent_calls_of_a_function_meet_the_same_object(shop: Bench) -> None:
    charge = function_of(shop)
    first = charge.schedule("0 8 * * *", {"plan": "gold", "n": 1})
    assert charge.schedule("0 8 * * *", {"n": 1, "plan": "gold"}) == first
    assert first.object == ObjectRef("billing.charge", first.id)
    assert charge.schedule("0 8 * * *", {"plan": "silver"}).id != first.id
    assert charge.schedule("0 8 * * *", {"plan": "gold", "n": 1}, idempotent=False).id != first.id
    assert charge.schedule_every(60).id == charge.schedule_every(60).id
    assert charge.schedule(60).id != charge.schedule(60).id
    assert charge.schedule(60, idempotent=True) == charge.schedule(70, idempotent=True)


def test_schedules_of_a_function_are_listed_got_replaced_and_cancelled(shop: Bench) -> None:
    charge = function_of(shop)
    charge.schedule(60, id="a")
    charge.schedule(30, id="b")
    charge.schedule_every(45, id="c")
    assert [one.id for one in charge.list_schedules()] == ["b", "c", "a"]
    assert [one.id for one in charge.list_schedules(type="interval")] == ["c"]
    assert charge.schedule(90, id="a").time == at("2026-03-01T12:01:30")
    assert charge.get_schedule("a").callback == "billing.charge"
    assert charge.get_schedule("d") is None
    assert (charge.cancel_schedule("a"), charge.cancel_schedule("a")) == (True, False)
    charge.push(id="plain", delay=60)
    assert len(charge.list_schedules()) == 2


# --- jitter and transactions


def test_a_jitter_ends_with_the_year_9999_and_the_objects_schedules_stay_readable(shop: Bench) -> None:
    cart = cart_of(shop)
    last = datetime.max.replace(tzinfo=timezone.utc, microsecond=999_000)
    for id in ("a", "b", "c"):
        assert cart.schedule(datetime.max.replace(tzinfo=timezone.utc), "remind", jitter=60, id=id).time == last
        years = timedelta(days=6000 * 365)
        assert cart.schedule_every(years, "digest", jitter=years - timedelta(days=1), id=f"every {id}").time <= last
        again = {"id": f"again {id}", "idempotent": True}
        cart.schedule(datetime.max.replace(tzinfo=timezone.utc), "remind", **again)
        assert cart.schedule(at("2026-03-02"), "remind", **again, jitter=60).time == last
    assert len(cart.list_schedules()) == 9
    assert cart.get_schedule("a").scheduled_for == last
    assert all(cart.cancel_schedule(one.id) for one in cart.list_schedules())


def test_jitter_is_the_same_each_time_and_spreads_the_objects(shop: Bench) -> None:
    offsets = []
    for number in range(40):
        cart = cart_of(shop, f"user-{number}")
        made = cart.schedule("0 * * * *", "remind", jitter=900)
        assert made.scheduled_for == at("2026-03-01T13:00:00")
        offsets.append((made.time - made.scheduled_for).total_seconds())
    assert all(0 <= offset < 900 for offset in offsets)
    assert len({offset // 90 for offset in offsets}) >= 8
    again = cart_of(shop, "user-0")
    again.cancel_schedule(again.list_schedules()[0].id)
    assert (
        again.schedule("0 * * * *", "remind", jitter=900).time - at("2026-03-01T13:00:00")
    ).total_seconds() == offsets[0]


def test_a_schedule_in_the_callers_transaction_exists_if_that_commits(shop: Bench) -> None:
    cart, engine = cart_of(shop), create_engine(shop.config.url)
    with Session(engine) as session:
        cart.schedule("0 8 * * *", "remind", session=session)
        session.rollback()
        assert cart.list_schedules() == []
        first = cart.schedule("0 8 * * *", "remind", session=session)
        assert cart.schedule("0 8 * * *", "remind", session=session) == first
        session.commit()
    assert [one.id for one in cart.list_schedules()] == [first.id]
    engine.dispose()


@pytest.mark.databases("sqlite")
def test_a_class_or_function_of_one_app_is_not_registered_in_another(shop: Bench, tmp_path: Any) -> None:
    cart_of(shop), function_of(shop)
    with bench(f"sqlite:///{tmp_path}/other.db", START) as other:
        assert "cart.remind" in shop.app.tasks
        assert "billing.charge" in shop.app.tasks
        assert not {"cart.remind", "billing.charge", "cart.on_alarm"} & set(other.app.tasks)
