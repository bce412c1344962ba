"""The beat scheduler: claims what is due, sends it, sleeps until the next alarm; ordinary entries run beside it."""

from __future__ import annotations

import gc
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from celery.beat import Scheduler
from kombu.exceptions import KombuError

from celery_lifecycle import events, holds
from celery_lifecycle.beside import beside
from celery_lifecycle.calls import is_call, tell_from_outside
from celery_lifecycle.entries import Entries
from celery_lifecycle.errors import LifecycleError, LockTimeout
from celery_lifecycle.lifecycle import Lifecycle, lifecycle_of
from celery_lifecycle.model import Phase
from celery_lifecycle.outcome import tell
from celery_lifecycle.store.claims import Heads
from celery_lifecycle.store.database import url_of

LOOK_AT_HOLDS_EVERY = 10.0
HOUSEKEEPING_EVERY = 60.0
TELL_EVERY = 1.0
ROUNDS_FOR = 1.0
# What is due, but held by somebody's open transaction, is looked for again after so long: not at once, for ever.
LOCKED_FOR = 0.02
# How long one queue is served before the others have their turn, and how long it is left alone when its messages can't be sent.
TURN_FOR = 1.0
HELD_FOR = 0.2
BACK_OFF = (0.1, 1.0)


class Stop:
    """What `close` sets. A signal handler may call it while this very thread waits, which an `Event`'s lock does not allow."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, seconds: float) -> None:
        """Sleep, unless it is set already. The signals that end beat end the sleep, by the exception that they raise."""
        if not self._set:
            time.sleep(seconds)


class LifecycleScheduler(Scheduler):
    """Used as `celery beat -S lifecycle`. Any number of beats may run on one database.

    `tick` catches everything that the database or the broker can throw, waits inside, and returns 0; `close` may be called
    twice and in mid-tick. The instance that Celery makes for its banner (`lazy=True`) touches nothing.
    """

    max_interval = 5

    def __init__(
        self, app: Any, schedule: Any = None, max_interval: Any = None, lazy: bool = False, **kwargs: Any
    ) -> None:
        self._lifecycle: Lifecycle | None = None
        self._id = uuid.uuid4().hex
        self._stopping = Stop()
        self._failures = 0
        self._held_until: dict[str, float] = {}
        self._locked: set[str] = set()
        self._told = 0.0
        self._looked = 0.0
        self._doubts: dict[tuple[str, str], int] = {}
        self._kept_house = 0.0
        self._entries: Entries | None = None
        self._ticked = False
        self._house: Future[Any] | None = None
        self._telling: list[Future[None]] = []
        super().__init__(app, schedule, max_interval, lazy=lazy, **kwargs)

    @property
    def info(self) -> str:
        config = self.lifecycle_config()
        return f"    . lifecycle -> {config}"

    def lifecycle_config(self) -> str:
        """What the banner shows; read from settings, nothing is opened."""
        return url_of(lifecycle_of(self.app).config).render_as_string(hide_password=True)

    def setup_schedule(self) -> None:
        """Verify the schema and install the ordinary entries; an error here stops beat with its reason."""
        self._lifecycle = lifecycle_of(self.app)
        self._lifecycle.verify()
        _ = self._lifecycle.database_id
        self._entries = Entries(self, self._lifecycle.store, self._id)
        self._entries.set_up()

    # --- one tick

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Do what is due, then wait until the next alarm, at most one poll interval."""
        assert self._lifecycle is not None
        assert self._entries is not None
        if not self._ticked:
            self._ticked = True
            # What is loaded by now stays for as long as beat runs: the collector need not go through it again and again.
            gc.collect()
            gc.freeze()
        poll = self._lifecycle.config.poll_interval
        try:
            wait = min(self._dispatch_due(), self._entries.run(self._stopping), poll)
            self._keep_house()
            self._tell()
            if self._failures:
                events.database_back()
            self._failures = 0
        except LifecycleError as error:
            wait = self._failed("Beat could not do its work", error)
        except (KombuError, OSError) as error:
            wait = self._failed("Beat could not reach the broker", error)
        except Exception as error:  # an exception out of tick() would end beat
            wait = self._failed("Beat met an unexpected error", error)
        self._stopping.wait(max(wait, 0.0))
        return 0.0

    def _failed(self, what: str, error: Exception) -> float:
        self._failures += 1
        if isinstance(error, (LifecycleError, KombuError, OSError)):
            if self._failures == 1 or self._failures % 30 == 0:
                events.database_failed(what, error)
        else:
            events.unexpected(what, error)
        first, longest = BACK_OFF
        return float(min(first * 2 ** min(self._failures, 10), longest))

    # --- objects

    def _dispatch_due(self) -> float:
        """Claim and send, queue by queue, until nothing is due; returns the seconds to the next alarm."""
        assert self._lifecycle is not None
        until = time.monotonic() + ROUNDS_FOR
        while True:
            looked = time.monotonic()
            heads = self._lifecycle.store.claims.heads()
            busy = False
            for one in heads:
                busy |= self._dispatch_queue(one)
            if not busy or time.monotonic() > until or self._stopping.is_set():
                return min((self._next_wake(one, looked) for one in heads), default=3600.0)

    def _next_wake(self, heads: Heads, looked: float) -> float:
        """The seconds until a queue's next alarm; `looked` is when its heads were read."""
        assert self._lifecycle is not None
        room = self._lifecycle.window.room(heads.queue) > 0
        alarms = [heads.idle if room else None, heads.sent, heads.open]
        now = time.monotonic()
        held = max(0.0, self._held_until.get(heads.queue, 0.0) - now)
        waits = [max((alarm - heads.now) / 1000 - (now - looked), held) for alarm in alarms if alarm is not None]
        soonest = min(waits, default=3600.0)
        return max(soonest, LOCKED_FOR) if heads.queue in self._locked and soonest <= 0 else soonest

    def _dispatch_queue(self, heads: Heads) -> bool:
        """What is due in each phase of a queue. Returns whether there may be more that is due."""
        queue = heads.queue
        if self._is_held(queue):
            return False
        more = False
        self._locked.discard(queue)
        for phase, alarm in ((Phase.OPEN, heads.open), (Phase.SENT, heads.sent), (Phase.IDLE, heads.idle)):
            if alarm is not None and alarm <= heads.now:
                more |= self._dispatch_phase(queue, phase)
                if self._is_held(queue):
                    return False
        return more

    def _dispatch_phase(self, queue: str, phase: Phase) -> bool:
        """Claim and send in batches for a turn, each claimed while the one before it is sent. Returns whether there may be more.

        What is claimed is sent in any case, or released: after a failure nothing more is claimed.
        """
        assert self._lifecycle is not None
        database, claim = self._lifecycle.store.database, self._lifecycle.store.claims.claim
        until = time.monotonic() + TURN_FOR
        limit = self._limit(queue, phase)
        if limit <= 0:
            return False
        claimed = claim(queue, phase, limit)
        if claimed.rows == 0:
            self._locked.add(queue)
        while True:
            more = claimed.rows >= limit
            limit = self._limit(queue, phase, unsent=len(claimed.shipments))
            # What is lost is due until it has been looked into: it would be claimed again.
            goes_on = more and limit > 0 and phase is not Phase.OPEN and not self._is_held(queue)
            goes_on = goes_on and time.monotonic() < until and not self._stopping.is_set()
            following = database.beside(claim, queue, phase, limit) if goes_on else None
            sent = self._lifecycle.send(claimed.shipments) if claimed.shipments else 0
            for object_id in claimed.lost:
                self._rescue(object_id)
            if phase is Phase.IDLE:
                self._lifecycle.window.take(queue, sent)
            if sent < len(claimed.shipments):
                self._held_until[queue] = time.monotonic() + HELD_FOR
            if following is None:
                return more
            claimed = following.result()

    def _is_held(self, queue: str) -> bool:
        return self._held_until.get(queue, 0.0) > time.monotonic()

    def _limit(self, queue: str, phase: Phase, unsent: int = 0) -> int:
        """How many objects to claim next: new chains need a place in the window."""
        assert self._lifecycle is not None
        batch = self._lifecycle.config.claim_batch
        return min(batch, self._lifecycle.window.room(queue) - unsent) if phase is Phase.IDLE else batch

    def _rescue(self, object_id: int) -> None:
        assert self._lifecycle is not None
        try:
            ended = self._lifecycle.store.ends.rescue(object_id)
        except LockTimeout as error:  # a caller holds the row: the others are looked into all the same
            events.database_failed("A lost run could not be looked into yet", error)
            return
        if ended is not None:
            tell(ended)
            if any(is_call(job) for job in ended.dead):  # no alarm waits for a result backend
                self._telling = [one for one in self._telling if not one.done()]
                self._telling.append(beside(tell_from_outside, self.app, ended.dead, ended.why))

    # --- upkeep

    def _keep_house(self) -> None:
        """Now and then, beside the ticks: rows that callers hold are waited for, and no alarm is late for that."""
        assert self._lifecycle is not None
        if self._house is not None:
            if not self._house.done():
                return
            house, self._house = self._house, None
            house.result()
        now = time.monotonic()
        tasks: list[Callable[[], Any]] = []
        if now - self._looked > min(LOOK_AT_HOLDS_EVERY, self._lifecycle.config.keep_alive / 3):
            tasks.append(self._look_at_holds)
        if now - self._kept_house > HOUSEKEEPING_EVERY:
            self._kept_house = now
            tasks += [self._lifecycle.store.beats.forget_old, self._lifecycle.store.dead.purge_old]
        if tasks:
            self._house = self._lifecycle.store.database.beside(lambda: [task() for task in tasks])

    def _look_at_holds(self) -> None:
        assert self._lifecycle is not None
        try:
            holds.look(self._lifecycle, self._doubts)
        finally:  # a beat that stood still before its look, with all others, must not take the next one at once
            self._looked = time.monotonic()

    def _tell(self) -> None:
        """Record that this beat ticks, for `lifecycle health`."""
        assert self._lifecycle is not None
        if time.monotonic() - self._told > TELL_EVERY:
            self._told = time.monotonic()
            facts = {"pid": os.getpid(), "host": os.uname().nodename, **self._lifecycle.whereabouts}
            self._lifecycle.store.beats.ticked(self._id, facts)

    # --- what the service asks for

    def should_sync(self) -> bool:
        return False

    def sync(self) -> None:
        """Nothing is kept in memory that is not in the database."""

    def close(self) -> None:
        self._stopping.set()
