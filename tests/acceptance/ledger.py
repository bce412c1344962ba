"""The ledger: what test jobs did and when, written by the jobs themselves, independent of what is tested.

One JSON object a line, each line one ``write`` to a file that is opened for appending, so that lines of
several processes never mix and nothing that was written is lost when a process is killed. Times are those of
the monotonic clock, which is one for all processes of a machine.
"""

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """One run of one job. ``ended`` is None if it never said so and nobody knows that its process is gone."""

    id: str
    object: str
    job: str
    pid: int
    thread: int
    started: float
    ended: float | None
    outcome: str
    data: dict[str, Any]
    parent: int = 0

    def overlaps(self, other: "Run") -> bool:
        """Whether both ran at one time."""
        first, second = sorted((self, other), key=lambda run: run.started)
        return first.ended is None or second.started < first.ended


class Ledger:
    """Writes the ledger at ``path`` and reads it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, event: str, **data: Any) -> None:
        """Write one line."""
        line = {
            "event": event,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "thread": threading.get_ident(),
            "at": time.monotonic(),
            "time": time.time(),
            **data,
        }
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)

    @contextmanager
    def run(self, object: str, job: str, **data: Any) -> Iterator[str]:
        """Write the start, and at the end whether the block raised; gives the run's id."""
        run_id = uuid.uuid4().hex
        self.append("start", run=run_id, object=object, job=job, data=data)
        outcome = "raised"
        try:
            yield run_id
            outcome = "ended"
        finally:
            self.append("end", run=run_id, object=object, job=job, outcome=outcome)

    def die(self, number: int = signal.SIGKILL) -> None:
        """Kill this process, with a word about it before."""
        self.append("gone")
        os.kill(os.getpid(), number)

    def gone(self, pids: Iterable[int], at: float) -> None:
        """Say that these processes were killed at the monotonic time ``at``: their runs are over."""
        for pid in pids:
            self.append("gone", pid=pid, at=at)

    def bury(self, parent: int) -> None:
        """Say that the children of a process that has ended are gone by now; their parent's death has killed them."""
        pids = [run.pid for run in self.runs() if run.outcome == "open" and run.parent == parent]
        self.gone(pids, time.monotonic())

    def records(self, event: str | None = None) -> list[dict[str, Any]]:
        """All lines in the order in which they were written, or those of one event."""
        if not self.path.exists():
            return []
        complete, _, _ = self.path.read_bytes().rpartition(b"\n")
        lines = [json.loads(line) for line in complete.splitlines()]
        return [line for line in lines if event is None or line["event"] == event]

    def runs(self, object: str | None = None, job: str | None = None) -> list[Run]:
        """All runs in the order of their starts, or those of an object, of a job."""
        runs: dict[str, Run] = {}
        for line in self.records():
            if line["event"] == "start":
                self._close(runs, line["at"], pid=line["pid"], thread=line["thread"])
                runs[line["run"]] = Run(
                    id=line["run"],
                    object=line["object"],
                    job=line["job"],
                    pid=line["pid"],
                    thread=line["thread"],
                    started=line["at"],
                    ended=None,
                    outcome="open",
                    data=line["data"],
                    parent=line.get("parent", 0),
                )
            elif line["event"] == "end":
                started = runs[line["run"]]
                if started.outcome == "open":  # what a process does that counts as gone is late
                    runs[line["run"]] = _ended(started, line["at"], line["outcome"])
            elif line["event"] == "gone":
                self._close(runs, line["at"], pid=line["pid"])
        return [run for run in runs.values() if object in (None, run.object) and job in (None, run.job)]

    @staticmethod
    def _close(runs: dict[str, Run], at: float, *, pid: int, thread: int | None = None) -> None:
        # A thread that starts a run has none open, and a dead process has none.
        for run in runs.values():
            if run.ended is None and run.pid == pid and thread in (None, run.thread):
                runs[run.id] = _ended(run, at, "died")

    def starts(self, job: str | None = None, object: str | None = None) -> list[Run]:
        """The same as ``runs``, asked by job."""
        return self.runs(object, job)

    def ends(self, job: str | None = None, object: str | None = None) -> list[Run]:
        """The runs that came to their end."""
        return [run for run in self.runs(object, job) if run.outcome == "ended"]

    def overlaps(self) -> list[tuple[Run, Run]]:
        """Pairs of runs of one object that ran at one time: there must be none."""
        found: list[tuple[Run, Run]] = []
        open_runs: dict[str, list[Run]] = {}
        for run in sorted(self.runs(), key=lambda run: run.started):
            before = [other for other in open_runs.get(run.object, ()) if other.overlaps(run)]
            found += [(other, run) for other in before]
            open_runs[run.object] = [*before, run]
        return found


def _ended(run: Run, at: float, outcome: str) -> Run:
    return replace(run, ended=max(at, run.started), outcome=outcome)
