"""Connections and transactions: one engine per process, the driver's own cursor, errors that say what to do."""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.engine import Dialect

from celery_lifecycle.beside import at_once, beside
from celery_lifecycle.config import Config
from celery_lifecycle.errors import ConfigurationError, DatabaseUnavailable, LifecycleError, LockTimeout, SchemaOutdated
from celery_lifecycle.store.sql import Sql

T = TypeVar("T")
Row = Sequence[Any]

TRIES = 5
"""How often a transaction is tried that others get in the way of."""

_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_inherited: list[Any] = []
# SQLite keeps in each process what that process has locked. A child that inherits it takes its parent's locks for its own:
# it waits for ever for a writer that it does not have, and locks too little. So no connection may be open at a fork.
_no_fork = threading.RLock()


# The server goes, or is a replica that takes no writes any more: another connection may find the one that serves.
# 57P0x shutdown, crash, start; 25006, 1290, 1836 read only; 1053 shutdown.
_GOING = {"57P01", "57P02", "57P03", "57P05", "25006", 1053, 1290, 1836}
# It is short of disk, memory or connections: 53xxx, 1021, 1037, 1040, 1041, 1114.
_SHORT = {"53000", "53100", "53200", "53300", "53400", 1021, 1037, 1040, 1041, 1114}


# By dialect: the extra of this package, and the driver that it brings.
_DRIVERS = {"postgresql": ("postgresql", "psycopg"), "mysql": ("mysql", "pymysql"), "sqlite": ("", "pysqlite")}


class Conflict(DatabaseUnavailable):
    """Another transaction got in the way (deadlock, serialization, unique key): the whole transaction is to be repeated."""


class StatementRefused(DatabaseUnavailable):
    """The job database answers, but not to this statement."""


class Disconnected(DatabaseUnavailable):
    """The connection to the job database broke. Check `lifecycle_database_url` and that the server runs.

    At the commit: what was to be stored may be stored.
    """


class Tx:
    """One transaction on the driver's own cursor. Statements come from `Sql`, parameters are named."""

    def __init__(self, connection: Any, sql: Sql, dialect: Dialect, clock: Callable[[], int] | None) -> None:
        self.sql = sql
        self._connection = connection
        self._dialect = dialect
        self._cursor = connection.cursor()
        self.clock = clock
        self.foreign = False
        self.statements = 0

    def rows(self, statement: str, params: Mapping[str, Any] | None = None) -> list[Row]:
        self._execute(statement, params)
        return self._cursor.fetchall()

    def row(self, statement: str, params: Mapping[str, Any] | None = None) -> Row | None:
        self._execute(statement, params)
        return self._cursor.fetchone()

    def run(self, statement: str, params: Mapping[str, Any] | None = None) -> int:
        self._execute(statement, params)
        return int(self._cursor.rowcount)

    def run_many(self, statement: str, params: Sequence[Mapping[str, Any]]) -> None:
        self.statements += 1
        try:
            self._cursor.executemany(statement, params)
        except self._errors as error:
            raise translate(error, self._dialect, self._connection) from error

    @contextlib.contextmanager
    def overlapping(self) -> Iterator[None]:
        """Statements that are started inside are on their way while their caller goes on, where the driver can (psycopg)."""
        pipeline = getattr(self._dialect.loaded_dbapi, "Pipeline", None)
        # A caller's connection may be what SQLAlchemy puts around an asynchronous one: that has no pipeline.
        can = pipeline is not None and hasattr(self._connection, "pipeline") and pipeline.is_supported()
        try:
            with self._connection.pipeline() if can else contextlib.nullcontext():
                yield
        except self._errors as error:
            raise translate(error, self._dialect, self._connection) from error

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """In a caller's transaction: what the block writes is taken back if it raises, and nothing else is."""
        if self.sql.dialect == "sqlite":
            # Python's driver begins no transaction for a savepoint, and to release one outside of a transaction commits.
            with contextlib.suppress(StatementRefused):  # it has begun one before
                self.run("BEGIN IMMEDIATE")
        self.run("SAVEPOINT celery_lifecycle")
        try:
            yield
        except BaseException:
            # After a deadlock, or with a connection that broke, there is no savepoint any more.
            with contextlib.suppress(LifecycleError):
                self.run("ROLLBACK TO SAVEPOINT celery_lifecycle")
            raise
        self.run("RELEASE SAVEPOINT celery_lifecycle")

    def start(self, statement: str, params: Mapping[str, Any]) -> Callable[[], list[Row]]:
        """Send a statement; what comes back waits for its rows."""
        self.statements += 1
        cursor = self._connection.cursor()
        cursor.execute(statement, params)
        return cursor.fetchall

    def run_together(self, first: str, second: str, params: Mapping[str, Any]) -> int:
        """Run two writes of different tables, in one round trip where the database can; the count of the second."""
        if self.sql.combines_writes:
            return self.run(f"WITH first AS ({first}) {second}", params)
        self.run(first, params)
        return self.run(second, params)

    @property
    def last_id(self) -> int:
        return int(self._cursor.lastrowid)

    def now(self) -> int:
        """The database's time in milliseconds, taken now: after whatever lock was granted before."""
        if self.clock is not None:
            return self.clock()
        row = self.row(self.sql.now)
        assert row is not None
        return int(row[0])

    def now_of(self, value: Any) -> int:
        """The time that a statement read along with its rows; a clock given for tests goes before it."""
        return self.clock() if self.clock is not None else int(value)

    @property
    def _errors(self) -> type[Exception]:
        return self._dialect.loaded_dbapi.Error

    def _execute(self, statement: str, params: Mapping[str, Any] | None) -> None:
        self.statements += 1
        try:
            self._cursor.execute(statement, params or {})
        except self._errors as error:
            raise translate(error, self._dialect, self._connection) from error


