"""Proves from the outside that a deployment dispatches: beat ticks, and nothing is overdue. It never hangs itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from celery_lifecycle.config import Config
from celery_lifecycle.describe import due_words, iso, seconds, span
from celery_lifecycle.errors import DatabaseUnavailable, LifecycleError, SchemaOutdated
from celery_lifecycle.store.database import Database
from celery_lifecycle.store.watch import COUNTED_TO, Due, Watch
from celery_lifecycle.timing.instants import delay_to_millis

PATIENCE: Final = 1.0
GIVES_UP_AFTER: Final = 6.0
MAX_LATENESS: Final = 60.0


@dataclass(slots=True)
class Health:
    """What was found. It is filled in as answers come, so that a hang leaves what was known before.

    Attributes:
        problems: why it is unhealthy, as sentences; empty: it is healthy.
        last_tick: when any beat ticked last, in milliseconds of the database's clock.
        beats: how many beats tick.
        oldest: the alarm that is overdue for longest, of whatever length; None: nothing is overdue.
        as_of: when `oldest` was true, if the table can't be asked now.
        overdue: alarms that are past for longer than is allowed, counted to 10,000 per queue.
        sent: chains on their way to workers.
    """

    now: int | None = None
    last_tick: int | None = None
    beats: int = 0
    oldest: Due | None = None
    as_of: int | None = None
    overdue: int = 0
    sent: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not self.problems

    @property
    def lateness(self) -> int:
        """How late the oldest overdue job is, in milliseconds; 0 if nothing is overdue."""
        if self.oldest is None or self.now is None:
            return 0
        return max(0, self.now - self.oldest.due_ms)

    @property
    def tick_age(self) -> int | None:
        """Milliseconds since the last tick of any beat."""
        return None if self.last_tick is None or self.now is None else max(0, self.now - self.last_tick)

    def to_json(self) -> dict[str, Any]:
        oldest = None
        if self.oldest is not None:
            due = self.oldest
            oldest = {
                "object": due.object, "job": due.job, "task": due.task, "queue": due.queue, "due_at": iso(due.due_ms),
                "known_as_of": iso(self.as_of),
            }  # fmt: skip
        return {
            "healthy": self.healthy, "problems": list(self.problems), "checked_at": iso(self.now),
            "last_tick": iso(self.last_tick), "last_tick_age": seconds(self.tick_age), "beats": self.beats,
            "oldest_overdue": oldest, "lateness": seconds(self.lateness), "overdue": self.overdue,
            "on_their_way": self.sent,
        }  # fmt: skip

    def lines(self) -> list[tuple[str, str]]:
        """The facts for people."""
        now = self.now or 0
        tick = "unknown" if self.last_tick is None else f"{iso(self.last_tick)} ({span(self.tick_age or 0)} ago)"
        told = "none" if self.oldest is None else due_words(self.oldest, now)
        if self.oldest is not None and self.as_of is not None:
            told += f", as far as known at {iso(self.as_of)}"
        return [
            ("last tick", tick),
            ("beats that tick", str(self.beats)),
            ("oldest overdue job", told),
            ("lateness", span(self.lateness)),
            ("overdue alarms", f"{self.overdue}{'+' if self.overdue >= COUNTED_TO else ''}"),
            ("chains on their way", str(self.sent)),
        ]


def default_max_tick_age(config: Config) -> float:
    """Seconds: two poll intervals, at least 5, because a beat tells of its ticks once a second and may be busy."""
    return max(2 * config.poll_interval, 5.0)


def measure(
    config: Config,
    max_tick_age: float | None = None,
    max_lateness: float | None = MAX_LATENESS,
    clock: Callable[[], int] | None = None,
) -> Health:
    """Look at a deployment for at most about `GIVES_UP_AFTER` seconds, whatever is locked or gone.

    Args:
        max_tick_age: seconds after which a beat counts as stopped; default `default_max_tick_age`.
        max_lateness: seconds that an alarm may be overdue; None: only beat's ticks are looked at.
        clock: milliseconds, for tests.
    """
    allowed = delay_to_millis(default_max_tick_age(config) if max_tick_age is None else max_tick_age)
    late = None if max_lateness is None else delay_to_millis(max_lateness)
    health = Health()
    # A thread of its own, because no driver gives up reliably on a server that has fallen silent.
    thread = threading.Thread(target=_look, args=(config, clock, health, allowed, late), daemon=True)
    thread.start()
    thread.join(GIVES_UP_AFTER)
    if thread.is_alive():
        found = replace(health, problems=list(health.problems))
        found.problems.append(
            f"The job database has not answered for {GIVES_UP_AFTER:g} s: is it hung, or the network?"
        )
        return found
    return health


def _look(config: Config, clock: Callable[[], int] | None, health: Health, allowed: int, late: int | None) -> None:
    try:
        database = Database(replace(config, lock_timeout=PATIENCE), clock, patience=PATIENCE)
        watch = Watch(database)
        try:
            beats = _look_at_ticks(watch, health, allowed)
            if late is not None:
                _look_at_alarms(watch, health, beats, late, config)
        finally:
            database.close()
    except LifecycleError as error:
        health.problems.append(str(error))
    except Exception as error:  # the edge of the thread: a probe must fail, not vanish
        health.problems.append(f"The check itself failed: {error!r}")


def _look_at_ticks(watch: Watch, health: Health, allowed: int) -> list[dict[str, Any]]:
    health.now, beats = watch.beats()
    now = health.now
    health.beats = sum(now - beat["seen"] <= allowed for beat in beats)
    if not beats:
        health.problems.append("No beat has ticked on this database within a day: start `celery beat -S lifecycle`.")
        return beats
    health.last_tick = int(beats[0]["seen"])
    if now - health.last_tick > allowed:
        health.problems.append(
            f"The last tick of any beat was {span(now - health.last_tick)} ago, at {iso(health.last_tick)}; at most"
            f" {span(allowed)} are allowed. Is a beat running, does its database answer it? Its log says."
        )
    return beats


def _look_at_alarms(watch: Watch, health: Health, beats: list[dict[str, Any]], late: int, config: Config) -> None:
    try:
        health.now, queues = watch.lateness(late)
    except SchemaOutdated:
        raise
    except DatabaseUnavailable as error:
        health.problems.append(
            f"The table of objects could not be read within {PATIENCE:g} s, so beat can't read it either. Look for a lock"
            f" on it. ({error})"
        )
        _look_elsewhere(watch, health, beats)
        return
    now = health.now
    health.sent = sum(queue.sent for queue in queues)
    health.overdue = sum(queue.late for queue in queues)
    due = min((queue.first for queue in queues), key=lambda due: due.due_ms, default=None)
    health.oldest = due if due is not None and due.due_ms <= now else None
    for queue in queues:
        if not queue.late:
            continue
        full = queue.sent >= config.dispatch_window
        why = f"Its dispatch window is full ({queue.sent} chains on their way): no worker takes them." if full else ""
        health.problems.append(
            f"Queue {queue.queue} has {queue.late}{'+' if queue.late >= COUNTED_TO else ''} alarms that are overdue for"
            f" more than {span(late)}, the oldest: {due_words(queue.first, now)}. {why}".rstrip()
        )


def _look_elsewhere(watch: Watch, health: Health, beats: list[dict[str, Any]]) -> None:
    """The oldest overdue job as far as it can be known without the table of objects."""
    now = health.now or 0
    told = Due.from_json(beats[0].get("next")) if beats else None
    if told is not None and told.due_ms <= now:
        health.oldest, health.as_of = told, health.last_tick
        return
    # Jobs of paused and of running objects are among these; only the locked table could tell them apart.
    try:
        health.oldest = watch.oldest_job()
    except DatabaseUnavailable as error:
        health.problems.append(f"The table of jobs could not be read within {PATIENCE:g} s either. ({error})")
        return
    if health.oldest is not None:
        health.as_of = now
