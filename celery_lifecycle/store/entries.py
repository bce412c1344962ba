"""What beats share of the ordinary entries of `beat_schedule`: their last runs, and which beat is publishing one now."""

from __future__ import annotations

from dataclasses import dataclass

from celery_lifecycle.config import Config
from celery_lifecycle.store.database import Database, Tx


@dataclass(frozen=True, slots=True)
class EntryRun:
    """The last run of an entry: when (ms, by the clock of the beat that ran it), and how many there were."""

    last_run_ms: int
    total: int


class Entries:
    """The ordinary entries of one database. Names are those of one app, so that two apps do not share an entry.

    An occurrence is claimed, published, and recorded, each on its own: no row is locked while the broker is waited for,
    and what a rollback undoes is never what was published.
    """

    def __init__(self, database: Database, config: Config) -> None:
        self.database = database
        self.config = config

    def all(self, app: str) -> dict[str, EntryRun]:
        """The last runs of an app's entries. Changes nothing."""
        rows = self.database.look(lambda tx: tx.rows(tx.sql.list_entries, {"app": app}))
        return {name: EntryRun(int(last), int(total)) for name, last, total in rows}

    def get(self, app: str, name: str) -> EntryRun | None:
        """The last run of one entry. Changes nothing."""
        row = self.database.look(lambda tx: tx.row(tx.sql.get_entry, {"app": app, "name": name}))
        return EntryRun(int(row[0]), int(row[1])) if row is not None else None

    def add(self, app: str, name: str, run: EntryRun) -> EntryRun:
        """Remember an entry from now on; one that is known stays as it is. Returns what is remembered."""
        params = {"app": app, "name": name, "last_run_at": run.last_run_ms, "count": run.total}

        def work(tx: Tx) -> EntryRun:
            tx.run(tx.sql.add_entry, params)
            row = tx.row(tx.sql.get_entry, {"app": app, "name": name})
            return EntryRun(int(row[0]), int(row[1])) if row is not None else run

        return self.database.run(work)

    def forget(self, app: str, name: str) -> None:
        """Forget an entry that is no longer scheduled: scheduled again, it begins anew."""
        self.database.run(lambda tx: tx.run(tx.sql.delete_entry, {"app": app, "name": name}))

    def claim(self, app: str, name: str, seen: EntryRun, beat: str) -> bool:
        """Claim the next occurrence for one beat, for as long as a backup alarm.

        Guard: the last run is the one that this beat has seen, and no other beat holds the claim; a row that another one
        has locked is skipped. A beat that dies with the claim costs the occurrence that long, never the occurrence.
        """

        def work(tx: Tx) -> bool:
            row = tx.row(tx.sql.lock_entry, {"app": app, "name": name})
            if row is None or (int(row[0]), int(row[1])) != (seen.last_run_ms, seen.total):
                return False
            now = tx.now()
            if row[2] not in (None, beat) and int(row[3]) > now:
                return False
            params = {"app": app, "name": name, "beat": beat, "until": now + self.config.backup_ms}
            return tx.run(tx.sql.claim_entry, params) == 1

        return self.database.run(work)

    def release(self, app: str, name: str, beat: str) -> None:
        """Give a claim back: the occurrence could not be published."""
        self.database.run(lambda tx: tx.run(tx.sql.release_entry, {"app": app, "name": name, "beat": beat}))

    def record(self, app: str, name: str, seen: EntryRun, last_run_ms: int) -> bool:
        """Record that an occurrence was published. Guard: the last run is still the one seen when it was claimed."""
        params = {
            "app": app, "name": name, "last_run_at": last_run_ms, "count": seen.total + 1,
            "seen_at": seen.last_run_ms, "seen_count": seen.total,
        }  # fmt: skip
        return self.database.run(lambda tx: tx.run(tx.sql.record_entry, params)) == 1
