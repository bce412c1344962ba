"""Life in Celery's own world, with real workers: what ``docs/celery.md`` says holds, holds."""

import signal
import time
from collections.abc import Callable

import pytest
from celery import Celery, chain, chord, group

from celery_lifecycle import Lifecycle
from tests.acceptance.ledger import Ledger
from tests.acceptance.nodes import BeatNode, WorkerNode
from tests.acceptance.world import add_world
from tests.support import Broker, wait_until

StartWorker = Callable[..., WorkerNode]
StartBeat = Callable[..., BeatNode]
WORLD = "tests.acceptance.world"


def until_ended(ledger: Ledger, count: int, timeout: float = 30) -> None:
    wait_until(
        lambda: len(ledger.ends()) >= count, timeout, lambda: f"{len(ledger.ends())} of {count}: {ledger.runs()}"
    )


# --- routing and priorities


@pytest.mark.parametrize(
    "settings", [{"task_routes": {"thing.work": {"queue": "routed"}, "plain": {"queue": "routed"}}}]
)
@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_jobs_and_calls_with_an_eta_go_where_task_routes_says(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, app: Celery
) -> None:
    routed, default = start_worker("routed", queues=["routed"]), start_worker("default")
    start_beat()
    thing = lifecycle.object("thing", "one")
    thing.jobs.push("work", id="routed")
    thing.jobs.push("softly", id="default")
    app.tasks["plain"].apply_async(("later",), countdown=0.5)
    until_ended(ledger, 3)
    pids = {run.job: run.pid for run in ledger.runs()}
    assert {pids["routed"], pids["later"]} <= set(routed.children())
    assert pids["default"] in default.children()


@pytest.mark.parametrize("settings", [{"task_queue_max_priority": 10, "worker_prefetch_multiplier": 1}])
@pytest.mark.combinations(("postgresql", "redis"), ("sqlite", "rabbitmq"))
def test_the_priority_of_a_job_is_that_of_its_message(
    start_worker: StartWorker, lifecycle: Lifecycle, ledger: Ledger, app: Celery, broker: Broker
) -> None:
    """RabbitMQ serves high numbers first, Redis low ones: Celery's own rule."""
    world = add_world(app, ledger)
    for number in range(6):
        fn = "zero" if number % 2 else "nine"
        world(f"{number}").jobs.push(fn, id=fn)
    start_worker(app=WORLD)
    until_ended(ledger, 6)
    first, second = ("nine", "zero") if broker.kind == "rabbitmq" else ("zero", "nine")
    assert [run.job for run in ledger.runs()] == [first] * 3 + [second] * 3


# --- results


@pytest.mark.combinations(("postgresql", "redis"), ("sqlite", "filesystem"))
def test_with_a_result_backend_each_link_has_its_outcome_as_its_result(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, app: Celery
) -> None:
    start_worker()
    start_beat()
    thing = lifecycle.object("thing", "one")
    thing.jobs.push("work", id="once")
    thing.jobs.push("work", id="again", payload={"again": 0.2, "rounds": 1})
    until_ended(ledger, 3)
    ids = {job: [run.data["task"] for run in ledger.runs(job=job)] for job in ("once", "again")}
    assert app.AsyncResult(ids["once"][0]).get(timeout=10) == {"outcome": "complete", "at": None}
    assert app.AsyncResult(ids["again"][0]).get(timeout=10)["outcome"] == "reschedule"
    assert app.AsyncResult(ids["again"][1]).get(timeout=10)["outcome"] == "complete"


@pytest.mark.combinations(("mariadb", "rabbitmq"))
def test_results_that_are_messages_come_back_to_who_called_with_an_eta(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, app: Celery
) -> None:
    assert app.conf.result_backend == "rpc://"
    start_worker()
    start_beat()
    early = app.tasks["add"].apply_async((1, 2), countdown=0.1)
    later = app.tasks["flaky"].apply_async(("f", 1), countdown=0.5)
    assert later.get(timeout=20) == "f"
    assert early.get(timeout=20) == 3


