"""A deployment without broker and processes: beat's claims and the worker's links are made here, under a test clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

from celery import Celery

from celery_lifecycle import Lifecycle
from celery_lifecycle.migrations.schema import migrate
from celery_lifecycle.model import DeadJob, ObjectRef, Phase, Shipment
from celery_lifecycle.runner import Report
from celery_lifecycle.store import Store
from celery_lifecycle.timing.instants import from_millis, to_millis
from tests.support.protocol import Clock, links_of

QUEUE = "celery"


class Bench(Lifecycle):
    """The real store, runner and handles; a message is a value in a list."""

    def __init__(self, url: str, start: str, *, timezone: str = "UTC", **settings: Any) -> None:
        app = Celery("bench", broker="memory://", set_as_current=False)
        app.conf.timezone = timezone
        super().__init__(app, database_url=url, **settings)
        self.clock = Clock(to_millis(datetime.fromisoformat(start)))
        self._store = Store(self.config, self.clock)
        migrate(self._store.database)
        self.sent: list[Shipment] = []
        self.reports: list[Report] = []

    @property
    def now(self) -> datetime:
        return from_millis(self.clock.ms)

    def send(self, shipments: Sequence[Shipment]) -> int:
        self.sent += shipments
        return len(shipments)

    def to(self, when: str) -> None:
        """Let time pass in which neither beat nor workers do anything."""
        self.clock.to(to_millis(datetime.fromisoformat(when)))

    def run_due(self, end: int | None = None) -> list[Report]:
        """What beat and the workers do now, to its end; or until the jobs have moved the clock beyond `end`."""
        before = len(self.reports)
        while end is None or self.clock.ms <= end:
            for phase in Phase:
                self.sent += self.store.claims.claim(QUEUE, phase, 500).shipments
            if not self.sent:
                return self.reports[before:]
            chains, self.sent = self.sent, []
            for chain in chains:
                self.run_chain(chain)
        return self.reports[before:]

    def run_until(self, when: str) -> None:
        """Let time pass with a beat and workers that are never late."""
        end = to_millis(datetime.fromisoformat(when))
        while True:
            alarms = [at for one in self.store.claims.heads() for at in (one.idle, one.sent, one.open)]
            alarm = min((at for at in alarms if at is not None), default=end + 1)
            if max(alarm, self.clock.ms) > end:
                self.clock.to(end)
                return
            self.clock.to(alarm)
            self.run_due(end)

    def run_chain(self, chain: Shipment) -> None:
        token = chain.token
        for link, brief in zip(links_of(chain), chain.jobs, strict=True):
            code = self.app.tasks[brief.task].code(self, chain.ref)
            report = self.runner.run(replace(link, token=token), code)
            self.reports.append(report)
            if not report.goes_on:
                return
            token = report.token

    def dead(self, kind: str, name: str) -> list[DeadJob]:
        return self.store.dead.list(ObjectRef(kind, name), limit=1000)


@contextmanager
def bench(url: str, start: str, **settings: Any) -> Iterator[Bench]:
    made = Bench(url, start, **settings)
    try:
        yield made
    finally:
        made.close()
