"""Push, replace, cancel, reschedule, rearm, list: the same on every database, with the alarm right after each."""

from collections.abc import Iterator

import pytest

from celery_lifecycle.errors import ObjectDisabled, OwnerConflict
from celery_lifecycle.model import ALARM, ObjectRef, Phase, Why
from celery_lifecycle.store.jobs import Pusher
from tests.support.protocol import CART, DONE, NOW, TASK, Clock, Table, links_of, table

HOUR = 3600.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def t(database_url: str, clock: Clock) -> Iterator[Table]:
    with table(database_url, clock=clock) as made:
        yield made
        made.check()


def test_a_pushed_job_comes_back_as_it_was_given(t):
    given = {
        "payload_json": '{"ä":"\U0001f600"}',
        "options_json": '{"priority":3}',
        "retry_json": "[5,0.5,9]",
        "singleflight": True,
        "hung_timeout_ms": 1500,
        "exclusive": True,
        "recovery_loop": True,
    }
    pushed = t.push("a", delay=60, **given).job
    assert t.job("a") == pushed
    assert {name: getattr(pushed, name) for name in given} == given
    assert (pushed.version, pushed.line, pushed.owner, pushed.task) == (1, "a", "host", TASK)
    assert (pushed.due_ms, pushed.created_ms, pushed.attempt, pushed.strikes) == (NOW + 60_000, NOW, 0, 0)
    assert pushed.object == CART


def test_a_push_without_an_id_makes_a_job_each_time(t):
    first, second = t.push().job, t.push().job
    assert first.id != second.id
    assert t.count("jobs") == 2
    assert t.count("objects") == 1


def test_the_alarm_is_that_of_the_earliest_job_after_every_verb(t):
    def wake():
        t.check()
        return t.find().wake_at

    t.push("late", delay=300)
    assert wake() == NOW + 300_000
    t.push("soon", delay=100)
    assert wake() == NOW + 100_000
    t.push("soon", delay=200)
    assert wake() == NOW + 200_000
    t.store.jobs.reschedule(CART, "late", "host", None, 50_000)
    assert wake() == NOW + 50_000
    t.store.jobs.cancel(CART, "late", "host")
    assert wake() == NOW + 200_000
    t.store.jobs.rearm(CART)
    assert wake() == NOW + 200_000
    t.store.jobs.cancel(CART, "soon", "host")
    assert not t.exists()


def test_a_stable_id_replaces_the_job_under_a_new_version(t):
    t.push("a", delay=60, payload_json='"old"')
    new = t.push("a", delay=90, payload_json='"new"').job
    assert t.ids() == ["a"]
    assert (t.job("a").payload, new.version, t.find().versions) == ("new", 2, 2)


def test_a_replaced_job_keeps_its_strikes_its_delay_and_its_suspicion_but_not_its_attempts(t):
    """D11: a struck job that is replaced with `delay=0` still waits."""
    t.push("a")
    with t.store.database.transaction() as tx:
        tx.run(
            "UPDATE lifecycle_jobs SET strikes = 2, attempt = 1, suspect_on = 'w9', not_before = " + str(NOW + 30_000)
        )
    t.store.jobs.rearm(CART)
    new = t.push("a").job
    assert (new.strikes, new.suspect_on, new.not_before_ms, new.attempt) == (2, "w9", NOW + 30_000, 0)
    assert t.find().wake_at == NOW + 30_000
    assert t.claim().shipments == ()


def test_a_job_that_is_kept_stays_as_it_is(t):
    first = t.push("a", delay=60, keep=True).job
    again = t.push("a", delay=5, keep=True, payload_json='"other"').job
    assert again == first == t.job("a")
    assert t.find().versions == 1


def test_an_id_belongs_to_its_owner(t):
    t.push("a", delay=60, owner="mailer")
    before = t.find()
    with pytest.raises(OwnerConflict, match=r"'a'.*'mailer'.*'host'.*another id"):
        t.push("a")
    assert t.store.jobs.cancel(CART, "a", "host") is None
    assert t.store.jobs.reschedule(CART, "a", "host", None, 0) is None
    assert t.store.jobs.get(CART, "a", "host") is None
    assert t.store.jobs.list(CART, "host") == []
    assert [one.id for one in t.store.jobs.list(CART, "mailer")] == ["a"]
    assert t.find() == before
    assert t.job("a").version == 1


def test_a_refused_push_to_a_new_object_leaves_no_row(t):
    t.store.objects.disable(CART)
    with pytest.raises(ObjectDisabled, match="cart/user-42"):
        t.push("a")
    assert t.count("jobs") == 0
    assert t.find().disabled


def test_cancel_tells_whether_there_was_a_job(t):
    t.push("a")
    assert t.store.jobs.cancel(CART, "a", "host").id == "a"
    assert t.store.jobs.cancel(CART, "a", "host") is None
    assert t.store.jobs.cancel(ObjectRef("cart", "nobody"), "a", "host") is None
    assert t.count("objects") == t.count("jobs") == t.count("dead_jobs") == 0


