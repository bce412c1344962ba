"""`doctor` finds what is wrong with a deployment, and says why it matters and what to do; it starts and changes nothing."""

import json
import time
import traceback
from collections.abc import Iterator

import pytest
import sqlalchemy
from celery import Celery

from celery_lifecycle import Lifecycle, LifecycleTask
from celery_lifecycle.beat import LifecycleScheduler
from celery_lifecycle.doctor import ERROR, INFO, OK, WARNING, Finding, examine, within
from celery_lifecycle.errors import ConfigurationError
from celery_lifecycle.migrations.schema import migrate


def make(database_url: str | None, broker: str = "memory://", **settings: object) -> Lifecycle:
    app = Celery("examined", broker=broker, set_as_current=False)
    app.conf.update(settings)

    @app.task(name="plain", base=LifecycleTask, shared=False)
    def plain() -> None: ...

    return Lifecycle(app, database_url=database_url)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker runs in these tests, so there is none to wait for."""
    monkeypatch.setattr("celery_lifecycle.doctor.INSPECT_TIMEOUT", 0.1)


@pytest.fixture
def lifecycle(database_url: str) -> Iterator[Lifecycle]:
    made = make(database_url)
    migrate(made.store.database)
    yield made
    made.close()


@pytest.fixture
def sqlite(tmp_path) -> str:
    return f"sqlite:///{tmp_path / 'jobs.db'}"


def of(found: list[Finding], subject: str) -> Finding:
    matching = [one for one in found if one.subject == subject]
    assert len(matching) == 1, found
    return matching[0]


def test_a_sound_deployment_has_no_error(lifecycle):
    lifecycle.store.beats.ticked("b1", lifecycle.whereabouts)
    lifecycle.store.workers.beat("w1", lifecycle.whereabouts)
    found = examine(lifecycle)
    assert {one.level for one in found} <= {OK, INFO}, found
    assert {"settings", "database", "schema", "clock", "broker", "beats", "workers"} <= {one.subject for one in found}


@pytest.mark.parametrize(
    "url",
    ["postgresql+psycopg://shop:s3cret@db:54x2/shop", "postgresql+psycopg//shop:s3/c@ret@db/shop", "shop:s3cret@db"],
)
def test_a_url_that_is_none_is_a_finding_that_hides_the_password(url):
    lifecycle = make(url)
    found = examine(lifecycle)
    assert of(found, "database").level == ERROR
    assert "not a SQLAlchemy URL" in of(found, "database").what
    assert {"tasks", "broker"} <= {one.subject for one in found}, "the rest is looked at all the same"
    for tell in (lambda: lifecycle.store, lambda: LifecycleScheduler(lifecycle.app, lazy=True).info):
        with pytest.raises(ConfigurationError, match=r"\*\*\*@") as caught:
            tell()
        told = "".join(traceback.format_exception(caught.value))
        assert not any(part in told + repr(found) for part in ("s3", "ret@")), told


def test_every_finding_that_is_not_ok_says_why_and_what_to_do(lifecycle):
    found = examine(lifecycle)
    assert all(one.why and one.todo for one in found if one.level != OK), found


def test_missing_tables_are_an_error_with_the_command_to_type(database_url):
    lifecycle = make(database_url)
    with lifecycle.store.database.engine.connect():
        pass  # the file of SQLite is there, its tables are not
    schema = of(examine(lifecycle), "schema")
    assert schema.level == ERROR
    assert "lifecycle migrate" in schema.what
    lifecycle.close()


def test_a_sqlite_file_that_is_not_there_is_not_made(sqlite, tmp_path):
    assert of(examine(make(sqlite)), "database").level == WARNING
    assert not (tmp_path / "jobs.db").exists()


def test_an_unreachable_database_and_broker_are_both_told_within_seconds():
    lifecycle = make("postgresql+psycopg://nobody@127.0.0.1:1/x", broker="redis://127.0.0.1:1/0")
    began = time.monotonic()
    found = examine(lifecycle)
    assert time.monotonic() - began < 20
    assert of(found, "database").level == ERROR
    assert of(found, "broker").level == ERROR


def test_an_unknown_setting_is_named(sqlite):
    found = examine(make(sqlite, lifecycle_pol_interval=1))
    assert [one.level for one in found] == [ERROR]
    assert "lifecycle_pol_interval" in found[0].what


@pytest.mark.parametrize(
    ("settings", "subject", "level"),
    [
        ({"accept_content": ["pickle"]}, "accept_content", ERROR),
        ({"task_always_eager": True}, "task_always_eager", WARNING),
        ({"worker_prefetch_multiplier": 4}, "worker_prefetch_multiplier", INFO),
        ({"task_acks_late": True}, "task_acks_late", INFO),
        ({"broker_transport_options": {"visibility_timeout": 5}}, "visibility_timeout", WARNING),
        ({"result_backend": "cache+memory://"}, "result_backend", INFO),
        ({"task_default_rate_limit": "10/m"}, "plain", ERROR),
        ({"task_annotations": {"plain": {"acks_late": True}}}, "plain", ERROR),
        ({"task_annotations": {"plain": {"reject_on_worker_lost": True}}}, "plain", ERROR),
        ({}, "apply_async", INFO),
    ],
)
def test_settings_and_tasks_that_hurt_are_told(sqlite, settings, subject, level):
    assert of(examine(make(sqlite, **settings)), subject).level == level


@pytest.mark.parametrize(
    "settings",
    [
        {"lifecycle_poll_interval": 30},
        {"lifecycle_backup_alarm": 1},
        {"lifecycle_strike_delay": 60, "lifecycle_strike_delay_max": 30},
    ],
)
def test_lifecycle_settings_that_do_not_go_together_are_a_warning(sqlite, settings):
    found = examine(make(sqlite, **settings))
    assert [one.level for one in found if one.subject == "settings"] == [OK, WARNING], found


@pytest.mark.databases("mariadb")
def test_a_table_that_is_not_innodb_is_an_error(lifecycle, database_url):
    engine = sqlalchemy.create_engine(database_url)
    with engine.connect() as connection:
        connection.exec_driver_sql("ALTER TABLE lifecycle_storage ENGINE=MyISAM")
    engine.dispose()
    engines = of(examine(lifecycle), "engine")
    assert engines.level == ERROR
    assert "lifecycle_storage" in engines.what


def test_a_machine_whose_clock_is_off_is_a_warning(lifecycle, monkeypatch):
    real = time.time_ns
    monkeypatch.setattr("celery_lifecycle.doctor.time.time_ns", lambda: real() + 90_000_000_000)
    if lifecycle.store.database.is_sqlite:
        return  # its clock is this machine's
    clock = of(examine(lifecycle), "clock")
    assert clock.level == WARNING
    assert "1 min 30 s ahead" in clock.what or "1 min 29 s ahead" in clock.what


def test_a_worker_of_another_broker_on_the_same_database_is_an_error(lifecycle):
    lifecycle.store.beats.ticked("b1", lifecycle.whereabouts)
    lifecycle.store.workers.beat("w1", {**lifecycle.whereabouts, "broker": "redis://elsewhere:6379/0"})
    workers = [one for one in examine(lifecycle) if one.subject == "workers"]
    assert [one.level for one in workers] == [OK, ERROR]
    assert "redis://elsewhere" in workers[1].what


def test_sealed_jobs_are_pointed_out(lifecycle):
    database = lifecycle.store.database
    with database.transaction() as tx:
        job = {"id": "j"}
        params = {"kind": "cart", "name": "a", "job_id": "j", "reason": "sealed", "job": json.dumps(job)}
        tx.run(tx.sql.add_dead, {**params, "error": None, "traceback": None, "details": "{}", "died_at": 0})
    assert "1 are sealed" in of(examine(lifecycle), "dead jobs").what


def test_a_queue_without_a_consumer_is_an_error_once_objects_wait_for_it(database_url, broker, monkeypatch):
    lifecycle = make(database_url, broker.url, **broker.conf())
    migrate(lifecycle.store.database)
    lifecycle.object("plain", "x").jobs.push("plain")
    monkeypatch.setattr("celery.app.control.Inspect.active_queues", lambda self: {"worker@here": [{"name": "another"}]})
    queues = of(examine(lifecycle), "queues")
    assert queues.level == ERROR
    assert "1 objects wait" in queues.what
    lifecycle.close()


def test_a_call_that_never_comes_back_is_given_up():
    began = time.monotonic()
    answer, error = within(0.2, lambda: time.sleep(30))
    assert time.monotonic() - began < 5
    assert answer is None
    assert isinstance(error, TimeoutError)
