"""Tasks with ``eta`` and ``countdown``: durable jobs that keep their id, their place in a canvas and their callbacks."""

import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest
from celery import chord, group

from celery_lifecycle import Lifecycle, ObjectRef
from celery_lifecycle.model import DeadJob
from tests.acceptance.ledger import Ledger
from tests.acceptance.nodes import BeatNode, WorkerNode
from tests.support import wait_until

StartWorker = Callable[..., WorkerNode]
StartBeat = Callable[..., BeatNode]

pytestmark = pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "redis"))


def dead_of(lifecycle: Lifecycle, task: str, task_id: str) -> list[DeadJob]:
    return lifecycle.store.dead.list(ObjectRef(task, task_id))


def test_results_chains_groups_chords_callbacks_and_retries_hold_over_durable_delays(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    add, flaky, plain, told = (lifecycle.app.tasks[name] for name in ("add", "flaky", "plain", "told"))
    start_worker(concurrency=2)
    start_beat()
    began = time.monotonic()
    single = add.apply_async((1, 2), countdown=1, task_id="chosen")
    assert single.id == "chosen"
    at = datetime.now(timezone.utc) + timedelta(seconds=1)
    dated = add.apply_async((3, 4), eta=at, link=told.s("linked"))
    chained = (add.s(1, 1).set(countdown=0.5) | add.s(10).set(countdown=0.5) | add.s(100)).apply_async()
    grouped = group(add.s(n, n).set(countdown=0.3) for n in range(3)).apply_async()
    chorded = chord([add.s(n, 1).set(countdown=0.3) for n in range(3)])(add.s().set(countdown=0.3))
    retried = flaky.apply_async(("stubborn", 2), countdown=0.2)
    failed = plain.apply_async(kwargs={"job": "broken", "do": "fail"}, countdown=0.2, link_error=told.s("failed"))
    assert single.get(timeout=20) == 3
    assert time.monotonic() - began > 1
    assert dated.get(timeout=20) == 7
    assert chained.get(timeout=20) == 112
    assert grouped.get(timeout=20) == [0, 2, 4]
    assert chorded.get(timeout=20) == 6
    assert retried.get(timeout=20) == "stubborn"
    with pytest.raises(ValueError, match="asked for by the test"):
        failed.get(timeout=20)
    assert [run.data["retries"] for run in ledger.starts("stubborn")] == [0, 1, 2]
    assert {run.data["id"] for run in ledger.starts("stubborn")} == {retried.id}
    wait_until(lambda: {record["args"][-1] for record in ledger.records("told")} == {"linked", "failed"}, 10)
    assert len(ledger.records("told")) == 2
    assert [dead.reason for dead in dead_of(lifecycle, "plain", failed.id)] == ["failed"]
    assert len(ledger.starts("broken")) == 1


def test_a_message_that_came_twice_gives_its_caller_the_result_of_the_one_run(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    start_beat()
    result = lifecycle.app.tasks["plain"].apply_async(kwargs={"job": "slow", "seconds": 1.5}, countdown=0.1)
    ref = ObjectRef("plain", result.id)
    # Nobody is there to run it, so it is sent again when its patience is over.
    wait_until(lambda: lifecycle.store.objects.find(ref).sent_count == 2, 10)
    worker = start_worker(concurrency=2)
    assert result.get(timeout=20) == "slow"
    assert len(ledger.starts("slow")) == 1
    assert worker.logs().count("received") == 2


def test_the_death_of_an_eta_task_is_hidden_from_its_caller_until_it_is_sealed(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """A poison message is bounded by the breaker, and one that was merely unlucky gives its result."""
    plain = lifecycle.app.tasks["plain"]
    start_worker()
    start_beat()
    unlucky = plain.apply_async(kwargs={"job": "unlucky", "do": "sigkill", "times": 1}, countdown=0.2)
    poison = plain.apply_async(kwargs={"job": "poison", "do": "sigkill"}, countdown=0.2)
    assert unlucky.get(timeout=40) == "unlucky"
    with pytest.raises(Exception, match="sealed"):
        poison.get(timeout=60)
    assert len(ledger.starts("unlucky")) == 2
    assert len(ledger.starts("poison")) == 3
    (dead,) = dead_of(lifecycle, "plain", poison.id)
    assert dead.reason == "sealed"


def test_revoked_and_expired_eta_tasks_do_not_run(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    plain = lifecycle.app.tasks["plain"]
    start_worker()
    start_beat()
    revoked = plain.apply_async(kwargs={"job": "revoked"}, countdown=2)
    expired = plain.apply_async(kwargs={"job": "expired"}, countdown=1, expires=0.5)
    ran = plain.apply_async(kwargs={"job": "ran"}, countdown=2)
    revoked.revoke()
    wait_until(lambda: dead_of(lifecycle, "plain", revoked.id), 5)
    assert ran.get(timeout=20) == "ran"
    assert [dead.reason for dead in dead_of(lifecycle, "plain", revoked.id)] == ["revoked"]
    assert [dead.reason for dead in dead_of(lifecycle, "plain", expired.id)] == ["expired"]
    assert [run.job for run in ledger.runs()] == ["ran"]
