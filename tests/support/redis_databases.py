"""A Redis database for one test, claimed without a race between the processes that run tests."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import redis
from kombu import pools

from tests.support import services
from tests.support.waiting import wait_until


@contextmanager
def private_redis_url() -> Iterator[str]:
    """The URL of an empty Redis database that no other test uses, flushed at the end."""
    address = services.address("redis").rstrip("/")
    count, error = _redis_databases(address)
    if error is not None:
        services.unavailable("redis", error)
    lock = wait_until(
        lambda: _claim_redis_database(address, count),
        timeout=60,
        message=f"a free database of {address}: all {count - 1} are locked, or in use by somebody else",
        interval=0.1,
    )
    url = f"{address}/{lock.number}"
    try:
        yield url
    finally:
        # Pools are kept by address: the next test on this database would get connections that are ended here.
        pools.reset()
        _evict(url, lock.number)
        _flush(url)
        lock.release(clean=True)


class _DatabaseLock:
    """Holds one Redis database for this process; the kernel frees the lock when the process dies.

    The file says "used" from the claim until the database is flushed: only then are keys found there those of
    a test that was killed, and may be deleted. A database with keys of somebody else is left alone.
    """

    def __init__(self, number: int, file: int) -> None:
        self.number = number
        self._file = file

    @classmethod
    def take(cls, name: str, number: int) -> "_DatabaseLock | None":
        folder = Path(tempfile.gettempdir()) / f"celery-lifecycle-tests-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        file = os.open(folder / f"{name}-{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return cls(number, file)

    @property
    def left_behind(self) -> bool:
        return os.pread(self._file, 4, 0) == b"used"

    def mark_used(self) -> None:
        os.pwrite(self._file, b"used", 0)

    def release(self, *, clean: bool) -> None:
        if clean:
            os.ftruncate(self._file, 0)
        # Unlocked by name, not by close alone: a process forked by the test may still hold the file open.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)


def _claim_redis_database(address: str, count: int) -> _DatabaseLock | None:
    parts = urlsplit(address)
    name = f"redis-{parts.hostname}-{parts.port or 6379}"
    # Database 0 is the one that people use by hand.
    for number in range(1, count):
        lock = _DatabaseLock.take(name, number)
        if lock is None:
            continue
        if not lock.left_behind and not is_unused(address, number):
            lock.release(clean=False)
            continue
        lock.mark_used()
        _flush(f"{address}/{number}")
        return lock
    return None


def is_unused(address: str, number: int) -> bool:
    with contextlib.closing(_client(f"{address}/{number}")) as client:
        users = [each for each in client.client_list() if each["db"] == str(number)]
        return client.dbsize() == 0 and len(users) <= 1  # itself


def _evict(url: str, number: int) -> None:
    """End the connections that a test has left open: they would keep the next test away, or write once more."""
    with contextlib.closing(_client(url)) as client:
        for each in client.client_list():
            if each["db"] == str(number) and int(each["id"]) != client.client_id():
                client.client_kill_filter(_id=each["id"])


def _flush(url: str) -> None:
    with contextlib.closing(_client(url)) as client:
        client.flushdb()


def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, decode_responses=True, socket_connect_timeout=services.CONNECT_TIMEOUT)


@cache
def _redis_databases(address: str) -> tuple[int, Exception | None]:
    try:
        with contextlib.closing(_client(address)) as client:
            return int(str(client.config_get("databases")["databases"])), None
    except (redis.RedisError, OSError) as error:
        return 0, error
