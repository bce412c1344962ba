"""Beat's side: claims in batches, slices, windows, revival, release, rescue, and what each of them costs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from celery_lifecycle.model import ALARM, ObjectRef, Phase
from celery_lifecycle.store.claims import queues_in
from celery_lifecycle.store.workers import Running
from celery_lifecycle.transitions.run import Refusal, Worker
from tests.support.protocol import CART, DONE, MORE, NOW, QUEUE, WORKER, Clock, Table, links_of, table


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def t(database_url: str, clock: Clock) -> Iterator[Table]:
    with table(database_url, clock=clock) as made:
        yield made
        made.check()


def carts(count, kind="cart"):
    return [ObjectRef(kind, f"user-{number:03}") for number in range(count)]


def push_all(t, refs, **more):
    t.store.jobs.push_many([t.draft("a", ref, **more) for ref in refs])


# --- batches


def test_a_claim_takes_the_earliest_first_and_no_more_than_its_limit(t):
    for number, ref in enumerate(reversed(carts(7))):
        t.push("a", ref, at_ms=NOW - 100 + number)
    taken = t.claim(limit=3)
    assert [chain.ref.name for chain in taken.shipments] == ["user-006", "user-005", "user-004"]
    assert taken.rows == 3
    t.check()
    assert len(t.claim(limit=10).shipments) == 4
    assert t.claim(limit=10).rows == 0


def test_a_claim_leaves_alone_what_is_not_due_or_of_another_queue(t):
    t.push("a", ObjectRef("cart", "later"), at_ms=NOW + 1)
    t.push("a", ObjectRef("cart", "elsewhere"), queue="slow")
    assert t.claim().rows == 0
    assert [chain.ref.name for chain in t.claim(queue="slow").shipments] == ["elsewhere"]


def test_claimed_rows_are_on_record_as_sent_before_anything_is_sent(t):
    push_all(t, carts(3))
    for chain in t.claim().shipments:
        found = t.find(chain.ref)
        assert (found.dispatch, found.sent_count, found.sent_until) == (chain.dispatch, 1, NOW + 30_000)
        assert found.phase is Phase.SENT
    assert t.store.claims.count_sent(QUEUE) == 3


def test_sent_chains_are_counted_up_to_the_window_only(database_url, clock):
    with table(database_url, clock=clock, dispatch_window=2) as t:
        push_all(t, carts(5))
        t.claim()
        assert t.store.claims.count_sent(QUEUE) == 2


def test_heads_tell_the_next_alarm_of_each_phase_and_the_next_queue(t):
    t.push("a", ObjectRef("cart", "idle"), at_ms=NOW + 7)
    t.push("a", ObjectRef("cart", "other"), queue="zeta", at_ms=NOW + 9)
    t.push("a", CART)
    chain = t.shipped()
    t.push("a", ObjectRef("cart", "open"))
    t.begin(links_of(t.shipped(ObjectRef("cart", "open")))[0])
    heads, zeta = t.store.claims.heads()
    assert (heads.idle, heads.sent, heads.open) == (NOW + 7, NOW + 30_000, NOW + 20_000)
    assert (heads.now, heads.queue) == (NOW, QUEUE)
    assert (zeta.queue, zeta.idle, zeta.sent, zeta.open) == ("zeta", NOW + 9, None, None)
    assert t.store.database.look(queues_in) == [QUEUE, "zeta"]
    assert chain.ref == CART


# --- slices


def test_a_thousand_due_jobs_of_one_object_run_in_slices_of_fifty_in_order_and_the_alarm_once(t):
    """D22"""
    count = 260
    t.store.jobs.push_many([t.draft(f"{n:04}", at_ms=NOW - 10_000 + n) for n in range(count)])
    chain, ran, slices = t.shipped(), [], []
    while chain is not None:
        slices.append((len(chain.jobs), chain.all_due))
        done, chain = t.run_chain(chain)
        ran += done
        t.check()
    assert ran == [f"{n:04}" for n in range(count)]
    assert slices == [(50, False)] * 5 + [(10, True)]
    assert not t.exists()


def test_a_bare_alarm_among_the_due_jobs_does_not_hide_that_there_are_more(t):
    """D22: `on_alarm` must not follow a slice that others follow."""
    t.store.objects.set_alarm(CART, "cart.on_alarm", QUEUE, NOW - 99_000, 0)
    t.store.jobs.push_many([t.draft(f"{n:04}", at_ms=NOW - 10_000 + n) for n in range(101)])
    chain, slices = t.shipped(), []
    while chain is not None:
        slices.append((len(chain.jobs), chain.all_due))
        _, chain = t.run_chain(chain)
        if len(slices) == 3:
            break
    assert slices == [(50, False), (50, False), (1, True)]


def test_exclusive_jobs_go_alone_and_the_others_after_them(t):
    t.push("plain", at_ms=NOW - 9)
    t.push("x", at_ms=NOW - 1, exclusive=True)
    t.push("later", delay=50, exclusive=True)
    t.check()
    first = t.shipped()
    assert [one.id for one in first.jobs] == ["x"]
    ran, second = t.run_chain(first)
    assert ran == ["x"]
    assert [one.id for one in second.jobs] == ["plain"]


def test_an_exclusive_job_is_found_behind_more_jobs_than_a_chain_takes(t):
    t.store.jobs.push_many([t.draft(f"{n:04}", at_ms=NOW - 10_000 + n) for n in range(120)])
    t.push("x", at_ms=NOW - 1, exclusive=True)
    assert [one.id for one in t.shipped().jobs] == ["x"]


def test_a_yielding_job_gives_the_others_their_turn(t, clock):
    t.push("a", at_ms=NOW - 2)
    t.push("b", at_ms=NOW - 1)
    chain = t.shipped()
    one, two = links_of(chain)
    begun = t.begin(one)
    t.finish(one, begun, MORE)
    clock.forward(1)
    two = replace(two, token=begun.token)
    done = t.finish(two, t.begin(two), DONE)
    assert [job.id for job in done.shipment.jobs] == ["a"]


# --- lost, doubled and stale messages


def test_a_lost_chain_is_sent_again_after_its_patience_which_doubles(t, clock):
    """D16"""
    t.push("a")
    waits = []
    t.claim()
    for _ in range(6):
        waits.append(t.find().sent_until - clock.ms)
        clock.to(t.find().sent_until)
        [chain] = t.claim(Phase.SENT).shipments
        t.check()
    assert waits == [30_000, 60_000, 120_000, 240_000, 300_000, 300_000]
    assert t.run_chain(chain)[0] == ["a"]


def test_a_sent_chain_whose_job_was_moved_is_forgotten_and_not_claimed_each_tick(t, clock):
    """D32"""
    t.push("a")
    t.claim()
    t.store.jobs.reschedule(CART, "a", "host", None, 90_000_000)
    clock.forward(30)
    assert t.claim(Phase.SENT).shipments == ()
    t.check()
    assert t.find().phase is Phase.IDLE
    assert [t.claim(phase).rows for phase in Phase] == [0, 0, 0]


def test_a_doubled_first_link_opens_no_second_run_even_after_the_lease(t, clock):
    """D23"""
    t.push("a")
    [link] = links_of(t.shipped())
    begun = t.begin(link)
    clock.forward(31)
    assert t.begin(link, Worker("w2", 5)).refused is Refusal.RUN_OPEN
    assert t.finish(link, begun).accepted


def test_a_doubled_middle_link_neither_runs_again_nor_goes_on_to_the_next(t):
    """D01"""
    for name in "abc":
        t.push(name)
    one, two, three = links_of(t.shipped())
    begun = t.begin(one)
    t.finish(one, begun)
    two, three = replace(two, token=begun.token), replace(three, token=begun.token)
    running = t.begin(two)
    assert t.begin(two).refused is not None
    assert t.begin(three).refused is not None
    assert t.ids() == ["b", "c"]
    t.finish(two, running)
    assert t.begin(two).refused is Refusal.PASSED
    assert t.begin(three).job.id == "c"


def test_a_stale_chain_of_a_closed_run_ends_quietly(t, clock):
    """D14"""
    t.push("a")
    t.push("later", delay=900)
    stale = t.shipped()
    clock.forward(30)
    fresh = t.shipped()
    t.run_chain(fresh)
    before = t.find()
    assert t.begin(links_of(stale)[0]).refused is Refusal.NOTHING_DUE
    assert t.find() == before


def test_the_chain_of_a_destroyed_object_does_not_touch_its_namesake(t):
    """D21"""
    t.push("a")
    old = t.shipped()
    t.store.objects.destroy(CART)
    assert t.begin(links_of(old)[0]).refused is Refusal.NO_OBJECT
    t.push("a", payload_json='"new"')
    before = t.find()
    assert t.begin(links_of(old)[0]).refused is Refusal.NO_OBJECT
    assert t.find() == before
    assert t.run_chain(t.shipped())[0] == ["a"]


def test_a_chain_is_cancelled_on_its_way_and_the_new_job_runs(t):
    """D03: cancel of the only job while its chain is on its way, then a push."""
    t.push("a")
    old = t.shipped()
    t.store.jobs.cancel(CART, "a", "host")
    assert not t.exists()
    pushed = t.push("b", claims=True)
    assert t.begin(links_of(old)[0]).refused is Refusal.NO_OBJECT
    assert t.run_chain(pushed.shipment)[0] == ["b"]


def test_pause_and_resume_during_a_run_make_no_second_run(t):
    """D03"""
    t.push("a")
    [link] = links_of(t.shipped())
    begun = t.begin(link)
    t.store.objects.pause(CART, "holiday")
    t.check()
    t.push("b")
    t.store.objects.resume(CART)
    t.check()
    assert t.claim().rows == 0
    done = t.finish(link, begun)
    assert [one.id for one in done.shipment.jobs] == ["b"]


def test_a_job_due_by_beats_clock_and_not_yet_by_the_databases_runs_all_the_same_in_the_end(t, clock):
    """D13: there is one clock, the database's; a link that comes too early is passed over and the job stays."""
    t.push("a")
    t.push("b")
    chain = t.shipped()
    clock.ms -= 3
    assert t.begin(links_of(chain)[0]).refused is Refusal.NOTHING_DUE
    t.check()
    clock.ms += 3
    assert t.run_chain(t.shipped())[0] == ["a", "b"]


