"""What happens in a worker, told to whoever watches: one JSON line per fact.

Where SHOP_FEED names a file, importing this module connects it to the signals of this process, as the demo's worker does
(`celery -A example.shop worker --include example.feed`). A shop does not need it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from celery_lifecycle import MemoryLimitContext, ObjectRef, signals

Fact = dict[str, Any]


class Feed:
    """A file that several processes write to and one reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def tell(self, fact: str, **facts: Any) -> None:
        """Add a line: one `write` to a file that is opened for appending, so lines of several processes never mix."""
        line = json.dumps({"at": time.time(), "fact": fact, **facts}, default=str).encode() + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def news(self) -> list[Fact]:
        """What was told since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        return [json.loads(line) for line in whole.splitlines()]

    def connect(self) -> None:
        """Tell every signal of this package, and what the shop itself logs."""
        for name in signals.__all__:
            getattr(signals, name).connect(partial(self._receive, name), weak=False)
        logging.getLogger("example.shop").addHandler(_Sayings(self))

    def _receive(
        self, fact: str, *, object: ObjectRef, context: MemoryLimitContext | None = None, **facts: Any
    ) -> None:
        told = {name: value for name, value in facts.items() if name not in ("sender", "signal")}
        self.tell(fact, object=str(object), **told, **(asdict(context) if context is not None else {}))


class _Sayings(logging.Handler):
    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    def emit(self, record: logging.LogRecord) -> None:
        self._feed.tell("said", text=record.getMessage(), pid=record.process)


if "SHOP_FEED" in os.environ:
    Feed(Path(os.environ["SHOP_FEED"])).connect()
