"""Rules of owners: the host and its capabilities share one table of ids, and each sees its own."""

from typing import Any

import pytest

from celery_lifecycle import YIELD, Capability, Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.errors import KindConflict, LifecycleError, OwnerConflict, UnknownTask
from celery_lifecycle.store.jobs import Draft
from celery_lifecycle.testing import Harness


class World:
    """A shop whose cart has an outbox, and what was called in it."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.called: list[Any] = []
        self.outcome: Any = None
        world = self

        class Outbox(Capability):
            def on_start(self) -> None:
                world.called.append(f"{self.id}.on_start of {self.object.name}")

            @lifecycle_job
            def send(self, ctx: Any) -> None:
                world.called.append((self.id, self.object.name, ctx.payload))
                ctx.jobs.push("flush", id="follow-up", delay=60)

            @lifecycle_job
            def flush(self, ctx: Any) -> None:
                world.called.append((self.id, "flush"))

            @lifecycle_job
            def fail(self, ctx: Any) -> None:
                raise ValueError("no network")

            def on_job_error(self, ctx: Any, error: BaseException) -> Any:
                world.called.append((self.id, "on_job_error", ctx.job.id, str(error), ctx.attempt))
                return world.outcome

            def on_memory_limit(self, context: Any) -> None:
                world.called.append((self.id, "on_memory_limit", context.executing))

        class Cart(LifecycleObject, lifecycle=lifecycle):
            outbox = Outbox()
            archive = Outbox(id="archiv")

            def on_start(self) -> None:
                world.called.append("host.on_start")

            @lifecycle_job
            def remind(self, ctx: Any) -> None:
                world.called.append(("host", ctx.payload))

            def on_memory_limit(self, context: Any) -> None:
                world.called.append(("host", "on_memory_limit", context.executing))

        self.Cart = Cart


@pytest.fixture
def world(lifecycle: Lifecycle) -> World:
    return World(lifecycle)


def test_the_host_owns_what_is_pushed_through_the_object(harness: Harness, world: World) -> None:
    job = world.Cart("a").jobs.push("remind", id="r")
    assert job.owner == "host"


def test_a_capability_owns_its_jobs_under_its_own_id(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    assert cart.outbox.jobs.push("send", id="s", delay=1).owner == "outbox"
    assert cart.archive.jobs.push("send", id="t", delay=1).owner == "archiv"
    assert cart.outbox.send.push(delay=1).owner == "outbox"


def test_a_capability_runs_its_jobs_bound_to_its_object(harness: Harness, world: World) -> None:
    world.Cart("a").outbox.jobs.push("send", payload=7)
    harness.run_due()
    assert ("outbox", "a", 7) in world.called


def test_ctx_jobs_of_a_capability_are_the_capabilitys_own(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.outbox.jobs.push("send")
    harness.run_due()
    assert cart.outbox.jobs.get("follow-up") is not None
    assert cart.jobs.get("follow-up") is None


def test_an_owner_neither_sees_nor_cancels_nor_moves_what_another_one_owns(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.outbox.jobs.push("send", id="s", delay=60)
    for others in (cart.jobs, cart.archive.jobs):
        assert others.get("s") is None
        assert others.list() == []
        assert others.cancel("s") is False
        with pytest.raises(LookupError, match="no pending job 's'"):
            others.reschedule("s", delay=1)
    assert [job.id for job in cart.outbox.jobs.list()] == ["s"]


def test_an_id_of_another_owner_raises_and_names_it(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    cart.outbox.jobs.push("send", id="s", delay=60)
    with pytest.raises(OwnerConflict, match=r"'s' of cart/a belongs to 'outbox', not to 'host'"):
        cart.jobs.push("remind", id="s")
    assert harness.assert_pending(cart, "s").task == "cart.outbox.send"


def test_the_same_id_on_another_object_is_another_job(harness: Harness, world: World) -> None:
    world.Cart("a").jobs.push("remind", id="r", payload=1)
    world.Cart("b").outbox.jobs.push("send", id="r", payload=2)
    harness.run_due()
    assert {entry for entry in world.called if isinstance(entry, tuple)} == {("host", 1), ("outbox", "b", 2)}


def test_on_start_of_the_host_comes_before_those_of_its_capabilities(harness: Harness, world: World) -> None:
    world.Cart("a").jobs.push("remind")
    harness.run_due()
    assert world.called == ["host.on_start", "archiv.on_start of a", "outbox.on_start of a", ("host", None)]


def test_on_job_error_is_called_once_after_the_last_attempt_of_a_capabilitys_job(
    harness: Harness, world: World
) -> None:
    cart = world.Cart("a")
    cart.outbox.jobs.push("fail", id="f")
    harness.run_due()
    assert [entry for entry in world.called if "on_job_error" in entry] == [
        ("outbox", "on_job_error", "f", "no network", 3)
    ]
    assert cart.outbox.jobs.list() == []
    assert cart.dead_jobs() == []


def test_what_on_job_error_returns_is_the_outcome(harness: Harness, world: World) -> None:
    from celery_lifecycle import Reschedule

    cart = world.Cart("a")
    world.outcome = Reschedule(delay=600)
    cart.outbox.jobs.push("fail", id="f")
    harness.run_due()
    job = harness.assert_pending(cart, "f")
    assert (job.due_at - harness.now).total_seconds() == 600
    assert job.attempt == 0
    assert cart.dead_jobs() == []


def test_an_invalid_outcome_of_on_job_error_counts_as_a_failing_hook(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    world.outcome = "again, please"
    cart.outbox.jobs.push("fail", id="f")
    harness.run_due()
    harness.assert_dead(cart, "f", reason="failed")


def test_on_job_error_may_yield(harness: Harness, world: World) -> None:
    cart = world.Cart("a")
    world.outcome = YIELD
    cart.outbox.jobs.push("fail", id="f", retry=None)
    harness.tick()
    harness.deliver()
    assert harness.assert_pending(cart, "f").due_at == harness.now
    assert harness.sent("job_yielded")


def test_on_memory_limit_of_capabilities_comes_before_the_hosts(harness: Harness, world: World) -> None:
    world.Cart("a").jobs.push("remind", id="r")
    harness.kill_next("r")
    harness.run_due()
    assert [entry for entry in world.called if "on_memory_limit" in entry] == [
        ("archiv", "on_memory_limit", "r"),
        ("outbox", "on_memory_limit", "r"),
        ("host", "on_memory_limit", "r"),
    ]


@pytest.mark.parametrize("taken", ["host", "scheduler"])
def test_the_ids_host_and_scheduler_are_taken(taken: str) -> None:
    with pytest.raises(LifecycleError, match="taken"):
        Capability(id=taken)


def test_two_capabilities_of_one_id_are_an_error(lifecycle: Lifecycle) -> None:
    with pytest.raises(LifecycleError, match="two capabilities with the id 'x'"):

        class Twice(LifecycleObject, lifecycle=lifecycle):
            one = Capability(id="x")
            other = Capability(id="x")


def test_jobs_of_a_capability_need_an_object(world: World) -> None:
    with pytest.raises(LifecycleError, match="only on an object"):
        _ = world.Cart.outbox.jobs


def test_a_task_name_belongs_to_one_job_whoever_inherits_it(lifecycle: Lifecycle) -> None:
    class Billed(LifecycleObject, abstract=True):
        @lifecycle_job(name="billing.charge")
        def charge(self, ctx: Any) -> None: ...

    class Cart(Billed, lifecycle=lifecycle): ...

    told = r"job charge of .*Order and .*job charge of .*Cart both have the task name 'billing.charge'"
    with pytest.raises(KindConflict, match=told):

        class Order(Billed, lifecycle=lifecycle): ...

    assert "order" not in lifecycle.kinds
    with pytest.raises(KindConflict, match=r"billing\.charge"):

        @lifecycle_job(name="billing.charge", app=lifecycle.app)
        def charge(ctx: Any) -> None: ...


def test_two_jobs_of_one_class_and_a_job_beside_a_hook_have_names_of_their_own(lifecycle: Lifecycle) -> None:
    with pytest.raises(KindConflict, match=r"job other of .* and .*job one of"):

        class Twice(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job(name="same")
            def one(self, ctx: Any) -> None: ...

            @lifecycle_job(name="same")
            def other(self, ctx: Any) -> None: ...

    with pytest.raises(KindConflict, match="the hook on_alarm of"):

        class Alarmed(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job
            def on_alarm(self, ctx: Any) -> None: ...


def test_a_kind_that_reads_like_a_capability_of_another_does_not_take_its_jobs(
    lifecycle: Lifecycle, world: World
) -> None:
    with pytest.raises(KindConflict, match=r"capability 'outbox' of .*Cart both have the task name 'cart.outbox.send'"):

        class Outbox(LifecycleObject, kind="cart.outbox", lifecycle=lifecycle):
            @lifecycle_job
            def send(self, ctx: Any) -> None: ...


def test_a_module_that_is_loaded_again_keeps_its_names(lifecycle: Lifecycle) -> None:
    for _ in range(2):

        class Cart(LifecycleObject, lifecycle=lifecycle):
            @lifecycle_job
            def remind(self, ctx: Any) -> None: ...

        @lifecycle_job(name="billing.charge", app=lifecycle.app)
        def charge(ctx: Any) -> None: ...

    assert lifecycle.kinds["cart"] is Cart


def test_a_job_of_a_class_never_runs_on_an_object_of_another_kind(
    harness: Harness, lifecycle: Lifecycle, world: World
) -> None:
    class Order(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def ship(self, ctx: Any) -> None:
            world.called.append("ship")

    order = Order("a")
    # As an older version, or a process that does not know the class, may have pushed it.
    harness.lifecycle.store.jobs.push(Draft(order.ref, "cart.remind", "celery", "host", "null", id="r", delay_ms=1000))
    order.jobs.push("ship", delay=1)
    harness.advance(1)
    assert world.called == ["ship"]
    harness.assert_pending(order, "r")
    harness.advance(900)
    harness.assert_dead(order, "r", reason="unknown task")
    assert world.called == ["ship"]


class Both(Capability):
    """Has a job of the same name as its host."""

    @lifecycle_job
    def go(self, ctx: Any) -> None: ...


@pytest.fixture
def both(lifecycle: Lifecycle) -> Any:
    class Basket(LifecycleObject, lifecycle=lifecycle):
        out = Both()

        @lifecycle_job
        def go(self, ctx: Any) -> None: ...

        @lifecycle_job
        def only(self, ctx: Any) -> None: ...

    return Basket


def test_a_capability_pushes_its_own_job_by_method_handle_name_or_full_name(harness: Harness, both: Any) -> None:
    basket = both("a")
    for index, fn in enumerate((Both.go, basket.out.go, "go", "basket.out.go")):
        job = basket.out.jobs.push(fn, id=f"j{index}", delay=60)
        assert (job.task, job.owner) == ("basket.out.go", "out")
        assert basket.out.jobs.get(job.id) == job
    assert basket.out.get_schedule(basket.out.schedule(60, Both.go).id).callback == "go"
    assert (basket.jobs.push(both.go, delay=60).task, basket.jobs.push("go", delay=60).task) == ("basket.go",) * 2


def test_a_capability_does_not_push_its_hosts_jobs_nor_the_host_its_methods(harness: Harness, both: Any) -> None:
    basket = both("a")
    for fn in (both.go, both.only, "only", "basket.only", basket.only, both("other").out.go):
        with pytest.raises(UnknownTask):
            basket.out.jobs.push(fn, delay=60)
        with pytest.raises(UnknownTask):
            basket.out.schedule(60, fn)
    with pytest.raises(UnknownTask, match=r"Basket has no job <job Both\.go>. It has: go, only"):
        basket.jobs.push(Both.go, delay=60)
    assert harness.lifecycle.store.objects.find(basket.ref) is None


def test_a_function_that_a_capability_pushes_is_the_capabilitys(
    harness: Harness, lifecycle: Lifecycle, both: Any
) -> None:
    called: list[str] = []

    @lifecycle_job(name="charge", app=lifecycle.app)
    def charge(ctx: Any) -> None:
        called.append(f"{ctx.object}, {ctx.job.owner}")

    basket = both("a")
    job = basket.out.jobs.push(charge, id="c", delay=60)
    assert basket.out.jobs.get("c") == job
    assert basket.jobs.get("c") is None
    harness.advance(60)
    assert called == ["basket/a, out"]
