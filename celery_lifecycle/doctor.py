"""Checks a deployment without starting anything: what is wrong, why that matters, and what to do about it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from celery import Celery

from celery_lifecycle.config import Config
from celery_lifecycle.describe import span
from celery_lifecycle.errors import ConfigurationError, LifecycleError
from celery_lifecycle.lifecycle import Lifecycle
from celery_lifecycle.migrations import revision
from celery_lifecycle.model import Phase
from celery_lifecycle.store.database import Database
from celery_lifecycle.store.watch import Overview, Watch
from celery_lifecycle.task import LifecycleTask

ERROR: Final = "error"
WARNING: Final = "warning"
INFO: Final = "info"
OK: Final = "ok"

BROKER_TIMEOUT: Final = 5.0
INSPECT_TIMEOUT: Final = 1.0
CLOCK_TOLERANCE_MS: Final = 1000
ALIVE_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: `error` (it does not work), `warning` (it will hurt), `info` (good to know), `ok`.
        subject: what was looked at, in one or two words.
        what: what was found.
        why: why that matters; empty for `ok`.
        todo: what to do about it; empty for `ok`.
    """

    level: str
    subject: str
    what: str
    why: str = ""
    todo: str = ""


Findings = Iterator[Finding]


def examine(lifecycle: Lifecycle) -> list[Finding]:
    """All findings about a deployment, in the order in which they were looked for. Changes nothing, starts nothing."""
    app = lifecycle.app
    try:
        config = lifecycle.config
    except ConfigurationError as error:
        why = "Beat and workers refuse to start with it."
        return [Finding(ERROR, "settings", str(error), why, "Correct it in app.conf or in Lifecycle(…).")]
    found = [*_settings(config), *_celery_settings(app, config), *_tasks(app)]
    try:
        database = Database(replace(config, lock_timeout=min(config.lock_timeout, 2)), patience=10)
    except ConfigurationError as error:
        why = "Beat and workers refuse to start with it."
        found.append(Finding(ERROR, "database", str(error), why, "Correct lifecycle_database_url."))
        return [*found, *_broker(app, None)]
    try:
        watch = Watch(database)
        reached, findings = _database(database, watch)
        found += findings
        seen = watch.overview() if reached else None
        if seen is not None:
            found += [*_processes(watch, lifecycle), *_dead(seen)]
        found += _broker(app, seen)
    except LifecycleError as error:
        found.append(Finding(ERROR, "database", str(error), "Nothing can be stored or sent.", "See the message."))
    finally:
        database.close()
    return found


# --- settings


def _settings(config: Config) -> Findings:
    yield Finding(OK, "settings", "all lifecycle_* settings are known and allowed")
    if config.embedded:
        yield Finding(
            INFO, "settings", f"no lifecycle_database_url is set: the embedded default {config.url} is used",
            "All processes must run in this directory of this machine to see the same jobs.",
            "Set lifecycle_database_url to a PostgreSQL, MariaDB or MySQL database for anything but a trial.",
        )  # fmt: skip
    if config.strike_delay > config.strike_delay_max:
        yield Finding(
            WARNING, "settings", f"lifecycle_strike_delay ({config.strike_delay:g} s) is longer than"
            f" lifecycle_strike_delay_max ({config.strike_delay_max:g} s)",
            "Every strike then waits the same.", "Make strike_delay_max some times strike_delay.",
        )  # fmt: skip
    if config.poll_interval > 5:
        yield Finding(
            WARNING, "settings", f"lifecycle_poll_interval is {config.poll_interval:g} s",
            "A job that is stored nearer than that starts up to so much too late.", "Leave it at 0.2 s: a tick is cheap.",
        )  # fmt: skip
    if config.backup_alarm < 3:
        yield Finding(
            WARNING, "settings", f"lifecycle_backup_alarm is {config.backup_alarm:g} s",
            "A worker or database that pauses for that long has its runs ended and struck as lost.",
            "Use 10 s or more outside tests.",
        )  # fmt: skip