def translate(error: Exception, dialect: Dialect, connection: Any = None) -> Exception:
    """The error of this package that a driver's error stands for."""
    # Both: newer versions of PyMySQL have a `sqlstate`, which is coarser than the number.
    codes = {getattr(error, "sqlstate", None), error.args[0] if error.args else None}
    text = str(error)
    if codes & {"55P03", 1205, 3572} or "database is locked" in text or "database table is locked" in text:
        return LockTimeout()
    if codes & {"40P01", "40001", "23505", 1213, 1020, 1062} or "UNIQUE constraint failed" in text:
        return Conflict(f"Another transaction got in the way: {text}")
    if codes & {"42P01", "42703", 1146, 1054, 1049} or "no such table" in text or "no such column" in text:
        return SchemaOutdated(
            f"The tables of celery_lifecycle are missing or old ({text.splitlines()[0]}). "
            "Run `celery -A <your app> lifecycle migrate`."
        )
    if codes & _SHORT or "disk is full" in text or "disk I/O error" in text:
        return DatabaseUnavailable(f"The job database is short of something: {text}")
    broken = codes & _GOING or dialect.is_disconnect(error, connection, None)  # type: ignore[arg-type]
    if broken or "connection" in text.lower():
        return Disconnected(f"The connection to the job database broke: {text}")
    return StatementRefused(f"The job database refused a statement: {text}")


def is_outage(error: BaseException | None) -> bool:
    """Whether the database is away: nobody's fault, where a lock that is held or a statement that is wrong is somebody's."""
    return isinstance(error, DatabaseUnavailable) and not isinstance(error, (LockTimeout, Conflict, StatementRefused))


def url_of(config: Config) -> URL:
    """The URL of the job database.

    Raises:
        ConfigurationError: it is none; the message hides its password.
    """
    try:
        return make_url(config.url)
    except Exception as error:
        # From the first colon after the scheme to the last @: in a URL that can't be read, that is where a password is.
        masked, why = (re.sub(r":(?!//).*@", ":***@", text, flags=re.DOTALL) for text in (config.url, str(error)))
        told = f"lifecycle_database_url is {masked!r}: not a SQLAlchemy URL ({why})."
    raise ConfigurationError(told)


