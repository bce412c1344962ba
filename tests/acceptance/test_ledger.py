"""The ledger as a witness: it must see an overlap that there was, and none that there was not."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.acceptance.ledger import Ledger
from tests.acceptance.process import ROOT


def write(ledger: Ledger, *lines: str) -> Ledger:
    """Lines such as ``1.0 start a cart job 7``: time, event, run, object, job, process."""
    for line in lines:
        at, event, run, object, job, pid = line.split()
        record = {
            "at": float(at),
            "time": float(at),
            "event": event,
            "run": run,
            "object": object,
            "job": job,
        }
        record |= {"pid": int(pid), "thread": int(pid), "outcome": "ended", "data": {}}
        with ledger.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return ledger


def test_runs_of_one_object_one_after_the_other_do_not_overlap(ledger: Ledger) -> None:
    write(ledger, "1 start a cart x 7", "2 end a cart x 7", "2 start b cart y 8", "3 end b cart y 8")
    assert ledger.overlaps() == []
    assert [run.job for run in ledger.ends()] == ["x", "y"]


def test_runs_of_one_object_at_one_time_overlap_and_those_of_two_objects_do_not(ledger: Ledger) -> None:
    write(ledger, "1 start a cart x 7", "2 start b cart y 8", "2 start c other x 9", "3 end a cart x 7")
    assert [(one.id, other.id) for one, other in ledger.overlaps()] == [("a", "b")]


def test_a_long_run_overlaps_all_that_began_within_it(ledger: Ledger) -> None:
    write(ledger, "1 start a cart x 7", "2 start b cart y 8", "3 end b cart y 8", "4 start c cart z 9")
    write(ledger, "9 end a cart x 7")
    assert [(one.id, other.id) for one, other in ledger.overlaps()] == [("a", "b"), ("a", "c")]


def test_a_run_whose_process_was_killed_is_over_from_then_on(ledger: Ledger) -> None:
    write(ledger, "1 start a cart x 7", "3 start b cart y 8")
    assert len(ledger.overlaps()) == 1
    ledger.gone([7], at=2.0)
    assert ledger.overlaps() == []
    assert ledger.runs()[0].outcome == "died"


def test_a_process_that_starts_a_run_has_no_other_one_open(ledger: Ledger) -> None:
    write(ledger, "1 start a cart x 7", "2 start b cart y 7", "3 end b cart y 7")
    assert ledger.overlaps() == []


def test_a_line_that_is_half_written_is_not_read_yet(ledger: Ledger) -> None:
    write(ledger, "1 start a cart x 7")
    with ledger.path.open("a") as file:
        file.write('{"event": "en')
    assert [record["event"] for record in ledger.records()] == ["start"]


def test_a_run_says_whether_it_raised(ledger: Ledger) -> None:
    with ledger.run("cart", "good", slice=3):
        pass
    with pytest.raises(ValueError, match="broken"), ledger.run("cart", "bad"):
        raise ValueError("broken")
    good, bad = ledger.runs()
    assert (good.outcome, good.data, good.pid) == ("ended", {"slice": 3}, os.getpid())
    assert bad.outcome == "raised"


def test_a_job_that_kills_its_process_says_so_before(ledger: Ledger) -> None:
    script = (
        "import sys; from tests.acceptance.ledger import Ledger; ledger = Ledger(sys.argv[1])\n"
        "with ledger.run('cart', 'job'): ledger.die()"
    )
    done = subprocess.run([sys.executable, "-c", script, str(ledger.path)], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert ledger.runs()[0].outcome == "died"


def test_lines_of_many_threads_never_mix(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "many")
    texts = ["x" * length for length in (10, 5_000, 50_000)]

    def write_all() -> None:
        for text in texts * 10:
            ledger.append("note", text=text)

    threads = [threading.Thread(target=write_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(record["text"]) for record in ledger.records("note")) == sorted(map(len, texts * 40))
