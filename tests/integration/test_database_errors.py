"""What a driver raises becomes the error of this package that it stands for, on every database and driver version."""

import pytest
import sqlalchemy

from celery_lifecycle.errors import LockTimeout, SchemaOutdated
from celery_lifecycle.store.database import Conflict
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
