"""A process that is forked while its parent uses the database: both go on, on connections of their own."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from celery import Celery

import celery_lifecycle
from celery_lifecycle.config import Config
from celery_lifecycle.dispatch import Sender
from celery_lifecycle.model import ObjectRef
from celery_lifecycle.store import Store
from celery_lifecycle.store.database import Tx
from tests.support.tables import make_tables


def fork_and_write(store: Store, name: str) -> int:
    """Write to the database in a forked child; its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            store.objects.put_values(ObjectRef("thing", name), {"key": "1"})
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_forked_in_the_middle_of_a_transaction_of_another_thread_can_write(database_url: str) -> None:
    store = Store(Config(database_url=database_url, lock_timeout=1))
    make_tables(store.database)
    entered, leave = threading.Event(), threading.Event()

    def hold(tx: Tx) -> None:
        tx.now()
        entered.set()
        leave.wait(5)

    with ThreadPoolExecutor() as pool:
        holding = pool.submit(store.database.run, hold)
        assert entered.wait(5)
        threading.Timer(0.2, leave.set).start()
        assert fork_and_write(store, "during") == 0
        holding.result()
    assert fork_and_write(store, "after") == 0
    store.objects.put_values(ObjectRef("thing", "parent"), {"key": "1"})
    assert {state.name for state in store.objects.find_many()} == {"during", "after", "parent"}
    store.close()


def test_a_child_forked_while_another_thread_sends_can_send() -> None:
    sender = Sender(Celery("forked", broker="memory://", set_as_current=False), "database")
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with sender._lock:
            entered.set()
            leave.wait(5)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(5)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if sender._lock.acquire(timeout=2) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    leave.set()
    holder.join()
    sender.close()


def test_nothing_is_computed_under_a_lock_that_a_fork_could_take_along():
    """Python 3.10 and 3.11 hold one in `cached_property`: an embedded beat, forked while another thread was in it, hung."""
    package = Path(celery_lifecycle.__file__).parent
    assert [file.name for file in package.rglob("*.py") if "cached_property" in file.read_text()] == []
