"""When jobs run: on time, once, however many beats there are and however long the queue is."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import pytest

from celery_lifecycle import Lifecycle
from tests.acceptance.ledger import Ledger
from tests.acceptance.looks import waiting_messages
from tests.acceptance.nodes import BeatNode, WorkerNode
from tests.acceptance.process import ROOT
from tests.support import Broker, wait_until

StartWorker = Callable[..., WorkerNode]
StartBeat = Callable[..., BeatNode]

NOISE = 1.0


@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_jobs_moved_cancelled_or_committed_by_another_process_run_when_they_are_due_or_not_at_all(
    start_worker: StartWorker,
    start_beat: StartBeat,
    lifecycle: Lifecycle,
    ledger: Ledger,
    environment: dict[str, str],
) -> None:
    """Cases C22 and C23."""
    worker = start_worker()
    start_beat()
    moved, cancelled = lifecycle.object("thing", "moved"), lifecycle.object("thing", "cancelled")
    for thing in (moved, cancelled):
        thing.jobs.push("work", delay=3, id="job")
    at = time.time() + 9
    for thing in (moved, cancelled):
        thing.jobs.reschedule("job", delay=9)
    assert cancelled.jobs.cancel("job")
    worker.restart()
    script = (
        "import os, sys, time; from tests.acceptance.app import make_app; app = make_app(os.environ)\n"
        "app.lifecycle.object('thing', 'other').jobs.push('work', delay=2, id='job'); print(time.time())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    pushed = float(done.stdout)
    wait_until(lambda: ledger.ends("job", "thing/moved") and ledger.ends("job", "thing/other"), 20)
    starts = {line["object"]: line["time"] for line in ledger.records("start")}
    assert set(starts) == {"thing/moved", "thing/other"}
    assert len(ledger.runs()) == 2
    assert at - 0.1 <= starts["thing/moved"] < at + NOISE
    assert pushed + 1.5 <= starts["thing/other"] < pushed + 2 + NOISE


@pytest.mark.combinations(("postgresql", "redis"))
def test_nothing_is_in_the_broker_before_it_is_due_so_no_visibility_timeout_repeats_it(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger, broker: Broker
) -> None:
    """Case C09, and a job that runs for longer than the timeout."""
    short = {"visibility_timeout": 1, "unacked_restore_interval": 0.2, "unacked_restore_throttle": 1}
    start_worker(concurrency=2, environment={"BROKER_OPTIONS": json.dumps(short)})
    start_beat()
    result = lifecycle.app.tasks["plain"].apply_async(kwargs={"job": "eta", "seconds": 3}, countdown=4)
    due = time.monotonic() + 4
    wait_until(lambda: time.monotonic() > due - 0.5, 10)
    with lifecycle.app.connection_for_read() as connection:
        assert connection.default_channel.client.llen("celery") == 0
        assert connection.default_channel.client.hlen("unacked") == 0
    assert ledger.runs() == []
    assert result.get(timeout=20) == "eta"
    assert len(ledger.starts("eta")) == 1


@pytest.mark.combinations(("postgresql", "redis"), ("mariadb", "rabbitmq"))
def test_two_beats_one_of_which_fails_in_a_claim_send_a_hundred_one_shots_once(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """Case C25."""
    start_worker(concurrency=2)
    failing = start_beat("beat", environment={"CLAIM_FAILS_ONCE": "1"})
    start_beat("second")
    errand = lifecycle.app.tasks["errand"]
    # Spread over two seconds, so that either beat has something to claim.
    errand.push_many([{"id": f"errand-{number}", "delay": 1.5 + number / 50} for number in range(100)])
    wait_until(lambda: len(ledger.ends()) >= 100, 30)
    failing.wait_for_log("no_such_table")
    wait_until(lambda: lifecycle.store.objects.find_many() == [], 10)
    assert Counter(run.job for run in ledger.runs()) == {f"errand-{number}": 1 for number in range(100)}
    assert failing.status == "running"


@pytest.mark.parametrize("settings", [{"lifecycle_dispatch_window": 20, "lifecycle_patience_max": 3}])
@pytest.mark.combinations(("mariadb", "rabbitmq"))
def test_with_all_workers_stopped_the_chains_on_their_way_stay_bounded_and_all_jobs_run_once_afterwards(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """The long queue; and case D16: a queue without consumers beside it, and all messages lost."""
    worker = start_worker(concurrency=2)
    worker.terminate()
    start_beat()
    start_beat("second")
    errand = lifecycle.app.tasks["errand"]
    errand.push_many([{"id": f"errand-{number}"} for number in range(300)])
    thing = lifecycle.object("thing", "nobody's")
    thing.jobs.push("elsewhere", id="job")
    wait_until(lambda: waiting_messages(lifecycle) >= 20, 15)
    lifecycle.app.control.purge()
    since = time.monotonic()
    wait_until(lambda: waiting_messages(lifecycle) >= 20, 15)  # sent again
    wait_until(lambda: time.monotonic() > since + 7, 15)
    # Two beats, so the window may be passed by what both saw at one time; each patience sends what is on its way again.
    assert waiting_messages(lifecycle) <= 4 * 40
    worker.restart()
    wait_until(lambda: len(ledger.ends()) == 300, 60, lambda: str(len(ledger.ends())))
    assert len(ledger.starts()) == 300
    thing.jobs.cancel("job")


@pytest.mark.combinations(("mariadb", "rabbitmq"))
def test_a_long_queue_of_chains_opens_no_run_twice_for_its_own_queueing(
    start_worker: StartWorker, start_beat: StartBeat, lifecycle: Lifecycle, ledger: Ledger
) -> None:
    """Case D15, scaled: 60 objects x 4 jobs, each link behind all others in the queue."""
    things = [lifecycle.object("thing", f"thing-{number}") for number in range(60)]
    for thing in things:
        thing.pause()
        for number in range(4):
            thing.jobs.push("work", payload={"seconds": 0.02}, id=f"job-{number}")
        thing.resume()
    worker = start_worker(concurrency=2)
    start_beat()
    wait_until(lambda: len(ledger.ends()) == 240, 60, lambda: str(len(ledger.ends())))
    wait_until(lambda: lifecycle.store.objects.find_many() == [], 10)
    assert len(ledger.starts()) == 240
    # Patience doubles: even where this machine is slow no chain is sent again more than once for its queueing.
    assert worker.logs().count("received") <= 240 + 60
    for thing in things:
        assert [run.job for run in ledger.runs(str(thing))] == [f"job-{number}" for number in range(4)]
