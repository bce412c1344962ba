"""Shows the demo: a live page in a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from celery_lifecycle.model import Job, ObjectState, Phase
from example.feed import Fact

PLAIN_WIDTH = 110
TABLE_EVERY = 6.0
STYLES = {
    "job_started": ("cyan", "starts again"),
    "job_completed": ("green", "is complete"),
    "job_rescheduled": ("blue", "is due again"),
    "job_yielded": ("blue", "yields"),
    "job_retrying": ("yellow", "failed, is tried again"),
    "job_failed": ("red", "is a dead job"),
    "job_discarded": ("dim", "a newer push won"),
    "job_put_back": ("yellow", "is put back"),
    "alarm_memory_limit_reset": ("bold red", "died"),
    "killed": ("bold magenta", "we kill its process"),
    "job_skipped": ("yellow", "outlasted its interval"),
    "said": ("white", ""),
}


@dataclass(frozen=True)
class Row:
    """One object as it stands in the database."""

    state: ObjectState
    jobs: list[Job]
    dead: int


class Screen:
    """A context manager; `show` is called a few times a second."""

    def __init__(self) -> None:
        self.console = Console()
        if not self.console.is_terminal:
            self.console = Console(width=PLAIN_WIDTH)
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self._began = time.time()
        self._events: deque[Text] = deque(maxlen=60)
        self._next_table = 0.0

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, markup=False)

    def begin(self) -> None:
        """Times are told from now on."""
        self._began = time.time()

    def show(self, rows: list[Row], facts: list[Fact], promises: list[tuple[bool, str]]) -> None:
        """The objects as they stand, what happened since the last call, and which promises are kept so far."""
        again = {(fact["object"], fact["job"]) for fact in facts if fact["fact"] == "job_rescheduled"}
        lines = [self._line(fact) for fact in facts if _is_news(fact, again)]
        self._events.extend(lines)
        if self._live is None:
            for line in lines:
                self.console.print(line, soft_wrap=True)
            if time.time() - self._began >= self._next_table:
                self._next_table += TABLE_EVERY
                self.console.print(self._objects(rows))
            return
        self._live.update(self._page(rows, promises), refresh=True)

    def summary(self, promises: list[tuple[bool, str, str]]) -> None:
        """What was promised, and what was seen."""
        table = Table(title="What was promised, and what was seen", title_justify="left", pad_edge=False, box=None)
        table.add_column("")
        table.add_column("promise", no_wrap=True)
        table.add_column("seen", style="dim")
        for kept, promise, seen in promises:
            table.add_row(_mark(kept), promise, Text(seen, no_wrap=True, overflow="ellipsis"))
        self.console.print(table)

    # --- parts

    def _page(self, rows: list[Row], promises: list[tuple[bool, str]]) -> Group:
        objects = self._objects(rows)
        kept = Table.grid(padding=(0, 1))
        for is_kept, promise in promises:
            kept.add_row(_mark(is_kept), Text(promise, style="" if is_kept else "dim"))
        room = self.console.height - len(rows) - 4 - 3
        parts: list[Panel | Table] = [objects]
        # What a small terminal has no room for is in the summary anyway.
        if room - len(promises) - 2 >= 5:
            room -= len(promises) + 2
            parts.append(Panel(kept, title="promises", title_align="left", border_style="dim"))
        shown = list(self._events)[-max(room, 3) :]
        parts.insert(1, Panel(Group(*shown), title="events", title_align="left", border_style="dim"))
        return Group(*parts)

    def _objects(self, rows: list[Row]) -> Table:
        seconds = time.time() - self._began
        table = Table(
            title=f"objects after {seconds:.0f} s", title_justify="left", box=None, expand=True, pad_edge=False
        )
        for name, width in (("object", 23), ("state", 14), ("alarm", 9), ("jobs", None)):
            table.add_column(name, width=width, ratio=None if width else 1, no_wrap=True, overflow="ellipsis")
        numbers = ["attempts", "strikes", "dead"] if self.console.width >= 100 else ["strikes"]
        for name in numbers:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            state = row.state
            of = {"attempts": max((job.attempt for job in row.jobs), default=0), "dead": row.dead}
            of["strikes"] = sum(job.strikes for job in row.jobs)
            table.add_row(
                str(state.ref),
                _describe(state),
                # While a chain is on its way or a run is open, the alarm is the backup in case that comes to nothing.
                Text(_until(state.wake_at), style="" if state.phase is Phase.IDLE else "dim"),
                ", ".join(f"{job.id[:14]} {_until(job.effective_ms)}" for job in row.jobs),
                *(Text(str(of[name] or ""), style="yellow") for name in numbers),
                style="bold" if state.in_flight is not None else "",
            )
        return table

    def _line(self, fact: Fact) -> Text:
        style, words = STYLES.get(fact["fact"], ("", fact["fact"].replace("_", " ")))
        line = Text(f"{max(0.0, fact['at'] - self._began):5.1f} s  ", style="dim", no_wrap=True, overflow="ellipsis")
        if fact["fact"] == "said":
            return line.append(f"{'':23} {'':10} {fact['text']}", style=style)
        line.append(f"{_short(fact['object']):23} {fact.get('job') or '':10} ", style="bold")
        return line.append(" ".join(filter(None, (words, _details(fact)))), style=style)


def _is_news(fact: Fact, again: set[tuple[str, str]]) -> bool:
    """A first start is none, the table shows what runs; nor is the end of a run whose next one is told at the same time."""
    if fact["fact"] == "job_started":
        return bool(fact["attempt"] > 1)
    return fact["fact"] != "job_completed" or (fact["object"], fact["job"]) not in again


def _short(ref: str) -> str:
    return ref if len(ref) <= 23 else f"{ref[:22]}…"


def _details(fact: Fact) -> str:
    name = fact["fact"]
    if name == "job_started":
        return f"(attempt {fact['attempt']})"
    if name == "job_rescheduled":
        return f"in {datetime.fromisoformat(fact['due_at']).timestamp() - fact['at']:.1f} s"
    if name == "job_retrying":
        return f"in {fact['delay']:.1f} s: {fact['error']}"
    if name == "job_failed":
        return f"({fact['reason']})"
    if name == "alarm_memory_limit_reset":
        then = "sealed" if fact["sealed"] else "slowed down"
        return f"({fact['cause']}): strike {fact['strikes']} of {fact['limit']}, {then}"
    return f"({fact['pid']})" if name == "killed" else ""


def _mark(kept: bool) -> Text:
    return Text("✓", style="green") if kept else Text("·", style="dim")


def _until(ms: int | None) -> str:
    if ms is None:
        return ""
    seconds = ms / 1000 - time.time()
    return "now" if seconds <= 0 else f"in {seconds:.1f} s"


def _describe(state: ObjectState) -> str:
    """What an object is at."""
    if state.paused is not None:
        return state.paused
    if state.phase is Phase.OPEN:
        return "runs" if state.in_flight is None else f"runs {state.in_flight.job}"
    if state.phase is Phase.SENT:
        return "on its way"
    return "asleep" if state.wake_at is not None else "at rest"
