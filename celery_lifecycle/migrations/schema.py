"""Makes and upgrades the tables; Alembic does the work, a lock of the database keeps others out meanwhile."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from alembic import command
from alembic.config import Config as AlembicConfig
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from celery_lifecycle.errors import DatabaseUnavailable
from celery_lifecycle.migrations.revision import current
from celery_lifecycle.store.beats import Beats
from celery_lifecycle.store.database import Database
from celery_lifecycle.tables import make_tables

LOCK = 7_426_931_855_321
# How long (seconds) MySQL waits for another process that migrates.
WAIT = 60

# What Alembic tells at every look is of interest to nobody but its own users.
_quiet = logging.getLogger("alembic.runtime.migration")


def _config(database: Database, connection: Connection | None = None) -> AlembicConfig:
    config = AlembicConfig()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    prefix = database.config.table_prefix
    config.attributes.update(
        connection=connection,
        prefix=prefix,
        tables=make_tables(prefix),
        version_table=version_table(database),
    )
    return config


def version_table(database: Database) -> str:
    return f"{database.config.table_prefix}alembic_version"


def migrate(database: Database, revision: str = "head") -> str:
    """Make or upgrade the tables. Processes that do it at the same time wait for each other.

    Returns:
        The revision reached.
    """
    try:
        with _hushed(), database.engine.connect() as connection, _alone(connection):
            command.upgrade(_config(database, connection), revision)
    except (DBAPIError, OSError) as error:
        raise DatabaseUnavailable(f"The tables could not be made or upgraded: {error}") from error
    Beats(database, database.config).database_id()  # from now on every transaction sees which database this is
    return current(database) or ""


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    level = _quiet.level
    _quiet.setLevel(logging.WARNING)
    try:
        yield
    finally:
        _quiet.setLevel(level)


@contextlib.contextmanager
def _alone(connection: Connection) -> Iterator[None]:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield
        connection.exec_driver_sql("COMMIT")
    elif connection.dialect.name == "postgresql":
        with connection.begin():
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            yield
    else:
        if connection.execute(text("SELECT GET_LOCK('celery_lifecycle', :wait)"), {"wait": WAIT}).scalar_one() != 1:
            raise DatabaseUnavailable(
                f"Another process has been migrating tables of celery_lifecycle on this server for {WAIT} s. Wait for its "
                "end, or end it, and migrate again; nothing was changed."
            )
        try:
            yield
            connection.commit()
        finally:
            connection.execute(text("SELECT RELEASE_LOCK('celery_lifecycle')"))
