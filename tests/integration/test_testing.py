"""The harness for users' own tests: its clock, its broker, its faults, and that it leaves an application as it was."""

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.worker import state as worker_state

from celery_lifecycle import Lifecycle, LifecycleObject, LifecycleTask, lifecycle_job
from celery_lifecycle.holds import live_holds
from celery_lifecycle.testing import Harness, HarnessError

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


class Shop:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self.called: list[Any] = []
        self.does: Any = lambda ctx: None
        shop = self

        class Cart(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job
            def remind(self, ctx: Any) -> Any:
                shop.called.append((self.name, ctx.payload))
                return shop.does(ctx)

        @lifecycle_job(name="charge", app=lifecycle.app)
        def charge(ctx: Any) -> None:
            shop.called.append(("charge", ctx.payload))

        @lifecycle.app.task(name="mail", shared=False)
        def mail(to: str) -> str:
            shop.called.append(("mail", to))
            return "sent"

        self.Cart, self.charge, self.mail = Cart, charge, mail


@pytest.fixture
def shop(lifecycle: Lifecycle) -> Shop:
    return Shop(lifecycle)


@pytest.fixture
def running(lifecycle: Lifecycle, shop: Shop) -> Any:
    with Harness(lifecycle, start=NOON) as harness:
        yield harness


def test_without_a_database_url_it_makes_a_database_of_its_own_and_removes_it(lifecycle: Lifecycle, shop: Shop) -> None:
    from pathlib import Path

    with Harness(lifecycle) as harness:
        path = Path(lifecycle.config.url.removeprefix("sqlite:///"))
        assert path.exists()
        shop.Cart("a").jobs.push("remind")
        harness.run_due()
    assert shop.called == [("a", None)]
    assert not path.exists()


def test_it_takes_the_celery_app_as_well(lifecycle: Lifecycle, shop: Shop) -> None:
    with Harness(lifecycle.app) as harness:
        assert harness.lifecycle is lifecycle


def test_time_stands_still_until_the_test_moves_it(running: Harness, shop: Shop) -> None:
    shop.Cart("a").jobs.push("remind", delay=60)
    assert running.now == NOON
    running.run_due()
    assert shop.called == []
    running.advance(timedelta(seconds=59))
    assert shop.called == []
    running.advance_to(NOON + timedelta(seconds=60))
    assert shop.called == [("a", None)]
    with pytest.raises(HarnessError, match="only goes forward"):
        running.advance_to(NOON)


def test_without_a_start_the_clock_starts_at_the_real_time(lifecycle: Lifecycle) -> None:
    with Harness(lifecycle) as harness:
        assert abs(harness.now - datetime.now(timezone.utc)) < timedelta(minutes=1)


def test_what_comes_due_runs_in_order_each_at_its_own_time(running: Harness, shop: Shop) -> None:
    for name, delay in (("late", 300), ("early", 100)):
        shop.Cart(name).jobs.push("remind", delay=delay)
    running.advance(1000)
    assert [(ran.object, (ran.at - NOON).total_seconds()) for ran in running.ran] == [
        ("cart/early", 100), ("cart/late", 300),
    ]  # fmt: skip


def test_functions_and_ordinary_tasks_run_too(running: Harness, shop: Shop) -> None:
    shop.charge.push(payload=5, delay=10)
    shop.does = lambda ctx: shop.mail.delay("you") and None
    shop.Cart("a").jobs.push("remind")
    running.advance(10)
    assert shop.called == [("a", None), ("mail", "you"), ("charge", 5)]
    [mail] = [ran for ran in running.ran if ran.task == "mail"]
    assert (mail.object, mail.job, mail.state, mail.result) == (None, None, "SUCCESS", "sent")


def test_an_ordinary_task_with_a_countdown_waits_for_the_clock(running: Harness, shop: Shop) -> None:
    shop.mail.apply_async(("you",), countdown=60)
    running.advance(55)
    assert shop.called == []
    running.advance(6)
    assert shop.called == [("mail", "you")]


def test_retries_within_a_run_sleep_by_the_clock(running: Harness, shop: Shop) -> None:
    shop.does = lambda ctx: 1 / 0
    shop.Cart("a").jobs.push("remind", id="r")
    running.run_due()
    slept = sum(fact["delay"] for fact in running.sent("job_retrying"))
    assert (running.now - NOON).total_seconds() == pytest.approx(slept, abs=0.01)


def test_messages_can_be_looked_at_lost_and_doubled(running: Harness, shop: Shop) -> None:
    shop.Cart("a").jobs.push("remind", id="r")
    [message] = running.messages
    assert (message.task, message.job, message.queue) == ("cart.remind", "r", "celery")
    running.messages.append(message)
    running.run_due()
    assert [ran.result["outcome"] for ran in running.ran] == ["complete", "refused"]
    shop.Cart("b").jobs.push("remind")
    running.messages.clear()
    running.run_due()
    assert len(shop.called) == 1
    running.advance(30)
    assert len(shop.called) == 2


def test_deliver_runs_one_message_and_says_what_became_of_it(running: Harness, shop: Shop) -> None:
    assert running.deliver() is None
    shop.Cart("a").jobs.push("remind", id="r")
    ran = running.deliver()
    assert ran is not None
    assert (ran.object, ran.job, ran.task, ran.state) == ("cart/a", "r", "cart.remind", "SUCCESS")
    assert ran.result == {"outcome": "complete", "at": None}


def test_kill_next_kills_the_next_attempts_as_they_begin(running: Harness, shop: Shop) -> None:
    cart = shop.Cart("a")
    cart.jobs.push("remind", id="r")
    running.kill_next("other")
    running.kill_next("r", times=2, cause="crash")
    running.advance(300)
    assert len(running.started("r")) == 3
    assert shop.called == [("a", None)]
    assert [ran.state for ran in running.ran] == ["LOST", "LOST", "SUCCESS"]
    with pytest.raises(HarnessError, match="give one of oom, suspected, crash, lost"):
        running.kill_next(cause="boredom")


def test_code_under_test_may_die_in_its_middle_and_can_not_catch_that(running: Harness, shop: Shop) -> None:
    def does(ctx: Any) -> None:
        try:
            running.die()
        except Exception:
            shop.called.append("caught")

    shop.does = does
    shop.Cart("a").jobs.push("remind", id="r")
    running.run_due()
    assert shop.called == [("a", None)]
    [ran] = running.ran
    assert ran.state == "LOST"


def test_a_loop_without_an_end_is_an_error_that_names_it(running: Harness, shop: Shop) -> None:
    from celery_lifecycle import YIELD

    shop.does = lambda ctx: YIELD
    shop.Cart("a").jobs.push("remind", id="r")
    with pytest.raises(HarnessError, match=r"More than 20 messages .* cart/a#r"):
        running.run_due(limit=20)


def test_a_message_is_not_delivered_while_a_job_runs(running: Harness, shop: Shop) -> None:
    def does(ctx: Any) -> None:
        with pytest.raises(HarnessError, match="no other message meanwhile"):
            running.deliver()

    shop.does = does
    shop.Cart("a").jobs.push("remind")
    [ran] = running.run_due()
    assert ran.state == "SUCCESS"


def test_assertions_say_what_was_found_instead(running: Harness, shop: Shop) -> None:
    cart = shop.Cart("a")
    cart.jobs.push("remind", id="r", delay=60)
    assert running.assert_pending(cart, "r", at=NOON + timedelta(seconds=60)).id == "r"
    with pytest.raises(AssertionError, match=r"no pending job 'x'; it has \['r'\]"):
        running.assert_pending(cart, "x")
    with pytest.raises(AssertionError, match="is due at 2026-01-01 12:01"):
        running.assert_pending(cart, "r", at=NOON)
    with pytest.raises(AssertionError, match="began 0 times, not at least once"):
        running.assert_ran("r")
    running.advance(60)
    running.assert_ran("r")
    running.assert_ran("r", times=1, object=cart)
    with pytest.raises(AssertionError, match=r"began 1 times, not 2 times. These began: \['r'\]"):
        running.assert_ran("r", times=2)
    with pytest.raises(AssertionError, match="is dead for"):
        running.assert_dead(cart, "r")
    running.assert_idle()
    cart.jobs.push("remind", id="s")
    with pytest.raises(AssertionError, match=r"cart\.remind"):
        running.assert_idle()


def test_it_leaves_the_application_as_it_was(lifecycle: Lifecycle, shop: Shop) -> None:
    app = lifecycle.app
    app.conf.task_always_eager = True
    before = lifecycle.config
    with Harness(lifecycle) as harness:
        assert app.conf.task_always_eager is False
        shop.Cart("a").keep_alive()
        shop.Cart("a").jobs.push("remind")
        harness.kill_next()
        harness.run_due()
    assert app.conf.task_always_eager is True
    assert lifecycle.config is before
    assert "producer_or_acquire" not in app.__dict__
    assert lifecycle._store is None
    assert live_holds() == []
    assert worker_state.requests == {}


def test_results_stay_in_memory_and_the_backend_of_the_application_is_its_own_again() -> None:
    from celery.backends.redis import RedisBackend

    # Nobody listens there.
    app = Celery("stores", broker="redis://127.0.0.1:1/0", backend="redis://127.0.0.1:1/0", set_as_current=False)
    shop = Shop(Lifecycle(app))
    for word in ("sent", "sent again"):
        with Harness(app) as harness:
            shop.Cart("a").jobs.push("remind")
            result = shop.mail.delay("you")
            harness.run_due()
            assert [ran.state for ran in harness.ran] == ["SUCCESS", "SUCCESS"], word
            assert result.get(timeout=1) == "sent"
    assert type(app.backend) is RedisBackend
    assert shop.mail.__trace__ is None


def test_an_application_without_a_result_backend_has_none_in_a_harness(lifecycle: Lifecycle, shop: Shop) -> None:
    with Harness(lifecycle) as harness:
        result = shop.mail.delay("you")
        harness.run_due()
        with pytest.raises(NotImplementedError, match="No result backend"):
            result.get(timeout=1)


def test_one_harness_after_the_other_has_nothing_of_the_first(lifecycle: Lifecycle, shop: Shop) -> None:
    for _ in range(2):
        with Harness(lifecycle) as harness:
            cart = shop.Cart("a")
            assert cart.jobs.list() == []
            cart.jobs.push("remind", id="r", delay=60)
            assert harness.ran == []


def test_two_applications_run_side_by_side(lifecycle: Lifecycle, shop: Shop) -> None:
    other = Lifecycle(Celery("other", set_as_current=False))
    their_shop = Shop(other)
    with Harness(lifecycle) as ours, Harness(other) as theirs:
        shop.Cart("a").jobs.push("remind")
        their_shop.Cart("b").jobs.push("remind")
        theirs.run_due()
        ours.run_due()
    assert (shop.called, their_shop.called) == ([("a", None)], [("b", None)])


def test_with_always_eager_and_no_harness_a_task_with_an_eta_runs_at_once(
    lifecycle: Lifecycle, database_url: str
) -> None:
    """What Celery promises of `task_always_eager`; nothing is stored."""
    app = lifecycle.app
    app.conf.update(task_always_eager=True, lifecycle_database_url=database_url, lifecycle_auto_migrate=True)

    @app.task(base=LifecycleTask, name="add", shared=False)
    def add(a: int, b: int) -> int:
        return a + b

    assert add.apply_async((1, 2), countdown=3600).get() == 3
    assert lifecycle.store.watch is not None
    assert lifecycle.store.objects.find_many() == []


def test_a_database_of_ones_own_is_used_as_it_is(lifecycle: Lifecycle, shop: Shop, database_url: str) -> None:
    with Harness(lifecycle, database_url=database_url, start=NOON):
        shop.Cart("a").jobs.push("remind", id="r", delay=60)
    with Harness(lifecycle, database_url=database_url, start=NOON) as harness:
        harness.assert_pending(shop.Cart("a"), "r")
        harness.advance(60)
    assert shop.called == [("a", None)]
