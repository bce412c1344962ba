"""Several pushers and several workers at once: new names, skipped rows, the one place of a suspect."""

from __future__ import annotations

import pytest

from celery_lifecycle.model import ObjectRef, Phase
from celery_lifecycle.store.database import TRIES, Conflict
from celery_lifecycle.store.entries import EntryRun
from celery_lifecycle.store.unit import lock_by_name
from celery_lifecycle.store.workers import Running
from celery_lifecycle.transitions.run import Worker
from tests.support.protocol import CART, DONE, WORKER, Table, carts, links_of
from tests.support.races import Call, Gate
from tests.support.waiting import wait_until

SERVERS = pytest.mark.databases("postgresql", "mariadb")


def push_all(t: Table, refs: list[ObjectRef]) -> None:
    t.store.jobs.push_many([t.draft("a", ref) for ref in refs])


@SERVERS
def test_an_occurrence_of_an_ordinary_entry_is_claimed_by_one_beat_and_the_other_does_not_wait(tables):
    """C26"""
    one, two, _ = tables
    seen = one.store.entries.add("shop", "hourly", EntryRun(1000, 0))
    assert two.store.entries.add("shop", "hourly", EntryRun(5000, 9)) == seen
    with Gate(one).holding(lambda: one.store.entries.claim("shop", "hourly", seen, "beat-1")) as first:
        assert two.store.entries.claim("shop", "hourly", seen, "beat-2") is False
    assert first.result() is True
    assert two.store.entries.claim("shop", "hourly", seen, "beat-2") is False
    one.store.entries.release("shop", "hourly", "beat-1")
    assert two.store.entries.claim("shop", "hourly", seen, "beat-2") is True
    assert two.store.entries.record("shop", "hourly", seen, 2000) is True
    assert one.store.entries.record("shop", "hourly", seen, 2000) is False
    assert one.store.entries.claim("shop", "hourly", seen, "beat-1") is False


@SERVERS
def test_a_callers_open_transaction_keeps_nobody_else_from_being_renewed_or_claimed(tables, clock):
    """D25: it holds one object's row for a minute, the worker runs nine others beside it."""
    one, two, _ = tables
    refs = carts(10)
    push_all(one, refs)
    running, begun = [], {}
    for chain in one.claim().shipments:
        [link] = links_of(chain)
        begun[link.object_id] = one.begin(link)
        running.append(Running(link.object_id, link.task_id, WORKER.pid))
    held = refs[4]
    with one.store.database.transaction() as tx:
        assert lock_by_name(tx, held, 50) is not None
        for _ in range(12):
            clock.forward(5)
            assert two.store.workers.renew(WORKER.instance, running) == 9
            claimed = two.claim(Phase.OPEN)
            assert claimed.lost == ()
        found = {row.name: row for row in two.store.objects.find_many()}
        assert {name for name, row in found.items() if row.lease_until == clock.ms + 20_000} == {
            ref.name for ref in refs if ref != held
        }
    lost = two.claim(Phase.OPEN).lost
    assert len(lost) == 1
    assert two.store.ends.rescue(lost[0]) is None, "two looks: the worker has time to renew it"
    assert two.store.workers.renew(WORKER.instance, running) == 10
    clock.forward(6)
    assert two.claim(Phase.OPEN).lost == ()


@SERVERS
def test_a_conflict_that_does_not_end_is_an_error_and_stores_nothing(tables):
    one, _, _ = tables
    tries = []

    def work(tx):
        tries.append(1)
        one.store.jobs.push_in(tx, one.draft("a"))
        raise Conflict

    with pytest.raises(Conflict):
        one.store.database.run(work)
    assert len(tries) == TRIES
    assert one.count("jobs") == 0


@SERVERS
def test_two_suspects_that_meet_on_one_worker_do_not_run_together(tables, clock):
    """Section 7, rule 7: the mark is unique in the database, so the second begin waits, and is put 5 s back."""
    one, two, eyes = tables
    refs = carts(2)
    for ref in refs:
        one.push("a", ref)
    for chain in one.claim().shipments:
        one.begin(links_of(chain)[0])
    for forward in (21, 6):
        clock.forward(forward)
        for object_id in one.claim(Phase.OPEN).lost:
            one.store.ends.rescue(object_id)
    assert all(one.job("a", ref).suspect_on for ref in refs)
    clock.forward(301)
    worker = Worker("w2", 9)
    first, second = (links_of(chain)[0] for chain in one.claim().shipments)
    with Gate(one).holding(lambda: one.begin(first, worker)) as ahead:
        behind = Call(lambda: two.begin(second, worker))
        wait_until(lambda: not behind.is_alive() or eyes.waiting(), 20, "it does not wait")
    assert ahead.result().job is not None
    passed = behind.result()
    assert (passed.job, passed.refused, passed.closed) == (None, None, True)
    later = [one.job("a", ref) for ref in refs if one.find(ref).token is None]
    assert [job.not_before_ms for job in later] == [clock.ms + 5_000]
    assert sum(one.job("a", ref).suspect_on == "w2" for ref in refs) == 1


def test_many_pushers_to_one_new_name_make_one_row_and_lose_no_job(tables):
    one, two, _ = tables
    calls = [
        Call(lambda t=t, n=n: [t.push(f"{n}-{k}", delay=60) for k in range(5)])
        for n, t in enumerate((one, two, one, two))
    ]
    for call in calls:
        call.result()
    assert len(one.ids()) == 20
    assert one.count("objects") == 1
    assert one.find().versions == 20


def test_pushes_and_cancels_of_one_name_at_once_leave_nothing_behind(tables):
    """Push repeats insert-if-absent and lock until it holds a row, while others remove it."""
    one, two, _ = tables

    def again_and_again(t: Table, job_id: str) -> int:
        done = 0
        for _ in range(15):
            t.push(job_id, delay=60)
            done += t.store.jobs.cancel(CART, job_id, "host") is not None
        return done

    calls = [Call(lambda t=t, n=n: again_and_again(t, f"job-{n}")) for n, t in enumerate((one, two, one))]
    assert [call.result() for call in calls] == [15, 15, 15]
    assert (one.count("objects"), one.count("jobs")) == (0, 0)


def test_bulk_pushes_to_overlapping_new_names_at_once_store_everything(tables):
    one, two, _ = tables
    refs = carts(30)
    calls = [
        Call(lambda t=t, n=n, order=order: t.store.jobs.push_many([t.draft(f"job-{n}", ref) for ref in order]))
        for n, (t, order) in enumerate(((one, refs), (two, refs[::-1]), (one, refs[10:])))
    ]
    for call in calls:
        call.result()
    assert one.count("objects") == 30
    assert one.count("jobs") == 80


def test_a_run_that_two_workers_get_at_once_is_opened_by_one(tables):
    one, two, _ = tables
    for ref in carts(10):
        one.push("a", ref)
        [link] = links_of(one.shipped(ref))
        calls = [Call(lambda t=t, w=w, link=link: t.begin(link, Worker(w, 1))) for t, w in ((one, "w1"), (two, "w2"))]
        came = [call.result() for call in calls]
        assert sorted(begun.refused is None for begun in came) == [False, True]
        [begun] = [begun for begun in came if begun.refused is None]
        assert one.finish(link, begun, DONE).accepted