def test_a_stale_chain_does_not_start_a_struck_job_before_its_time(t, clock):
    """D27"""
    t.push("a")
    t.push("b")
    chain = t.shipped()
    one, two = links_of(chain)
    begun = t.begin(one)
    t.finish(one, begun, DONE)
    with t.store.database.transaction() as tx:
        tx.run(f"UPDATE lifecycle_jobs SET not_before = {NOW + 30_000}")
    passed = t.begin(replace(two, token=begun.token))
    assert (passed.job, passed.closed) == (None, True)
    assert t.ids() == ["b"]
    assert t.find().wake_at == NOW + 30_000


# --- release


def test_one_object_that_cant_be_sent_is_released_and_the_others_go_out(t, clock):
    """D18"""
    push_all(t, carts(3))
    bad, *good = t.claim().shipments
    assert t.store.claims.release([bad], 200) == 1
    t.check()
    found = t.find(bad.ref)
    assert (found.sent_count, found.wake_at) == (0, NOW + 200)
    assert all(t.run_chain(chain)[0] == ["a"] for chain in good)
    clock.forward(0.2)
    assert t.run_chain(t.shipped(bad.ref))[0] == ["a"]


def test_a_push_that_comes_between_claim_and_release_is_not_lost(t, clock):
    """D32"""
    t.push("a")
    [chain] = t.claim().shipments
    t.push("b")
    t.store.claims.release([chain], 100)
    t.check()
    clock.forward(0.1)
    assert [one.id for one in t.shipped().jobs] == ["a", "b"]


