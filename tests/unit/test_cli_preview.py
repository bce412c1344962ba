"""`lifecycle preview`: the next runs of an expression, in the zone and in UTC, days of change marked; it needs no database."""

import json
from datetime import datetime, timedelta

from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_lifecycle.cli import lifecycle as commands


def run(*arguments: str, zone: str | None = None) -> Result:
    app = Celery("x", set_as_current=False)
    app.conf.timezone = zone
    done = CliRunner().invoke(commands, ["preview", *arguments], obj=CLIContext(app=app, no_color=True, workdir=None))
    assert done.exit_code == 0, done.output
    return done


def test_the_next_runs_are_listed_in_the_zone_and_in_utc():
    done = run("0 8 * * *", "--timezone", "Europe/Berlin", "-n", "3", "--from", "2026-10-24T00:00:00Z")
    lines = done.output.splitlines()
    assert lines[0].split() == ["EUROPE/BERLIN", "UTC"]
    assert lines[1].split() == ["Sat", "2026-10-24", "08:00", "CEST", "2026-10-24", "06:00Z"]
    assert lines[2].startswith("Sun 2026-10-25 08:00 CET   2026-10-25 07:00Z  clocks go back 1:00")
    assert len(lines) == 4


def test_json_is_a_list_of_utc_and_local_times_in_iso_8601():
    done = run("30 2 * * *", "--timezone", "Europe/Berlin", "-n", "2", "--from", "2026-03-28T00:00:00Z", "--json")
    first, second = json.loads(done.output)
    assert (first["utc"], first["local"]) == ("2026-03-28T01:30:00+00:00", "2026-03-28T02:30:00+01:00")
    assert (second["utc"], second["local"]) == ("2026-03-29T01:00:00+00:00", "2026-03-29T03:00:00+02:00")
    assert first["note"] is None
    assert "runs right after the gap" in second["note"]


def test_the_zone_is_that_of_the_app_and_ten_runs_from_now_are_shown_by_default():
    (first, *rest) = json.loads(run("* * * * *", "--json", zone="Asia/Kolkata").output)
    assert len(rest) == 9
    assert first["local"].endswith("+05:30")
    now = datetime.now().astimezone()
    assert timedelta(0) < datetime.fromisoformat(first["utc"]) - now + timedelta(minutes=1) < timedelta(minutes=3)


def test_a_time_with_any_offset_may_be_given():
    done = run("0 0 1 1 *", "-n", "1", "--from", "2026-06-01T00:00:00+02:00", "--json")
    assert json.loads(done.output)[0]["utc"] == "2027-01-01T00:00:00+00:00"


def test_where_the_times_end_none_is_repeated():
    done = run("0 8 * * *", "-n", "3", "--from", "9998-12-30T00:00:00Z", "--json", zone="UTC")
    assert [row["utc"][:10] for row in json.loads(done.output)] == ["9998-12-30", "9998-12-31"]
    last = run("*/30 * * * *", "-n", "9", "--from", "9998-12-31T22:45:00Z", "--json", zone="UTC")
    assert [row["utc"][11:16] for row in json.loads(last.output)][:2] == ["23:00", "23:30"]
    assert "It never runs again" in run("0 8 * * *", "-n", "2", "--from", "9999-06-01T00:00:00Z").output
