"""Words, tables and durations of the command line."""

import pytest

from celery_lifecycle import describe
from celery_lifecycle.cli import text
from celery_lifecycle.cli.base import duration
from celery_lifecycle.model import SEALED
from celery_lifecycle.store.watch import Picture
from tests.support.protocol import NOW, busy_state, job, open_state, sent_state, state


@pytest.mark.parametrize(
    ("ms", "told"),
    [
        (0, "0 ms"), (999, "999 ms"), (1500, "1.5 s"), (10_000, "10 s"), (61_000, "1 min 1 s"), (3_600_000, "1 h"),
        (90_061_000, "1 d 1 h"), (-5000, "5.0 s"),
    ],
)  # fmt: skip
def test_a_duration_is_told_in_at_most_two_units(ms, told):
    assert describe.span(ms) == told


@pytest.mark.parametrize(("given", "seconds"), [("90", 90), ("1.5h", 5400), ("15m", 900), ("7d", 604_800), ("0", 0)])
def test_a_duration_may_have_a_unit(given, seconds):
    assert duration(given) == seconds


def test_a_table_is_aligned_also_with_wide_characters_and_without_control_characters(capsys):
    text.table(("object", "jobs"), [("日本", 1), ("a\nb\x1b[31m", 100), ("x" * 100, None)], "none")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4, "a line break in a name makes no line"
    assert "\x1b" not in "".join(lines)
    assert {text.width(line) for line in lines} == {text.width(lines[0])}
    assert lines[3].startswith("x" * 59 + "…")


def test_an_empty_table_is_a_sentence(capsys):
    text.table(("a",), [], "There is none.")
    assert capsys.readouterr().out == "There is none.\n"


@pytest.mark.parametrize(
    ("given", "word", "sentence"),
    [
        (state(), "idle", "no alarm"),
        (state(queue="celery", wake_at=NOW + 60_000), "waiting", "waits for its alarm, in 1 min"),
        (state(queue="celery", wake_at=NOW - 2000), "overdue", "overdue for 2.0 s"),
        (sent_state(), "sent", "its chain is on its way to queue celery, sent once"),
        (sent_state(sent_count=3), "sent", "sent 3 times"),
        (busy_state("a"), "running", "runs a (task cart.remind), link 1 of its run; its lease ends in 20 s"),
        (open_state(lease=NOW - 5000), "running", "between two links, at step 0; its lease is over since 5.0 s"),
        (open_state(doubt=True), "running", "beat has taken a first look"),
        (state(paused="holiday"), "paused", "paused: holiday"),
        (state(paused=SEALED), "sealed", "until somebody resumes it"),
        (state(disabled=True), "disabled", "disabled for good"),
    ],
)
def test_every_state_has_a_word_and_a_sentence(given, word, sentence):
    picture = Picture(NOW, given, (job("a"),), None, (), (), ())
    assert describe.word(given, NOW) == word
    assert sentence in describe.sentence(picture)
    assert describe.picture_facts(picture)["state"] == word


def test_the_protocols_own_jobs_are_told_by_what_they_call():
    assert [describe.call(one) for one in ("#alarm", "#start", "#hook-7", "remind")] == [
        "on_alarm",
        "on_start",
        "on_memory_limit",
        "remind",
    ]
