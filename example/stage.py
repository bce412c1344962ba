"""A worker and a beat as real processes in a place of their own, and nothing of it left afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlalchemy import Table

from celery_lifecycle.migrations.schema import version_table
from celery_lifecycle.tables import make_tables

ROOT = Path(__file__).parents[1]
START_WITHIN = 60.0
STOP_WITHIN = 20.0
STOP_AT_ONCE = 1.0


class StageError(Exception):
    """A process ended, or said nothing, when it should have been there."""


class Stage:
    """The folder in which worker, beat and this process work: job table, messages, logs. A context manager.

    Where DATABASE_URL or BROKER_URL name servers, tables and queue get names of their own there.

    Args:
        settings: any Celery or lifecycle settings of the shop.
        day: seconds in a day of the shop.
    """

    def __init__(self, settings: dict[str, Any], day: float) -> None:
        self._came_from = Path.cwd()
        self.folder = Path(tempfile.mkdtemp(prefix="lifecycle-demo-"))
        self.feed = self.folder / "feed.jsonl"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # The embedded defaults are relative to the working directory.
        os.chdir(self.folder)
        mine = secrets.token_hex(3)
        if "DATABASE_URL" in os.environ:
            settings = {**settings, "lifecycle_table_prefix": f"demo_{mine}_", "lifecycle_auto_migrate": True}
        if "BROKER_URL" in os.environ:
            settings = {**settings, "task_default_queue": f"demo-{mine}"}
        os.environ["SETTINGS"] = json.dumps(settings)
        os.environ["SHOP_DAY"] = str(day)
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "SHOP_FEED": str(self.feed),
            # kombu moves messages of its filesystem transport through it.
            "TMPDIR": str(self.folder),
        }

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with _uninterrupted():
            self.stop(STOP_AT_ONCE)
            if "example.shop" in sys.modules:
                _clear_servers()
            os.chdir(self._came_from)
            shutil.rmtree(self.folder)

    def start(self) -> None:
        """Start both and wait until they are at work."""
        self._start("worker", "--concurrency=3", "--loglevel=INFO", "--include=example.feed")
        self._start("beat", "--scheduler=lifecycle", "--loglevel=INFO", "--pidfile=")
        self._wait_for("worker", " ready.")
        self._wait_for("beat", "beat: Starting...")

    def _start(self, name: str, *options: str) -> None:
        command = [sys.executable, "-m", "celery", "--app=example.shop", name, *options]
        with self.log(name).open("wb") as log:
            # A session of its own: Ctrl-C in the terminal is ours to pass on, in the right order.
            self._processes[name] = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait_for(self, name: str, words: str) -> None:
        deadline = time.monotonic() + START_WITHIN
        while words not in self.log(name).read_text(errors="replace"):
            self.check()
            if time.monotonic() > deadline:
                raise StageError(f"The {name} did not say {words!r} within {START_WITHIN:.0f} s.")
            time.sleep(0.1)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def tail(self, lines: int = 15) -> str:
        """The ends of both logs."""
        return "\n".join(
            "\n".join([f"--- {name}", *self.log(name).read_text(errors="replace").splitlines()[-lines:]])
            for name in self._processes
        )

    def check(self) -> None:
        """Both are alive, or it is an error."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise StageError(f"The {name} has ended with {process.returncode}.")

    def stop(self, patience: float = STOP_WITHIN) -> dict[str, int]:
        """End both as a deploy does, by force where that takes longer than `patience`. Returns their exit codes."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + patience
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            # Whoever is left of its group: the process itself, or children that outlived it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return {name: process.returncode for name, process in self._processes.items()}


def _clear_servers() -> None:
    """Drop the tables and the queue that the demo had on servers; what was in its folder goes with the folder."""
    from example.shop import app, lifecycle

    if not lifecycle.config.embedded:
        tables = make_tables(lifecycle.config.table_prefix).metadata
        Table(version_table(lifecycle.store.database), tables)
        tables.drop_all(lifecycle.store.database.engine)
    lifecycle.close()
    if "BROKER_URL" in os.environ:
        with app.connection_for_write() as connection:
            queue = app.amqp.queues[app.conf.task_default_queue](connection.default_channel)
            # kombu's Redis transport deletes only what it has declared.
            queue.declare()
            queue.delete()
            queue.exchange.delete()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Somebody who presses Ctrl-C twice wants it to end, not half cleaned up."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
