"""Ordinary tasks with ``base=LifecycleTask``: a call that is put off behaves as Celery's own, and is kept by the table."""

from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from celery import Celery, chord
from celery.backends.rpc import RPCBackend
from kombu import Exchange, Queue

from celery_lifecycle import Lifecycle, LifecycleTask, lifecycle_job
from celery_lifecycle.errors import DatabaseUnavailable, TimeInvalid
from celery_lifecycle.testing import Harness
from tests.support.tables import tables_at

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


@pytest.fixture
def lifecycle() -> Lifecycle:
    """An application with a result backend."""
    return Lifecycle(Celery("calls", set_as_current=False, backend="cache+memory://"), backup_alarm=30)


@pytest.fixture
def harness(lifecycle: Lifecycle, database_url: str) -> Iterator[Harness]:
    with Harness(lifecycle, database_url=tables_at(database_url), start=NOON) as running:
        yield running


def task_of(lifecycle: Lifecycle, body: Callable[..., Any], **options: Any) -> Any:
    """A bound task whose body is given."""
    settings = {"name": "call", "bind": True, "typing": False, **options}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return body(self, *args, **kwargs)

    return lifecycle.app.task(base=LifecycleTask, shared=False, **settings)(run)


def job_of(lifecycle: Lifecycle, result: Any, name: str = "call") -> Any:
    """The pending job of a call, or None."""
    return lifecycle.object(name, result.id).jobs.get(result.id)


# --- retries


