"""What is measured: pushing, handing over, running, yielding, lateness, idling."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import psutil
import redis

from benchmarks.ground import Ground, analyze, celery, empty, percentile, until

Result = dict[str, Any]


def _parts() -> Any:
    from benchmarks import app as parts
    from celery_lifecycle.migrations.schema import migrate

    migrate(parts.lifecycle.store.database)
    parts.app.finalize()
    return parts


def _rate(count: int, work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return count / (time.perf_counter() - begun)


def _bare_rate(parts: Any, count: int) -> float:
    """Bare `apply_async` per second with a reused producer."""
    task = parts.app.tasks["bare"]
    with parts.app.producer_or_acquire() as producer:
        for _ in range(100):
            task.apply_async(producer=producer)
        rate = _rate(count, lambda: [task.apply_async(producer=producer) for _ in range(count)])
        parts.app.amqp.queues[parts.app.conf.task_default_queue].bind(producer.channel).purge()
    return rate


def push(where: Ground, scale: float) -> Iterator[Result]:
    """Jobs a day ahead, each an object of its own: one by one, and in bulk."""
    parts = _parts()
    noop = parts.app.tasks["noop"]
    bare = _bare_rate(parts, int(3000 * scale))
    one = int(2000 * scale)
    noop.push(delay=86400)
    yield _row("push one by one", _rate(one, lambda: [noop.push(delay=86400) for _ in range(one)]), "jobs/s", bare)
    many = int(30000 * scale)
    pushes = [{"delay": 86400} for _ in range(many)]
    yield _row("push_many", _rate(many, lambda: noop.push_many(pushes)), "jobs/s", bare)


def hand_over(where: Ground, scale: float) -> Iterator[Result]:
    """Objects due at one instant, claimed and sent by a real beat: single jobs, and chains of five.

    The time is from that instant to the last message in the queue.
    """
    from celery_lifecycle import ObjectRef, Push
    from celery_lifecycle.deployment import Target
    from celery_lifecycle.queue import draft_of

    parts = _parts()
    count = int(10000 * scale)
    with celery(where, "beat", "-S", "lifecycle"):
        until(lambda: parts.lifecycle.store.beats.list(), 30)
        for what, length in (("hand-over, single jobs", 1), ("hand-over, chains of five", 5)):
            pairs = []
            for round_ in range(5):
                before = _bare_rate(parts, int(3000 * scale))
                refs = [ObjectRef("noop", f"{round_}-{place // length}") for place in range(count)]
                due = datetime.now(timezone.utc) + timedelta(seconds=2 + count / 5000)
                pushes = [Push("noop", id=f"job-{place % length}", at=due) for place in range(count)]
                noop = Target("noop")
                drafts = [
                    draft_of(parts.lifecycle, ref, "host", noop, push) for ref, push in zip(refs, pushes, strict=True)
                ]
                parts.lifecycle.store.jobs.push_many(drafts)
                analyze(where.database)
                time.sleep(max(0.0, due.timestamp() - time.time()))
                until_sent = _messages_are(parts, count // length)
                rate = count / (until_sent - due.timestamp())
                empty(where.database)
                _purge(parts)
                pairs.append((rate, (before + _bare_rate(parts, int(3000 * scale))) / 2))
            yield _paired(what, pairs, "jobs/s")


def _messages_are(parts: Any, count: int) -> float:
    """Wait until so many messages are in the queue; the time at which they were."""
    with parts.app.connection_for_read() as connection:
        queue = parts.app.amqp.queues[parts.app.conf.task_default_queue].bind(connection.default_channel)
        until(lambda: queue.queue_declare().message_count >= count, 120, every=0.01)
        return time.time()


def _purge(parts: Any) -> None:
    with parts.app.connection_for_write() as connection:
        parts.app.amqp.queues[parts.app.conf.task_default_queue].bind(connection.default_channel).purge()


def work(where: Ground, scale: float) -> Iterator[Result]:
    """A no-op in the same workers: bare Celery task, lifecycle job, and the yields of one object."""
    parts = _parts()
    count = int(6000 * scale)
    queue = parts.app.conf.task_default_queue
    noop = parts.app.tasks["noop"]
    with celery(where, "worker", "-c", "2", "-n", _node(parts), "--without-gossip", "--without-mingle"):
        until(lambda: parts.app.control.ping([_node(parts)], timeout=0.5), 30)
        bares, ours = [], []
        for _ in range(3):
            before = _accepted(parts, "bare")
            with parts.app.producer_or_acquire() as producer:
                for _ in range(count):
                    parts.app.tasks["bare"].apply_async(producer=producer)
            bares.append(_consumed(parts, "bare", before, count))
            before = _accepted(parts, "noop")
            noop.push_many([{} for _ in range(count)])
            analyze(where.database)
            while claimed := parts.lifecycle.store.claims.claim(queue, _idle(), 1000).shipments:
                parts.lifecycle.send(claimed)
            ours.append(_consumed(parts, "noop", before, count))
        yield _row("no-op in the worker", statistics.median(ours), "jobs/s", statistics.median(bares))
        turns = int(600 * scale)
        looper = parts.Looper("one")
        begun = time.perf_counter()
        looper.jobs.push("turn", payload=turns)
        until(lambda: looper.storage.get("turns", 0) >= turns, 120)
        yield _row("yields of one object", turns / (time.perf_counter() - begun), "yields/s", None)


def _idle() -> Any:
    from celery_lifecycle.model import Phase

    return Phase.IDLE


def _consumed(parts: Any, task: str, before: int, count: int) -> float:
    """Time what the worker takes from a queue that is full, up to the last tenth."""
    marks: list[tuple[float, int]] = []
    while not marks or marks[-1][1] < count * 0.98:
        marks.append((time.perf_counter(), _accepted(parts, task) - before))
        time.sleep(0.02)
    (start, first), (end, last) = marks[0], max(mark for mark in marks if mark[1] <= count * 0.9)
    return (last - first) / (end - start)


def _node(parts: Any) -> str:
    return f"{parts.app.conf.task_default_queue}@bench"


def _accepted(parts: Any, task: str) -> int:
    replies = parts.app.control.inspect(destination=[_node(parts)], timeout=2).stats() or {}
    return sum(one["total"].get(task, 0) for one in replies.values())


def lateness(where: Ground, scale: float) -> Iterator[Result]:
    """How late chains reach the broker, with a million other jobs pending."""
    if not where.is_redis or not where.database.startswith("postgresql"):
        return
    parts = _parts()
    pending = int(1_000_000 * scale)
    _fill(parts, pending)
    analyze(where.database)
    queue, client = parts.app.conf.task_default_queue, redis.Redis.from_url(where.broker)
    with celery(where, "beat", "-S", "lifecycle"):
        until(lambda: parts.lifecycle.store.beats.list(), 30)
        for rate in (200, 1000):
            seconds = 10
            start = datetime.now(timezone.utc) + timedelta(seconds=3 + rate / 1000)
            due = [start + timedelta(seconds=place / rate) for place in range(rate * seconds)]
            pushes = [{"at": at, "id": f"{rate}-{place}-{round(at.timestamp() * 1e6)}"} for place, at in enumerate(due)]
            parts.app.tasks["noop"].push_many(pushes)
            late = []
            while len(late) < len(pushes):
                popped = client.blpop(queue, timeout=30)
                arrived = time.time()
                header = json.loads(json.loads(popped[1])["headers"]["lifecycle"])
                late.append(arrived - int(header["job"].split("-")[2]) / 1e6)
            for share in (0.5, 0.99):
                what = f"lateness at {rate}/s, {pending:,} pending, p{share * 100:g}"
                yield _row(what, percentile(late, share) * 1000, "ms", None)


def _fill(parts: Any, count: int) -> None:
    """Pending jobs a day ahead, in the shape that push_many gives them."""
    noop = parts.app.tasks["noop"]
    for start in range(0, count, 50_000):
        noop.push_many([{"delay": 86400 + start} for _ in range(min(50_000, count - start))])


def idle(where: Ground, scale: float) -> Iterator[Result]:
    """What a beat costs that has nothing to do, by the number of pending jobs."""
    parts = _parts()
    have = 0
    for pending in (1_000, 10_000, 100_000, 1_000_000):
        wanted = int(pending * scale)
        _fill(parts, wanted - have)
        have = wanted
        analyze(where.database)
        known = len(parts.lifecycle.store.beats.list())
        begun = time.perf_counter()
        with celery(where, "beat", "-S", "lifecycle") as process:
            until(lambda known=known: len(parts.lifecycle.store.beats.list()) > known, 60)
            ready = time.perf_counter() - begun
            beat = psutil.Process(process.pid)
            used, at = sum(beat.cpu_times()[:2]), time.perf_counter()
            time.sleep(10)
            cpu = (sum(beat.cpu_times()[:2]) - used) / (time.perf_counter() - at)
            memory = beat.memory_info().rss / 2**20
        yield _row(f"idle beat, {wanted:,} pending: ready after", ready, "s", None)
        yield _row(f"idle beat, {wanted:,} pending: memory", memory, "MiB", None)
        yield _row(f"idle beat, {wanted:,} pending: CPU", cpu * 100, "% of a core", None)


def _paired(what: str, pairs: list[tuple[float, float]], unit: str) -> Result:
    """A row of several rounds, each beside bare Celery of its own time: the medians, and that of the ratios."""
    row = _row(what, statistics.median(ours for ours, _ in pairs), unit, statistics.median(bare for _, bare in pairs))
    return {**row, "ratio": round(statistics.median(ours / bare for ours, bare in pairs), 2)}


def _row(what: str, value: float, unit: str, bare: float | None) -> Result:
    return {
        "what": what,
        "value": round(value, 2),
        "unit": unit,
        "bare": None if bare is None else round(bare, 1),
        "ratio": None if bare is None else round(value / bare, 2),
    }


ALL: dict[str, Callable[[Ground, float], Iterator[Result]]] = {
    "push": push,
    "hand-over": hand_over,
    "work": work,
    "lateness": lateness,
    "idle": idle,
}
