"""What the demo does with the shop: its customers, two accidents, and what the feed has told of it so far."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

from example.feed import Fact, Feed
from example.shop import DAY, Cart, CatalogueImport, Parcel, SearchIndex, Subscription, invoice, lifecycle

PUSHES, ROWS, PICTURES = 12, 100, 8


class Story:
    """Plays the customers of the shop, and keeps what has been told of the jobs."""

    def __init__(self, feed: Feed) -> None:
        self.facts: list[Fact] = []
        self._feed = feed
        self._killed: set[str] = set()
        self.cart, self.bought = Cart("anna"), Cart("bert")
        self.subscription, self.supplier = Subscription("carla"), CatalogueImport("acme")
        self.index, self.parcel = SearchIndex("articles"), Parcel("4711")
        self._script: list[tuple[float, Callable[[], Any]]] = [
            *((0.1 * DAY * n, lambda: self.cart.put("something")) for n in range(PUSHES)),
            (0.0, lambda: self.bought.put("article 1")),
            (0.0, self.subscription.start),
            (0.0, self.index.open),
            (0.2 * DAY, lambda: invoice.push(id="dora", payload={"to": "dora at example"})),
            (0.3 * DAY, lambda: self.supplier.begin(ROWS, PICTURES)),
            (0.6 * DAY, self.bought.check_out),
            (2.0 * DAY, lambda: self.parcel.jobs.push("label", id="label")),
        ]
        self._script.sort(key=lambda scene: scene[0])

    def play(self, elapsed: float) -> None:
        """Do what is due by now."""
        while self._script and self._script[0][0] <= elapsed:
            self._script.pop(0)[1]()
        self._kill(self.parcel, "label", self._pid_of_printer())
        self._kill(self.supplier, "pictures", self._pid_of_copier())

    @property
    def is_played(self) -> bool:
        """Whether the customers have done all that they do."""
        return not self._script

    def _kill(self, of: Any, job: str, pid: int | None) -> None:
        """An accident, once: no process can defend itself against this."""
        if pid is not None and job not in self._killed:
            self._killed.add(job)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._feed.tell("killed", object=str(of.ref), job=job, pid=pid)

    def _pid_of_printer(self) -> int | None:
        state = lifecycle.store.objects.find(self.parcel.ref)
        return state.worker_pid if state is not None and state.in_flight is not None else None

    def _pid_of_copier(self) -> int | None:
        return next((one["pid"] for one in self.facts if one.get("text") == "picture 3 copied"), None)

    def listen(self) -> list[Fact]:
        """What has been told since the last time."""
        news = self._feed.news()
        self.facts += news
        return news

    def leave(self) -> None:
        """Cancel what would go on forever."""
        self.subscription.stop()
        self.index.close()

    # What promises ask for.

    def of(self, fact: str, object: Any, job: str | None = None) -> list[Fact]:
        """The facts of one sort about an object."""
        return [
            one
            for one in self.facts
            if one["fact"] == fact and one["object"] == str(object) and (job is None or one["job"] == job)
        ]

    def said(self, words: str) -> list[str]:
        return [one["text"] for one in self.facts if one["fact"] == "said" and one["text"].startswith(words)]