def test_a_release_of_a_chain_that_arrived_after_all_changes_nothing(t):
    t.push("a")
    [chain] = t.claim().shipments
    t.begin(links_of(chain)[0])
    before = t.find()
    assert t.store.claims.release([chain], 100) == 0
    assert t.find() == before
    t.store.objects.destroy(CART)
    assert t.store.claims.release([chain._replace(object_id=10**9)], 100) == 0


def test_a_release_while_the_object_was_destroyed_leaves_nothing(t):
    t.push("a")
    [chain] = t.claim().shipments
    t.store.jobs.cancel(CART, "a", "host")
    assert t.store.claims.release([chain], 100) == 0
    assert not t.exists()


# --- runs that nobody looks after


def between_links(t):
    for name in "ab":
        t.push(name)
    one, two = links_of(t.shipped())
    begun = t.begin(one)
    t.finish(one, begun)
    return replace(two, token=begun.token)


def test_a_run_whose_next_link_was_lost_goes_on_under_its_token(t, clock):
    """D05, D02: no strike."""
    lost = between_links(t)
    t.push("new", at_ms=NOW - 9)
    assert t.claim().rows == 0
    clock.to(t.find().lease_until)
    [chain] = t.claim(Phase.OPEN).shipments
    t.check()
    assert (chain.token, chain.first_position) == (lost.token, 1)
    assert [one.id for one in chain.jobs] == ["new", "b"]
    assert t.claim(Phase.OPEN).rows == 0, "one chain per patience (D24)"
    assert t.run_chain(chain)[0] == ["new", "b"]
    assert not t.exists()
    assert t.count("dead_jobs") == 0