def test_a_revoked_job_is_kept_as_a_dead_job(t):
    ref = ObjectRef("billing.charge", "task-1")
    t.push("task-1", ref, delay=60)
    assert t.store.jobs.revoke(["other", "billing.charge"], "task-1").id == "task-1"
    assert t.store.jobs.revoke(["other", "billing.charge"], "task-1") is None
    [dead] = t.store.dead.list(ref)
    assert (dead.reason, dead.job.id, dead.died_ms) == (Why.REVOKED.value, "task-1", NOW)
    assert not t.exists(ref)


def test_reschedule_moves_a_job_with_a_new_version_and_no_attempts(t):
    t.push("a", delay=60)
    with t.store.database.transaction() as tx:
        tx.run("UPDATE lifecycle_jobs SET attempt = 2")
    moved = t.store.jobs.reschedule(CART, "a", "host", NOW + 5, 0)
    assert (moved.due_ms, moved.version, moved.attempt) == (NOW + 5, 2, 0)
    assert t.job("a") == moved
    assert t.store.jobs.reschedule(CART, "b", "host", NOW, 0) is None


def test_moved_to_two_minutes_and_cancelled_a_second_before_it_never_runs(t, clock):
    """C22"""
    t.push("a", delay=60)
    t.store.jobs.reschedule(CART, "a", "host", None, 120_000)
    clock.forward(119)
    assert t.claim().rows == 0
    t.store.jobs.cancel(CART, "a", "host")
    clock.forward(5)
    assert t.claim().rows == 0
    assert not t.exists()


def test_moved_to_two_minutes_it_runs_exactly_once_at_the_new_time(t, clock):
    """C22"""
    t.push("a", delay=60)
    t.store.jobs.reschedule(CART, "a", "host", None, 120_000)
    clock.forward(119.999)
    assert t.claim().rows == 0
    clock.forward(0.001)
    assert t.run_chain(t.shipped()) == (["a"], None)
    clock.forward(3600)
    assert t.claim().rows == 0


def test_a_list_is_in_due_order_without_the_protocols_own_jobs(t):
    for name, delay in (("b", 10), ("c", 5), ("a", 10), ("!", 10), ("~", 1)):
        t.push(name, delay=delay)
    t.store.objects.set_alarm(CART, "cart.on_alarm", "celery", None, 0)
    assert t.ids() == ["~", "c", "!", "a", "b"]
    assert t.count("jobs") == 6


def test_rearm_puts_right_what_somebody_else_wrote(t):
    t.push("a", delay=60)
    with t.store.database.transaction() as tx:
        tx.run("UPDATE lifecycle_objects SET wake_at = 5, queue = 'wrong'")
    t.store.jobs.rearm(CART)
    assert (t.find().wake_at, t.find().queue) == (NOW + 60_000, "celery")
    t.store.jobs.rearm(ObjectRef("cart", "nobody"))
    assert t.count("objects") == 1


def test_many_jobs_are_stored_in_one_transaction_and_come_back_in_the_order_given(t):
    refs = [ObjectRef("cart", f"user-{n % 7}") for n in range(40)]
    pushed = t.store.jobs.push_many([t.draft(f"job-{n}", ref, delay_ms=n) for n, ref in enumerate(refs)])
    assert [(one.object, one.id, one.due_ms) for one in pushed] == [
        (ref, f"job-{n}", NOW + n) for n, ref in enumerate(refs)
    ]
    assert (t.count("jobs"), t.count("objects")) == (40, 7)


def test_one_refused_job_refuses_the_whole_of_push_many(t):
    t.push("taken", delay=60, owner="mailer")
    with pytest.raises(OwnerConflict):
        t.store.jobs.push_many([t.draft("fine"), t.draft("other", ObjectRef("a", "a")), t.draft("taken")])
    assert t.ids() == ["taken"]
    assert t.count("objects") == 1


def test_a_due_push_claims_an_idle_object_and_only_that(t):
    pushed = t.push("a", claims=True)
    assert [one.id for one in pushed.shipment.jobs] == ["a"]
    assert t.find().phase is Phase.SENT
    assert t.push("b", claims=True).shipment is None
    _, following = t.run_chain(pushed.shipment)
    begun = t.begin(links_of(following)[0])
    assert begun.job.id == "b"
    assert t.push("c", claims=True).shipment is None
    assert t.find().phase is Phase.OPEN


def test_a_push_for_later_claims_nothing(t):
    assert t.push("a", delay=5, claims=True).shipment is None
    assert t.find().phase is Phase.IDLE


def test_an_object_pushed_again_and_again_keeps_its_place_in_the_queue(t, clock):
    """D17: overdue is not moved up to now."""
    t.push("a")
    for _ in range(5):
        clock.forward(1)
        t.push("b")
    assert t.find().wake_at == NOW


def test_ten_thousand_names_pushed_and_cancelled_leave_no_rows(t):
    """D37 (the number is smaller here; the rule is per name)."""
    for number in range(150):
        ref = ObjectRef("cart", f"user-{number}")
        t.push("a", ref, delay=60)
        t.store.jobs.cancel(ref, "a", "host")
        t.push("#".join("ab"), ref)
        t.store.objects.destroy(ref)
    assert [t.count(name) for name in ("objects", "jobs", "storage", "heartbeats", "dead_jobs")] == [0] * 5


