"""Fixtures of acceptance tests: ``start_worker``, ``start_beat``, ``app``, ``lifecycle``, ``ledger``, ``celery_setup``.

A test that takes any of them runs on the pairs of database and broker in ``tests.conftest.PAIRS``, unless
its marks say otherwise. ``celery_setup`` is pytest-celery's: a worker and a beat, with broker and database
as nodes.
"""

import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from celery import Celery
from pytest_celery import CeleryBrokerCluster, CeleryTestCluster, CeleryWorkerCluster

from celery_lifecycle import Lifecycle
from tests.acceptance.app import make_app
from tests.acceptance.docker_process import DockerProcess, engine
from tests.acceptance.ledger import Ledger
from tests.acceptance.looks import left_over
from tests.acceptance.nodes import BeatNode, BrokerNode, DatabaseNode, LifecycleSetup, Nodes, WorkerNode
from tests.acceptance.process import LocalProcess
from tests.support import Broker, Database, Proxy, wait_until
from tests.support.tables import make_tables

_NODES = pytest.StashKey[Nodes]()
_FAILED = pytest.StashKey[bool]()

#: The design's figures for tests that are to be quick: a tenth of the backup alarm, a sixtieth of the delays.
QUICK = {
    "lifecycle_backup_alarm": 3,
    "lifecycle_strike_delay": 0.5,
    "lifecycle_strike_delay_max": 5,
    "lifecycle_suspect_delay": 0.5,
    "lifecycle_poll_interval": 0.1,
    "lifecycle_unknown_task_grace": 0,
}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """What the jobs of this test write about themselves."""
    return Ledger(tmp_path / "ledger.jsonl")


@pytest.fixture
def broker_node(request: pytest.FixtureRequest, broker: Broker, proxy: Callable[[str], Proxy]) -> BrokerNode:
    """The broker; a test marked ``outages`` can kill, pause and restart it."""
    return BrokerNode(broker.kind, broker.url, _outage(request, broker.kind, broker.url, proxy))


@pytest.fixture
def database_node(request: pytest.FixtureRequest, database: Database, proxy: Callable[[str], Proxy]) -> DatabaseNode:
    """The database; a test marked ``outages`` can kill, pause and restart it."""
    return DatabaseNode(database.kind, database.url, _outage(request, database.kind, database.url, proxy))


def _outage(request: pytest.FixtureRequest, kind: str, url: str, proxy: Callable[[str], Proxy]) -> Proxy | None:
    if kind in ("sqlite", "filesystem", "memory") or not request.node.get_closest_marker("outages"):
        return None
    return proxy(url)


@pytest.fixture
def settings() -> dict[str, object]:
    """Further Celery and lifecycle settings of the application, over ``QUICK``; override or parametrize it as needed."""
    return {}


@pytest.fixture
def environment(
    broker: Broker,
    broker_node: BrokerNode,
    database_node: DatabaseNode,
    ledger: Ledger,
    settings: dict[str, object],
) -> dict[str, str]:
    """The environment variables that lead the application under test."""
    same = broker.result_backend == broker.url
    return {
        "BROKER_URL": broker_node.url,
        "BROKER_OPTIONS": json.dumps(broker.transport_options),
        "DEFAULT_QUEUE": broker.default_queue,
        "RESULT_BACKEND": broker_node.url if same else broker.result_backend,
        "DATABASE_URL": database_node.url,
        "LEDGER": str(ledger.path),
        "SETTINGS": json.dumps({**QUICK, **settings}),
    }


@pytest.fixture
def app(environment: dict[str, str]) -> Iterator[Celery]:
    """The application under test, in the test's own process; its tables are there."""
    with make_app(environment) as application:
        make_tables(application.lifecycle.store.database)
        yield application
        application.lifecycle.close()


@pytest.fixture
def lifecycle(request: pytest.FixtureRequest, nodes: Nodes, app: Celery, ledger: Ledger) -> Iterator[Lifecycle]:
    """The application's ``Lifecycle``. At the end of the test no runs of one object may have overlapped, and no job,
    run or chain may be left in the tables."""
    yield app.lifecycle
    if not request.node.stash.get(_FAILED, False):
        overlaps = "\n".join(f"{one}\n    {other}" for one, other in ledger.overlaps())
        assert not overlaps, overlaps
        wait_until(lambda: left_over(app.lifecycle) == [], 10, lambda: f"still there: {left_over(app.lifecycle)}")


@pytest.fixture
def nodes(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    environment: dict[str, str],
    app: Celery,
    ledger: Ledger,
) -> Iterator[Nodes]:
    """Starts workers and beats, and ends them with the test."""
    process = DockerProcess if engine() else LocalProcess
    started = Nodes(process, directory=tmp_path, environment=environment, app=app, ledger=ledger)
    request.node.stash[_NODES] = started
    yield started
    started.teardown()


@pytest.fixture
def start_worker(nodes: Nodes) -> Callable[..., WorkerNode]:
    """``start_worker(name, concurrency=…, pool=…, queues=…, environment=…)``, see ``Nodes.worker``."""
    return nodes.worker


@pytest.fixture
def start_beat(nodes: Nodes) -> Callable[..., BeatNode]:
    """``start_beat(name, scheduler="lifecycle", environment=…)``, see ``Nodes.beat``."""
    return nodes.beat


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows the end of every node's log with a test that failed."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    if report.failed and _NODES in item.stash:
        for node in item.stash[_NODES].started:
            report.sections.append((f"log of {node.name()} ({node.status})", node.logs()[-6000:]))
    return report


# pytest-celery's fixtures, with nodes of ours.


@pytest.fixture
def celery_setup_cls() -> type[LifecycleSetup]:
    return LifecycleSetup


@pytest.fixture
def celery_setup_app(app: Celery) -> Celery:
    return app


@pytest.fixture
def celery_broker_cluster(broker_node: BrokerNode) -> CeleryBrokerCluster:
    return CeleryBrokerCluster(broker_node)


@pytest.fixture
def celery_backend_cluster() -> None:
    return None


@pytest.fixture
def celery_worker(nodes: Nodes) -> WorkerNode:
    return nodes.worker(wait=False)


@pytest.fixture
def celery_worker_cluster(celery_worker: WorkerNode) -> CeleryWorkerCluster:
    return CeleryWorkerCluster(celery_worker)


@pytest.fixture
def celery_beat_cluster(nodes: Nodes) -> CeleryTestCluster:
    """A cluster of one beat; a test that wants several overrides it."""
    return CeleryTestCluster(nodes.beat(wait=False))


@pytest.fixture
def celery_setup(
    celery_setup_cls: type[LifecycleSetup],
    celery_worker_cluster: CeleryWorkerCluster,
    celery_beat_cluster: CeleryTestCluster,
    celery_broker_cluster: CeleryBrokerCluster,
    celery_setup_app: Celery,
    database_node: DatabaseNode,
) -> LifecycleSetup:
    """A worker and a beat that are ready, their broker and their database."""
    setup = celery_setup_cls(
        celery_worker_cluster, celery_broker_cluster, celery_setup_app, celery_beat_cluster, database_node
    )
    assert setup.ready()
    return setup
