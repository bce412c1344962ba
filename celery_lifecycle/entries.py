"""Runs the ordinary entries of `beat_schedule` in one beat: each occurrence once, however many beats there are."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Protocol

from celery.beat import ScheduleEntry, Scheduler
from celery.result import denied_join_result
from kombu.exceptions import OperationalError

from celery_lifecycle import events, validate
from celery_lifecycle.errors import LifecycleError, NameInvalid
from celery_lifecycle.store import Store
from celery_lifecycle.store.entries import EntryRun
from celery_lifecycle.timing.instants import from_millis, to_millis

CONNECT_TIMEOUT = 1.0
LOOK_AGAIN = 0.2
BACK_OFF = (0.1, 5.0)
REPORT_AGAIN = 60.0


class BrokerAway(Exception):
    """The broker takes no messages: what is due waits."""


class Stopping(Protocol):
    """What tells that beat is to stop."""

    def is_set(self) -> bool: ...


class Entries:
    """The entries of one scheduler, whose `data` holds them by name, as Celery's own schedulers have it.

    One whose next time can't be told, or which can't be sent, is reported, tried again later, and stops no other.
    """

    def __init__(self, scheduler: Scheduler, store: Store, beat: str) -> None:
        self._scheduler = scheduler
        self._app = scheduler.app
        self._store = store.entries
        self._app_name = _key(str(self._app.main or "celery"))
        self._beat = beat
        self._configured: dict[str, Any] = {}
        self._report_at: dict[str, float] = {}
        self._mine: dict[str, ScheduleEntry] = {}
        self._runs: dict[str, EntryRun] = {}
        self._published: dict[str, int] = {}
        self._look_at: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._broker_failures = 0
        self._broker_at = 0.0
        self._connection: Any = None
        self._producer: Any = None
        self._pid = 0

    def set_up(self) -> None:
        """Take over the last runs from the database. Entries that are new begin now; those that are gone are forgotten."""
        self._merge(starting=True)
        self._scheduler.install_default_entries(self._scheduler.data)
        known = self._store.all(self._app_name)
        keys = {_key(name) for name in self._scheduler.data}
        for key in known.keys() - keys:
            self._store.forget(self._app_name, key)
        for name in list(self._scheduler.data):
            self._learn(name, known.get(_key(name)))

    def run(self, stopping: Stopping) -> float:
        """Run what is due; returns the seconds until something may be due again."""
        self._merge()
        wait = 3600.0
        for name in list(self._scheduler.data):
            if stopping.is_set():
                break
            wait = min(wait, self._run_one(name))
        return wait

    def _merge(self, starting: bool = False) -> None:
        """Take what has changed in `app.conf.beat_schedule`; entries that were added to the scheduler itself stay.

        What no entry can be made of stops beat when it starts, with its reason. While beat runs it is tried again later; an
        entry that stood in its place stays, and the others are taken.
        """
        try:
            wanted = {str(name): fields for name, fields in self._app.conf.beat_schedule.items()}
        except Exception as error:  # whatever somebody put there
            if starting:
                raise
            self._not_made("(beat_schedule)", error)
            return
        if wanted == self._configured:
            self._report_at.clear()
            return
        data = self._scheduler.data
        for name in self._configured.keys() - wanted.keys():
            data.pop(name, None)
            self._store.forget(self._app_name, _key(name))
            self._runs.pop(name, None)
            del self._configured[name]
        for name, fields in wanted.items():
            if name in self._configured and self._configured[name] == fields:
                continue
            try:
                data[name] = self._scheduler.Entry(**{**dict(fields), "name": name, "app": self._app})
            except Exception as error:  # whatever somebody put there
                if starting:
                    raise
                self._not_made(name, error)
            else:
                self._configured[name] = fields
                self._report_at.pop(name, None)

    def _not_made(self, name: str, error: Exception) -> None:
        """Report what no entry can be made of: at first, and now and then while it stays so."""
        now = time.monotonic()
        if now >= self._report_at.get(name, 0.0):
            self._report_at[name] = now + REPORT_AGAIN
            events.entry_failed(name, error)

    def _learn(self, name: str, known: EntryRun | None) -> None:
        entry = self._scheduler.data[name]
        if known is None:
            begins = EntryRun(_millis(entry, entry.last_run_at), entry.total_run_count)
            known = self._store.add(self._app_name, _key(name), self._runs.get(name, begins))
        self._adopt(name, entry, known)

    def _adopt(self, name: str, entry: ScheduleEntry, run: EntryRun) -> None:
        self._runs[name] = run
        self._mine[name] = self._scheduler.data[name] = _as_of(entry, run, self._app.timezone)
        self._look_at.pop(name, None)

    def _run_one(self, name: str) -> float:
        """Run an entry if it is due; returns the seconds until it is to be looked at again."""
        now = time.monotonic()
        is_mine = self._scheduler.data[name] is self._mine.get(name)
        look_at = self._look_at.get(name, 0.0)
        if is_mine and look_at > now:
            return look_at - now
        try:
            if not is_mine:
                self._learn(name, self._store.get(self._app_name, _key(name)))
            pause = self._run_due(name)
            self._failures.pop(name, None)
        except BrokerAway as error:
            pause = self._broker_at - time.monotonic()
            if self._broker_failures == 1 or self._broker_failures % 12 == 0:
                events.entry_waits(name, error.__cause__ or error)
        except LifecycleError:
            raise
        except Exception as error:  # whatever an entry's schedule, arguments or routing throw
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            pause = _back_off(failures)
            if failures == 1 or failures % 12 == 0:
                events.entry_failed(name, error)
        self._look_at[name] = time.monotonic() + pause
        return pause

    def _run_due(self, name: str) -> float:
        if name in self._published:
            return self._record(name)
        entry = self._scheduler.data[name]
        is_due, following = self._scheduler.is_due(entry)
        if not is_due:
            # Looked at again before that: another beat may have run it, clocks may have been set.
            longest = float(self._scheduler.max_interval)
            return min(following, longest) if isinstance(following, (int, float)) and following > 0 else longest
        if self._broker_at > time.monotonic():
            return self._broker_at - time.monotonic()
        ran_ms, seen = _millis(entry, entry.default_now()), self._runs[name]
        if not self._store.claim(self._app_name, _key(name), seen, self._beat):
            return self._catch_up(name)
        try:
            self._publish(entry)
        except Exception:
            self._release(name)
            raise
        self._published[name] = ran_ms
        return self._record(name)

    def _catch_up(self, name: str) -> float:
        """Another beat was faster, or is just at it."""
        seen = self._runs[name]
        fresh = self._store.get(self._app_name, _key(name))
        self._learn(name, fresh)
        return LOOK_AGAIN if fresh == seen else 0.0

    def _record(self, name: str) -> float:
        """Record what was published, for as long as the database does not answer; it is not published again meanwhile."""
        seen, ran_ms = self._runs[name], self._published[name]
        if self._store.record(self._app_name, _key(name), seen, ran_ms):
            known: EntryRun | None = EntryRun(ran_ms, seen.total + 1)
        else:
            known = self._store.get(self._app_name, _key(name))
        del self._published[name]
        if known is None:
            self._runs[name] = EntryRun(ran_ms, seen.total + 1)
        self._learn(name, known)
        return 0.0

    def _release(self, name: str) -> None:
        try:
            self._store.release(self._app_name, _key(name), self._beat)
        except LifecycleError as error:
            events.database_failed(f"The claim of beat entry {name!r} ends by itself", error)

    # --- the broker

    def _publish(self, entry: ScheduleEntry) -> None:
        # Not retried in there, where it would block: the occurrence stays due. Headers are copied, Celery adds to them.
        options = {"retry": False, **entry.options, "headers": dict(entry.options.get("headers") or {})}
        producer = self._ready_producer()
        away = (OSError, OperationalError, *self._connection.connection_errors, *self._connection.channel_errors)
        events.entry_due(entry.name, entry.task)
        try:
            copied = type(entry)(**{**dict(entry), "options": options})
            # Nobody waits for results here. Backends would prepare for it: that blocks while the broker is away (rpc), and
            # subscribes to each task for ever (redis).
            with denied_join_result():
                self._scheduler.apply_async(copied, producer=producer, advance=False)
        except Exception as error:
            cause = error.__cause__ or error.__context__ or error
            self._drop_connection()
            if isinstance(cause, away):
                raise self._away() from cause
            raise
        self._broker_failures = 0

    def _ready_producer(self) -> Any:
        """A producer whose connection never blocks for long, and is made again after a failure or a fork."""
        if self._producer is None or self._pid != os.getpid():
            self._pid = os.getpid()
            try:
                connection = self._app.connection_for_write(connect_timeout=CONNECT_TIMEOUT)
                connection.ensure_connection(max_retries=1, timeout=CONNECT_TIMEOUT, interval_start=0)
            except Exception as error:  # the broker's client raises whatever its transport does
                raise self._away() from error
            self._connection = connection
            self._producer = self._scheduler.Producer(connection, auto_declare=False)
        return self._producer

    def _away(self) -> BrokerAway:
        self._broker_failures += 1
        self._broker_at = time.monotonic() + _back_off(self._broker_failures)
        return BrokerAway()

    def _drop_connection(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            try:
                connection.release()
            except Exception as error:  # a broken connection may break once more while it is closed
                events.close_failed(error)


def _back_off(failures: int) -> float:
    first, longest = BACK_OFF
    return float(min(first * 2 ** min(failures - 1, 10), longest))


def _key(name: object) -> str:
    """The name under which an entry is stored: its own, or what stands for one that no column would take."""
    name = str(name)
    try:
        return validate.name(name)
    except NameInvalid:
        return "=" + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:40]


def _millis(entry: ScheduleEntry, at: datetime) -> int:
    """A time as the entry's schedule has it: a naive one is UTC, as Celery has it."""
    if at.tzinfo is None:
        at = at.replace(tzinfo=timezone.utc)
    return to_millis(at)


def _as_of(entry: ScheduleEntry, run: EntryRun, zone: Any) -> ScheduleEntry:
    """The entry with its last run, aware or naive as its schedule's own clock is."""
    last = from_millis(run.last_run_ms)
    is_naive = entry.default_now().tzinfo is None
    last = last.replace(tzinfo=None) if is_naive else last.astimezone(zone)
    fields: Mapping[str, Any] = {**dict(entry), "last_run_at": last, "total_run_count": run.total}
    return type(entry)(**fields)
