"""A local process that answers as one of pytest-celery's containers does.

pytest-celery's nodes speak to a container: its name, status, log, kill, restart. This class gives them all
that for a process of this machine, in a process group of its own, and leaves nothing behind.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.support import wait_until

ROOT = Path(__file__).parents[2]
LAUNCH = Path(__file__).with_name("launch.py")

#: Carried by every process of a node, also by one that has left the node's process group.
MARK = "LIFECYCLE_TEST_NODE"

SIGKILL = int(signal.SIGKILL)


class LocalProcess:
    """One command, started in ``directory`` with ``environment`` added to this process's own."""

    python = sys.executable

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        directory: Path,
        environment: Mapping[str, str],
        ready_prompt: str,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = name
        self.ready_prompt = ready_prompt
        self._command = list(command)
        self._directory = directory
        self._environment = dict(environment)
        self._log = directory / f"{name}-{self.id[:6]}.log"
        self._begin = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    # What pytest-celery calls.

    @property
    def status(self) -> str:
        """``created``, ``running``, ``paused`` or ``exited``, Docker's words."""
        if self._process is None:
            return "created"
        if self._process.poll() is not None:
            return "exited"
        return "paused" if self._paused else "running"

    @property
    def attrs(self) -> dict[str, Any]:
        """The few of Docker's attributes that nodes look at."""
        process = self._process
        code = process.poll() if process else None
        return {"State": {"Pid": process.pid if process and code is None else 0, "ExitCode": code}}

    def reload(self) -> None:
        """Nothing to bring up to date: every answer is asked for anew."""

    def logs(self) -> str:
        """All that was printed, in all lives."""
        return self._read().decode(errors="replace")

    def start(self) -> None:
        """Start the process; ``ready`` waits for it."""
        self._begin = len(self._read())
        self._paused = False
        path = os.pathsep.join(filter(None, (str(ROOT), self._environment.get("PYTHONPATH"))))
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        environment = {
            **inherited,
            "PYTHONUNBUFFERED": "1",
            **self._environment,
            "PYTHONPATH": path,
            MARK: self.id,
        }
        launch = [sys.executable, "-IS", str(LAUNCH), str(os.getpid()), *self._command]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                launch,
                cwd=self._directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ready(self, timeout: float = 30) -> bool:
        """Wait until the process has said that it is ready; fail at once if it ends instead."""
        wait_until(self._said_ready, timeout, lambda: f"{self.name} to say {self.ready_prompt!r}\n{self._tail()}")
        return True

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Signal the main process; after SIGKILL it is gone when this returns."""
        number = signal_number(signal)
        self.signal_pid(self._running().pid, number)
        if number == SIGKILL:
            self.wait(10)

    def restart(self, timeout: float = 60) -> None:
        """End the process as a deployment does, if it runs, and start it again."""
        if self.status in ("running", "paused"):
            self.unpause()
            self.kill("SIGTERM")
            try:
                self.wait(timeout)
            except AssertionError:
                self.kill("SIGKILL")
        self._sweep()
        self.start()
        self.ready()

    def exec_run(self, command: str | Sequence[str]) -> tuple[int, bytes]:
        """Run a command where the node runs."""
        words = shlex.split(command) if isinstance(command, str) else list(command)
        environment = {**os.environ, **self._environment}
        done = subprocess.run(words, cwd=self._directory, env=environment, capture_output=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def teardown(self) -> None:
        """End everything that the node started, at once."""
        if self._process is not None:
            self._sweep()
            self._process.wait(timeout=10)

    # What our own nodes call besides.

    def logs_of_this_life(self) -> str:
        """What was printed since the last start."""
        return self._read()[self._begin :].decode(errors="replace")

    def wait(self, timeout: float = 30) -> int:
        """Wait for the end of the main process and give its exit code, negative for a signal."""
        process = self._started()
        wait_until(lambda: process.poll() is not None, timeout, lambda: f"{self.name} to end\n{self._tail()}")
        return process.wait()

    def pause(self) -> None:
        """Stop all processes of the group where they are, as a machine that hangs."""
        os.killpg(self._running().pid, signal.SIGSTOP)
        self._paused = True

    def unpause(self) -> None:
        """Let them go on."""
        os.killpg(self._running().pid, signal.SIGCONT)
        self._paused = False

    def signal_pid(self, pid: int, number: int) -> None:
        """Signal one process of the node."""
        os.kill(pid, number)

    def kill_everything(self) -> None:
        """Kill the main process and its children in one blow, as a machine that is gone."""
        self._sweep()
        self.wait(10)

    def _said_ready(self) -> bool:
        if self.ready_prompt in self.logs_of_this_life():
            return True
        code = self._started().poll()
        if code is not None:
            self._fail(f"{self.name} ended with {code} before it was ready")
        return False

    def _sweep(self) -> None:
        """Kill the group in one blow, then whoever left it but still carries the mark, and see them gone."""
        process = self._started()
        marked = [each for each in psutil.process_iter() if self._is_marked(each)]
        # Once the main process is reaped, its number may be that of somebody else's group.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)
        for each in marked:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        wait_until(lambda: all(is_gone(each.pid) for each in marked), message=f"the end of {marked}")

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(MARK) == self.id)
        except (psutil.Error, OSError):
            return False

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            self._fail(f"{self.name} was not started")
        return self._process

    def _running(self) -> "subprocess.Popen[bytes]":
        process = self._started()
        if process.poll() is not None:
            self._fail(f"{self.name} has ended with {process.returncode}")
        return process

    def _read(self) -> bytes:
        return self._log.read_bytes() if self._log.exists() else b""

    def _tail(self) -> str:
        return "\n".join(self.logs_of_this_life().splitlines()[-30:])

    def _fail(self, text: str) -> NoReturn:
        raise AssertionError(f"{text}\n{self._tail()}")


def is_gone(pid: int) -> bool:
    """Whether a process runs no more; that its parent has not looked after it yet does not count."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def signal_number(name: str | int) -> int:
    """The number of a signal that is given by name or by number."""
    return int(signal.Signals[name]) if isinstance(name, str) else int(name)
