"""Names, payloads, times and bad input, through the public surface, on every database (D20, C18, issue "main job": Bad input)."""

import itertools
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest
import sqlalchemy
from celery import Celery
from sqlalchemy import make_url

from celery_lifecycle import Lifecycle, RetryPolicy
from celery_lifecycle.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    LifecycleError,
    NameInvalid,
    PayloadError,
    PolicyInvalid,
    SchemaOutdated,
    TimeInvalid,
    UnknownJob,
    UnknownTask,
)
from celery_lifecycle.model import ObjectRef
from tests.support.databases import Database
from tests.support.protocol import NOW, QUEUE, TASK, Clock, Table, table
from tests.support.tables import make_tables

UTC = timezone.utc


@pytest.fixture
def t(database_url: str) -> Iterator[Table]:
    with table(database_url, clock=Clock()) as made:
        yield made
        made.check()


@pytest.fixture
def lifecycle(database_url: str) -> Iterator[Lifecycle]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    made = Lifecycle(app, database_url=database_url)
    make_tables(made.store.database)
    yield made
    made.close()


@pytest.fixture
def cart(lifecycle):
    return lifecycle.object("cart", "user-42")


def rows(lifecycle) -> list[int]:
    names = ("objects", "jobs", "storage", "heartbeats", "dead_jobs")
    with lifecycle.store.database.transaction() as tx:
        return [int(tx.rows(f"SELECT count(*) FROM lifecycle_{name}")[0][0]) for name in names]


# --- names

ALIKE = ["cart", "Cart", "CART"]
NAMES = [
    "user", "User", "user ", " user", "user  ", "usér", "use\u0301r", "ｕser", "uſer", "strasse", "straße", "ß", "ss",
    "I", "i", "ı", "İ", "æ", "ae", "Æ", "0", "00", "\U0001f600", "\U0001f601", "a\u200b", "a", "%s", "a'b", 'a"b', "\\",
    "ﬁ", "fi",
]  # fmt: skip


def test_kinds_and_names_that_look_alike_are_different_objects(t):
    """D20: case, accents, trailing blanks, ligatures, compatibility forms."""
    refs = [ObjectRef(kind, name) for kind, name in itertools.product(ALIKE, NAMES)]
    for number, ref in enumerate(refs):
        t.push("job", ref, at_ms=NOW + number)
    assert t.count("objects") == len(refs) == t.count("jobs")
    for number, ref in enumerate(refs):
        found = t.job("job", ref)
        assert (found.object, found.due_ms) == (ref, NOW + number)
    assert t.store.objects.find(ObjectRef("cart", "USER")) is None


def test_ids_owners_and_storage_keys_that_look_alike_are_different(t):
    """D20"""
    for number, name in enumerate(NAMES):
        t.push(name, delay=number)
    assert sorted(t.ids()) == sorted(NAMES)
    for name in NAMES:
        assert t.job(name).id == name
    t.push("x", owner="mailer")
    assert t.store.jobs.get(ObjectRef("cart", "user-42"), "x", "Mailer") is None
    assert t.store.jobs.get(ObjectRef("cart", "user-42"), "x", "mailer ") is None
    for name in NAMES:
        t.store.jobs.cancel(ObjectRef("cart", "user-42"), name, "host")
    assert t.ids() == ["x"]


def test_objects_are_locked_in_the_same_order_that_the_database_sorts_them_in(t):
    """Several objects in one transaction are locked in (kind, name) order, byte by byte."""
    refs = [ObjectRef("cart", name) for name in NAMES]
    t.store.jobs.push_many([t.draft("a", ref) for ref in refs])
    with t.store.database.transaction() as tx:
        stored = [row[0] for row in tx.rows("SELECT name FROM lifecycle_objects ORDER BY kind, name")]
    assert stored == sorted(NAMES)