def test_a_late_link_and_its_revival_do_not_run_twice(t, clock):
    late = between_links(t)
    clock.to(t.find().lease_until)
    [chain] = t.claim(Phase.OPEN).shipments
    assert t.run_link(late)[0].job.id == "b"
    assert t.begin(links_of(chain)[0]).refused is not None
    assert not t.exists()


def test_a_paused_objects_run_is_closed_instead_of_revived(t, clock):
    between_links(t)
    t.store.objects.pause(CART, "holiday")
    clock.to(t.find().lease_until)
    assert t.claim(Phase.OPEN).shipments == ()
    assert t.find().phase is Phase.IDLE
    assert t.find().wake_at is None


def running(t, count=1, job="a"):
    flying = []
    for ref in carts(count):
        t.push(job, ref)
        [link] = links_of(t.shipped(ref))
        assert t.begin(link).job is not None
        flying.append((ref, link))
    return flying


def rescue_all(t):
    lost = t.claim(Phase.OPEN).lost
    return [t.store.ends.rescue(object_id) for object_id in lost]


def test_a_loss_takes_two_looks_and_a_renewal_in_between_clears_the_doubt(t, clock):
    """D07, D25: an outage of 31 s under running jobs; beat comes back before the workers."""
    [(ref, link)] = running(t)
    clock.forward(31)
    assert rescue_all(t) == [None]
    assert (t.find(ref).doubt, t.find(ref).lease_until) == (True, clock.ms + 5_000)
    t.check()
    assert rescue_all(t) == []
    clock.forward(4)
    assert t.store.workers.renew(WORKER.instance, [Running(t.find(ref).id, link.task_id, WORKER.pid)]) == 1
    assert not t.find(ref).doubt
    clock.forward(2)
    assert rescue_all(t) == []
    assert t.find(ref).wake_at == t.find(ref).lease_until
    assert t.job("a", ref).strikes == 0