class Database:
    """The job database of one deployment, as seen from this process.

    Args:
        config: `url`, `lock_timeout` and `table_prefix` are used.
        clock: milliseconds since the epoch, instead of the database's time: for tests and simulation.
        patience: seconds after which any statement is given up, for those who only look; default: never.
    """

    def __init__(self, config: Config, clock: Callable[[], int] | None = None, patience: float | None = None) -> None:
        self.config = config
        self._patience = patience
        self.url = url_of(config)
        self._dialect_name = self.url.get_backend_name()
        if self._dialect_name not in ("postgresql", "mysql", "mariadb", "sqlite"):
            raise ConfigurationError(
                f"lifecycle_database_url names {self._dialect_name!r}: PostgreSQL, MySQL, MariaDB and SQLite are supported."
            )
        self.sql = Sql(config.table_prefix, self._dialect_name)
        self._given_clock = clock
        # SQLite has no clock but this machine's: a read of it after BEGIN IMMEDIATE is "after the lock", and no statement.
        self.clock = clock or (_machine_clock if self._dialect_name == "sqlite" else None)
        self._engine: Engine | None = None
        _databases.add(self)

    @property
    def is_sqlite(self) -> bool:
        return self._dialect_name == "sqlite"

    @property
    def engine(self) -> Engine:
        """The engine of this process, made when first needed; connections never cross a fork."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def _make_engine(self) -> Engine:
        timeout = self.config.lock_timeout
        connect_args: dict[str, Any] = {}
        options: dict[str, Any] = {"pool_reset_on_return": None}
        if self.is_sqlite:
            connect_args = {"timeout": timeout, "check_same_thread": False}
        elif self._dialect_name == "postgresql" and self.url.get_driver_name() == "psycopg":
            connect_args = {
                "connect_timeout": max(2, round(timeout)),
                # A server that is gone without a word is noticed within a quarter of a minute.
                "keepalives_idle": 5,
                "keepalives_interval": 3,
                "keepalives_count": 3,
                "tcp_user_timeout": 15_000,
            }
        elif self.url.get_driver_name() == "pymysql":
            connect_args = {
                "connect_timeout": max(2, round(timeout)),
                "read_timeout": 60,
                "write_timeout": 60,
            }
        connect_args = {key: value for key, value in connect_args.items() if key not in self.url.query}
        if not (self.is_sqlite and self.url.database in (None, "", ":memory:")):
            options |= {"pool_size": 5, "max_overflow": 20}
        try:
            engine = create_engine(self.url, connect_args=connect_args, **options)
        except ModuleNotFoundError as error:
            extra, driver = _DRIVERS[self.sql.dialect]
            named = self.url.get_driver_name() == driver
            write = "" if named else f"begin the URL with {self._dialect_name}+{driver}:// and "
            raise ConfigurationError(
                f"lifecycle_database_url ({self.url.drivername}://…) needs the driver {error.name!r}, which is not"
                f" installed: {write}pip install 'celery-lifecycle[{extra}]'."
            ) from error
        event.listen(engine, "connect", self._on_connect)
        return engine

    def _on_connect(self, connection: Any, record: Any) -> None:
        timeout = self.config.lock_timeout
        if self.is_sqlite:
            connection.isolation_level = None  # transactions are begun by `transaction`, with BEGIN IMMEDIATE
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            return
        cursor = connection.cursor()
        if self._dialect_name == "postgresql":
            cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute(f"SET lock_timeout = {round(timeout * 1000)}")
            # A process that is stopped in mid-transaction must not hold a row for ever.
            cursor.execute(f"SET idle_in_transaction_session_timeout = {round(timeout * 6000)}")
        else:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {max(1, round(timeout))}")
            cursor.execute(f"SET SESSION lock_wait_timeout = {max(1, round(timeout))}")
        if self._patience is not None:
            self._limit(cursor, self._patience)
        cursor.close()
        connection.commit()

    def _limit(self, cursor: Any, seconds: float) -> None:
        """MySQL and MariaDB have each a variable of their own for it, and refuse the other's."""
        refused = []
        for statement in self.sql.limit_statements:
            try:
                cursor.execute(statement.format(ms=round(seconds * 1000), seconds=seconds))
                return
            except self.engine.dialect.loaded_dbapi.Error as error:
                refused.append(error)
        raise DatabaseUnavailable(f"The job database takes no limit for the time of a statement: {refused}")

    @contextlib.contextmanager
    def transaction(self, reads: bool = False) -> Iterator[Tx]:
        """One short transaction of our own: committed at the end of the block, rolled back if it raises.

        `reads`: it only reads, so that SQLite need not wait for a writer, and PostgreSQL is not told of a beginning and an
        end; as each statement sees what is committed, there or here, it sees the same.
        """
        with _no_fork if self.is_sqlite else contextlib.nullcontext():
            yield from self._transaction(reads)

    def _transaction(self, reads: bool) -> Iterator[Tx]:
        connection = self._connect()
        broken = False
        glances = reads and self._dialect_name == "postgresql"
        try:
            if glances:
                connection.dbapi_connection.autocommit = True
            tx = Tx(connection.dbapi_connection, self.sql, self.engine.dialect, self.clock)
            if self.is_sqlite:
                tx.run("BEGIN" if reads else "BEGIN IMMEDIATE")
            yield tx
            try:
                connection.dbapi_connection.commit()
            except self.engine.dialect.loaded_dbapi.Error as error:
                broken = True
                raise translate(error, self.engine.dialect, connection.dbapi_connection) from error
        except BaseException as error:
            broken = broken or isinstance(error, Disconnected)
            if not broken:
                try:
                    connection.dbapi_connection.rollback()
                except self.engine.dialect.loaded_dbapi.Error:
                    broken = True
            raise
        finally:
            if broken:
                connection.invalidate()
            elif glances:
                connection.dbapi_connection.autocommit = False
            connection.close()

    def run(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `work(tx, …)` in a transaction; again if another one got in the way, or if a pooled connection was dead.

        A connection that breaks at the commit is not tried again: whether the commit was done is not known.
        """
        return self._run(False, work, *args, **kwargs)

    def look(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`run` for work that only reads: SQLite then waits for no writer."""
        return self._run(True, work, *args, **kwargs)

    def _run(self, reads: bool, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        for attempt in range(TRIES):
            reached_end = False
            try:
                with self.transaction(reads) as tx:
                    result = work(tx, *args, **kwargs)
                    reached_end = True
                return result
            except Conflict:
                if attempt == TRIES - 1:
                    raise
                self.back_off(attempt)
            except Disconnected:
                if reached_end or attempt > 0:
                    raise
                self.engine.dispose()
        raise AssertionError("unreachable")

    def back_off(self, attempt: int) -> None:
        """Out of the way of the transaction that won, which may need what this one would lock again at once."""
        time.sleep(random.uniform(0, 0.02 * 2**attempt))

    def beside(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Work with this database in a thread beside the caller's; with SQLite, where no server is waited for, here and now."""
        return (at_once if self.is_sqlite else beside)(work, *args)

    @contextlib.contextmanager
    def within(self, dbapi_connection: Any, dialect: Dialect) -> Iterator[Tx]:
        """The caller's own transaction, on the connection that it already has; it is neither committed nor rolled back."""
        tx = Tx(dbapi_connection, self.sql, dialect, self.clock)
        tx.foreign = True
        yield tx

    def _connect(self) -> Any:
        try:
            return self.engine.raw_connection()
        except self.engine.dialect.loaded_dbapi.Error as error:
            raise self._unreachable(error) from error
        except OSError as error:
            raise self._unreachable(error) from error
        except Exception as error:
            if getattr(error, "orig", None) is None and "Timeout" not in type(error).__name__:
                raise
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> DatabaseUnavailable:
        where = self.url.render_as_string(hide_password=True)
        return DatabaseUnavailable(
            f"The job database {where} could not be reached: {getattr(error, 'orig', None) or error}. "
            "Check lifecycle_database_url and that the server runs; nothing was stored."
        )

    def close(self) -> None:
        """Close the pooled connections of this process; a later use opens new ones."""
        if self._engine is not None:
            self._engine.dispose()

    def before_fork(self) -> None:
        """Close what SQLite has open; one in memory would be gone."""
        if self.is_sqlite and self.url.database not in (None, "", ":memory:"):
            self.close()

    def after_fork(self) -> None:
        """Let go of the parent's connections without closing them; kept, so that no collector closes them either."""
        if self._engine is not None:
            _inherited.append(self._engine.pool)
            self._engine.dispose(close=False)
            self._engine = None


def _machine_clock() -> int:
    return time.time_ns() // 1_000_000


def _before_fork() -> None:
    _no_fork.acquire()
    for database in list(_databases):
        database.before_fork()


def _after_fork_in_child() -> None:
    _no_fork.release()
    for database in list(_databases):
        database.after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_no_fork.release, after_in_child=_after_fork_in_child)