def _celery_settings(app: Celery, config: Config) -> Findings:
    conf = app.conf
    accepted = set(conf.accept_content or ())
    if accepted & {"json", "application/json"}:
        yield Finding(OK, "accept_content", "json is accepted")
    else:
        yield Finding(
            ERROR, "accept_content", f"json is not in accept_content ({sorted(accepted)})",
            "Every link of every chain is JSON: workers would refuse them all.", "Add 'json' to accept_content.",
        )  # fmt: skip
    if conf.task_always_eager:
        yield Finding(
            WARNING, "task_always_eager", "it is set", "Nothing is sent to workers; it is meant for tests.",
            "Unset it outside tests.",
        )  # fmt: skip
    if conf.worker_prefetch_multiplier != 1:
        yield Finding(
            INFO, "worker_prefetch_multiplier", f"it is {conf.worker_prefetch_multiplier}",
            "A worker reserves so many messages per process: a chain that it holds behind a long job waits, though another"
            " worker may be idle.", "Set it to 1 if jobs run for longer than about a second.",
        )  # fmt: skip
    if conf.task_acks_late:
        yield Finding(
            INFO, "task_acks_late", "it is set for all tasks",
            "Lifecycle tasks acknowledge early all the same, because the table replays them; other tasks do as set.",
            "Nothing to do.",
        )  # fmt: skip
    visibility = (conf.broker_transport_options or {}).get("visibility_timeout")
    if visibility is not None and visibility < config.backup_alarm:
        yield Finding(
            WARNING, "visibility_timeout", f"it is {visibility} s, shorter than lifecycle_backup_alarm"
            f" ({config.backup_alarm:g} s)",
            "Messages that wait in a worker are delivered twice; second copies end quietly, at the price of a query each.",
            "Leave it at its default of an hour: it is not needed for lifecycle jobs.",
        )  # fmt: skip
    if conf.result_backend:
        yield Finding(
            INFO, "result_backend", f"each link of a run stores a result there for {conf.result_expires}",
            "A busy deployment writes one result per job.",
            "Set task_ignore_result where nobody reads them, or a shorter result_expires.",
        )  # fmt: skip


# --- tasks


def _tasks(app: Celery) -> Findings:
    tasks = [task for _, task in sorted(app.tasks.items()) if isinstance(task, LifecycleTask)]
    if not tasks:
        yield Finding(
            WARNING, "tasks", "this process knows no lifecycle task",
            "Either none is defined, or the modules that define them are not imported by this app.",
            "Add them to `include`, or call app.autodiscover_tasks().",
        )  # fmt: skip
        return
    yield Finding(OK, "tasks", f"{len(tasks)} lifecycle tasks are known")
    for task in tasks:
        if task.rate_limit:
            yield Finding(
                ERROR, task.name, f"rate_limit is {task.rate_limit!r}",
                "Every duplicate of a message uses up its tokens, so that jobs wait for nothing.",
                "Remove it (also from task_annotations and task_default_rate_limit) and bound the rate by concurrency.",
            )  # fmt: skip
        late = [name for name in ("acks_late", "reject_on_worker_lost", "retry_on_worker_lost") if getattr(task, name)]
        if late:
            yield Finding(
                ERROR, task.name, f"{', '.join(late)} is overridden",
                "The broker then delivers again what the table replays already, and a job that kills its worker comes back"
                " without a limit.", "Remove the override: lifecycle jobs survive the loss of a worker by themselves.",
            )  # fmt: skip
    plain = [task.name for task in tasks if task.lifecycle_code is None]
    if plain:
        yield Finding(
            INFO, "apply_async", f"{', '.join(plain)}: apply_async and delay without eta or countdown are ordinary Celery"
            " calls", "They acknowledge early, so they run at most once: one whose worker dies is lost.",
            "Where that matters push a job, or give countdown=0.001.",
        )  # fmt: skip


# --- database