def test_the_second_look_is_a_strike_and_the_run_is_ended(t, clock):
    [(ref, link)] = running(t)
    clock.forward(20)
    rescue_all(t)
    clock.forward(5)
    [ended] = rescue_all(t)
    assert ended.cause.value == "lost"
    assert t.job("a", ref).strikes == 1
    assert clock.ms + 30_000 <= t.job("a", ref).not_before_ms <= clock.ms + 90_000
    assert t.find(ref).phase is Phase.IDLE
    t.check()
    late = t.store.runs.finish(link, "whatever", DONE)
    assert not late.accepted


def test_a_rescue_of_a_run_that_is_well_changes_nothing(t):
    [(ref, _)] = running(t)
    before = t.find(ref)
    assert t.store.ends.rescue(before.id) is None
    assert t.find(ref) == before
    assert t.store.ends.rescue(10**9) is None


def test_a_worker_that_was_draining_costs_nobody_a_strike(t, clock):
    """D08"""
    [(ref, _)] = running(t)
    t.store.workers.beat(WORKER.instance, {"draining": True})
    clock.forward(20)
    rescue_all(t)
    clock.forward(5)
    [ended] = rescue_all(t)
    assert ended.put_back
    found = t.job("a", ref)
    assert (found.strikes, found.attempt, found.not_before_ms) == (0, 0, None)
    assert t.claim().rows == 1


def test_a_renewal_of_another_instance_process_or_task_renews_nothing(t, clock):
    """C06: ownership is not the host."""
    [(ref, link)] = running(t)
    object_id = t.find(ref).id
    before = t.find(ref)
    clock.forward(5)
    for instance, task_id, pid in (("w2", link.task_id, 101), ("w1", "other-0", 101), ("w1", link.task_id, 102)):
        assert t.store.workers.renew(instance, [Running(object_id, task_id, pid)]) == 0
    assert t.store.workers.renew("w1", []) == 0
    assert t.find(ref) == before
    assert t.store.workers.renew("w1", [Running(object_id, link.task_id, 101), Running(9, "x", 101)]) == 1
    assert t.find(ref).lease_until == clock.ms + 20_000


def lose_the_worker(t, clock):
    clock.forward(25)
    rescue_all(t)
    clock.forward(5)
    return rescue_all(t)


def test_when_a_worker_is_lost_with_several_runs_each_is_struck_once_and_a_suspect(t, clock):
    """D09"""
    running(t, 4)
    assert [ended.cause.value for ended in lose_the_worker(t, clock)] == ["lost"] * 4
    found = [t.job("a", ref) for ref in carts(4)]
    assert [one.strikes for one in found] == [1] * 4
    assert len({one.suspect_on for one in found} - {None}) == 4
    t.check()


def test_the_culprit_is_sealed_after_three_losses_and_none_of_its_neighbours_ever(t, clock):
    """D09, D31: one of eight is the cause, always; the suspects run one at a time."""
    refs = carts(8)
    push_all(t, refs)
    culprit, sealed = refs[3], None
    for life in range(200):
        worker = Worker(f"w{life}", 1)
        flying = []
        for phase in (Phase.IDLE, Phase.SENT, Phase.OPEN):
            for chain in t.claim(phase).shipments:
                [link] = links_of(chain)
                begun = t.begin(link, worker)
                if begun.job is not None:
                    flying.append((chain.ref, link, begun))
        if any(ref == culprit for ref, _, _ in flying):
            lose_the_worker(t, clock)
        else:
            for _, link, begun in flying:
                assert t.finish(link, begun).accepted
        t.check()
        clock.forward(60)
        dead = t.store.dead.list()
        if dead:
            sealed = [one.job.object for one in dead]
        if sealed and not any(t.exists(ref) and t.ids(ref) for ref in refs):
            break
    assert sealed == [culprit]
    assert not any(t.ids(ref) for ref in refs)


def test_a_suspect_waits_while_another_one_runs_on_the_same_worker(t, clock):
    running(t, 2)
    lose_the_worker(t, clock)
    clock.forward(300)
    one, two = t.claim().shipments
    worker = Worker("w2", 1)
    assert t.begin(links_of(one)[0], worker).job is not None
    passed = t.begin(links_of(two)[0], worker)
    assert passed.job is None
    assert t.job("a", two.ref).not_before_ms == clock.ms + 5_000
    t.check()
    clock.forward(5)
    [again] = t.claim().shipments
    assert t.begin(links_of(again)[0], Worker("w3", 1)).job is not None


