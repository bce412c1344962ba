"""What a node asks of Docker, with a stand-in for the engine: no engine has run these nodes yet."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery

from tests.acceptance import docker_process
from tests.acceptance.docker_process import IMAGE, DockerProcess
from tests.acceptance.ledger import Ledger
from tests.acceptance.nodes import Nodes
from tests.acceptance.process import ROOT


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A Docker client with one container, whose log and state the test sets."""
    client = Mock()
    container = client.containers.create.return_value
    container.logs.return_value = b""
    container.attrs = {"State": {"Pid": 0}}
    container.status = "created"
    monkeypatch.setattr(DockerProcess, "client", client)
    return client


def make_nodes(tmp_path: Path) -> Nodes:
    app = Celery("acceptance", set_as_current=False)
    environment = {"DATABASE_URL": "postgresql://there"}
    ledger = Ledger(tmp_path / "ledger")
    return Nodes(DockerProcess, directory=tmp_path, environment=environment, app=app, ledger=ledger)


def test_a_worker_gets_the_machines_network_and_process_ids_the_code_and_the_folder_of_the_test(
    client: Mock, tmp_path: Path
) -> None:
    make_nodes(tmp_path).worker("first", concurrency=3, wait=False)
    client.images.build.assert_called_once()
    (image, command), options = client.containers.create.call_args
    assert image == IMAGE
    assert command[:4] == ["python", "-m", "celery", "--app=tests.acceptance.app"]
    assert "--concurrency=3" in command
    assert (options["network_mode"], options["pid_mode"]) == ("host", "host")
    assert options["volumes"][str(ROOT)] == {"bind": str(ROOT), "mode": "ro"}
    assert options["volumes"][str(tmp_path)] == {"bind": str(tmp_path), "mode": "rw"}
    assert options["environment"]["DATABASE_URL"] == "postgresql://there"
    client.containers.create.return_value.start.assert_called_once_with()


def test_a_container_that_was_restarted_is_ready_by_its_new_log_only(client: Mock, tmp_path: Path) -> None:
    container = client.containers.create.return_value
    container.status = "running"
    beat = make_nodes(tmp_path).beat(wait=False)
    container.logs.return_value = b"beat: ready"
    assert beat.ready()
    beat.start()
    with pytest.raises(AssertionError, match="to be ready"):
        beat.ready(timeout=0.05)
    container.logs.return_value = b"beat: readybeat: ready"
    assert beat.ready()


def test_a_container_that_ended_is_not_waited_for(client: Mock, tmp_path: Path) -> None:
    client.containers.create.return_value.status = "exited"
    with pytest.raises(AssertionError, match="ended before it was ready"):
        make_nodes(tmp_path).beat()


def test_signals_pauses_and_the_end_go_to_the_engine(client: Mock, tmp_path: Path) -> None:
    container = client.containers.create.return_value
    container.wait.return_value = {"StatusCode": 137}
    nodes = make_nodes(tmp_path)
    worker = nodes.worker(wait=False)
    worker.kill("SIGTERM")
    container.kill.assert_called_once_with(signal=15)
    assert worker.wait() == -9
    worker.pause()
    worker.unpause()
    worker.kill_pid(4711, "SIGUSR1")
    container.exec_run.assert_called_once_with(["sh", "-c", "kill -10 4711"])
    nodes.teardown()
    container.remove.assert_called_once_with(force=True, v=True)
    assert [call[0] for call in container.method_calls if call[0] in ("pause", "unpause")] == [
        "pause",
        "unpause",
    ]


@pytest.mark.parametrize(("variable", "found"), [("", True), ("local", False), ("docker", True)])
def test_an_engine_that_answers_is_used_unless_local_nodes_are_wanted(
    variable: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = Mock()
    monkeypatch.setenv(docker_process.NODES, variable)
    monkeypatch.setattr(docker_process.docker, "from_env", lambda timeout: client)
    monkeypatch.setattr(docker_process.sys, "platform", "linux")
    docker_process.engine.cache_clear()
    assert docker_process.engine() is (client if found else None)
    docker_process.engine.cache_clear()