@pytest.mark.parametrize("size", [70_000, 2 * 1024 * 1024 - 2])
def test_large_payloads_come_back_whole(t, size):
    """D20: 70 kB, and the most that is allowed."""
    text = ("ä😀\\\"' " * (size // 9 + 1)).encode()[: size // 2].decode(errors="ignore")
    import json

    payload = json.dumps(text, ensure_ascii=False)
    t.push("big", payload_json=payload)
    assert t.job("big").payload == text


def test_the_longest_names_fit(t):
    ref = ObjectRef("k" * 200, "ä" * 100)
    t.push("😀" * 50, ref, owner="o" * 200, queue="q" * 200)
    assert t.job("😀" * 50, ref).owner == "o" * 200
    [chain] = t.claim(queue="q" * 200).shipments
    assert chain.ref == ref


# --- times


EDGES = [
    datetime(1970, 1, 1, tzinfo=UTC),
    datetime(2026, 3, 29, 1, 59, 59, 999_000, tzinfo=UTC),
    datetime(2026, 10, 25, 1, 0, tzinfo=UTC),
    datetime(2038, 1, 19, 3, 14, 8, tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC),
    datetime(2026, 7, 1, 8, 0, 0, 1, tzinfo=timezone(timedelta(hours=5, minutes=45))),
]


@pytest.mark.parametrize("zone", ["Asia/Shanghai", "America/St_Johns", "UTC"])
def test_a_due_time_is_the_same_to_the_millisecond_whatever_the_servers_time_zone(database, zone, monkeypatch):
    """C18"""
    monkeypatch.setenv("TZ", zone)
    monkeypatch.setenv("PGTZ", zone)
    app = Celery("shop", broker="memory://", set_as_current=False)
    made = Lifecycle(app, database_url=database.url)
    make_tables(made.store.database)
    in_zone(made.store.database.engine, database.kind, zone)
    try:
        handle = made.object("cart", "user-42")
        for number, when in enumerate(EDGES):
            job = handle.jobs.push(TASK, at=when, id=f"job-{number}")
            assert job.due_ms == -(-(when - EDGES[0]) // timedelta(milliseconds=1))
            assert handle.jobs.get(job.id).due_at == job.due_at
        real = datetime.now(UTC)
        now = made.store.beats.now()
        assert abs(now - real.timestamp() * 1000) < 5_000
        later = handle.jobs.push(TASK, delay=60)
        assert abs((later.due_at - real).total_seconds() - 60) < 5
    finally:
        made.close()


def in_zone(engine, kind, zone):
    """Sessions of this engine have their server's clock in a zone."""
    offset = {"Asia/Shanghai": "+08:00", "America/St_Johns": "-03:30", "UTC": "+00:00"}[zone]
    statement = {"postgresql": f"SET TIME ZONE '{zone}'", "mariadb": f"SET time_zone = '{offset}'"}.get(kind)

    @sqlalchemy.event.listens_for(engine, "connect")
    def connected(connection, record):
        if statement is not None:
            cursor = connection.cursor()
            cursor.execute(statement)
            cursor.close()
            connection.commit()

    engine.dispose()


def test_a_fraction_of_a_millisecond_is_rounded_up_and_a_past_time_is_due_at_once(cart, lifecycle):
    job = cart.jobs.push(TASK, at=datetime(2030, 1, 1, 0, 0, 0, 1, tzinfo=UTC))
    assert job.due_at == datetime(2030, 1, 1, 0, 0, 0, 1000, tzinfo=UTC)
    past = cart.jobs.push(TASK, at=datetime(2001, 1, 1, tzinfo=UTC), id="past")
    assert past.due_at == datetime(2001, 1, 1, tzinfo=UTC)
    assert lifecycle.store.claims.claim(QUEUE, 0, 10).rows == 1


# --- bad input: an error at once, nothing stored

NAIVE = datetime(2030, 1, 1)
CENTURIES = timedelta(days=366 * 7001)

BAD_PUSHES = [
    ({"at": NAIVE}, TimeInvalid, ["2030-01-01T00:00:00", "naive", "timezone.utc"]),
    ({"at": "2030-01-01"}, TimeInvalid, ["'2030-01-01'", "aware datetime"]),
    ({"delay": -1}, TimeInvalid, ["-1", "negative", "0"]),
    ({"delay": timedelta(microseconds=-1)}, TimeInvalid, ["negative"]),
    ({"delay": float("nan")}, TimeInvalid, ["nan", "finite"]),
    ({"delay": "60"}, TimeInvalid, ["'60'", "seconds"]),
    ({"delay": True}, TimeInvalid, ["bool", "seconds"]),
    ({"delay": 10**18}, TimeInvalid, ["10000"]),
    ({"delay": CENTURIES}, TimeInvalid, ["10000"]),
    ({"at": EDGES[3], "delay": 5}, PolicyInvalid, ["at=", "delay=", "one of them"]),
    ({"payload": {1, 2}}, PayloadError, ["set", "list and dict"]),
    ({"payload": {"a": b"x"}}, PayloadError, ["bytes", "JSON"]),
    ({"payload": float("inf")}, PayloadError, ["finite"]),
    ({"payload": {1: 2}}, PayloadError, ["key 1", "str"]),
    ({"payload": "x" * 2_097_151}, PayloadError, ["2,097,153", "2,097,152", "push its id"]),
    ({"id": ""}, NameInvalid, ["id ''", "1 to 200"]),
    ({"id": "x" * 201}, NameInvalid, ["201", "1 to 200"]),
    ({"id": "a\x00b"}, NameInvalid, ["control"]),
    ({"id": "#alarm"}, NameInvalid, ["'#alarm'", "protocol"]),
    ({"id": 5}, NameInvalid, ["5", "str"]),
    ({"retry": 3}, PolicyInvalid, ["retry=3", "RetryPolicy"]),
    ({"singleflight": 1}, PolicyInvalid, ["singleflight=1", "True or False"]),
    ({"exclusive": "no"}, PolicyInvalid, ["exclusive='no'"]),
    ({"recovery_loop": 0}, PolicyInvalid, ["recovery_loop=0"]),
    ({"hung_timeout": 0}, PolicyInvalid, ["hung_timeout=0", "more than 0"]),
    ({"hung_timeout": "1m"}, PolicyInvalid, ["hung_timeout='1m'"]),
]


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(("bad", "error", "said"), BAD_PUSHES, ids=[str(one[0])[:40] for one in BAD_PUSHES])
def test_a_push_with_bad_input_says_what_was_given_and_allowed_and_stores_nothing(lifecycle, cart, bad, error, said):
    with pytest.raises(error) as caught:
        cart.jobs.push(TASK, **bad)
    assert isinstance(caught.value, LifecycleError)
    for part in said:
        assert part in str(caught.value), str(caught.value)
    assert rows(lifecycle) == [0] * 5


def test_no_bad_push_reaches_any_database(lifecycle, cart):
    for bad, error, _ in BAD_PUSHES:
        with pytest.raises(error):
            cart.jobs.push(TASK, **bad)
    assert rows(lifecycle) == [0] * 5


def test_one_bad_push_of_many_stores_nothing(lifecycle, cart):
    from celery_lifecycle.queue import Push

    with pytest.raises(TimeInvalid):
        cart.jobs.push_many([Push(TASK), Push(TASK, delay=-1)])
    with pytest.raises(TimeInvalid):
        cart.jobs.push_many([Push(TASK), Push(TASK, delay=CENTURIES)])
    assert rows(lifecycle) == [0] * 5


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("", "a", "kind ''"),
        ("9", "a", "kind '9'"),
        ("k" * 201, "a", "at most 199"),
        ("a\x00b", "a", "kind"),
        ("cart", "", "name ''"),
        ("cart", "x" * 201, "1 to 200"),
        ("cart", "a\x00b", "control"),
        ("cart", "#a", "protocol"),
        ("cart", None, "NoneType"),
        (5, "a", "kind 5"),
    ],
)
def test_a_bad_kind_or_name_is_refused_before_anything_is_asked_of_the_database(lifecycle, kind, name, said):
    with pytest.raises(NameInvalid) as caught:
        lifecycle.object(kind, name)
    assert said in str(caught.value)


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("verb", ["get", "cancel", "reschedule"])
@pytest.mark.parametrize("bad", ["", "#alarm", "a\x00", "x" * 201, None])
def test_a_bad_id_is_refused_by_every_verb(cart, verb, bad):
    with pytest.raises(NameInvalid, match="id"):
        getattr(cart.jobs, verb)(bad)


def test_a_reschedule_of_what_is_not_there_or_to_no_time_is_an_error(cart, lifecycle):
    with pytest.raises(UnknownJob, match=r"no pending job 'nope'.*jobs.list\(\)"):
        cart.jobs.reschedule("nope", delay=5)
    job = cart.jobs.push(TASK, delay=60)
    for bad in ({"at": NAIVE}, {"delay": -1}, {"delay": CENTURIES}):
        with pytest.raises(TimeInvalid):
            cart.jobs.reschedule(job.id, **bad)
    assert cart.jobs.get(job.id) == job


@pytest.mark.databases("sqlite")
def test_an_unknown_function_is_an_error_that_says_what_to_import(cart, lifecycle):
    with pytest.raises(UnknownTask, match=r"'remind'.*import the class"):
        cart.jobs.push("remind")

    @lifecycle.app.task(name="shop.plain")
    def plain():
        return 1

    for bad in (plain, "shop.plain"):
        with pytest.raises(UnknownTask, match=r"shop.plain.*@lifecycle_job"):
            cart.jobs.push(bad)
    for bad in (5, None, lambda ctx: None, ""):
        with pytest.raises((UnknownTask, NameInvalid)):
            cart.jobs.push(bad)
    assert rows(lifecycle) == [0] * 5


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("bad", [NAIVE, -1, "5", float("inf"), CENTURIES])
def test_a_bad_time_for_the_bare_alarm_stores_nothing(cart, lifecycle, bad):
    with pytest.raises(TimeInvalid):
        cart.set_alarm(bad)
    assert rows(lifecycle) == [0] * 5


def test_bad_storage_is_refused_and_stores_nothing(cart, lifecycle):
    for key, value, error in (
        ("", 1, NameInvalid),
        ("a\x00", 1, NameInvalid),
        ("k" * 201, 1, NameInvalid),
        ("k", {1, 2}, PayloadError),
        ("k", "x" * 2_097_151, PayloadError),
    ):
        with pytest.raises(error):
            cart.storage[key] = value
    assert rows(lifecycle) == [0] * 5


def test_a_good_push_after_all_of_that_is_stored(cart, lifecycle):
    job = cart.jobs.push(TASK, delay=60, retry=RetryPolicy(5), payload={"ä": [1.5, None]}, id="Ü b")
    assert cart.jobs.get("Ü b") == job
    assert rows(lifecycle)[:2] == [1, 1]


# --- the database itself


def make(url, **settings):
    return Lifecycle(Celery("shop", broker="memory://", set_as_current=False), database_url=url, **settings)


@pytest.mark.databases("postgresql", "mariadb")
def test_an_unreachable_database_is_an_error_that_names_it_without_its_password(database: Database):
    url = make_url(database.url).set(port=1, password="geheim")
    made = make(url.render_as_string(hide_password=False))
    for verb in (made.verify, lambda: made.object("cart", "a").jobs.push(TASK, delay=1)):
        with pytest.raises(DatabaseUnavailable, match=r"lifecycle_database_url") as caught:
            verb()
        assert "geheim" not in str(caught.value)
        assert ":1/" in str(caught.value)


def test_missing_tables_are_an_error_with_the_command_to_type(database_url):
    made = make(database_url)
    for verb in (made.verify, lambda: made.object("cart", "a").jobs.push(TASK, delay=1)):
        with pytest.raises(SchemaOutdated, match="lifecycle migrate"):
            verb()
    made.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [("nonsense", "not a SQLAlchemy URL"), ("oracle://x", "PostgreSQL, MySQL, MariaDB and SQLite")],
)
def test_a_bad_url_is_an_error_that_says_what_is_allowed(url, said):
    with pytest.raises(ConfigurationError, match=said):
        _ = make(url).store


