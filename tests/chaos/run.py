"""One run of chaos: two beats, two workers, a workload, faults; then peace, and the check."""

import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery

from celery_lifecycle.errors import DatabaseUnavailable
from celery_lifecycle.migrations.schema import migrate
from tests.acceptance.ledger import Ledger
from tests.acceptance.looks import left_over
from tests.acceptance.nodes import BeatNode, Nodes, WorkerNode
from tests.acceptance.process import LocalProcess, is_gone
from tests.chaos.app import make_chaos_app
from tests.chaos.checker import Findings, check
from tests.chaos.faults import Faults, Service
from tests.chaos.workload import Workload
from tests.support import Broker, Database, Proxy, WaitTimeout, wait_until
from tests.support.brokers import private_broker
from tests.support.databases import private_database
from tests.support.servers import SERVERS, private_server

APP = "tests.chaos.app"
SETTINGS = {
    "lifecycle_backup_alarm": 6,
    "lifecycle_patience_max": 12,
    "lifecycle_poll_interval": 0.1,
    "lifecycle_strike_delay": 0.1,
    "lifecycle_strike_delay_max": 1,
    "lifecycle_suspect_delay": 0.2,
    # Chaos kills at random: no loop is to be found guilty here.
    "lifecycle_max_memory_strikes": 1000,
    "broker_connection_max_retries": None,
}
SETTLE = 90.0
# More objects than that are not kept alive: a machine that is slower than the rate would measure its own queue.
MOST_LIVE = 60
Say = Callable[[str], None]


@dataclass
class Cluster:
    """The processes, and what they stand on."""

    app: Celery
    ledger: Ledger
    workers: list[WorkerNode]
    beats: list[BeatNode]
    database: Service
    broker: Service
    nodes: Nodes
    directory: Path


@contextmanager
def cluster(database: str, broker: str, directory: Path) -> Iterator[Cluster]:
    """Two beats and two workers on a private database and a private broker, both behind proxies.

    Servers of our own where this machine has their programs, so that they can be killed; else a place in everybody's.
    """
    with ExitStack() as stack:
        servers = {
            kind: stack.enter_context(private_server(kind)) for kind in (database, broker) if SERVERS[kind].is_there()
        }
        if database in servers:
            tables = Database(database, servers[database].url, database)
        else:
            tables = stack.enter_context(private_database(database, directory))
        if broker in servers:
            messages = Broker(broker, servers[broker].url, result_backend="")
        else:
            messages = stack.enter_context(private_broker(broker, directory))
        to_tables, to_messages = (
            Service(name, stack.enter_context(Proxy(url)), servers.get(kind))
            for name, kind, url in (("database", database, tables.url), ("broker", broker, messages.url))
        )
        ledger = Ledger(directory / "ledger.jsonl")
        direct = {
            "BROKER_URL": messages.url,
            "BROKER_OPTIONS": json.dumps(messages.transport_options),
            "DEFAULT_QUEUE": messages.default_queue,
            "DATABASE_URL": tables.url,
            "LEDGER": str(ledger.path),
            "SETTINGS": json.dumps(SETTINGS),
        }
        app = stack.enter_context(make_chaos_app(direct))
        migrate(app.lifecycle.store.database)
        stack.callback(app.lifecycle.close)
        environment = {**direct, "BROKER_URL": to_messages.proxy.url, "DATABASE_URL": to_tables.proxy.url}
        nodes = Nodes(LocalProcess, directory=directory, environment=environment, app=app, ledger=ledger)
        stack.callback(nodes.teardown)
        workers = [nodes.worker(f"worker-{n}", concurrency=3, app=APP, wait=False) for n in (1, 2)]
        beats = [nodes.beat(f"beat-{n}", app=APP, wait=False) for n in (1, 2)]
        for node in (*workers, *beats):
            node.ready()
        yield Cluster(app, ledger, workers, beats, to_tables, to_messages, nodes, directory)


def run(
    *,
    database: str,
    broker: str,
    seconds: float,
    seed: int,
    directory: Path | None = None,
    rate: float = 4.0,
    every: float = 2.0,
    say: Say = print,
) -> Findings:
    """Chaos for so many seconds: ``rate`` objects a second, a fault about ``every`` so many seconds."""
    place = directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    with cluster(database, broker, place) as world:
        random_ = random.Random(seed)
        workload = Workload(world.app, random_)
        faults = Faults(random_, world.workers, world.beats, world.database, world.broker, world.ledger)
        began = time.monotonic()
        _storm(workload, faults, random_, began + seconds, rate, every, say)
        faults.repair_all()
        calm = time.monotonic()
        settled, wrong = _settle(world, faults)
        say(wrong or f"all at rest {settled - calm:.1f} s after the last fault")
        hanging = _end(world)
        dead = Counter(
            (str(one.job.object), one.job.id, one.reason) for one in world.app.lifecycle.store.dead.list(limit=100_000)
        )
        found = check(workload.expected, world.ledger.runs(), faults.seen, dead)
        found.wrong = [*filter(None, [wrong]), *faults.unexpected, *hanging, *found.wrong]
        found.figures = {
            "seconds of faults": round(calm - began),
            "seconds to rest after them": round(settled - calm, 1),
            "servers of its own": [one.server.program for one in (world.database, world.broker) if one.server],
            **found.figures,
        }
        return found


def _storm(
    workload: Workload, faults: Faults, random_: random.Random, until: float, rate: float, every: float, say: Say
) -> None:
    next_push = next_fault = next_word = time.monotonic()
    next_fault += every
    while (now := time.monotonic()) < until:
        faults.step()
        if now >= next_push:
            # A client that finds the database away comes again later.
            with contextlib.suppress(DatabaseUnavailable):
                if workload.live() < MOST_LIVE:
                    workload.push()
            next_push = max(next_push + random_.expovariate(rate), now - 1)
        if now >= next_fault:
            faults.strike()
            next_fault = time.monotonic() + random_.expovariate(1 / every)
        if now >= next_word:
            next_word = now + 15
            say(f"{until - now:6.0f} s left: {len(workload.expected)} jobs pushed, {len(faults.seen)} faults")
        time.sleep(0.01)


def _settle(world: Cluster, faults: Faults) -> tuple[float, str]:
    """Wait until no job is left; the time when that was so, and what is wrong if it never was."""

    def left() -> list[Any]:
        return left_over(world.app.lifecycle)

    def at_rest() -> bool:
        faults.step()
        return not left()

    try:
        wait_until(at_rest, SETTLE, interval=0.2)
    except WaitTimeout:
        return time.monotonic(), f"{len(left())} objects are not at rest after {SETTLE:.0f} s: {left()[:5]}"
    return time.monotonic(), ""


def _end(world: Cluster) -> list[str]:
    """End all nodes as a deployment does; those that hang, or leave a process."""
    wrong, pids = [], []
    nodes = (*world.workers, *world.beats)
    for node in nodes:
        if node.status == "running":
            node.ready()
            pids += [node.pid, *node.children()]
            node.container.kill("SIGTERM")
    for node in nodes:
        try:
            code = node.wait(30)
            if code != 0:
                wrong.append(f"{node.name()} ended with {code}")
        except AssertionError as error:
            wrong.append(f"{node.name()} hangs: {str(error)[-2000:]}")
    wrong += [f"process {pid} is left" for pid in pids if pid and not is_gone(pid)]
    return wrong
