"""The package's tables for one test: `migrate` makes them once in a test process, and they are copied from there."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import event

from celery_lifecycle.config import read_config
from celery_lifecycle.migrations.revision import current
from celery_lifecycle.migrations.schema import migrate
from celery_lifecycle.store.beats import Beats
from celery_lifecycle.store.database import Database
from tests.support.databases import private_database

_originals = ExitStack()


def make_tables(database: Database) -> None:
    """What `migrate` does, in a fraction of its time; a database that has tables already is migrated."""
    in_memory = database.is_sqlite and database.url.database in (None, "", ":memory:")
    if in_memory or current(database) is not None:
        migrate(database)
        return
    with database.engine.begin() as connection:
        for statement in _copying(database.url.get_backend_name(), database.config.table_prefix):
            connection.exec_driver_sql(statement)
    Beats(database, database.config).database_id()


def tables_at(url: str) -> str:
    """`make_tables` in a database that is named by its URL, which is given back."""
    database = Database(read_config({"database_url": url}))
    make_tables(database)
    database.close()
    return url


def forget_originals() -> None:
    """Called once, at the end of the test session."""
    _originals.close()


@cache
def _copying(backend: str, prefix: str) -> list[str]:
    """The statements that make in an empty database what `migrate` made in another one."""
    kind = "mariadb" if backend == "mysql" else backend
    private = _originals.enter_context(private_database(kind, Path(_originals.enter_context(TemporaryDirectory()))))
    database = Database(read_config({"database_url": private.url, "table_prefix": prefix}))
    said: list[str] = []

    def hear(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.split()[0] in ("CREATE", "INSERT"):
            said.append(statement)

    event.listen(database.engine, "before_cursor_execute", hear)
    migrate(database)
    tables = database.look(lambda tx: tx.rows("SHOW TABLES")) if kind == "mariadb" else []
    database.close()
    if tables:  # with their indexes, each of which would be a change of its table
        copies = [f"CREATE TABLE {table} LIKE {private.name}.{table}" for (table,) in tables]
        version = f"{prefix}alembic_version"
        return [*copies, f"INSERT INTO {version} SELECT * FROM {private.name}.{version}"]
    return said if kind == "sqlite" else [";".join(said)]
