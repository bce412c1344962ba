"""Worker instances: the renewal of what they run, their heartbeats, and whether they are draining."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery_lifecycle.config import Config
from celery_lifecycle.store.database import Database, Tx

REMEMBERED_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Running:
    """A link that a worker's parent sees running in one of its processes."""

    object_id: int
    task_id: str
    pid: int


class Workers:
    """Worker instances of one database."""

    def __init__(self, database: Database, config: Config) -> None:
        self.database = database
        self.config = config

    def renew(self, instance: str, running: Sequence[Running]) -> int:
        """Extend the leases of all links that run here, and clear their doubts.

        Guard: task id, instance and pid are those in flight; rows locked by others are skipped. `wake_at` is left to the
        claim, so that a renewal moves no index entry. Returns how many were renewed.
        """
        if not running:
            return 0
        return self.database.run(self._renew, instance, running)

    def _renew(self, tx: Tx, instance: str, running: Sequence[Running]) -> int:
        seen = {(one.object_id, one.task_id, one.pid) for one in running}
        ids = sorted({one.object_id for one in running})
        rows = tx.rows(tx.sql.renewable, {"ids": tx.sql.ids(ids), "worker": instance})
        mine = [row[0] for row in rows if (row[0], row[1], row[2]) in seen]
        if not mine:
            return 0
        return tx.run(tx.sql.renew, {"ids": tx.sql.ids(mine), "lease": tx.now() + self.config.lease_ms})

    def beat(self, instance: str, data: dict[str, Any]) -> None:
        """Write the heartbeat of an instance. It outlives the instance for a day, for those who look into its loss."""

        def work(tx: Tx) -> None:
            params = {"kind": "worker", "key": instance, "object": None, "job": None}
            now = tx.now()
            tx.run(
                tx.sql.put_heartbeat,
                {**params, "expires_at": now + REMEMBERED_MS, "data": json.dumps({**data, "seen": now})},
            )
            # It lives: who was aboard when it was taken for lost says nothing about a loss to come.
            tx.run(tx.sql.delete_heartbeat, {"kind": "lost", "key": instance})

        self.database.run(work)

    def list(self) -> list[dict[str, Any]]:
        """What is known of worker instances, with `instance` and `seen` (ms). Changes nothing."""

        def work(tx: Tx) -> list[dict[str, Any]]:
            rows = tx.rows(tx.sql.list_heartbeats, {"kind": "worker"})
            return [{"instance": row[1], **json.loads(row[5])} for row in rows]

        return self.database.look(work)