@pytest.mark.parametrize(
    ("settings", "environment_of_worker"),
    [({}, {"RESULT_BACKEND": ""}), ({"task_ignore_result": True}, {})],
    ids=["no-backend", "ignored"],
)
@pytest.mark.combinations(("postgresql", "redis"))
def test_without_results_chains_failures_and_deaths_go_the_same_way(
    start_worker: StartWorker,
    start_beat: StartBeat,
    lifecycle: Lifecycle,
    ledger: Ledger,
    environment_of_worker: dict[str, str],
) -> None:
    start_worker(environment=environment_of_worker)
    start_beat()
    thing = lifecycle.object("thing", "one")
    thing.jobs.push("work", id="1", payload={"do": "fail", "times": 1})
    thing.jobs.push("work", id="2", payload={"do": "sigkill", "times": 1})
    thing.jobs.push("work", id="3")
    until_ended(ledger, 3)
    assert [run.job for run in ledger.runs()[:3]] == ["1", "1", "2"]
    assert {run.job for run in ledger.ends()} == {"1", "2", "3"}


@pytest.mark.combinations(("postgresql", "redis"), ("sqlite", "filesystem"))
def test_members_of_a_canvas_may_have_an_eta(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, app: Celery, broker: Broker
) -> None:
    start_worker(concurrency=2)
    start_beat()
    add, told = app.tasks["add"], app.tasks["told"]
    one = chain(add.s(1, 2), add.s(3).set(countdown=0.5), add.s(4))
    assert one.apply_async().get(timeout=20) == 10
    assert group(add.s(1, 1).set(countdown=0.4), add.s(2, 2)).apply_async().get(timeout=20) == [2, 4]
    if broker.kind == "redis":  # a chord needs a backend that can count
        header = [add.s(1, 1).set(countdown=0.3), add.s(2, 2).set(countdown=0.6)]
        assert chord(header)(add.s()).get(timeout=20) == 6
    result = add.apply_async((5, 6), countdown=0.3, link=told.s())
    assert result.get(timeout=20) == 11
    wait_until(lambda: any(line["args"] == ["11"] for line in ledger.records("told")))
    failing = add.apply_async((5, "six"), countdown=0.3, link_error=told.si("failed"))
    with pytest.raises(TypeError):
        failing.get(timeout=20)
    wait_until(lambda: any(line["args"] == ["failed"] for line in ledger.records("told")))


@pytest.mark.combinations(("postgresql", "redis"))
def test_a_retry_with_a_countdown_is_a_durable_job_of_the_same_id(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, app: Celery
) -> None:
    worker = start_worker()
    start_beat()
    result = app.tasks["flaky"].delay("f", 2)
    wait_until(lambda: lifecycle.object("flaky", result.id).jobs.list(), message="the retry, stored")
    worker.kill(method="everything")
    worker.restart()
    assert result.get(timeout=20) == "f"
    assert [run.data["retries"] for run in ledger.runs(job="f")] == [0, 1, 2]
    assert {run.data["id"] for run in ledger.runs(job="f")} == {result.id}


# --- how workers take messages


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"worker_prefetch_multiplier": 1}, ()),
        ({"worker_prefetch_multiplier": 16}, ()),
        ({"worker_prefetch_multiplier": 0}, ()),
        ({"worker_prefetch_multiplier": 4}, ("-O", "fair")),
        ({"worker_disable_prefetch": True}, ()),
    ],
    ids=["1", "16", "unlimited", "fair", "disabled"],
)
@pytest.mark.combinations(("postgresql", "redis"))
def test_however_many_messages_a_worker_takes_ahead_objects_run_one_job_at_a_time_in_order(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, arguments: tuple[str, ...]
) -> None:
    start_worker("one", concurrency=2, arguments=arguments)
    start_worker("two", concurrency=2, arguments=arguments)
    start_beat()
    for job in "abc":
        for name in range(8):
            lifecycle.object("thing", f"{name}").jobs.push("work", id=job, payload={"seconds": 0.05})
    until_ended(ledger, 24)
    assert len(ledger.starts()) == 24
    for name in range(8):
        assert [run.job for run in ledger.runs(f"thing/{name}")] == ["a", "b", "c"]