def test_a_retry_that_the_database_can_not_take_puts_the_job_back_with_its_attempts(
    harness: Harness, lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    retries = []

    def body(self: Any) -> str:
        retries.append(self.request.retries)
        if self.request.retries < 1:
            raise self.retry(countdown=60)
        return "done"

    result = task_of(lifecycle, body, max_retries=1).apply_async(countdown=5)
    push, outages = lifecycle.store.jobs.push, iter([True, True])

    def blinks(*args: Any) -> Any:
        if next(outages, False):
            raise DatabaseUnavailable("away for a second")
        return push(*args)

    monkeypatch.setattr(lifecycle.store.jobs, "push", blinks)
    harness.advance(5)
    assert result.state == "RETRY"
    harness.advance(100)
    assert retries == [0, 0, 0, 1]
    assert (result.state, result.result) == ("SUCCESS", "done")
    assert lifecycle.object("call", result.id).dead_jobs() == []


def test_a_retry_that_is_not_allowed_is_a_failure_that_says_why(harness: Harness, lifecycle: Lifecycle) -> None:
    result = task_of(lifecycle, lambda self: self.retry(countdown=-5)).apply_async(countdown=5)
    harness.advance(60)
    assert result.state == "FAILURE"
    dead = harness.assert_dead(lifecycle.object("call", result.id), result.id, reason="failed")
    assert "must not be negative" in dead.error


VALUES = [
    Decimal("1.50"),
    NOON,
    datetime(2026, 1, 1),
    date(2026, 1, 1),
    time(12, 30),
    UUID("12345678123456781234567812345678"),
    b"text",
    b"\xff",
    {"a": [Decimal(1)]},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.databases("sqlite")
def test_arguments_that_celerys_json_has_types_for_come_back_as_they_were(
    harness: Harness, lifecycle: Lifecycle, value: Any
) -> None:
    seen: list[Any] = []

    def body(self: Any, one: Any, key: Any) -> None:
        seen.extend([one, key, *self.request.args, *self.request.kwargs.values()])
        if self.request.retries < 2:
            raise OSError("net")

    task = task_of(lifecycle, body, autoretry_for=(OSError,), default_retry_delay=5)
    result = task.delay(value, key=value)
    harness.advance(60)
    assert seen == [value] * 12
    assert result.state == "SUCCESS"
    seen.clear()
    task.apply_async((value, value), countdown=60, retries=2)
    harness.advance(60)
    assert seen == [value] * 4


def test_keys_that_are_no_text_become_text_as_in_a_message(harness: Harness, lifecycle: Lifecycle) -> None:
    seen = []
    task = task_of(lifecycle, lambda self, one: seen.append(one))
    task.apply_async(({1: "a"},), countdown=1)
    task.delay({1: "a"})
    harness.advance(1)
    assert seen == [{"1": "a"}] * 2


@pytest.mark.databases("sqlite")
def test_models_are_dumped_as_for_a_message(harness: Harness, lifecycle: Lifecycle) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Order(pydantic.BaseModel):
        number: int

    seen = []

    @lifecycle.app.task(base=LifecycleTask, name="model", shared=False, pydantic=True)
    def model(order: Order) -> None:
        seen.append(order)

    model.apply_async((Order(number=3),), countdown=1)
    harness.advance(1)
    assert seen == [Order(number=3)]


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    ("name", "argument", "serializer"),
    [
        ("send mail/now", 1, "json"),
        ("call", {1, 2}, "pickle"),
        ("call", float("inf"), "json"),
        ("call", "x" * 2_200_000, "json"),
    ],
    ids=["name", "pickle", "infinite", "large"],
)
def test_a_retry_that_the_table_can_not_keep_is_a_message_of_celerys_own(
    harness: Harness, lifecycle: Lifecycle, name: str, argument: Any, serializer: str, caplog: pytest.LogCaptureFixture
) -> None:
    lifecycle.app.conf.accept_content = ["json", "pickle"]
    seen = []

    def body(self: Any, one: Any) -> None:
        seen.append(one)
        if self.request.retries < 1:
            raise self.retry(countdown=5)

    result = task_of(lifecycle, body, name=name, serializer=serializer).delay(argument)
    harness.advance(60)
    assert seen == [argument] * 2
    assert result.state == "SUCCESS"
    assert f"{name}[{result.id}] is tried again by a message of Celery's own" in caplog.text


@pytest.mark.parametrize("options", [{"countdown": 5}, {}], ids=["durable", "ordinary"])
def test_a_retry_at_once_is_durable_too(harness: Harness, lifecycle: Lifecycle, options: dict[str, Any]) -> None:
    retries = []

    def body(self: Any) -> None:
        retries.append(self.request.retries)
        if self.request.retries < 1:
            raise self.retry(countdown=0)

    result = task_of(lifecycle, body).apply_async(**options)
    harness._now_ms += 5000
    harness.tick()
    harness.deliver()
    assert job_of(lifecycle, result) is not None
    harness.messages.clear()  # it gets lost on its way
    harness.advance(60)
    assert result.state == "SUCCESS"
    assert retries == [0, 1]


def test_a_call_without_a_delay_is_a_message_of_celerys_own(harness: Harness, lifecycle: Lifecycle) -> None:
    task = task_of(lifecycle, lambda self: None)
    for result in (task.apply_async(countdown=0), task.delay()):
        assert job_of(lifecycle, result) is None
    assert len(harness.messages) == 2


def test_a_retry_at_a_naive_time_is_a_failure_that_says_what_to_write(harness: Harness, lifecycle: Lifecycle) -> None:
    task = task_of(lifecycle, lambda self: self.retry(eta=datetime(2026, 1, 1, 13)))
    for result in (task.delay(), task.apply_async(countdown=1)):
        harness.advance(60)
        assert result.state == "FAILURE"
        assert "is naive" in str(result.result)


def test_a_retry_keeps_when_its_call_expires(harness: Harness, lifecycle: Lifecycle) -> None:
    seen = []

    def body(self: Any) -> None:
        seen.append(self.request.expires)
        raise self.retry(countdown=4)

    result = task_of(lifecycle, body).apply_async(countdown=1, expires=10)
    harness.advance(60)
    assert seen == ["2026-01-01T12:00:10+00:00"] * 3
    harness.assert_dead(lifecycle.object("call", result.id), result.id, reason="expired")


@pytest.mark.databases("sqlite")
def test_a_retry_takes_a_naive_expiry_as_celery_does(harness: Harness, lifecycle: Lifecycle) -> None:
    task = task_of(lifecycle, lambda self: self.retry(countdown=60))
    result = task.apply_async(expires=datetime(2100, 1, 1))
    harness.run_due()
    assert (
        job_of(lifecycle, result).options["expires_ms"] == datetime(2100, 1, 1, tzinfo=timezone.utc).timestamp() * 1000
    )


def test_a_retry_of_what_was_pushed_puts_its_job_back(harness: Harness, lifecycle: Lifecycle) -> None:
    retries = []

    def body(self: Any, **kwargs: Any) -> None:
        retries.append((self.request.retries, kwargs))
        raise OSError("net")

    task = task_of(lifecycle, body, autoretry_for=(OSError,), default_retry_delay=60, max_retries=2)
    task.push(id="foo", payload={"a": 1})
    harness.run_due()
    assert [str(one.ref) for one in lifecycle.store.objects.find_many()] == ["call/foo"]
    harness.advance(600)
    assert retries == [(0, {"a": 1}), (1, {"a": 1}), (2, {"a": 1})]
    assert "net" in (harness.assert_dead(lifecycle.object("call", "foo"), "foo", reason="failed").error or "")


def test_a_retry_of_a_schedule_ends_with_it(harness: Harness, lifecycle: Lifecycle) -> None:
    retries = []

    def body(self: Any) -> None:
        retries.append(self.request.retries)
        raise self.retry(countdown=60)

    task = task_of(lifecycle, body)
    task.schedule("0 * * * *", id="hourly")
    harness.advance(3600)
    assert retries == [0]
    harness.advance(60)
    assert retries == [0, 1]
    assert task.cancel_schedule("hourly")
    harness.advance(7200)
    assert retries == [0, 1]
    assert lifecycle.store.objects.find_many() == []


# --- times


@pytest.mark.databases("sqlite")
def test_a_countdown_goes_before_an_eta(harness: Harness, lifecycle: Lifecycle) -> None:
    task = task_of(lifecycle, lambda self: None)
    eta = NOON + timedelta(hours=1)
    assert job_of(lifecycle, task.apply_async(eta=eta, countdown=5)).due_at == NOON + timedelta(seconds=5)
    assert job_of(lifecycle, task.apply_async(eta=eta, countdown=0)).due_at == eta
    assert job_of(lifecycle, task.apply_async(eta="2026-01-01T13:00:00Z")).due_at == eta


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    "options",
    [
        {"eta": "soon"},
        {"eta": 5},
        {"eta": datetime(2026, 1, 1, 13)},
        {"countdown": "5"},
        {"countdown": 5, "expires": "60"},
        {"countdown": 5, "expires": [60]},
        {"countdown": 5, "expires": datetime(2026, 1, 1, 13)},
    ],
    ids=repr,
)
def test_a_time_that_is_none_is_refused_in_words(
    harness: Harness, lifecycle: Lifecycle, options: dict[str, Any]
) -> None:
    with pytest.raises(TimeInvalid):
        task_of(lifecycle, lambda self: None).apply_async(**options)


