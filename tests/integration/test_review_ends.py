"""Deaths and limits of what is no job: `on_start`, `on_alarm`, hooks; suspects among them; switches and dead jobs at the edge."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, signals

from celery_lifecycle import Lifecycle, worker
from celery_lifecycle.errors import ObjectDisabled
from celery_lifecycle.model import ALARM, HOOK_PREFIX, SEALED, Cause, Link, ObjectRef, Phase, Why
from celery_lifecycle.store.ends import End
from celery_lifecycle.store.runs import Begun
from celery_lifecycle.transitions.run import Action, Refusal, Verdict, Worker
from tests.support.protocol import CART, Clock, Table, links_of, table

START = {"starts": True}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def t(database_url: str, clock: Clock) -> Iterator[Table]:
    with table(database_url, clock=clock) as made:
        yield made


def begun(t: Table, ref: ObjectRef, who: Worker, **calling: Any) -> tuple[Link, Begun]:
    [link, *_] = links_of(t.shipped(ref))
    return link, t.begin(link, who, **calling)


# --- suspects


class Fleet:
    """Eight objects on workers that are killed whole whenever the culprit's code runs on them."""

    def __init__(self, t: Table, clock: Clock, culprit: str) -> None:
        self.t, self.clock, self.culprit = t, clock, culprit
        self.lives = 0
        self.deaths = 0
        self.done: set[str] = set()
        for number in range(8):
            ref = ObjectRef("cart", f"o{number}")
            if number == 0 and culprit == "alarm":
                t.store.objects.set_alarm(ref, "cart.on_alarm", "celery", None, 0)
            else:
                t.push("j", ref)

    def round(self) -> None:
        """All that is due begins on one worker; with the culprit aboard it is lost, else all of it gets done."""
        self.lives += 1
        who, aboard = Worker(f"w{self.lives}", 100), []
        chains = [one for phase in (Phase.IDLE, Phase.SENT, Phase.OPEN) for one in self.t.claim(phase).shipments]
        for chain in chains:
            is_culprit = chain.ref.name == "o0"
            [link] = links_of(chain)
            came = self.t.begin(link, who, **(START if is_culprit and self.culprit == "start" else {}))
            if came.refused is None and (came.job is not None or came.alarm):
                aboard.append((chain, link, came))
        if any(chain.ref.name == "o0" for chain, _, _ in aboard):
            self.deaths += 1
            for _ in range(2):
                self.clock.forward(30)
                for object_id in self.t.claim(Phase.OPEN).lost:
                    self.t.store.ends.rescue(object_id)
        else:
            for chain, link, came in aboard:
                self.t.finish(link, came)
                self.done.add(chain.ref.name)
        self.clock.forward(400)


@pytest.mark.parametrize("culprit", ["start", "alarm", "job"])
def test_a_worker_killed_whole_by_one_of_eight_runs_seals_nobody_else(t: Table, clock: Clock, culprit: str) -> None:
    """D09, also where the culprit is an `on_start` or an `on_alarm`."""
    fleet = Fleet(t, clock, culprit)
    for _ in range(30):
        fleet.round()
    assert fleet.done == {f"o{number}" for number in range(1, 8)}
    assert fleet.deaths == 3
    sealed = {dead.job.object.name for dead in t.store.dead.list()}
    assert sealed == ({"o0"} if culprit == "job" else set())
    if culprit != "job":
        assert t.find(ObjectRef("cart", "o0")).paused == SEALED


@pytest.mark.parametrize("end", ["throws", "dies", "limit", "memory"])
def test_a_suspect_whose_start_did_not_end_well_gives_its_place_free(t: Table, end: str) -> None:
    t.push("j")
    who = Worker("w1", 100)
    with t.store.database.transaction() as tx:
        tx.run(f"UPDATE {t.config.table_prefix}jobs SET suspect_on = '?'")
    link, came = begun(t, CART, who, **START)
    assert t.job("j").suspect_on == "w1"
    if end == "throws":
        t.store.runs.start_failed(link, came.token)
    elif end == "dies":
        t.die(link, who)
    elif end == "limit":
        t.die(link, who, End.TIMED_OUT)
    else:
        t.store.ends.struck_inside(link, came.token, Cause.MEMORY_ERROR, {})
    assert str(t.job("j").suspect_on).startswith("?")
    t.check()


