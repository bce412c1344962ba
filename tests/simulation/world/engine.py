"""The simulated machine room: one clock, one queue of events, processes made of greenlets, all decided by one seed."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

EPOCH = 1_700_000_000_000


class Killed(BaseException):
    """The process that this code runs in has just died: nothing of it may go on."""


class Process:
    """One operating-system process: it lives, stalls and dies as a whole.

    Attributes:
        role: `beat`, `worker` (a worker's parent), `child` or `client`.
        offset: how far (ms) its own clock is ahead of the database's.
        pid: as its own machine or container counts; others have processes of the same number.
        lifecycle: its own `Lifecycle`.
        life: for workers and their children, the worker's `_Life`.
        holding: what it holds, and renews in a thread of its own.
    """

    def __init__(
        self, world: World, role: str, name: str, parent: Process | None = None, pid: int | None = None
    ) -> None:
        self.world = world
        self.role = role
        self.name = name
        self.parent = parent
        self.pid = world.next_pid() if pid is None else pid
        self.alive = True
        self.stalled_until = 0
        self.cut_until = 0
        self.offset = world.draw(f"offset:{name}", 20_000) - 10_000
        self.lifecycle: Any = parent.lifecycle if parent is not None else None
        self.life: Any = parent.life if parent is not None else None
        self.holding: Any = None
        self.actors: list[Actor] = []
        self.on_death: Callable[[], None] | None = None
        world.processes.append(self)

    @property
    def is_stalled(self) -> bool:
        return self.stalled_until > self.world.now

    def kill(self) -> None:
        """SIGKILL: no code of it runs any more."""
        if not self.alive:
            return
        self.alive = False
        self.world.say(f"{self.name} dies")
        for child in self.world.processes:
            if child.parent is self:
                child.kill()
        for actor in self.actors:
            actor.bury()
        self.actors.clear()
        if self.on_death is not None:
            self.on_death()

    def start(self, body: Callable[[], None], after: int = 0) -> Actor:
        actor = Actor(self, body)
        self.actors.append(actor)
        self.world.at(self.world.now + after, actor)
        return actor


class Actor:
    """One thread of control of a process."""

    __slots__ = ("epoch", "glet", "is_late", "process")

    def __init__(self, process: Process, body: Callable[[], None]) -> None:
        self.process = process
        self.epoch = 0
        self.is_late = False
        self.glet = greenlet(lambda: self._run(body), parent=process.world.hub)

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Killed:
            pass
        except Exception as error:
            self.process.world.broken = self.process.world.broken or error
        if self in self.process.actors:
            self.process.actors.remove(self)

    def bury(self) -> None:
        """Unwind it. Code that is unwound finds its process dead wherever it tries to do anything."""
        self.epoch += 1
        if self.glet and self.glet is not getcurrent():
            self.process.world.corpses.append(self)


class World:
    """Everything that is simulated. One seed, one plan, one story."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.seed = seed
        self.salt = str(seed)
        self.now = 0
        self.hub = getcurrent()
        self.current: Actor | None = None
        self.processes: list[Process] = []
        self.corpses: list[Actor] = []
        self.broken: Exception | None = None
        self.trace: list[str] | None = [] if trace else None
        self.on_switch: Callable[[Process | None], None] = lambda process: None
        self._events: list[tuple[int, int, Any, int]] = []
        self._serial = 0
        self._pids = 1000
        self._draws: dict[str, int] = {}

    # --- chance: each draw depends on the seed, on what it is for and on how often that was drawn, on nothing else

    def draw(self, what: str, below: int) -> int:
        count = self._draws.get(what, 0)
        self._draws[what] = count + 1
        return zlib.crc32(f"{self.salt}:{what}:{count}".encode()) * 2654435761 % 4294967311 % below

    def chance(self, what: str) -> float:
        return self.draw(what, 1 << 24) / (1 << 24)

    def digits(self, what: str, count: int) -> str:
        text = "".join(f"{self.draw(what, 1 << 31):08x}" for _ in range((count + 7) // 8))
        return text[:count]

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    # --- events

    def at(self, when: int, what: Any) -> None:
        """Call a function, or resume an actor, at a time."""
        self._serial += 1
        epoch = what.epoch if isinstance(what, Actor) else 0
        # What happens in the same millisecond happens in an order of the seed's own.
        order = zlib.crc32(b"%d:%d" % (self._serial, self.seed)) & 0xFFFF
        heapq.heappush(self._events, (max(when, self.now), order << 32 | self._serial, what, epoch))

    def run(self, until: int, done: Callable[[], bool] | None = None) -> None:
        """Let time pass until `until`, or until `done` says so between two events."""
        while self._events and self._events[0][0] <= until:
            if done is not None and done():
                return
            when, _, what, epoch = heapq.heappop(self._events)
            self.now = max(self.now, when)
            if isinstance(what, Actor):
                self._resume(what, epoch)
            else:
                what()
            if self.corpses:
                self._bury()
            if self.broken is not None:
                raise self.broken
        if not self._events or self._events[0][0] > until:
            self.now = max(self.now, until)

    def _resume(self, actor: Actor, epoch: int) -> None:
        process = actor.process
        if actor.epoch != epoch or not process.alive:
            return
        if process.stalled_until > self.now:
            actor.is_late = True
            self.at(process.stalled_until, actor)
            return
        actor.is_late = False
        actor.epoch += 1
        self.current = actor
        self.on_switch(process)
        actor.glet.switch()
        self.current = None
        self.on_switch(None)

    def _bury(self) -> None:
        while self.corpses:
            self.current = self.corpses.pop()
            if not self.current.glet.dead:
                self.current.glet.throw(Killed)
            self.current = None

    def end(self) -> None:
        """Unwind whatever still waits."""
        for process in self.processes:
            process.on_death = None
            process.alive = False
            for actor in process.actors:
                actor.bury()
        self._bury()

    # --- what an actor does

    @property
    def process(self) -> Process | None:
        return self.current.process if self.current is not None else None

    def sleep(self, ms: int) -> None:
        """Let others run for a while. The end of the process is the end of the sleep."""
        actor = self.current
        if actor is None:
            return
        if not actor.process.alive:
            raise Killed
        self.at(self.now + ms, actor)
        self.hub.switch()
        if not actor.process.alive:
            raise Killed

    def say(self, text: str) -> None:
        if self.trace is not None:
            who = f"{self.current.process.name}: " if self.current is not None else ""
            self.trace.append(f"{self.now / 1000:9.3f}  {who}{text}")


class Event:
    """A `threading.Event` whose waiting is simulated time."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self._set = False
        self._waiting: Actor | None = None
        self._missed: int | None = None

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self.wake()

    def clear(self) -> None:
        self._set = False

    def wake(self, after: int = 0) -> None:
        """End a wait that is under way, at the latest after so many milliseconds."""
        if self._waiting is not None:
            self.world.at(self.world.now + after, self._waiting)
        else:
            self._missed = after

    def wait(self, timeout: float) -> bool:
        if not self._set:
            ms = max(0, round(timeout * 1000))
            if self._missed is not None:
                ms, self._missed = min(ms, self._missed), None
            self._waiting = self.world.current
            self.world.sleep(ms)
            self._waiting = None
        return self._set


class Clock:
    """The `time` module as each process sees it: its own clock is not the database's, nor that of its neighbours."""

    def __init__(self, world: World) -> None:
        self.world = world

    def monotonic(self) -> float:
        return self.of(self.world.process)

    def of(self, process: Process | None) -> float:
        return (self.world.now + 1_000_000 + (process.offset if process else 0)) / 1000

    def time(self) -> float:
        return self.monotonic() + EPOCH / 1000

    def sleep(self, seconds: float) -> None:
        self.world.sleep(round(seconds * 1000))