@pytest.mark.parametrize(
    ("url", "missing", "said"),
    [
        ("mysql://root:s3cret@h/d", "MySQLdb", r"mysql\+pymysql:// and pip install 'celery-lifecycle\[mysql\]'"),
        ("mariadb://root:s3cret@h/d", "MySQLdb", r"mariadb\+pymysql:// and pip install 'celery-lifecycle\[mysql\]'"),
        ("postgresql+psycopg2://h/d", "psycopg2", r"postgresql\+psycopg:// and pip install"),
        ("postgresql+psycopg://h/d", "psycopg", r"installed: pip install 'celery-lifecycle\[postgresql\]'"),
    ],
)
def test_a_driver_that_is_missing_is_an_error_that_says_which_url_to_write(monkeypatch, url, missing, said):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigurationError, match=said) as caught:
        _ = make(url).store.database.engine
    assert "s3cret" not in str(caught.value)


@pytest.mark.databases("sqlite")
def test_an_unknown_setting_is_an_error_where_it_is_given(lifecycle):
    with pytest.raises(ConfigurationError, match="lifecycle_backup_alarms"):
        make("sqlite://", backup_alarms=5)
    lifecycle.app.conf.update(lifecycle_poll_intervall=3)
    fresh = Lifecycle(lifecycle.app, database_url="sqlite://")
    with pytest.raises(ConfigurationError, match="lifecycle_poll_intervall"):
        _ = fresh.config