def test_who_was_aboard_is_forgotten_when_the_worker_turns_out_to_live(t: Table, clock: Clock) -> None:
    who = Worker("w1", 100)
    t.push("a")
    begun(t, CART, who)
    for _ in range(2):
        clock.forward(30)
        for object_id in t.claim(Phase.OPEN).lost:
            t.store.ends.rescue(object_id)
    assert t.job("a").strikes == 1
    t.store.workers.beat("w1", {})
    with t.store.database.transaction() as tx:
        assert tx.row(tx.sql.get_heartbeat, {"kind": "lost", "key": "w1"}) is None


# --- time limits of what is no job


def test_a_start_that_hits_a_time_limit_holds_its_object_back(t: Table, clock: Clock) -> None:
    t.push("j")
    for seconds in (1, 2, 4):
        link, _ = begun(t, CART, Worker("w1", 100), **START)
        assert t.die(link, Worker("w1", 100), End.TIMED_OUT) is not None
        assert t.find().wake_at == clock.ms + seconds * 1000
        clock.forward(seconds)
    assert t.job("j").attempt == 0


def test_an_alarm_that_hits_a_time_limit_is_retried_like_one_that_throws(t: Table, clock: Clock) -> None:
    t.store.objects.set_alarm(CART, "cart.on_alarm", "celery", None, 0)
    for seconds in (2, 4, 8, 16, 32, 64):
        link, _ = begun(t, CART, Worker("w1", 100))
        assert t.die(link, Worker("w1", 100), End.TIMED_OUT).dead == ()
        assert t.find().wake_at == clock.ms + seconds * 1000
        clock.forward(seconds)
    link, _ = begun(t, CART, Worker("w1", 100))
    [dead] = t.die(link, Worker("w1", 100), End.TIMED_OUT).dead
    assert (dead.id, [one.reason for one in t.store.dead.list()]) == (ALARM, ["timed out"])
    assert not t.exists()


def test_an_alarm_after_jobs_that_hits_a_time_limit_is_set_again(t: Table, clock: Clock) -> None:
    t.push("j")
    link, came = begun(t, CART, Worker("w1", 100))
    link = Link(**{**{name: getattr(link, name) for name in link.__dataclass_fields__}, "last": False})
    t.finish(link, came)
    alarm = Link(
        **{
            **{name: getattr(link, name) for name in link.__dataclass_fields__},
            "position": 1, "job": ALARM, "task_id": f"{link.dispatch}-1", "token": came.token, "last": True,
        }
    )  # fmt: skip
    assert t.begin(alarm, Worker("w1", 100)).alarm
    t.die(alarm, Worker("w1", 100), End.TIMED_OUT)
    assert t.find().wake_at == clock.ms + 2000


def hook_link(t: Table) -> Link:
    t.push("j")
    link, _ = begun(t, CART, Worker("w1", 100), hook="cart.on_memory_limit")
    t.die(link, Worker("w1", 100))
    [hook] = links_of(t.shipped())
    assert hook.job.startswith(HOOK_PREFIX)
    return hook


@pytest.mark.parametrize("end", [End.TIMED_OUT, End.HUNG, End.DIED])
def test_a_hook_is_tried_once_however_it_ends(t: Table, end: End) -> None:
    hook = hook_link(t)
    t.begin(hook, Worker("w1", 100))
    t.die(hook, Worker("w1", 100), end)
    assert t.count("jobs") == 1
    assert t.count("dead_jobs") == 0


# --- switches


def test_a_hook_opens_no_run_of_an_object_that_a_person_paused(t: Table) -> None:
    hook = hook_link(t)
    t.store.objects.pause(CART, "by me")
    assert t.begin(hook, Worker("w1", 100)).refused is Refusal.PAUSED
    t.store.objects.resume(CART)
    t.check()


def test_a_hook_opens_no_run_of_a_disabled_object(t: Table) -> None:
    hook = hook_link(t)
    t.store.objects.disable(CART)
    assert t.begin(hook, Worker("w1", 100)).refused is Refusal.PAUSED