# --- what it costs


def test_a_claim_of_a_batch_takes_the_same_number_of_statements_whatever_its_size(t):
    push_all(t, carts(60))
    counts = []
    for limit in (3, 40):
        with t.store.database.transaction() as tx:
            t.store.claims._claim(tx, QUEUE, Phase.IDLE, limit)
            counts.append(tx.statements)
    assert counts[0] == counts[1] <= 6


def test_a_tick_reads_its_queue_by_index_whatever_waits_in_another_one(t, database):
    """D34: overdue rows of a queue without consumers cost the healthy queue nothing (by the plan, not by the clock)."""
    with t.store.database.transaction() as tx:
        rows = [
            {"id": n, "name": f"n{n}", "queue": "stuck" if n % 300 else QUEUE, "wake_at": NOW - n}
            for n in range(1, 3001)
        ]
        insert = t.store.database.sql._(
            "INSERT INTO lifecycle_objects (id, kind, name, queue, wake_at, phase, versions, sent_count, queue_wait, doubt,"
            " step, disabled, not_before_count, holds, stored, sealed) VALUES (:id, 'cart', :name, :queue, :wake_at, 0, 0, 0,"
            " 0, 0, 0, 0, 0, 1, 0, 0)"
        )
        tx.run_many(insert, rows)
    with t.store.database.transaction() as tx:
        if database.kind != "sqlite":
            tx.rows("ANALYZE TABLE lifecycle_objects") if database.kind == "mariadb" else tx.run(
                "ANALYZE lifecycle_objects"
            )
        params = {"queue": QUEUE, "phase": 0, "now": NOW, "limit": 500}
        explain = "EXPLAIN QUERY PLAN " if database.kind == "sqlite" else "EXPLAIN "
        plan = str(tx.rows(explain + tx.sql.claimable, params))
        heads = str(tx.rows(explain + tx.sql.queue_heads, {"queue": ""}))
    assert "objects_alarm_idx" in plan
    assert "Sort" not in plan
    assert "TEMP B-TREE" not in plan
    assert "filesort" not in plan
    assert "filesort" not in heads
    assert "TEMP B-TREE" not in heads
    if database.kind == "mariadb":
        assert "Select tables optimized away" in heads
    else:
        assert heads.count("objects_alarm_idx") == 5
        assert "Seq Scan" not in heads
    with t.store.database.transaction() as tx:
        tx.run("DELETE FROM lifecycle_objects")


def test_the_alarm_of_an_object_with_many_jobs_is_read_in_one_statement(t):
    t.store.jobs.push_many([t.draft(f"{n:04}", at_ms=NOW + n) for n in range(300)])
    with t.store.database.transaction() as tx:
        t.store.jobs.push_in(tx, t.draft("zz"))
        assert tx.statements <= 5
    assert t.find().wake_at == NOW
    t.store.objects.set_alarm(CART, "cart.on_alarm", QUEUE, None, 10_000_000)
    assert [one.id for one in t.shipped().jobs if one.id == ALARM] == []


@pytest.mark.databases("mariadb")
def test_a_claim_goes_by_its_index_however_small_the_table_is(t):
    """Whoever sorts all that is due locks it too: another beat then found nothing."""
    for number in range(3):
        t.push("a", ObjectRef("cart", f"{number}"))
    with t.store.database.transaction() as tx:
        tx.rows("ANALYZE TABLE lifecycle_objects")
        params = {"queue": QUEUE, "phase": 0, "now": NOW, "limit": 500}
        [plan] = tx.rows(f"EXPLAIN {tx.sql.claimable}", params)
    assert "lifecycle_objects_alarm_idx" in plan[5]
    assert "filesort" not in plan[9]
