"""The fixtures that all other tests stand on: private, empty, and gone at the end."""

import http.server
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
import sqlalchemy
from kombu import Connection

from tests.support import Broker, Database, Proxy, WaitTimeout, redis_databases, services, wait_until
from tests.support.brokers import private_broker
from tests.support.databases import DATABASES, private_database
from tests.support.redis_databases import private_redis_url
from tests.support.virtual_hosts import ManagementApi

ROOT = Path(__file__).parents[2]


def test_a_wait_ends_at_once_when_the_condition_holds_and_gives_its_value_back() -> None:
    values = iter([None, 0, "there"])
    assert wait_until(lambda: next(values), timeout=5) == "there"


def test_a_wait_that_fails_says_what_was_waited_for() -> None:
    with pytest.raises(WaitTimeout, match=r"0\.01 s: a miracle"):
        wait_until(lambda: False, timeout=0.01, message=lambda: "a miracle")


def test_a_database_is_empty_and_can_be_written_by_two_connections(database_url: str) -> None:
    engine = sqlalchemy.create_engine(database_url)
    assert sqlalchemy.inspect(engine).get_table_names() == []
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE thing (id INTEGER PRIMARY KEY)")
        connection.exec_driver_sql("INSERT INTO thing VALUES (1)")
    other = sqlalchemy.create_engine(database_url)
    with other.connect() as connection:
        assert connection.exec_driver_sql("SELECT id FROM thing").scalar() == 1
    assert sqlalchemy.inspect(other).get_table_names() == ["thing"]
    other.dispose()
    engine.dispose()


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_database_is_dropped_even_if_a_transaction_was_left_open(kind: str, tmp_path: Path) -> None:
    with ExitStack() as until_dropped:
        database = until_dropped.enter_context(private_database(kind, tmp_path))
        engine = sqlalchemy.create_engine(database.url)
        connection = engine.connect()
        connection.exec_driver_sql("CREATE TABLE thing (id INTEGER PRIMARY KEY)")
        connection.commit()
        connection.exec_driver_sql("INSERT INTO thing VALUES (1)")
        started = time.monotonic()
    assert time.monotonic() - started < 5
    connection.invalidate()
    connection.close()
    with sqlalchemy.create_engine(services.address(kind)).connect() as admin:
        places = "SELECT schema_name FROM information_schema.schemata"
        assert database.name not in admin.exec_driver_sql(places).scalars().all()


@pytest.mark.databases("postgresql")
def test_a_mark_chooses_the_database(database: Database) -> None:
    assert database.kind == "postgresql"


@pytest.mark.brokers("redis", "rabbitmq", "filesystem", "memory")
def test_a_broker_passes_messages_and_begins_empty(broker: Broker) -> None:
    with Connection(broker.url, transport_options=broker.transport_options) as connection:
        with connection.SimpleQueue(broker.default_queue) as queue:
            queue.put({"number": 1})
            message = queue.get(timeout=5)
            assert message.payload == {"number": 1}  # not the 2 of an earlier test
            message.ack()
            queue.put({"number": 2})  # left for nobody to find


@pytest.mark.parametrize("kind", ["filesystem", "memory"])
def test_the_next_broker_of_a_kind_knows_nothing_of_the_one_before(kind: str, tmp_path: Path) -> None:
    for number in range(2):
        with private_broker(kind, tmp_path / str(number)) as broker:
            with Connection(broker.url, transport_options=broker.transport_options) as connection:
                with connection.SimpleQueue("celery") as queue:
                    queue.put(number)
                    assert queue.get(timeout=5).payload == number


@pytest.mark.combinations(("sqlite", "memory"))
def test_a_mark_chooses_one_pair_of_database_and_broker(database: Database, broker: Broker) -> None:
    assert (database.kind, broker.kind) == ("sqlite", "memory")


def test_two_redis_databases_at_the_same_time_are_different_and_flushed_at_the_end() -> None:
    with private_redis_url() as one, private_redis_url() as other:
        assert one != other
        redis.Redis.from_url(one).set("key", "value")
        assert redis.Redis.from_url(other).dbsize() == 0
    assert redis.Redis.from_url(one).dbsize() == 0


def test_a_connection_that_a_test_leaves_open_does_not_keep_its_redis_database() -> None:
    with private_redis_url() as url:
        open_client = redis.Redis.from_url(url)
        open_client.ping()
        number = int(url.rpartition("/")[2])
    wait_until(lambda: redis_databases.is_unused(services.address("redis"), number))
    open_client.close()


