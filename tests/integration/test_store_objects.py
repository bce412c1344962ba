"""Objects as a whole on every database: pause, disable, destroy, storage, keep-alives, seals, housekeeping."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from celery_lifecycle.model import ALARM, SEALED, ObjectRef, Phase
from celery_lifecycle.transitions.run import Refusal
from tests.support.protocol import CART, NOW, QUEUE, Clock, Table, links_of, table

ALARM_TASK = "cart.on_alarm"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def t(database_url: str, clock: Clock) -> Iterator[Table]:
    with table(database_url, clock=clock) as made:
        yield made
        made.check()


def values(t, prefix=""):
    return dict(t.store.objects.list_values(CART, prefix))


def opened(t, *names):
    for name in names or ("a",):
        t.push(name)
    links = links_of(t.shipped())
    begun = t.begin(links[0])
    return [replace(link, token=begun.token) for link in links], begun


# --- switches


def test_a_paused_object_wakes_for_nothing_until_it_is_resumed(t):
    t.push("a")
    t.store.objects.pause(CART, "holiday")
    t.push("b")
    t.check()
    assert t.find().wake_at is None
    assert t.claim().rows == 0
    assert t.store.objects.resume(CART)
    assert t.find().wake_at == NOW
    assert t.run_chain(t.shipped())[0] == ["a", "b"]


def test_a_pause_is_remembered_before_there_is_any_job_and_forgotten_with_resume(t):
    t.store.objects.pause(CART, "holiday")
    t.push("a")
    assert t.claim().rows == 0
    t.store.jobs.cancel(CART, "a", "host")
    assert t.find().paused == "holiday"
    t.store.objects.resume(CART)
    assert not t.exists()
    assert t.store.objects.resume(CART) is False


def test_a_chain_of_an_object_that_was_paused_meanwhile_ends_quietly(t):
    t.push("a")
    chain = t.shipped()
    t.store.objects.pause(CART, "holiday")
    assert t.begin(links_of(chain)[0]).refused is Refusal.PAUSED
    assert t.ids() == ["a"]


def test_a_paused_objects_open_run_goes_on_to_its_end(t):
    links, begun = opened(t, "a", "b")
    t.store.objects.pause(CART, "holiday")
    assert t.finish(links[0], begun).accepted
    assert t.run_link(links[1])[1].closed
    assert t.find().wake_at is None


def test_a_disabled_object_stays_disabled_and_keeps_its_jobs(t):
    t.push("a")
    t.store.objects.disable(CART)
    t.store.jobs.rearm(CART)
    assert t.claim().rows == 0
    assert t.find().wake_at is None
    assert t.ids() == ["a"]


def test_what_a_breaker_left_is_cleared_by_resume(t):
    [link], _ = opened(t)
    t.die(link)
    assert t.job("a").strikes == 1
    t.store.objects.resume(CART)
    found = t.job("a")
    assert (found.strikes, found.not_before_ms, found.suspect_on) == (0, None, None)
    assert t.find().lines is None
    assert t.find().wake_at == NOW


def test_an_object_paused_as_sealed_stays_sealed_when_somebody_pauses_it(t):
    t.push("a")
    t.store.objects.change(CART, lambda state: state.but(paused=SEALED))
    t.store.objects.pause(CART, "holiday")
    assert t.find().paused == SEALED


# --- destroy


def everything(t):
    t.push("a")
    t.push("late", delay=900)
    t.store.objects.set_alarm(CART, ALARM_TASK, QUEUE, None, 900_000)
    t.store.objects.put_values(CART, {"k": "1"})
    t.store.holds.hold(CART, "alive", "h1", None, {}, 30_000)


def test_destroy_takes_jobs_storage_keep_alives_and_the_row(t):
    everything(t)
    assert t.store.objects.destroy(CART)
    assert [t.count(name) for name in ("objects", "jobs", "storage", "heartbeats")] == [0] * 4
    assert t.store.objects.destroy(CART) is False


def test_destroy_lifts_pauses_disablings_and_strikes(t):
    [link], _ = opened(t)
    t.die(link)
    t.store.objects.pause(CART, "holiday")
    t.store.objects.disable(CART)
    t.store.objects.destroy(CART)
    assert not t.exists()
    assert t.push("a").job.strikes == 0
    assert t.claim().rows == 1


def test_destroy_during_a_run_keeps_the_row_until_the_link_ends(t):
    """D36, rule "destroy from within a job is safe": jobs and storage go at once, the row when its run ends."""
    [link], begun = opened(t)
    t.store.objects.put_values(CART, {"k": "1"})
    t.store.objects.destroy(CART)
    t.check()
    assert t.find().phase is Phase.OPEN
    assert (t.ids(), values(t)) == ([], {})
    done = t.finish(link, begun)
    assert (done.accepted, done.discarded) == (True, True)
    assert not t.exists()


def test_later_links_of_a_destroyed_objects_run_end_quietly_and_on_alarm_is_not_called(t):
    everything(t)
    t.push("b")
    links = links_of(t.shipped())
    begun = t.begin(links[0])
    one, two = (replace(link, token=begun.token, last=False) for link in links)
    on_alarm = replace(two, position=2, job=ALARM, task_id="d-2", last=True)
    t.store.objects.destroy(CART)
    done = t.finish(one, begun)
    assert (done.accepted, done.closed) == (True, True)
    assert not t.exists()
    assert t.begin(two).refused is not None
    assert t.begin(on_alarm).refused is not None


def test_a_push_to_a_destroyed_objects_run_lands_in_its_row_and_runs_after_it(t):
    """D36: one row, no overlap."""
    links, begun = opened(t, "a", "b")
    t.store.objects.destroy(CART)
    assert t.push("new", claims=True).shipment is None
    assert t.count("objects") == 1
    assert t.claim().rows == 0
    done = t.finish(links[0], begun)
    assert done.closed
    assert [one.id for one in done.shipment.jobs] == ["new"]
    assert t.begin(links[1]).refused is not None
    assert t.run_chain(done.shipment)[0] == ["new"]
    assert not t.exists()


def test_destroy_between_two_links_ends_the_run_at_once(t):
    links, begun = opened(t, "a", "b")
    t.finish(links[0], begun)
    t.store.objects.destroy(CART)
    assert not t.exists()
    assert t.begin(links[1]).refused is Refusal.NO_OBJECT


def test_a_job_that_destroys_its_object_and_dies_leaves_its_strike_to_nobody(t):
    [link], _ = opened(t)
    t.store.objects.destroy(CART)
    assert t.die(link) is not None
    t.check()
    assert t.ids() == []
    assert t.find().phase is Phase.IDLE


def test_a_destroyed_object_whose_worker_is_lost_is_rescued_and_forgotten(t, clock):
    opened(t, "a", "b")
    t.store.objects.destroy(CART)
    for _ in range(2):
        clock.forward(21)
        for object_id in t.claim(Phase.OPEN).lost:
            t.store.ends.rescue(object_id)
    assert t.find().phase is Phase.IDLE
    clock.forward(3601)
    t.store.beats.forget_old()
    assert not t.exists()


# --- storage


def test_storage_keeps_json_by_key_in_key_order(t):
    t.store.objects.put_values(CART, {"b": "2", "a": '"ä😀"', "ab": "3"})
    assert values(t) == {"a": '"ä😀"', "ab": "3", "b": "2"}
    assert values(t, "a") == {"a": '"ä😀"', "ab": "3"}
    assert t.store.objects.get_value(CART, "b") == "2"
    assert t.store.objects.get_value(CART, "none") is None
    t.store.objects.put_values(CART, {"b": "9", "a": None})
    assert values(t) == {"ab": "3", "b": "9"}


def test_storage_alone_keeps_the_row_and_the_last_deleted_key_lets_it_go(t):
    t.store.objects.put_values(CART, {"a": "1"})
    t.push("x")
    t.store.jobs.cancel(CART, "x", "host")
    assert t.exists()
    t.store.objects.put_values(CART, {"a": None})
    assert not t.exists()
    t.store.objects.put_values(CART, {"a": None})
    assert not t.exists()


def test_keys_compare_byte_by_byte(t):
    keys = {"k": "1", "K": "2", "k ": "3", "ké": "4", "ke\u0301": "5"}
    t.store.objects.put_values(CART, keys)
    assert values(t) == keys


# --- keep-alives


def test_a_keep_alive_keeps_the_row_is_in_no_list_and_is_given_back_once(t):
    t.store.holds.hold(CART, "alive", "h1", None, {}, 30_000)
    t.store.holds.hold(CART, "alive", "h2", None, {}, 30_000)
    assert t.find().holds == 2
    assert (t.ids(), t.find().wake_at) == ([], None)
    assert t.store.holds.let_go(CART, "alive", "h1")
    assert not t.store.holds.let_go(CART, "alive", "h1")
    assert t.find().holds == 1
    assert t.store.holds.let_go(CART, "alive", "h2")
    assert not t.exists()


def test_a_keep_alive_expires_unless_it_is_renewed(t, clock):
    t.store.holds.hold(CART, "alive", "h1", None, {}, 30_000)
    clock.forward(20)
    assert t.store.holds.extend("alive", "h1", 30_000)
    clock.forward(20)
    assert t.store.holds.expired() == []
    clock.forward(11)
    assert [one.key for one in t.store.holds.expired()] == ["h1"]
    assert not t.store.holds.extend("alive", "gone", 30_000)


# --- memory of strikes


def test_strikes_of_lines_are_forgotten_an_hour_after_the_last_death_and_the_row_with_them(t, clock):
    [link], _ = opened(t)
    t.die(link)
    t.store.jobs.cancel(CART, "a", "host")
    assert t.find().lines is not None
    clock.forward(3599)
    t.store.beats.forget_old()
    assert t.exists()
    clock.forward(2)
    t.store.beats.forget_old()
    assert not t.exists()


def test_forgetting_old_things_touches_no_object_that_has_something_to_do(t, clock):
    [link], _ = opened(t)
    t.die(link)
    t.push("b", ObjectRef("cart", "other"), delay=9_000_000)
    clock.forward(4000)
    before = t.find()
    t.store.beats.forget_old()
    assert t.find().but(lines=None) == before.but(lines=None)
    assert t.exists(ObjectRef("cart", "other"))


# --- dead jobs


def failed(t, name="a"):
    from celery_lifecycle.model import Why
    from celery_lifecycle.transitions.run import Action, Verdict

    [link], begun = opened(t, name)
    t.finish(link, begun, Verdict(Action.DEAD, why=Why.FAILED, error="boom", traceback="trace"))


def test_a_dead_job_keeps_what_it_was_and_is_replayed_once(t):
    failed(t)
    assert not t.exists()
    [dead] = t.store.dead.list()
    assert (dead.reason, dead.error, dead.traceback, dead.job.id, dead.died_ms) == ("failed", "boom", "trace", "a", NOW)
    again = t.store.dead.replay(dead.key)
    assert (again.id, again.due_ms, again.attempt) == ("a", NOW, 0)
    assert t.store.dead.replay(dead.key) is None
    assert t.store.dead.list() == []
    assert t.run_chain(t.shipped())[0] == ["a"]


def test_a_replay_does_not_replace_the_pending_job_of_its_id(t):
    failed(t)
    [dead] = t.store.dead.list()
    t.push("a", delay=60, payload_json='"newer"')
    again = t.store.dead.replay(dead.key)
    assert again.id != "a"
    assert t.job("a").payload == "newer"
    assert len(t.ids()) == 2


def test_dead_jobs_are_purged_by_key_or_by_age(t, clock):
    failed(t, "a")
    clock.forward(86_400)
    failed(t, "b")
    assert t.store.dead.count() == {"failed": 2}
    clock.forward(29.5 * 86_400)
    assert t.store.dead.purge_old() == 1
    [left] = t.store.dead.list(CART)
    assert left.job.id == "b"
    assert t.store.dead.purge(left.key)
    assert not t.store.dead.purge(left.key)


# --- the database's own facts


def test_the_id_of_a_database_is_made_once(t, database_url):
    first = t.store.beats.database_id()
    with table(database_url, migrates=False) as other:
        assert other.store.beats.database_id() == first


def test_objects_are_listed_in_the_order_of_their_ids(t):
    for number in range(5):
        t.push("a", ObjectRef("cart" if number % 2 else "bag", f"n{number}"))
    assert [one.name for one in t.store.objects.find_many()] == [f"n{n}" for n in range(5)]
    second = t.store.objects.find_many("cart")[1]
    assert [one.name for one in t.store.objects.find_many("bag", after=second.id)] == ["n4"]