def test_resume_clears_strikes_whose_line_is_forgotten(t: Table, clock: Clock) -> None:
    t.push("j")
    link, _ = begun(t, CART, Worker("w1", 100))
    t.die(link, Worker("w1", 100))
    clock.forward(4000)
    t.store.jobs.reschedule(CART, "j", None, None, 10**9)
    with t.store.database.transaction() as tx:
        tx.run(f"UPDATE {t.config.table_prefix}objects SET strike_lines = NULL")
    assert t.job("j").strikes == 1
    t.store.objects.resume(CART)
    assert t.job("j").strikes == 0


# --- dead jobs


def failed(t: Table, **more: Any) -> int:
    t.push("j", **more)
    link, came = begun(t, CART, Worker("w1", 100))
    t.finish(link, came, Verdict(Action.DEAD, why=Why.FAILED))
    return t.store.dead.list()[-1].key


def test_a_dead_job_of_a_disabled_object_is_not_replayed(t: Table) -> None:
    key = failed(t)
    t.store.objects.disable(CART)
    with pytest.raises(ObjectDisabled):
        t.store.dead.replay(key)
    assert [dead.key for dead in t.store.dead.list()] == [key]


def test_an_expired_job_that_is_replayed_runs(t: Table, clock: Clock) -> None:
    t.push("j", options_json=f'{{"expires_ms": {clock.ms - 1}}}')
    _, passed = begun(t, CART, Worker("w1", 100))
    assert passed.why is Why.EXPIRED
    t.store.dead.replay(t.store.dead.list()[-1].key)
    _, came = begun(t, CART, Worker("w1", 100))
    assert came.job is not None


def test_a_dead_alarm_beside_a_newer_one_is_not_replayed_as_a_job(t: Table) -> None:
    t.store.objects.set_alarm(CART, "cart.on_alarm", "celery", None, 0)
    for _ in range(7):
        t.clock.forward(200)
        link, _ = begun(t, CART, Worker("w1", 100))
        t.die(link, Worker("w1", 100), End.TIMED_OUT)
    [dead] = t.store.dead.list()
    t.store.objects.set_alarm(CART, "cart.on_alarm", "celery", None, 60_000)
    replayed = t.store.dead.replay(dead.key)
    assert replayed is not None
    assert (replayed.id, replayed.due_ms, t.count("jobs")) == (ALARM, t.clock.ms, 1)


# --- the worker's parent


def test_a_header_that_is_none_of_ours_stops_no_worker() -> None:
    app = Celery("x", set_as_current=False)
    Lifecycle(app, database_url="sqlite://", auto_migrate=True)
    acked, taken = [], []
    consumer = SimpleNamespace(app=app, connection_errors=())
    for header in ("nonsense", '{"of": "somebody else"}'):
        message = SimpleNamespace(
            headers={"lifecycle": header, "id": "1"}, ack_log_error=lambda *_: acked.append(1)
        )  # fmt: skip
        worker._guarded(consumer, "plain", taken.append)(message)
    assert len(taken) == 1  # it looks like no link at all
    assert acked == [1]


class Starting:
    """A worker that is being made, as far as receivers look."""

    def __init__(self, app: Celery) -> None:
        self.app = app


@pytest.mark.parametrize("settings", [{}, {"lifecycle_poll_intervall": 1}], ids=["no tables", "unknown setting"])
def test_a_worker_that_can_not_work_stops_and_says_what_to_do(settings: dict[str, Any], tmp_path: Any) -> None:
    app = Celery("x", set_as_current=False)
    app.conf.update(lifecycle_database_url=f"sqlite:///{tmp_path}/x.db", **settings)
    Lifecycle(app)
    with pytest.raises(SystemExit, match=r"lifecycle migrate|Unknown setting lifecycle_poll_intervall"):
        signals.worker_init.send(sender=Starting(app))


def test_a_worker_starts_while_the_database_is_away() -> None:
    app = Celery("x", set_as_current=False)
    Lifecycle(app, database_url="postgresql+psycopg://nobody@127.0.0.1:1/none")
    signals.worker_init.send(sender=Starting(app))