# --- calls that never run


def waiting(lifecycle: Lifecycle, ends: str, harness: Harness) -> tuple[Any, Any]:
    """A call that comes to the given end, in a chord with one that runs; the results of both, and of the chord."""
    task = task_of(lifecycle, body_that(harness))
    task_of(lifecycle, lambda self, results: results, name="total")
    options: dict[str, Any] = {"countdown": 10, "link_error": task_of(lifecycle, print, name="failed").si()}
    if ends == "expired":
        options["expires"] = 5
    header = [task.si("ok"), task.si(ends).set(**options)]
    result = chord(header)(lifecycle.app.tasks["total"].s())
    return result.parent.results[1], result


def body_that(harness: Harness) -> Callable[..., Any]:
    def body(self: Any, what: str) -> None:
        if what in ("crash", "lost"):
            harness.die(what)
        if what == "memory":
            raise MemoryError

    return body


@pytest.mark.parametrize("ends", ["expired", "revoked"])
def test_a_call_that_never_runs_is_revoked_for_whoever_waits(harness: Harness, lifecycle: Lifecycle, ends: str) -> None:
    call, total = waiting(lifecycle, ends, harness)
    harness.run_due()
    if ends == "revoked":
        harness.revoke(call.id)
    harness.advance(60)
    harness.assert_dead(lifecycle.object("call", call.id), call.id, reason=ends)
    assert call.state == "REVOKED"
    assert total.state == "FAILURE"


@pytest.mark.parametrize("ends", ["crash", "lost", "memory"])
def test_a_call_that_is_sealed_ends_its_chord(harness: Harness, lifecycle: Lifecycle, ends: str) -> None:
    """Told by the parent of its process; by beat, where that was lost too; or by the process itself."""
    call, total = waiting(lifecycle, ends, harness)
    harness.advance(3600)
    assert [one["reason"] for one in harness.sent("job_failed")] == ["sealed"]
    harness.assert_dead(lifecycle.object("call", call.id), call.id, reason="sealed")
    assert (call.state, total.state) == ("FAILURE", "FAILURE")
    assert "failed" in [one.task for one in harness.ran]


