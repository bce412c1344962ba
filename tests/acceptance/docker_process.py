"""A container that stands in a node where a Docker engine answers; nothing of this has run on an engine yet.

It is written against docker-py's interface and tested with a stand-in for its client. The container shares
the network and the process ids of the machine, so the addresses, files and process ids that a test knows
are valid in it, and the same tests run on it unchanged. ``LIFECYCLE_TEST_NODES=local`` takes local
processes although there is an engine.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import DockerException

from tests.acceptance.process import ROOT, signal_number
from tests.support import wait_until

#: ``local`` or ``docker``; without it, Docker where an engine answers.
NODES = "LIFECYCLE_TEST_NODES"
IMAGE = "celery-lifecycle:test"


@cache
def engine() -> Any | None:
    """A client of the Docker engine on this machine, or None if there is none that the nodes should use."""
    wanted = os.environ.get(NODES, "")
    # Elsewhere Docker runs in a virtual machine, whose network and processes are not those of the tests.
    if wanted == "local" or (not wanted and sys.platform != "linux"):
        return None
    try:
        client = docker.from_env(timeout=60)
        client.ping()
    except DockerException as error:
        if wanted == "docker":
            pytest.fail(f"{NODES}=docker, but no Docker engine answers: {error}", pytrace=False)
        return None
    return client


@cache
def _image(client: Any) -> str:
    client.images.build(path=str(ROOT), dockerfile="example/Dockerfile", tag=IMAGE, rm=True)
    return IMAGE


class DockerProcess:
    """One command in a container; the same methods as ``LocalProcess``."""

    python = "python"
    client: Any = None

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        directory: Path,
        environment: Mapping[str, str],
        ready_prompt: str,
    ) -> None:
        self.ready_prompt = ready_prompt
        self.client = self.client or engine()
        self._begin = 0
        self._container = self.client.containers.create(
            _image(self.client),
            list(command),
            environment={"PYTHONUNBUFFERED": "1", **environment, "PYTHONPATH": str(ROOT)},
            volumes={
                str(ROOT): {"bind": str(ROOT), "mode": "ro"},
                str(directory): {"bind": str(directory), "mode": "rw"},
            },
            working_dir=str(directory),
            user=f"{os.getuid()}:{os.getgid()}",
            network_mode="host",
            pid_mode="host",
            labels={"celery-lifecycle": "test"},
            name=f"lifecycle-{name}-{os.urandom(3).hex()}",
        )

    @property
    def id(self) -> str:
        """The container's id."""
        return str(self._container.id)

    @property
    def name(self) -> str:
        """The container's name."""
        return str(self._container.name)

    @property
    def status(self) -> str:
        """``created``, ``running``, ``paused`` or ``exited``."""
        self.reload()
        return str(self._container.status)

    @property
    def attrs(self) -> dict[str, Any]:
        """Docker's attributes."""
        self.reload()
        return dict(self._container.attrs)

    def reload(self) -> None:
        """Ask the engine for the state."""
        self._container.reload()

    def logs(self) -> str:
        """All that was printed, in all lives."""
        return bytes(self._container.logs()).decode(errors="replace")

    def logs_of_this_life(self) -> str:
        """What was printed since the last start."""
        return bytes(self._container.logs())[self._begin :].decode(errors="replace")

    def start(self) -> None:
        """Start the container; ``ready`` waits for it."""
        self._begin = len(bytes(self._container.logs()))
        self._container.start()

    def ready(self, timeout: float = 60) -> bool:
        """Wait until the process has said that it is ready; fail at once if it ends instead."""
        wait_until(self._said_ready, timeout, lambda: f"{self.name} to be ready\n{self.logs()[-3000:]}")
        return True

    def _said_ready(self) -> bool:
        if self.ready_prompt in self.logs_of_this_life():
            return True
        assert self.status != "exited", f"{self.name} ended before it was ready\n{self.logs()[-3000:]}"
        return False

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Signal the main process."""
        self._container.kill(signal=signal_number(signal))

    def restart(self, timeout: float = 60) -> None:
        """End the process as a deployment does, if it runs, and start it again."""
        self._container.stop(timeout=int(timeout))
        self.start()
        self.ready()

    def wait(self, timeout: float = 30) -> int:
        """Wait for the end of the main process and give its exit code, negative for a signal."""
        code = int(self._container.wait(timeout=timeout)["StatusCode"])
        return 128 - code if code > 128 else code

    def pause(self) -> None:
        """Stop all processes where they are, as a machine that hangs."""
        self._container.pause()

    def unpause(self) -> None:
        """Let them go on."""
        self._container.unpause()

    def signal_pid(self, pid: int, number: int) -> None:
        """Signal one process of the node."""
        self._container.exec_run(["sh", "-c", f"kill -{number} {pid}"])

    def kill_everything(self) -> None:
        """Kill the main process; the engine ends all others of the container with it."""
        self._container.kill(signal=signal_number("SIGKILL"))
        self.wait()

    def exec_run(self, command: str | Sequence[str]) -> tuple[int, bytes]:
        """Run a command in the container."""
        code, output = self._container.exec_run(command)
        return int(code), bytes(output)

    def teardown(self) -> None:
        """Remove the container and all that runs in it."""
        self._container.remove(force=True, v=True)