def test_an_object_id_is_never_used_again(t):
    t.push("a")
    first = t.find().id
    t.store.objects.destroy(CART)
    t.push("a")
    assert t.find().id > first


# --- lines and seals


def pusher(job="a", line="a", task=TASK, ref=CART):
    return Pusher(ref, job, task, line)


def test_a_job_pushed_by_a_running_job_of_its_task_is_of_the_same_line(t):
    """D30"""
    assert t.push("b", pusher=pusher("a", "first")).job.line == "first"
    assert t.push("c", pusher=pusher("a", "first", task="cart.other")).job.line == "c"
    assert t.push("d", pusher=pusher("a", "first", ref=ObjectRef("cart", "else"))).job.line == "d"


def sealed(t, **more):
    """A job that died often enough."""
    t.push("a", **more)
    for _ in range(3):
        chain = t.shipped()
        [link] = links_of(chain)
        t.begin(link)
        t.die(link)
        t.check()
        t.clock.forward(100)
    assert t.ids() == []
    assert t.find().sealed


def test_from_inside_a_run_a_sealed_job_stays_away(t):
    """D12, section 7 rule 3"""
    sealed(t)
    back = t.push("a", pusher=pusher("z", "z")).job
    assert back.sealed
    assert t.ids() == []
    same_call = t.push(None, pusher=pusher("z", "z")).job
    assert same_call.sealed
    other = t.push(None, pusher=pusher("z", "z"), payload_json='"other"').job
    assert not other.sealed


def test_a_push_from_outside_lifts_the_seal(t):
    sealed(t)
    back = t.push("a").job
    assert not back.sealed
    assert t.ids() == ["a"]
    assert not t.find().sealed
    assert [one.reason for one in t.store.dead.list(CART)] == ["lifted"]
    assert t.push("a", pusher=pusher("z", "z")).job.sealed is False


@pytest.mark.parametrize("how", ["resume", "purge", "replay", "destroy"])
def test_a_person_lifts_the_seal(t, how):
    sealed(t)
    [dead] = t.store.dead.list(CART)
    {
        "resume": lambda: t.store.objects.resume(CART),
        "purge": lambda: t.store.dead.purge(dead.key),
        "replay": lambda: t.store.dead.replay(dead.key),
        "destroy": lambda: t.store.objects.destroy(CART),
    }[how]()
    t.check()
    assert t.push("a", pusher=pusher("z", "z")).job.sealed is False
    assert t.ids() == ["a"]
    assert t.job("a").strikes == 0


# --- the bare alarm


def set_alarm(t, delay=0):
    return t.store.objects.set_alarm(CART, "cart.on_alarm", "celery", None, round(delay * 1000))


def test_setting_the_alarm_again_moves_it(t):
    set_alarm(t, 60)
    set_alarm(t, 30)
    assert t.store.jobs.get_alarm(CART).due_ms == NOW + 30_000
    assert t.count("jobs") == 1
    assert t.find().wake_at == NOW + 30_000
    t.store.jobs.cancel(CART, ALARM, "host")
    assert t.store.jobs.get_alarm(CART) is None
    assert not t.exists()


def test_the_alarm_is_none_while_it_runs_unless_it_is_set_again(t):
    set_alarm(t)
    [link] = links_of(t.shipped())
    begun = t.begin(link)
    assert begun.alarm
    assert t.store.jobs.get_alarm(CART) is None
    set_alarm(t, 90)
    assert t.store.jobs.get_alarm(CART).due_ms == NOW + 90_000
    assert t.finish(link, begun, DONE).accepted
    assert t.store.jobs.get_alarm(CART).due_ms == NOW + 90_000


def test_an_alarm_that_failed_is_retried_from_two_seconds_doubling_six_times(t, clock):
    set_alarm(t)
    waits = []
    for _ in range(6):
        [link] = links_of(t.shipped())
        begun = t.begin(link)
        done = t.store.runs.alarm_failed(link, begun.token, "celery", "cart.on_alarm", "boom", "trace")
        waits.append(done.due_ms - clock.ms)
        assert t.store.jobs.get_alarm(CART).due_ms == done.due_ms, "get_alarm gives the time of the retry"
        t.check()
        clock.to(done.due_ms)
    assert waits == [2000, 4000, 8000, 16000, 32000, 64000]
    [link] = links_of(t.shipped())
    begun = t.begin(link)
    assert t.store.runs.alarm_failed(link, begun.token, "celery", "cart.on_alarm", "boom", "trace").due_ms is None
    assert [one.reason for one in t.store.dead.list(CART)] == ["failed"]
    assert not t.exists()


def test_a_newer_alarm_stands_though_the_one_before_it_failed(t):
    set_alarm(t)
    [link] = links_of(t.shipped())
    begun = t.begin(link)
    set_alarm(t, 500)
    t.store.runs.alarm_failed(link, begun.token, "celery", "cart.on_alarm", "boom", "trace")
    assert t.store.jobs.get_alarm(CART).due_ms == NOW + 500_000
    assert t.store.jobs.get_alarm(CART).attempt == 0