def _database(database: Database, watch: Watch) -> tuple[bool, list[Finding]]:
    where = database.url.render_as_string(hide_password=True)
    if database.is_sqlite and not os.path.exists(str(database.url.database)):
        why = "Beat and workers make an embedded database at their start; others need it made."
        todo = "celery -A <your app> lifecycle migrate"
        return False, [Finding(WARNING, "database", f"{where} is not there yet", why, todo)]
    try:
        version = watch.version()
    except LifecycleError as error:
        why = "Nothing can be stored, sent or run."
        return False, [Finding(ERROR, "database", str(error), why, "Check the URL, the server and the network.")]
    found = [Finding(OK, "database", f"{where} answers ({version.split(' on ')[0]})"), _clock(watch)]
    found += _server(database, watch, version)
    try:
        revision.verify(database)
    except LifecycleError as error:
        why = "Beat and workers refuse to start."
        found.append(Finding(ERROR, "schema", str(error), why, "celery -A <your app> lifecycle migrate"))
        return False, found
    found.append(Finding(OK, "schema", f"the tables are at revision {revision.HEAD}"))
    return True, found


def _clock(watch: Watch) -> Finding:
    before = time.time_ns() // 1_000_000
    theirs = watch.now()
    after = time.time_ns() // 1_000_000
    off = max(before - theirs, theirs - after, 0)
    if off <= CLOCK_TOLERANCE_MS:
        return Finding(OK, "clock", f"this machine and the database differ by less than {span(CLOCK_TOLERANCE_MS)}")
    return Finding(
        WARNING, "clock", f"this machine is {span(off)} {'ahead of' if before > theirs else 'behind'} the database",
        "Jobs go by the database's clock: `delay=` is right all the same, an `at=` computed from this machine's clock is"
        " not, nor are the times in its logs.", "Synchronise both with NTP.",
    )  # fmt: skip


def _server(database: Database, watch: Watch, version: str) -> list[Finding]:
    dialect = database.sql.dialect
    if dialect == "mysql":
        return _mysql(watch, version)
    return _postgresql(database, watch) if dialect == "postgresql" else []


def _mysql(watch: Watch, version: str) -> list[Finding]:
    numbers = tuple(int(part) for part in version.split("-")[0].split(".")[:2])
    if numbers < ((10, 6) if "MariaDB" in version else (8, 0)):
        why = "SKIP LOCKED is missing: two beats would wait for each other."
        return [
            Finding(ERROR, "database", f"version {version} is too old", why, "Use MariaDB 10.6, MySQL 8.0 or newer.")
        ]
    wrong = sorted(name for name, engine in watch.engines().items() if engine.lower() != "innodb")
    if wrong:
        return [
            Finding(
                ERROR, "engine", f"not InnoDB: {', '.join(wrong)}",
                "Without row locks and transactions the protocol does not hold.", "ALTER TABLE … ENGINE=InnoDB",
            )
        ]  # fmt: skip
    return [Finding(OK, "engine", "all tables are InnoDB")]


def _postgresql(database: Database, watch: Watch) -> list[Finding]:
    seen = watch.backends(5)
    set_to = f"{round(database.config.lock_timeout * 1000)}ms"
    lost = [timeout for _, timeout in seen if timeout not in (set_to, f"{database.config.lock_timeout:g}s")]
    if len({pid for pid, _ in seen}) == 1 and not lost:
        return []
    return [
        Finding(
            WARNING, "pooler", "server connections change between transactions: a pooler like PgBouncer in transaction mode",
            "Settings of a session (lock_timeout) get lost, and prepared statements need PgBouncer 1.21 or newer with"
            " max_prepared_statements.",
            "Point lifecycle_database_url at PostgreSQL itself or at a pool in session mode, or set lock_timeout for the"
            " role and add ?prepare_threshold=… to the URL.",
        )
    ]  # fmt: skip