@pytest.mark.parametrize("settings", [{"worker_prefetch_multiplier": 16}])
@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_messages_that_a_killed_worker_had_taken_ahead_are_sent_again_within_their_patience(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    first = start_worker("first")
    start_beat()
    lifecycle.object("thing", "0").jobs.push("work", id="w", payload={"seconds": 60, "do": "fail"})
    wait_until(lambda: ledger.starts())
    for name in range(1, 6):
        lifecycle.object("thing", f"{name}").jobs.push("work", id="w")
    lifecycle.object("thing", "0").jobs.push("work", id="w")
    wait_until(lambda: not _waiting(first))
    first.kill(method="everything")
    start_worker("second", concurrency=2)
    until_ended(ledger, 6)
    assert sorted(run.object for run in ledger.ends()) == [f"thing/{name}" for name in range(6)]
    assert len(ledger.starts()) == 7


def _waiting(worker: WorkerNode) -> bool:
    """Whether the worker has not taken five messages ahead yet."""
    found = worker.app.control.inspect([worker.hostname()], timeout=1).reserved() or {}
    return len(found.get(worker.hostname(), [])) < 5


@pytest.mark.parametrize("pool", ["solo", "threads"])
@pytest.mark.combinations(("postgresql", "redis"))
def test_other_pools_run_chains_through_failures_and_lose_a_killed_job_with_the_whole_worker(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, pool: str
) -> None:
    worker = start_worker(pool=pool)
    start_beat()
    thing = lifecycle.object("thing", "one")
    thing.jobs.push("work", id="1", payload={"do": "fail", "times": 1})
    thing.jobs.push("work", id="2", payload={"do": "memory_error", "times": 1})
    thing.jobs.push("work", id="3")
    until_ended(ledger, 3)
    assert {line["cause"] for line in ledger.records("struck")} == {"memory_error"}
    lifecycle.object("thing", "two").jobs.push("work", id="deadly", payload={"do": "sigkill", "times": 1})
    wait_until(lambda: worker.status == "exited", 20)
    worker.restart()
    until_ended(ledger, 4)
    assert [line["cause"] for line in ledger.records("struck")][-1] == "lost"


# --- pools that change


@pytest.mark.parametrize(
    "settings", [{"worker_max_tasks_per_child": 1}, {"worker_max_memory_per_child": 1000}], ids=["tasks", "memory"]
)
@pytest.mark.combinations(("mariadb", "redis"))
def test_processes_that_are_replaced_after_each_task_are_no_strikes(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    start_worker(concurrency=2)
    start_beat()
    for job in "abc":
        for name in range(4):
            lifecycle.object("thing", f"{name}").jobs.push("work", id=job)
    until_ended(ledger, 12)
    assert len(ledger.starts()) == 12
    assert len({run.pid for run in ledger.runs()}) == 12
    assert {(run.data["attempt"], run.data["strikes"]) for run in ledger.runs()} == {(1, 0)}
    assert ledger.records("struck") == []


@pytest.mark.parametrize("settings", [{"worker_max_memory_per_child": 1000, "worker_prefetch_multiplier": 1}])
@pytest.mark.combinations(("postgresql", "redis"))
def test_a_memory_error_is_caught_before_the_process_is_replaced_for_its_memory(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    start_worker()
    start_beat()
    lifecycle.object("thing", "greedy").jobs.push("limited", id="w", payload={"do": "grow", "times": 1})
    lifecycle.object("thing", "healthy").jobs.push("work", id="w")
    until_ended(ledger, 2)
    assert [(line["object"], line["cause"]) for line in ledger.records("struck")] == [("thing/greedy", "memory_limit")]


@pytest.mark.combinations(("postgresql", "redis"))
def test_a_pool_that_autoscale_grows_and_shrinks_loses_no_job(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    worker = start_worker(arguments=("--autoscale=4,1",), environment={"AUTOSCALE_KEEPALIVE": "1"})
    start_beat()
    for name in range(12):
        lifecycle.object("thing", f"{name}").jobs.push("work", id="w", payload={"seconds": 0.5})
    until_ended(ledger, 12)
    assert len({run.pid for run in ledger.runs()}) > 1
    wait_until(lambda: len(worker.children()) == 1, 60)
    lifecycle.object("thing", "after").jobs.push("work", id="w")
    until_ended(ledger, 13)
    assert len(ledger.starts()) == 13
    assert ledger.records("struck") == []


# --- shutdowns: see also test_shutdowns.py


@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_sigterm_remapped_to_sigquit_puts_running_jobs_back_at_once_without_a_strike(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    worker = start_worker(concurrency=2, environment={"REMAP_SIGTERM": "SIGQUIT"})
    start_beat()
    for name in ("one", "two"):
        lifecycle.object("thing", name).jobs.push("work", payload={"seconds": 8}, id="long")
    wait_until(lambda: len(ledger.starts("long")) == 2)
    started = time.monotonic()
    worker.kill(signal.SIGTERM)
    worker.wait(20)
    assert time.monotonic() - started < 8
    worker.restart()
    wait_until(lambda: len(ledger.ends("long")) == 2, 30)
    assert len(ledger.starts("long")) == 4
    assert {(run.data["attempt"], run.data["strikes"]) for run in ledger.runs()} == {(1, 0)}
    assert ledger.records("struck") == []


# --- work that a job hands off to a task of any base class


@pytest.mark.parametrize("settings", [{"lifecycle_keep_alive": 2}])
@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_a_tracked_task_whose_process_is_killed_strikes_the_job_that_watches_it_and_is_started_anew(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    start_worker(concurrency=2, app=WORLD)
    start_beat()
    watched = lifecycle.object("world", "one")
    watched.jobs.push("world.watch", id="watch", payload={"do": "sigkill", "times": 1, "seconds": 0.2})
    wait_until(lambda: watched.storage.get("loaded"), 30, lambda: str(ledger.runs()))
    wait_until(lambda: watched.jobs.list() == [], 10)
    assert [run.outcome for run in ledger.runs(job="load")] == ["died", "ended"]
    assert 1 in {run.data["strikes"] for run in ledger.runs(job="watch")}
    # Given back by the worker once its process has ended the task, which the job may have heard of before.
    wait_until(lambda: lifecycle.store.holds.of(watched.ref) == [], 10)
    watched.destroy()


@pytest.mark.parametrize("settings", [{"lifecycle_keep_alive": 2}])
@pytest.mark.combinations(("postgresql", "redis"))
def test_a_tracked_task_whose_process_is_killed_each_time_seals_the_job_that_watches_it(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    start_worker(concurrency=2, app=WORLD)
    start_beat()
    watched = lifecycle.object("world", "one")
    watched.jobs.push("world.watch", id="watch", payload={"do": "sigkill", "seconds": 0.2})
    dead = wait_until(watched.dead_jobs, 60, lambda: str(ledger.runs()))
    assert [(one.job.id, one.reason) for one in dead] == [("watch", "sealed")]
    assert len(ledger.runs(job="load")) == 3
    watched.destroy()


@pytest.mark.parametrize("settings", [{"lifecycle_keep_alive": 2, "task_routes": {"load": {"queue": "loads"}}}])
@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_a_tracked_task_that_is_lost_with_its_worker_is_noticed_when_its_keep_alive_is_over(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    loads = start_worker("loads", app=WORLD, queues=["loads"])
    start_worker("jobs", app=WORLD)
    start_beat()
    watched = lifecycle.object("world", "one")
    watched.jobs.push("world.watch", id="watch", payload={"seconds": 4, "times": 1, "do": "fail"})
    wait_until(lambda: ledger.starts("load"), 20)
    loads.kill(method="everything")
    loads.restart()
    wait_until(lambda: watched.jobs.list() == [], 60, lambda: str(ledger.runs()))
    assert [run.outcome for run in ledger.runs(job="load")] == ["died", "ended"]
    assert 1 in {run.data["strikes"] for run in ledger.runs(job="watch")}
    assert ledger.records("alarm")
    watched.destroy()


@pytest.mark.parametrize("settings", [{"lifecycle_keep_alive": 2}])
@pytest.mark.combinations(("postgresql", "redis"))
def test_a_tracked_task_longer_than_a_keep_alive_is_renewed_by_its_worker(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    start_worker(concurrency=2, app=WORLD)
    start_beat()
    watched = lifecycle.object("world", "one")
    watched.jobs.push("world.watch", id="watch", payload={"seconds": 8})
    wait_until(lambda: watched.storage.get("loaded"), 30, lambda: str(ledger.runs()))
    wait_until(lambda: watched.jobs.list() == [], 10)
    assert len(ledger.runs(job="load")) == 1
    assert {run.data["strikes"] for run in ledger.runs(job="watch")} == {0}
    watched.destroy()
