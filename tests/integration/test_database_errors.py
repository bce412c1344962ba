"""What a driver raises becomes the error of this package that it stands for, on every database and driver version."""

from types import SimpleNamespace

import psycopg
import pymysql
import pytest
import sqlalchemy
from sqlalchemy.dialects.mysql.pymysql import MySQLDialect_pymysql
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from celery_lifecycle.errors import DatabaseUnavailable, LockTimeout, SchemaOutdated
from celery_lifecycle.store import database
from celery_lifecycle.store.database import TRIES, Conflict, Disconnected, StatementRefused, is_outage, translate
from tests.support.protocol import table


@pytest.fixture
def t(database_url):
    with table(database_url, lock_timeout=1) as made:
        yield made


def test_a_row_that_stays_locked_is_a_lock_timeout_that_names_the_object(t, database_url):
    t.push("a")
    engine = sqlalchemy.create_engine(database_url)
    with engine.connect() as connection:
        connection.exec_driver_sql("UPDATE lifecycle_objects SET step = step")
        with pytest.raises(LockTimeout):
            t.push("b")
        connection.rollback()
    engine.dispose()
    assert t.push("b").job.id == "b"


def test_a_second_row_of_a_unique_key_is_a_conflict(t):
    t.push("a")
    with pytest.raises(Conflict), t.store.database.transaction() as tx:
        tx.run(
            "INSERT INTO lifecycle_objects (kind, name, phase, versions, sent_count, queue_wait, doubt, step, disabled,"
            " not_before_count, holds, stored, sealed) SELECT kind, name, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0"
            " FROM lifecycle_objects"
        )


def test_a_table_that_is_not_there_says_what_to_type(t):
    with pytest.raises(SchemaOutdated, match="lifecycle migrate"), t.store.database.transaction() as tx:
        tx.rows("SELECT * FROM lifecycle_nothing")


@pytest.mark.databases("postgresql")
def test_a_server_that_has_become_a_replica_is_an_outage_and_is_looked_for_anew(t, database_url):
    t.push("a")
    engine = t.store.database.engine
    with engine.connect() as connection:
        connection.exec_driver_sql("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
        connection.commit()
    # The pooled connection is refused; the one made in its stead is not.
    assert t.push("b").job.id == "b"
    with t.store.database.transaction() as tx:
        tx.run("SET TRANSACTION READ ONLY")
        with pytest.raises(Disconnected) as refused:
            tx.run("UPDATE lifecycle_objects SET step = step")
    assert is_outage(refused.value)


@pytest.mark.parametrize("number", [1053, 1290, 1836, 1927, 2006, 2013])
def test_mariadb_going_down_or_read_only_is_a_broken_connection(number):
    error = translate(pymysql.err.OperationalError(number, "text"), dialect_of(MySQLDialect_pymysql, pymysql))
    assert isinstance(error, Disconnected)
    assert is_outage(error)


@pytest.mark.parametrize(
    ("error", "kind", "driver"),
    [
        (psycopg.errors.DiskFull("could not extend file"), PGDialect_psycopg, psycopg),
        (psycopg.errors.OutOfMemory("out of memory"), PGDialect_psycopg, psycopg),
        (pymysql.err.OperationalError(1021, "Disk full"), MySQLDialect_pymysql, pymysql),
        (pymysql.err.OperationalError(1114, "The table is full"), MySQLDialect_pymysql, pymysql),
    ],
)
def test_a_server_that_is_short_of_something_is_an_outage(error, kind, driver):
    found = translate(error, dialect_of(kind, driver))
    assert isinstance(found, DatabaseUnavailable)
    assert is_outage(found)


def test_a_value_that_the_database_refuses_is_somebodys_fault():
    error = psycopg.errors.NumericValueOutOfRange("integer out of range")
    found = translate(error, dialect_of(PGDialect_psycopg, psycopg))
    assert isinstance(found, StatementRefused)
    assert not is_outage(found)


def dialect_of(kind, driver):
    return kind(dbapi=driver)


@pytest.mark.databases("sqlite")
def test_a_transaction_gets_out_of_the_way_of_the_one_that_won_before_it_is_repeated(t, monkeypatch):
    """At random, or two that met once would meet again; up to twice as long with each try; and not after the last one."""
    pauses = []
    monkeypatch.setattr(database, "time", SimpleNamespace(sleep=pauses.append))

    def loses(tx):
        raise Conflict

    for _ in range(20):
        with pytest.raises(Conflict):
            t.store.database.run(loses)
    monkeypatch.undo()
    for attempt in range(TRIES - 1):
        drawn = pauses[attempt :: TRIES - 1]
        longest = 0.02 * 2**attempt
        assert len(set(drawn)) == 20
        assert all(0 <= pause <= longest for pause in drawn)
        assert max(drawn) > longest / 2
    assert len(pauses) == 20 * (TRIES - 1)
