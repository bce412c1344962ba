"""The store: all run-time SQL. Each verb is one short transaction around one pure function."""

from __future__ import annotations

from collections.abc import Callable

from celery_lifecycle.config import Config
from celery_lifecycle.store.beats import Beats
from celery_lifecycle.store.claims import Claims
from celery_lifecycle.store.database import Database
from celery_lifecycle.store.dead import DeadJobs
from celery_lifecycle.store.ends import Ends
from celery_lifecycle.store.entries import Entries
from celery_lifecycle.store.holds import Holds
from celery_lifecycle.store.jobs import Jobs
from celery_lifecycle.store.objects import Objects
from celery_lifecycle.store.runs import Runs
from celery_lifecycle.store.watch import Watch
from celery_lifecycle.store.workers import Workers

__all__ = ["Store"]


class Store:
    """All verbs over one database, by what they are about."""

    def __init__(self, config: Config, clock: Callable[[], int] | None = None) -> None:
        self.config = config
        self.database = Database(config, clock)
        self.jobs = Jobs(self.database, config)
        self.claims = Claims(self.database, config)
        self.runs = Runs(self.database, config)
        self.ends = Ends(self.database, config)
        self.objects = Objects(self.database, config)
        self.holds = Holds(self.database, config)
        self.dead = DeadJobs(self.database, config)
        self.workers = Workers(self.database, config)
        self.beats = Beats(self.database, config)
        self.entries = Entries(self.database, config)
        self.watch = Watch(self.database)

    def close(self) -> None:
        """Close the connections of this process."""
        self.database.close()