def _processes(watch: Watch, lifecycle: Lifecycle) -> Findings:
    now, beats = watch.beats()
    _, workers = watch.workers()
    for name, what, found, start in (
        ("beats", "beat ticks", beats, "celery -A <your app> beat -S lifecycle"),
        ("workers", "worker renews its leases", workers, "celery -A <your app> worker"),
    ):
        alive = [one for one in found if now - one["seen"] <= ALIVE_MS]
        if not alive:
            why = "Nothing is sent." if name == "beats" else "Nothing is run."
            yield Finding(WARNING, name, f"no {what} on this database", why, f"Start: {start}")
            continue
        yield Finding(OK, name, f"{len(alive)} alive")
        yield from _strangers(name, alive, lifecycle.whereabouts)


def _strangers(name: str, alive: list[dict[str, Any]], ours: dict[str, str]) -> Findings:
    """Beats and workers of another app or broker that share this database."""
    for key in ("broker", "app"):
        others = sorted({one[key] for one in alive if one.get(key) and one[key] != ours[key]})
        if others:
            yield Finding(
                ERROR if key == "broker" else WARNING, name,
                f"some use another {key} than this app ({ours[key]}): {', '.join(others)}",
                "Two deployments on one job database send each other's jobs to where nobody knows them.",
                "Give each deployment a database or a lifecycle_table_prefix of its own. (If it is one broker under two"
                " names, nothing is wrong.)",
            )  # fmt: skip


def _dead(seen: Overview) -> Findings:
    sealed = seen.dead.get("sealed", 0)
    if sealed:
        yield Finding(
            WARNING, "dead jobs", f"{sealed} are sealed", "They killed their workers again and again and stay away.",
            "celery -A <your app> lifecycle dead list --reason sealed",
        )  # fmt: skip


# --- broker


def within(seconds: float, work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What `work` returns or raises, if it does within a time; else a `TimeoutError`. A broker's client may never give up."""
    answer: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            answer.append((work(), None))
        except Exception as error:  # handed to the caller
            answer.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else (None, TimeoutError(f"no answer within {seconds:g} s"))


def _broker(app: Celery, seen: Overview | None) -> Findings:
    def connect() -> str:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=BROKER_TIMEOUT)
            return str(connection.as_uri())

    uri, error = within(BROKER_TIMEOUT + 1, connect)
    if error is not None:
        yield Finding(
            ERROR, "broker", f"{app.connection_for_write().as_uri()} could not be reached: {error}",
            "Nothing can be sent; jobs wait in the table meanwhile.", "Check broker_url, the server and the network.",
        )  # fmt: skip
        return
    yield Finding(OK, "broker", f"{uri} answers")
    queues, error = within(INSPECT_TIMEOUT + BROKER_TIMEOUT, app.control.inspect(timeout=INSPECT_TIMEOUT).active_queues)
    if error is not None or not queues:
        yield Finding(
            INFO, "queues", f"no worker has answered `inspect active_queues` ({error or 'none runs'})",
            "Whether every queue has a consumer is not known.", "Run doctor again while the workers run.",
        )  # fmt: skip
        return
    consumed = {queue["name"] for of_worker in queues.values() for queue in of_worker}
    alarms = {} if seen is None else {one.queue: 0 for one in seen.alarms}
    for one in seen.alarms if seen is not None else ():
        overdue = one.phase is not Phase.OPEN and seen is not None and one.earliest <= seen.now
        alarms[one.queue] += one.count if overdue or one.phase is Phase.SENT else 0
    for queue, waiting in sorted(alarms.items()):
        if queue in consumed:
            continue
        told = f", and {waiting} objects wait for one" if waiting else ""
        yield Finding(
            ERROR if waiting else WARNING, "queues", f"queue {queue!r} has no consumer{told}",
            "Its chains are sent and nobody takes them.", f"Start a worker with -Q {queue}, or route its tasks elsewhere.",
        )  # fmt: skip
    if set(alarms) <= consumed:
        yield Finding(OK, "queues", f"all {len(alarms)} queues with alarms have a consumer")
