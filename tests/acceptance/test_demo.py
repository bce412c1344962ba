"""The demo, run as a user runs it: exit code, summary, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import Broker, Database, wait_until

ROOT = Path(__file__).parents[2]
MARK = "LIFECYCLE_TEST_DEMO"


class Demo:
    """The demo as a process that writes into a pipe, with a folder for temporary files of its own."""

    def __init__(self, temporary: Path, **environment: str) -> None:
        self.temporary = temporary
        ours = {"TMPDIR": str(temporary), MARK: str(temporary), "PYTHONUNBUFFERED": "1", **environment}
        inherited = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "BROKER_URL")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "example.demo"], cwd=ROOT, env={**inherited, **ours}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def end(self, timeout: float = 200) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output

    def processes(self) -> list[psutil.Process]:
        """Whatever the demo started, directly or not, that still runs."""
        return [one for one in psutil.process_iter() if self._is_ours(one)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == str(self.temporary) and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    def kill(self) -> None:
        for process in self.processes():
            process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def demo(temporary: Path) -> Iterator[Demo]:
    running = Demo(temporary)
    yield running
    running.kill()


def changed_files() -> set[str]:
    """What git sees as new or changed in the repository."""
    command = ["git", "status", "--porcelain", "--untracked-files=all", "--", "example", "*.db", "queue"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines())


def test_the_demo_keeps_its_promises_ends_by_itself_and_leaves_nothing_behind(temporary: Path) -> None:
    before = changed_files()
    demo = Demo(temporary)
    try:
        code, output = demo.end()
    finally:
        demo.kill()
    assert code == 0, output
    kept, promised = re.findall(r"(\d+) of (\d+) promises kept; worker ended with 0, beat ended with 0", output)[0]
    assert kept == promised
    assert output.count("✓") == int(promised) >= 10
    assert "\x1b" not in output, "not a terminal, so no control codes"
    assert demo.processes() == []
    assert list(temporary.iterdir()) == []
    assert changed_files() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_its_processes_and_leaves_nothing_behind(demo: Demo, number: signal.Signals) -> None:
    wait_until(lambda: list(demo.temporary.glob("*/feed.jsonl")), 60, "the first event")
    demo.process.send_signal(number)
    demo.process.send_signal(number)
    code, output = demo.end(30)
    assert code == 130, output
    assert "Traceback" not in output
    assert demo.processes() == []
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.combinations(("postgresql", "rabbitmq"))
def test_the_demo_runs_on_servers_too(temporary: Path, database: Database, broker: Broker) -> None:
    demo = Demo(temporary, DATABASE_URL=database.url, BROKER_URL=broker.url)
    try:
        code, output = demo.end()
    finally:
        demo.kill()
    assert code == 0, output


def test_no_promise_is_kept_by_nothing_happening(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from example.feed import Feed; from example.promises import PROMISES\n"
        "from example.story import Story\n"
        "story = Story(Feed(Path('feed')))\n"
        "print([promise.text for promise in PROMISES if promise.check(story)[0]])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
