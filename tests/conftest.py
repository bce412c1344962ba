"""Fixtures of the whole test suite: a private database, a private broker, outages, a machine of one's own.

A test that takes ``database`` (or ``database_url``) runs once on each database, one that takes ``broker`` (or
``broker_url``) on Redis and on RabbitMQ, and one that takes both on ``PAIRS``. Marks choose otherwise, see
``MARKS``.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from celery import _state

from tests.support import brokers, databases
from tests.support.brokers import Broker
from tests.support.databases import Database
from tests.support.proxy import Proxy
from tests.support.redis_databases import private_redis_url
from tests.support.tables import forget_originals
from tests.support.virtual_hosts import finish_deletions

MARKS = (
    "databases(*kinds): run on these databases only: sqlite, postgresql, mariadb",
    "brokers(*kinds): run on these brokers only: redis, rabbitmq, filesystem, memory",
    "combinations(*pairs): run on these (database, broker) pairs only",
    "alone: no other test of this session runs at the same time; for tests that measure time",
    "outages: acceptance test that takes its broker or its database away; they are reached through a proxy",
    *(f"{kind}: runs on {kind}; given to tests by their parameters" for kind in databases.DATABASES),
    *(f"{kind}: runs on {kind}; given to tests by their parameters" for kind in brokers.BROKERS),
)

#: What a test that takes both a database and a broker runs on.
PAIRS = (("postgresql", "redis"), ("mariadb", "rabbitmq"), ("sqlite", "filesystem"))


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = [name for name in ("database", "broker") if name in metafunc.fixturenames]
    chosen = {
        "database": metafunc.definition.get_closest_marker("databases"),
        "broker": metafunc.definition.get_closest_marker("brokers"),
    }
    pairs = metafunc.definition.get_closest_marker("combinations")
    if len(wanted) == 2 and (pairs or not any(chosen.values())):
        values = [_parameter(*pair) for pair in (pairs.args if pairs else PAIRS)]
        metafunc.parametrize(("database", "broker"), values, indirect=True)
        return
    kinds = {"database": databases.DATABASES, "broker": brokers.DEFAULT_BROKERS}
    if pairs:  # and the test takes one of the two only
        kinds = {name: tuple(dict.fromkeys(of)) for name, of in zip(kinds, zip(*pairs.args, strict=True), strict=True)}
    for name in wanted:
        mark = chosen[name]
        values = [_parameter(kind) for kind in (mark.args if mark else kinds[name])]
        metafunc.parametrize(name, values, indirect=True)


def _parameter(*kinds: str) -> object:
    unknown = set(kinds) - {*databases.DATABASES, *brokers.BROKERS}
    if unknown:
        raise pytest.UsageError(f"no such database or broker: {sorted(unknown)}")
    marks = [getattr(pytest.mark, kind) for kind in kinds]
    return pytest.param(*kinds, marks=marks, id="-".join(kinds))


def pytest_sessionfinish() -> None:
    forget_originals()
    finish_deletions()


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A private, empty database: ``kind``, ``url``, ``name``."""
    with databases.private_database(request.param, tmp_path) as provided:
        yield provided


@pytest.fixture
def database_url(database: Database) -> str:
    """The SQLAlchemy URL of a private, empty database."""
    return database.url


@pytest.fixture
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """A private, empty broker: ``kind``, ``url``, ``transport_options``, ``result_backend``, ``conf()``."""
    with brokers.private_broker(request.param, tmp_path) as provided:
        yield provided


@pytest.fixture
def broker_url(broker: Broker) -> str:
    """The URL of a private, empty broker."""
    return broker.url


@pytest.fixture
def redis_url() -> Iterator[str]:
    """The URL of a private, empty Redis database, whatever the broker is."""
    with private_redis_url() as url:
        yield url


@pytest.fixture
def proxy() -> Iterator[Callable[[str], Proxy]]:
    """Makes proxies: ``proxy(database_url).url`` leads to the database until ``cut()`` or ``stall()``."""
    with ExitStack() as proxies:
        yield lambda url: proxies.enter_context(Proxy(url))


@pytest.fixture(autouse=True)
def _own_current_app() -> Iterator[None]:
    """Gives each test the current and default Celery application that the session began with."""
    before = _state._tls.current_app, _state.default_app
    yield
    _state._tls.current_app, _state.default_app = before


@pytest.fixture(autouse=True, scope="session")
def _session_locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int] | None]:
    """Two files that all processes of one pytest-xdist session share; nothing if this is the only one."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield None
        return
    shared = tmp_path_factory.getbasetemp().parent
    files = [os.open(shared / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("gate.lock", "machine.lock")]
    yield files[0], files[1]
    for file in files:
        os.close(file)


@pytest.fixture(autouse=True)
def _own_machine(request: pytest.FixtureRequest, _session_locks: tuple[int, int] | None) -> Iterator[None]:
    """Holds the machine for a test marked ``alone``, shares it for every other one.

    The gate makes it fair: a waiting ``alone`` test holds it, so that no other test can begin before it.
    """
    if _session_locks is None:
        yield
        return
    gate, machine = _session_locks
    alone = request.node.get_closest_marker("alone") is not None
    fcntl.flock(gate, fcntl.LOCK_EX)
    fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    fcntl.flock(gate, fcntl.LOCK_UN)
    yield
    fcntl.flock(machine, fcntl.LOCK_UN)


@pytest.fixture(autouse=True)
def _results_may_be_waited_for() -> None:
    """Celery keeps in one global whether a task is running: a test that ran one in this process may have left it set."""
    _state._set_task_join_will_block(False)