def test_a_redis_database_with_keys_of_somebody_else_is_left_alone() -> None:
    with private_redis_url() as url:
        number = int(url.rpartition("/")[2])
        client = redis.Redis.from_url(url)
        client.set("somebody", "else")
        assert not redis_databases.is_unused(services.address("redis"), number)
        client.flushdb()
        client.close()
        wait_until(lambda: redis_databases.is_unused(services.address("redis"), number))


def test_a_redis_database_of_a_test_process_that_was_killed_is_flushed_and_used_again() -> None:
    script = """
        import os, redis
        from tests.support.redis_databases import private_redis_url
        with private_redis_url() as url:
            redis.Redis.from_url(url).set("left", "behind")
            print(url, flush=True)
            os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if not done.stdout and "skip" in done.stderr.lower():
        pytest.skip(done.stderr)
    left = done.stdout.strip()
    assert redis.Redis.from_url(left).get("left") == b"behind", done.stderr
    with ExitStack() as stack:
        taken = []
        # Other processes hold some of the databases, so it is looked for among all that are given out.
        while left not in taken:
            taken.append(stack.enter_context(private_redis_url()))
        assert redis.Redis.from_url(left).dbsize() == 0


@pytest.mark.parametrize("service", ["postgresql", "mariadb", "redis", "rabbitmq"])
@pytest.mark.parametrize(("required", "outcome"), [("1", "failed"), ("", "skipped")])
def test_a_missing_service_skips_a_test_unless_services_are_required(
    service: str, required: str, outcome: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variable, default = services.ADDRESSES[service]
    nowhere = default.replace(f"{sqlalchemy.engine.make_url(default).port}", "1")
    monkeypatch.setenv(variable, nowhere)
    monkeypatch.setenv(services.REQUIRE_SERVICES, required)
    expected = pytest.fail.Exception if outcome == "failed" else pytest.skip.Exception
    place = private_database if service in DATABASES else private_broker
    with pytest.raises(expected, match=variable), place(service, tmp_path):
        pass


@pytest.fixture
def management() -> Iterator[tuple[str, list[tuple[str, str, object]]]]:
    """A stand-in for RabbitMQ's management plugin, and what it was asked."""
    asked: list[tuple[str, str, object]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append((self.command, self.path, json.loads(body) if body else None))
            self.send_response(204)
            self.end_headers()

        do_GET = do_PUT = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            """Keeps the test's output clean."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_a_virtual_host_is_made_and_removed_through_the_management_plugin_where_there_is_one(
    management: tuple[str, list[tuple[str, str, object]]],
) -> None:
    url, asked = management
    api = ManagementApi("amqp://somebody:secret@127.0.0.1:5672/", url)
    assert api.answers()
    name = api.create()
    assert api.url(name) == f"amqp://somebody:secret@127.0.0.1:5672/{name}"
    api.delete(name)
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    assert asked == [
        ("GET", "/api/whoami", None),
        ("PUT", f"/api/vhosts/{name}", None),
        ("PUT", f"/api/permissions/{name}/somebody", everything),
        ("DELETE", f"/api/vhosts/{name}", None),
    ]


@pytest.mark.brokers("redis")
def test_a_proxy_takes_a_service_away_and_gives_it_back(broker_url: str, proxy: Callable[[str], Proxy]) -> None:
    proxied = proxy(broker_url)
    client = redis.Redis.from_url(proxied.url, socket_timeout=0.2, retry=None)
    client.set("key", "value")
    proxied.cut()
    with pytest.raises(redis.ConnectionError):
        client.get("key")
    proxied.restore()
    assert client.get("key") == b"value"
    proxied.stall()
    with pytest.raises(redis.TimeoutError):
        client.get("key")
    proxied.restore()
    assert client.get("key") == b"value"
    client.close()


@pytest.mark.databases("postgresql", "mariadb")
def test_a_database_url_keeps_its_name_and_options_through_a_proxy(
    database_url: str, proxy: Callable[[str], Proxy]
) -> None:
    direct = sqlalchemy.create_engine(database_url)
    with direct.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE thing (id INTEGER PRIMARY KEY)")
    through = sqlalchemy.create_engine(proxy(database_url).url)
    assert sqlalchemy.inspect(through).get_table_names() == ["thing"]
    through.dispose()
    direct.dispose()


def test_a_proxy_refuses_a_database_that_has_no_host() -> None:
    with pytest.raises(ValueError, match="names no host"):
        Proxy("sqlite:////tmp/file.db")


@pytest.mark.alone
def test_a_test_marked_alone_has_the_machine_for_itself(tmp_path_factory: pytest.TempPathFactory) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there is only one test process")
    lock = tmp_path_factory.getbasetemp().parent / "machine.lock"
    others = subprocess.run(["flock", "--shared", "--nonblock", str(lock), "true"], check=False)
    assert others.returncode == 1
