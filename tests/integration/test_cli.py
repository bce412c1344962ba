"""The commands of `celery -A <app> lifecycle …`: what they do to the table, what they print, how they refuse."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_lifecycle import Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.cli import lifecycle as commands
from celery_lifecycle.model import Cause, ObjectRef, Why
from celery_lifecycle.store.ends import End
from celery_lifecycle.store.runs import Calling
from tests.support.protocol import CART, WORKER, links_of
from tests.support.tables import make_tables

ROOT = Path(__file__).parents[2]
Run = Callable[..., Result]


@pytest.fixture
def lifecycle(database_url: str) -> Iterator[Lifecycle]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    made = Lifecycle(app, database_url=database_url, lock_timeout=1)

    class Cart(LifecycleObject, lifecycle=made):
        @lifecycle_job()
        def remind(self, ctx): ...

    make_tables(made.store.database)
    yield made
    made.close()


@pytest.fixture
def run(lifecycle: Lifecycle) -> Run:
    def invoke(*arguments: object, code: int = 0, typed: str | None = None) -> Result:
        context = CLIContext(app=lifecycle.app, no_color=True, workdir=None)
        done = CliRunner().invoke(commands, [str(one) for one in arguments], obj=context, input=typed)
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.output
        return done

    return invoke


@pytest.fixture
def ask(run: Run) -> Callable[..., object]:
    def invoke(*arguments: object) -> object:
        return json.loads(run(*arguments, "--json").output)

    return invoke


def pending(lifecycle: Lifecycle, ref: ObjectRef = CART) -> dict[str, int]:
    return {job.id: job.due_ms for job in lifecycle.store.jobs.list(ref, None)}


def test_migrate_makes_the_tables_and_says_so_once(lifecycle, run, ask):
    with lifecycle.store.database.engine.begin() as connection:
        for name in ("objects", "alembic_version"):
            connection.exec_driver_sql(f"DROP TABLE lifecycle_{name}")
    assert "lifecycle migrate" in run("status", code=1).output
    for name in ("jobs", "storage", "dead_jobs", "heartbeats", "beat_entries", "meta"):
        with lifecycle.store.database.engine.begin() as connection:
            connection.exec_driver_sql(f"DROP TABLE lifecycle_{name}")
    assert "before: none" in run("migrate").output
    assert "already" in run("migrate").output
    found = ask("migrate")
    assert found["revision"] == found["before"] is not None


def test_an_unknown_revision_is_refused_in_one_line(run):
    done = run("migrate", "--revision", "nonsense", code=1)
    assert len(done.output.splitlines()) == 1


def test_a_pushed_job_is_stored_and_shown_everywhere(lifecycle, run, ask):
    at = datetime.now(timezone.utc) + timedelta(hours=1)
    done = run("push", CART, "remind", "--at", at.isoformat(), "--id", "r", "--payload", '{"template": "forgot"}')
    assert "Pushed cart/user-42#r (task cart.remind)" in done.output
    (job,) = ask("jobs", CART)
    assert (job["id"], job["payload"], job["attempts"]) == ("r", {"template": "forgot"}, 0)
    assert datetime.fromisoformat(job["due_at"]) - at < timedelta(milliseconds=2)
    for command in (("jobs", CART), ("show", CART)):
        assert "cart.remind" in run(*command).output
    assert "cart/user-42" in run("objects").output
    assert [one["state"] for one in ask("objects")] == ["waiting"]
    assert "waits for its alarm" in ask("show", CART)["description"]
    status = ask("status")
    assert (status["objects"], status["jobs"], status["queues"][0]["alarms"]) == (1, 1, 1)


def test_a_push_without_a_time_goes_out_at_once(lifecycle, run):
    run("push", CART, "cart.remind")
    assert lifecycle.store.objects.find(CART).dispatch is not None


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("push", "cart", "remind"), 2, "KIND/NAME"),
        (("push", "1cart/x", "remind"), 2, "kind"),
        (("push", "cart/#x", "remind"), 2, "#"),
        (("push", "cart/x", "nope"), 1, "nope"),
        (("push", "unknown/x", "remind"), 1, "import the class"),
        (("push", "cart/x", "remind", "--at", "2026-01-01T00:00:00"), 2, "time zone"),
        (("push", "cart/x", "remind", "--at", "tomorrow"), 2, "ISO 8601"),
        (("push", "cart/x", "remind", "--delay=-1"), 2, "not negative"),
        (("push", "cart/x", "remind", "--payload", "{"), 2, "not JSON"),
        (("push", "cart/x", "remind", "--delay", "1", "--at", "2026-01-01T00:00:00Z"), 1, "give one of them"),
        (("push", "cart/x", "remind", "--id", "#alarm"), 1, "#"),
        (("cancel", "cart/x", "r"), 1, "no pending job 'r'"),
        (("reschedule", "cart/x", "r", "--delay", "5"), 1, "no pending job 'r'"),
        (("reschedule", "cart/x", "r"), 2, "--at or --delay"),
        (("show", "cart/x"), 1, "no object cart/x"),
        (("jobs", "cart/x"), 1, "no object cart/x"),
        (("pause", "cart/x", "--reason", "sealed"), 1, "only the memory breaker seals"),
        (("resume", "cart/x"), 1, "no object cart/x"),
        (("rearm", "cart/x"), 1, "no object cart/x"),
        (("destroy", "cart/x", "--yes"), 1, "no object cart/x"),
        (("objects", "--kind", "1"), 1, "kind"),
        (("objects", "--state", "odd"), 2, "overdue"),
        (("dead", "show", "7"), 1, "no dead job 7"),
        (("dead", "replay", "7"), 1, "no dead job 7"),
        (("dead", "purge", "7", "--yes"), 1, "no dead job 7"),
        (("dead", "replay"), 2, "Give keys"),
        (("preview", "61 * * * *"), 1, "minute"),
        (("preview", "0 8 * * *", "--timezone", "Mars/Olympus"), 1, "Mars/Olympus"),
    ],
)
@pytest.mark.databases("sqlite")
def test_what_is_not_allowed_is_refused_in_words(run, lifecycle, arguments, code, told):
    assert told in run(*arguments, code=code).output
    assert lifecycle.store.objects.find_many() == []


@pytest.mark.databases("sqlite")
def test_an_error_that_nobody_foresaw_is_one_line(run, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("celery_lifecycle.store.watch.Watch.overview", broken)
    done = run("status", code=1)
    assert done.output == "Error: ZeroDivisionError: of all things (LIFECYCLE_TRACEBACK=1 shows where)\n"
    monkeypatch.setenv("LIFECYCLE_TRACEBACK", "1")
    context = CLIContext(app=Celery("x", set_as_current=False), no_color=True, workdir=None)
    assert "Error:" in CliRunner().invoke(commands, ["preview", "x"], obj=context).output


def test_a_job_is_cancelled_and_moved_whoever_owns_it(lifecycle, run):
    lifecycle.object("cart", "user-42").jobs.push("remind", delay=3600, id="a")
    before = pending(lifecycle)["a"]
    assert "Moved" in run("reschedule", CART, "a", "--delay", "2h").output
    assert pending(lifecycle)["a"] - before > 3_000_000
    run("cancel", CART, "a")
    assert pending(lifecycle) == {}


def test_switches_do_what_they_say(lifecycle, run, ask):
    lifecycle.object("cart", "user-42").jobs.push("remind", delay=3600)
    run("pause", CART, "--reason", "stock-taking")
    assert ask("show", CART)["paused"] == "stock-taking"
    assert [one["object"] for one in ask("objects", "--state", "paused")] == ["cart/user-42"]
    run("resume", CART)
    assert ask("show", CART)["paused"] is None
    assert "waits for its alarm" in run("rearm", CART).output
    run("disable", CART, typed="n\n", code=1)
    assert ask("show", CART)["disabled"] is False
    run("disable", CART, "--yes")
    assert ask("show", CART)["state"] == "disabled"
    assert "disabled for good" in run("push", CART, "remind", code=1).output


def test_destroy_asks_first(lifecycle, run):
    lifecycle.object("cart", "user-42").jobs.push("remind", delay=3600)
    assert "with 1 jobs" in run("destroy", CART, typed="n\n", code=1).output
    assert lifecycle.store.objects.find(CART) is not None
    run("destroy", CART, typed="y\n")
    assert lifecycle.store.objects.find(CART) is None


def strike(lifecycle: Lifecycle, job: str, told: str) -> None:
    """Let the job of the object die with its process once."""
    store = lifecycle.store
    with store.database.transaction() as tx:
        tx.run("UPDATE lifecycle_jobs SET not_before = NULL, due_at = 1")
    store.jobs.rearm(CART)
    chain = store.claims.claim_named(CART)
    link = links_of(chain)[0]
    assert store.runs.begin(link, Calling(task="cart.remind", limit=3), WORKER).refused is None
    assert store.ends.end(link, WORKER, End.DIED, Cause.OOM, {"told": told}) is not None


def test_show_tells_strikes_cause_next_try_and_the_seal(lifecycle, run, ask):
    lifecycle.object("cart", "user-42").jobs.push("remind", delay=3600, id="a")
    strike(lifecycle, "a", "signal 9 (SIGKILL)")
    shown = ask("show", CART)
    assert [(one["line"], one["strikes"], one["cause"]) for one in shown["strikes"]] == [("a", 1, "oom")]
    assert shown["jobs"][0]["strikes"] == 1
    assert shown["jobs"][0]["not_before"] == shown["jobs"][0]["next_try"] is not None
    printed = run("show", CART).output
    assert "Strikes" in printed
    assert "oom  signal 9 (SIGKILL)" in printed
    assert [one["object"] for one in ask("objects", "--state", "struck")] == ["cart/user-42"]
    strike(lifecycle, "a", "again")
    strike(lifecycle, "a", "and again")
    assert "a is sealed after 3 deaths, the last one oom: `lifecycle dead replay" in run("show", CART).output
    (dead,) = ask("dead", "list", "--reason", "sealed")
    assert [one["cause"] for one in dead["details"]["deaths"]] == ["oom", "oom", "oom"]
    assert "death 3" in run("dead", "show", dead["key"]).output
    run("dead", "replay", dead["key"])
    assert pending(lifecycle).keys() == {"a"}
    assert ask("dead", "list") == []


def test_show_tells_of_a_run_that_is_open(lifecycle, run, ask):
    lifecycle.object("cart", "user-42").jobs.push("remind", delay=3600, id="a")
    lifecycle.store.jobs.reschedule(CART, "a", None, None, 0)
    chain = lifecycle.store.claims.claim_named(CART)
    assert "its chain is on its way to queue celery, sent once" in run("show", CART).output
    lifecycle.store.workers.beat(WORKER.instance, {"hostname": "w@host"})
    lifecycle.store.runs.begin(links_of(chain)[0], Calling(task="cart.remind", limit=3), WORKER)
    printed = run("show", CART).output
    assert "runs a (task cart.remind), link 1 of its run; its lease ends in" in printed
    assert "w@host, process 101" in printed
    assert "in flight" in printed
    assert ask("show", CART)["run"]["in_flight"]["job"] == "a"
    assert "w@host" in run("workers").output


def test_show_lists_storage_and_keep_alives(lifecycle, run):
    cart = lifecycle.object("cart", "user-42")
    cart.storage["import:pending"] = [1, 2, 3]
    with cart.keep_alive():
        printed = run("show", CART).output
    assert "import:pending" in printed
    assert "Keep-alives" in printed


def test_dead_jobs_are_listed_replayed_and_purged_by_key_object_and_reason(lifecycle, run, ask):
    cart, other = lifecycle.object("cart", "user-42"), lifecycle.object("cart", "user-1")
    for handle, job in ((cart, "a"), (cart, "b"), (other, "c")):
        handle.jobs.push("remind", delay=60, id=job)
        lifecycle.store.jobs.cancel(handle.ref, job, None, Why.REVOKED)
    assert [one["job"] for one in ask("dead", "list")] == ["c", "b", "a"]
    assert [one["job"] for one in ask("dead", "list", CART, "--limit", 1)] == ["b"]
    assert "more may follow" in run("dead", "list", "--limit", 1).output
    assert "revoked" in run("dead").output
    run("dead", "purge", "--object", CART, "--reason", "sealed", "--yes")
    assert len(ask("dead", "list")) == 3
    run("dead", "replay", "--object", CART)
    assert pending(lifecycle).keys() == {"a", "b"}
    run("dead", "purge", "--reason", "revoked", typed="y\n")
    assert ask("dead", "list") == []


def test_a_dead_job_that_can_not_be_replayed_or_is_gone_stops_none_of_the_others(lifecycle, run, ask):
    for name in ("a", "b", "c"):
        cart = lifecycle.object("cart", name)
        cart.jobs.push("remind", id="j")
        lifecycle.store.jobs.cancel(cart.ref, "j", None, Why.FAILED)
    lifecycle.object("cart", "a").disable_alarms()
    keys = sorted(one["key"] for one in ask("dead", "list"))
    told = run("dead", "replay", "--reason", "failed", code=1).output
    assert f"Error: {keys[0]}: " in told
    assert [f"Replayed {key}" in told for key in keys] == [False, True, True]
    assert [one["key"] for one in ask("dead", "list")] == keys[:1]
    told = run("dead", "purge", keys[1], keys[0], "--yes", code=1).output
    assert f"no dead job {keys[1]}" in told
    assert "Forgot 1 dead jobs." in told
    assert ask("dead", "list") == []


def test_long_lists_of_objects_go_on_where_they_ended(lifecycle, run, ask):
    for number in range(7):
        lifecycle.object("cart", f"user-{number}").jobs.push("remind", delay=60)
    first = ask("objects", "--limit", 5)
    assert "--after 'cart/user-4'" in run("objects", "--limit", 5).output
    rest = ask("objects", "--limit", 5, "--after", first[-1]["object"])
    assert [one["name"] for one in (*first, *rest)] == [f"user-{number}" for number in range(7)]
    assert [one["name"] for one in ask("objects", "--name", "user-3", "--kind", "cart")] == ["user-3"]
    assert ask("objects", "--kind", "other") == []


def test_beats_and_workers_are_listed_with_their_age(lifecycle, run, ask):
    assert "No beat" in run("beats").output
    assert "No worker" in run("workers").output
    lifecycle.store.beats.ticked("b1", {"host": "h1", "pid": 7})
    assert "h1" in run("beats").output
    (beat,) = ask("beats")
    assert 0 <= beat["age"] < 60


def test_health_and_doctor_tell_by_their_exit_codes(lifecycle, run, ask):
    assert "UNHEALTHY" in run("health", code=1).output
    assert run("health", "--quiet", code=1).output == ""
    lifecycle.store.beats.ticked("b1", lifecycle.whereabouts)
    assert run("health").output.startswith("healthy")
    assert ask("health")["healthy"] is True
    assert "tables are at revision" in run("doctor").output
    run("doctor", "--strict", code=1)
    assert {one["level"] for one in ask("doctor")} >= {"ok", "warning"}


@pytest.mark.databases("sqlite")
def test_flower_that_is_not_installed_is_told_with_the_command_to_type(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "flower.command", None)
    assert "pip install 'celery-lifecycle[flower]'" in run("flower", code=1).output


def start(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}
    command = [sys.executable, "-m", "celery", "-A", "embedded", "lifecycle", *arguments]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=60)


def test_it_is_a_command_of_celery_and_the_embedded_database_is_made_by_migrate_only(tmp_path):
    (tmp_path / "embedded.py").write_text(
        "from celery import Celery\nfrom celery_lifecycle import Lifecycle\n"
        "app = Celery('embedded', broker='memory://')\nlifecycle = Lifecycle(app)\n"
    )
    done = start(tmp_path, "status")
    assert done.returncode == 1
    assert "there is no lifecycle.db" in done.stderr
    assert not (tmp_path / "lifecycle.db").exists()
    assert start(tmp_path, "migrate").returncode == 0
    done = start(tmp_path, "status", "--json")
    assert json.loads(done.stdout)["objects"] == 0


def test_a_setting_that_is_not_allowed_is_one_line(tmp_path):
    (tmp_path / "embedded.py").write_text(
        "from celery import Celery\nfrom celery_lifecycle import Lifecycle\n"
        "app = Celery('embedded', broker='memory://')\napp.conf.lifecycle_poll_interval = 'often'\n"
        "lifecycle = Lifecycle(app)\n"
    )
    for command in ("status", "doctor", "health"):
        done = start(tmp_path, command)
        assert done.returncode == 1
        assert "lifecycle_poll_interval" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
