"""The nodes themselves: what is started can be killed, restarted and ended without a trace."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
from celery import Celery
from pytest_celery import CeleryTestCluster

from tests.acceptance.docker_process import DockerProcess
from tests.acceptance.ledger import Ledger
from tests.acceptance.nodes import BeatNode, BrokerNode, LifecycleSetup, Nodes, WorkerNode
from tests.acceptance.process import MARK, ROOT, LocalProcess, is_gone
from tests.support import wait_until

StartWorker = Callable[..., WorkerNode]
StartBeat = Callable[..., BeatNode]


def test_a_worker_runs_tasks_and_answers_under_its_host_name(
    start_worker: StartWorker, app: Celery, ledger: Ledger
) -> None:
    worker = start_worker("first", concurrency=2)
    for number in range(3):
        app.send_task("note", ["cart", f"job {number}"])
    wait_until(lambda: len(ledger.ends()) == 3, message="three runs")
    assert {run.pid for run in ledger.runs()} <= set(worker.children())
    assert worker.answers(timeout=5)
    assert worker.terminate() == 0
    assert worker.children() == []


@pytest.mark.combinations(("sqlite", "redis"), ("sqlite", "rabbitmq"))
def test_a_killed_worker_takes_its_children_with_it_and_works_again_after_a_restart(
    start_worker: StartWorker, app: Celery, ledger: Ledger
) -> None:
    worker = start_worker(concurrency=2)
    app.send_task("note", ["cart", "long", 60])
    (run,) = wait_until(ledger.starts)
    before = worker.pid, *worker.children()
    worker.kill()
    assert worker.status == "exited"
    assert all(map(is_gone, before))
    assert ledger.runs()[0].outcome == "died"
    worker.restart()
    app.send_task("note", ["cart", "short"])
    (ended,) = wait_until(ledger.ends)
    assert ended.job == "short"
    assert ended.pid != run.pid
    assert ledger.overlaps() == []


@pytest.mark.combinations(("sqlite", "redis"))
def test_a_killed_child_is_replaced_by_its_worker(start_worker: StartWorker, app: Celery, ledger: Ledger) -> None:
    worker = start_worker()
    app.send_task("note", ["cart", "long", 60])
    (run,) = wait_until(ledger.starts)
    worker.kill_pid(run.pid)
    worker.wait_for_log("WorkerLostError")
    app.send_task("note", ["cart", "short"])
    wait_until(ledger.ends, timeout=15)
    assert worker.status == "running"
    assert ledger.overlaps() == []


@pytest.mark.combinations(("sqlite", "redis"))
def test_a_paused_worker_does_nothing_until_it_goes_on(start_worker: StartWorker, app: Celery, ledger: Ledger) -> None:
    worker = start_worker()
    worker.pause()
    app.send_task("note", ["cart", "job"])
    assert not worker.answers(timeout=0.5)
    assert ledger.runs() == []
    worker.unpause()
    wait_until(ledger.ends)


@pytest.mark.combinations(("sqlite", "redis"))
def test_a_node_that_ends_at_its_start_fails_at_once_with_its_log(start_worker: StartWorker) -> None:
    with pytest.raises(AssertionError, match=r"ended with \d+ before it was ready[^$]*No module named"):
        start_worker(app="no.such.module")


@pytest.mark.combinations(("sqlite", "filesystem"))
def test_teardown_leaves_no_process_even_if_one_left_the_group(nodes: Nodes, app: Celery) -> None:
    worker = nodes.worker()
    script = "import os, time; os.setsid(); print('away', flush=True); time.sleep(600)"
    escaped = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, MARK: worker.container.id}, stdout=subprocess.PIPE
    )
    assert escaped.stdout is not None
    assert escaped.stdout.readline() == b"away\n"
    pids = [worker.pid, *worker.children()]
    nodes.teardown()
    assert escaped.wait(timeout=10) == -signal.SIGKILL
    assert all(map(is_gone, pids))


def test_a_node_dies_with_a_test_session_that_is_killed(environment: dict[str, str], tmp_path: object) -> None:
    script = f"""
        import os, pathlib
        from tests.acceptance.process import LocalProcess
        command = [LocalProcess.python, "-c", "import time; print('up', flush=True); time.sleep(600)"]
        directory = pathlib.Path({str(tmp_path)!r})
        node = LocalProcess(command, name="node", directory=directory, environment={{}}, ready_prompt="up")
        node.start()
        node.ready()
        print(node.attrs["State"]["Pid"], flush=True)
        os.kill(os.getpid(), 9)
    """
    session = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(session, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: is_gone(int(done.stdout)))


def test_a_beat_starts_and_ends(start_beat: StartBeat) -> None:
    beat = start_beat(scheduler="celery.beat:PersistentScheduler")
    assert beat.pid
    assert beat.terminate() == 0
    assert beat.pid == 0
    beat.restart()
    assert beat.status == "running"


@pytest.mark.outages
@pytest.mark.combinations(("sqlite", "redis"), ("sqlite", "rabbitmq"))
def test_a_worker_outlives_an_outage_of_its_broker(
    start_worker: StartWorker, broker_node: BrokerNode, app: Celery, ledger: Ledger
) -> None:
    worker = start_worker()
    broker_node.kill()
    worker.wait_for_log("Connection to broker lost")
    broker_node.restart()
    app.send_task("note", ["cart", "job"])
    wait_until(ledger.ends, timeout=20)


@pytest.mark.combinations(("sqlite", "redis"))
def test_a_server_is_taken_away_only_from_a_test_that_says_so(broker_node: BrokerNode) -> None:
    with pytest.raises(RuntimeError, match="outages"):
        broker_node.kill()


@pytest.fixture
def celery_beat_cluster(nodes: Nodes) -> CeleryTestCluster:
    return CeleryTestCluster(nodes.beat(scheduler="celery.beat:PersistentScheduler", wait=False))


@pytest.mark.combinations(("sqlite", "redis"))
def test_pytest_celerys_setup_holds_workers_and_broker_and_pings_them(celery_setup: LifecycleSetup) -> None:
    assert celery_setup.ready(ping=True, control=True)
    celery_setup.worker.assert_log_exists("ready.")
    celery_setup.worker.assert_log_does_not_exist("no such text", timeout=0.1)
    assert celery_setup.worker.get_running_processes_info(["pid"])[0] == {"pid": celery_setup.worker.pid}
    assert celery_setup.broker.config()["url"].startswith("redis://")
    assert len(celery_setup) == 4


def test_local_processes_and_containers_have_the_same_methods() -> None:
    assert {name for name in dir(LocalProcess) if name[0] != "_"} <= {*dir(DockerProcess)}
