"""Makes a process of the application die or fail at a point that no signal from outside could hit.

======================== ============================================================================
``DIE_AFTER_SENDING``    set: the process is killed right after the first chains that it sends
``DIE_AFTER_FINISH``     the id of a job: once, its process is killed when the outcome is committed and nothing is published
``CLAIM_FAILS_ONCE``     set: the first claim that finds something fails in the middle of its transaction
======================== ============================================================================
"""

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from celery_lifecycle import Lifecycle
from celery_lifecycle.model import Link, Shipment
from celery_lifecycle.store.claims import Claims
from celery_lifecycle.store.database import Tx
from celery_lifecycle.store.runs import Runs
from tests.acceptance.ledger import Ledger


def sabotage(environment: Mapping[str, str], ledger: Ledger) -> None:
    """Do what the environment says."""
    if environment.get("DIE_AFTER_SENDING"):
        die_after_sending()
    if environment.get("DIE_AFTER_FINISH"):
        die_after_finish(environment["DIE_AFTER_FINISH"], ledger)
    if environment.get("CLAIM_FAILS_ONCE"):
        break_one_claim()


def die_after_sending() -> None:
    original = Lifecycle.send

    def send(self: Lifecycle, shipments: Sequence[Shipment]) -> int:
        original(self, shipments)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    Lifecycle.send = send  # type: ignore[method-assign]


def break_one_claim() -> None:
    original = Claims._claim
    failed = False

    def claim(self: Claims, tx: Tx, *args: Any) -> Any:
        nonlocal failed
        claimed = original(self, tx, *args)
        if claimed.rows and not failed:
            failed = True
            tx.rows("SELECT 1 FROM no_such_table")
        return claimed

    Claims._claim = claim  # type: ignore[method-assign]


def die_after_finish(job_id: str, ledger: Ledger) -> None:
    original = Runs.finish

    def finish(self: Runs, link: Link, *args: Any) -> Any:
        done = original(self, link, *args)
        if link.job == job_id and not ledger.records("gone"):
            ledger.die()
        return done

    Runs.finish = finish  # type: ignore[method-assign]