def test_a_call_that_is_sealed_with_its_line_fails_for_whoever_waits(harness: Harness, lifecycle: Lifecycle) -> None:
    def body(self: Any, generation: int) -> None:
        results.append(self.apply_async((generation + 1,), countdown=1))
        harness.die("crash")

    results: list[Any] = []
    task = task_of(lifecycle, body, ignore_result=False)
    results.append(task.apply_async((0,), countdown=1))
    harness.advance(3600)
    assert {result.state for result in results} == {"FAILURE"}


def test_a_result_that_nobody_wants_is_not_stored_for_a_call_that_never_runs(
    harness: Harness, lifecycle: Lifecycle
) -> None:
    result = task_of(lifecycle, lambda self: None).apply_async(countdown=10, expires=5, ignore_result=True)
    harness.advance(60)
    assert result.state == "PENDING"


# --- results that are messages


@pytest.mark.databases("sqlite")
def test_the_queue_of_the_caller_goes_with_the_call_and_its_retries(
    harness: Harness, lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, seen, declared = lifecycle.app, [], []
    task = task_of(lifecycle, lambda self: seen.append(self.request.reply_to) or self.retry(countdown=1), max_retries=1)
    backend = RPCBackend(app)
    monkeypatch.setattr(task, "_backend", backend)
    monkeypatch.setattr(backend, "store_result", lambda *args, **kwargs: None)
    monkeypatch.setattr(backend, "on_task_call", lambda producer, task_id: declared.append(task_id))
    result = task.apply_async(countdown=1)
    harness.advance(60)
    assert seen == [app.thread_oid] * 2
    assert declared == [result.id]


@pytest.mark.databases("sqlite")
def test_a_call_is_stored_also_if_the_queue_for_its_result_can_not_be_declared(
    harness: Harness, lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(producer: Any, task_id: str) -> None:
        raise ConnectionError("The broker is away.")

    task = task_of(lifecycle, lambda self: None)
    monkeypatch.setattr(task, "_backend", RPCBackend(lifecycle.app))
    monkeypatch.setattr(task.backend, "on_task_call", refuses)
    assert job_of(lifecycle, task.apply_async(countdown=1)) is not None


# --- routes


def test_a_task_goes_where_its_decorator_says_however_it_is_put_off(harness: Harness, lifecycle: Lifecycle) -> None:
    app = lifecycle.app
    app.conf.task_queues = [Queue("celery"), Queue("slow"), Queue("topics", Exchange("jobs", type="topic"))]
    slow = task_of(lifecycle, lambda self: None, name="slow", queue=Queue("slow"), priority=7)
    keyed = task_of(lifecycle, lambda self: None, name="keyed", exchange=Exchange("jobs"), routing_key="jobs.now")
    for task in (slow, keyed):
        task.apply_async(countdown=60)
        task.push(delay=60)
        task.schedule(60)
        task.push_many([{"delay": 60}])
        lifecycle.object("thing", task.name).jobs.push(task.name, delay=60)
    harness._now_ms += 60_000
    harness.tick()
    sent = {(one.task, one.queue, one.properties.get("priority")) for one in harness.messages}
    assert sent == {("slow", "slow", 7), ("keyed", "jobs.now", None)}
    assert len(harness.messages) == 10


def test_a_lifecycle_job_goes_where_its_decorator_says(harness: Harness, lifecycle: Lifecycle) -> None:
    @lifecycle_job(name="queued", app=lifecycle.app, queue=Queue("slow"))
    def queued(ctx: Any) -> None: ...

    @lifecycle_job(name="keyed", app=lifecycle.app, exchange="jobs", routing_key="jobs.now")
    def keyed(ctx: Any) -> None: ...

    assert queued.push(delay=1).queue == "slow"
    keyed.push(delay=1)
    harness._now_ms += 1000
    harness.tick()
    assert {(one.task, one.queue) for one in harness.messages} == {("queued", "slow"), ("keyed", "jobs.now")}


def test_the_priority_of_a_route_holds_unless_the_call_has_one(harness: Harness, lifecycle: Lifecycle) -> None:
    lifecycle.app.conf.task_routes = {"call": {"queue": "routed", "priority": 9}}
    task = task_of(lifecycle, lambda self: None)
    task.apply_async(countdown=1)
    task.apply_async(countdown=2, priority=3)
    task.apply_async(countdown=3, priority=0)
    harness._now_ms += 3000
    harness.tick()
    assert [(one.queue, one.properties["priority"]) for one in harness.messages] == [
        ("routed", 9),
        ("routed", 3),
        ("routed", 0),
    ]
