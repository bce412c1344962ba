"""Rules of off and on: pause, resume, disable, destroy."""

from typing import Any

import pytest

from celery_lifecycle import Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.errors import NameInvalid, ObjectDisabled
from celery_lifecycle.testing import Harness


class World:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self.called: list[str] = []
        self.does: Any = lambda ctx: None
        world = self

        class Cart(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job
            def go(self, ctx: Any) -> Any:
                world.called.append(ctx.job.id)
                return world.does(ctx)

            def on_alarm(self, info: Any) -> None:
                world.called.append("on_alarm")

        self.Cart = Cart


@pytest.fixture
def world(lifecycle: Lifecycle) -> World:
    return World(lifecycle)


def test_a_paused_object_does_not_run_and_takes_pushes(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.pause("broken supplier")
    cart.jobs.push("go", id="g")
    harness.advance(3600)
    assert world.called == []
    assert cart.paused == "broken supplier"
    harness.assert_pending(cart, "g")


def test_nobody_but_the_breaker_pauses_an_object_as_sealed(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    with pytest.raises(NameInvalid, match=r"'sealed': only the memory breaker seals"):
        cart.pause("sealed")
    assert cart.paused is None
    assert harness.lifecycle.store.objects.find(cart.ref) is None


def test_resume_runs_what_came_due_meanwhile(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.pause()
    cart.jobs.push("go", id="g", delay=60)
    harness.advance(3600)
    assert cart.resume() is True
    assert cart.paused is None
    harness.run_due()
    assert world.called == ["g", "on_alarm"]


def test_resume_of_an_object_that_does_not_exist_says_so(harness: Harness, world: World) -> None:
    assert world.Cart("nobody").resume() is False


def test_a_pause_while_a_chain_is_on_its_way_ends_it_quietly(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go", id="g")
    cart.pause()
    [ran] = [harness.deliver()]
    assert ran is not None
    assert ran.result == {"outcome": "refused", "reason": "the object is paused", "at": None}
    cart.resume()
    harness.run_due()
    assert world.called == ["g", "on_alarm"]


def test_an_open_run_of_a_paused_object_goes_on_to_its_end(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    world.does = lambda ctx: cart.pause() if ctx.job.id == "1" else None
    for job in "123":
        cart.jobs.push("go", id=job, delay=1)
    cart.jobs.push("go", id="later", delay=2)
    harness.advance(100)
    assert world.called == ["1", "2", "3", "on_alarm"]
    assert [job.id for job in cart.jobs.list()] == ["later"]


def test_pause_and_resume_during_a_run_open_no_second_run(harness: Harness, world: World) -> None:
    """D03: no second run beside the live one."""
    cart = world.Cart("a")

    def does(ctx: Any) -> None:
        cart.pause()
        cart.resume()
        harness.advance(60)
        assert harness.messages == []

    world.does = does
    cart.jobs.push("go", id="g")
    harness.run_due()
    assert world.called == ["g", "on_alarm"]


def test_an_open_run_of_a_paused_object_that_loses_its_next_link_is_not_revived(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go", id="1", delay=1)
    cart.jobs.push("go", id="2", delay=1)
    harness.lifecycle.store.objects.pause(cart.ref, "wait")
    harness.advance(1)
    cart.resume()
    harness.tick()
    harness.deliver()
    assert world.called == ["1"]
    cart.pause()
    harness.messages.clear()
    harness.advance(600)
    assert world.called == ["1"]
    cart.resume()
    harness.run_due()
    assert world.called == ["1", "2", "on_alarm"]


def test_disabling_is_for_good_nothing_wakes_the_object(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go", id="g", delay=60)
    cart.disable_alarms()
    harness.advance(3600)
    cart.resume()
    harness.advance(3600)
    assert world.called == []


def test_a_push_to_a_disabled_object_raises(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.disable_alarms()
    with pytest.raises(ObjectDisabled, match="cart/a"):
        cart.jobs.push("go")


def test_rearm_alarm_derives_the_alarm_and_does_not_enable(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go", id="g", delay=60)
    cart.disable_alarms()
    cart.rearm_alarm()
    harness.advance(3600)
    assert world.called == []
    with pytest.raises(ObjectDisabled):
        cart.jobs.push("go")


def test_disabling_from_within_a_job_lets_the_run_end(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    world.does = lambda ctx: cart.disable_alarms()
    cart.jobs.push("go", id="1", delay=1)
    cart.jobs.push("go", id="2", delay=1)
    cart.jobs.push("go", id="later", delay=5)
    harness.advance(600)
    assert world.called == ["1", "2", "on_alarm"]


def test_destroy_takes_jobs_storage_alarm_and_switches_at_once(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.jobs.push("go", id="g", delay=60)
    cart.storage["key"] = 1
    cart.set_alarm(60)
    cart.pause()
    assert cart.destroy() is True
    assert cart.destroy() is False
    assert cart.jobs.list() == []
    assert cart.get_alarm() is None
    assert cart.paused is None
    assert dict(cart.storage) == {}
    assert harness.lifecycle.store.objects.find(cart.ref) is None
    harness.advance(600)
    assert world.called == []


def test_destroy_lifts_what_was_disabled_a_later_push_makes_a_new_object(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.disable_alarms()
    cart.destroy()
    cart.jobs.push("go", id="g")
    harness.run_due()
    assert world.called == ["g", "on_alarm"]


def test_a_chain_of_a_destroyed_object_ends_quietly_also_if_its_name_is_used_again(
    harness: Harness, world: World
) -> None:
    """D21: destroy, then the same name again while a chain of the old one is on its way."""
    cart = world.Cart("a")
    cart.jobs.push("go", id="old")
    old = harness.messages.pop()
    cart.destroy()
    cart.jobs.push("go", id="new", delay=60)
    harness.messages.append(old)
    [ran] = harness.run_due()
    assert ran.result["outcome"] == "refused"
    assert world.called == []
    harness.advance(60)
    assert world.called == ["new", "on_alarm"]


def test_destroy_from_within_a_job_is_safe_later_links_end_quietly(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    world.does = lambda ctx: cart.destroy() and None
    for job in "123":
        cart.jobs.push("go", id=job, delay=1)
    cart.storage["key"] = 1
    harness.advance(600)
    assert world.called == ["1"]
    assert [ran.state for ran in harness.ran] == ["SUCCESS"] * len(harness.ran)
    assert harness.lifecycle.store.objects.find(cart.ref) is None
    assert dict(cart.storage) == {}


def test_a_run_of_a_destroyed_object_ends_without_on_alarm(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    world.does = lambda ctx: cart.destroy() and None
    cart.jobs.push("go", id="1")
    harness.advance(600)
    assert world.called == ["1"]


def test_a_job_that_destroys_its_object_and_reschedules_itself_is_gone(harness: Harness, world: World) -> None:
    from celery_lifecycle import Reschedule

    cart = world.Cart("a")

    def does(ctx: Any) -> Any:
        ctx.storage["late"] = 1
        cart.destroy()
        return Reschedule(delay=1)

    world.does = does
    cart.jobs.push("go", id="1")
    harness.advance(600)
    assert world.called == ["1"]
    assert cart.jobs.list() == []


def test_a_push_after_destroy_within_a_run_lands_in_one_row_and_runs_after_it(harness: Harness, world: World) -> None:
    """D36: destroy, then push, while a job of the object runs: one row, no overlap, the new job runs after."""
    cart = world.Cart("a")

    def does(ctx: Any) -> None:
        if ctx.job.id == "1":
            cart.destroy()
            cart.jobs.push("go", id="new")
            assert len(harness.lifecycle.store.objects.find_many("cart")) == 1
            harness.advance(60)
            assert harness.messages == []

    world.does = does
    cart.jobs.push("go", id="1")
    harness.run_due()
    assert world.called == ["1", "new", "on_alarm"]
    assert harness.lifecycle.store.objects.find(cart.ref) is None


def test_destroy_gives_back_keep_alives(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    held = cart.keep_alive()
    cart.destroy()
    harness.advance(600)
    assert world.called == []
    assert held.release() is True
    assert harness.lifecycle.store.objects.find(cart.ref) is None
