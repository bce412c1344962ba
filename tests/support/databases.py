"""A fresh, private and empty database for one test, on each of the databases that are supported."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import sqlalchemy
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import DBAPIError

from tests.support import services

DATABASES = ("sqlite", "postgresql", "mariadb")


@dataclass(frozen=True)
class Database:
    """A database of one test: its kind, the URL to reach it, its own name (file, schema or database)."""

    kind: str
    url: str
    name: str


@contextmanager
def private_database(kind: str, directory: Path) -> Iterator[Database]:
    """An empty database that nobody else uses, gone at the end."""
    with {"sqlite": _sqlite, "postgresql": _postgresql, "mariadb": _mariadb}[kind](directory) as database:
        yield database


@contextmanager
def _sqlite(directory: Path) -> Iterator[Database]:
    path = directory / "database" / "lifecycle.db"
    path.parent.mkdir()
    yield Database("sqlite", f"sqlite:///{path}", str(path))


@contextmanager
def _postgresql(_: Path) -> Iterator[Database]:
    engine = _admin("postgresql")
    name = _new_name()
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    url = make_url(services.address("postgresql")).update_query_dict({"options": f"-csearch_path={name}"})
    try:
        yield Database("postgresql", _text(url), name)
    finally:
        with engine.connect() as connection:
            # A test that failed or killed its processes may have left a transaction open, which blocks DROP.
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_class ON pg_class.oid = relation"
                " WHERE relnamespace = %s::regnamespace AND pid <> pg_backend_pid()",
                (name,),
            )
            connection.exec_driver_sql("SET client_min_messages = warning")
            connection.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")


@contextmanager
def _mariadb(_: Path) -> Iterator[Database]:
    engine = _admin("mariadb")
    name = _new_name()
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    url = make_url(services.address("mariadb")).set(database=name)
    try:
        yield Database("mariadb", _text(url), name)
    finally:
        with engine.connect() as connection:
            users = connection.exec_driver_sql(
                "SELECT id FROM information_schema.processlist WHERE db = %s", (name,)
            ).scalars()
            for user in users.all():
                _kill_connection(connection, user)
            connection.exec_driver_sql(f"DROP DATABASE {name}")


def _kill_connection(connection: sqlalchemy.Connection, user: int) -> None:
    try:
        connection.exec_driver_sql(f"KILL {int(user)}")
    except DBAPIError as error:
        # It may have ended by itself since it was listed: 1094, unknown thread id.
        if error.orig is None or error.orig.args[0] != 1094:
            raise


def _new_name() -> str:
    return f"lc_{secrets.token_hex(6)}"


def _text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def _admin(kind: str) -> Engine:
    engine, error = _connected(services.address(kind))
    if error is not None:
        services.unavailable(kind, error)
    return engine


@cache
def _connected(address: str) -> tuple[Engine, Exception | None]:
    """The engine that makes and drops databases, one for each test process, and why it can't be used."""
    engine = sqlalchemy.create_engine(
        address,
        isolation_level="AUTOCOMMIT",
        pool_pre_ping=True,
        connect_args={"connect_timeout": services.CONNECT_TIMEOUT},
    )
    try:
        with engine.connect():
            return engine, None
    except (DBAPIError, OSError) as error:
        return engine, error
