"""The Python in README and docs is run: whole programs as users would write them, fragments among the names that they speak of."""

import json
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from celery_lifecycle import Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.testing import Harness

ROOT = Path(__file__).parents[2]
BLOCKS = {
    path.name: re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
SHOP = BLOCKS["README.md"][0]


def run(folder: Path, *arguments: str) -> str:
    (folder / "shop.py").write_text(SHOP)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_is_no_python_in_the_docs_that_is_not_run_here() -> None:
    counts = {name: len(blocks) for name, blocks in BLOCKS.items() if blocks}
    assert counts == {"README.md": 1, "schedules.md": 2, "testing-your-app.md": 3}


def test_the_program_of_the_readme_reminds_of_what_was_put_last(tmp_path: Path) -> None:
    program = """
import shop
from celery_lifecycle.testing import Harness

with Harness(shop.lifecycle) as harness:
    for article in ("book", "teapot"):
        shop.Cart("anna").put(article)
    harness.advance(20)
"""
    assert 'Cart("anna").put("teapot")' in SHOP
    assert run(tmp_path, "-c", program) == "anna, you forgot your teapot\n"


def test_the_tests_of_testing_your_app_pass_beside_the_shop_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text("\n\n".join(BLOCKS["testing-your-app.md"]))
    told = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_shop.py")
    assert "3 passed" in told


@pytest.fixture
def cart(harness: Harness, lifecycle: Lifecycle) -> Any:
    class Cart(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def remind(self, ctx: Any) -> None: ...

        @lifecycle_job
        def digest(self, ctx: Any) -> None: ...

        @lifecycle_job
        def poll(self, ctx: Any) -> None: ...

    return Cart("anna")


@pytest.mark.databases("sqlite")
def test_the_calls_of_schedules_do_what_their_comments_say(harness: Harness, cart: Any) -> None:
    week = {"a": harness.now, "b": harness.now + timedelta(days=7)}
    exec(BLOCKS["schedules.md"][0], {"cart": cart, "datetime": datetime, "ZoneInfo": ZoneInfo, "id": "x", **week})
    assert [one.type for one in cart.list_schedules()] == ["interval", "interval", "delayed", "cron", "scheduled"]
    assert cart.list_schedules(type="delayed")[0].payload == {"template": "forgot"}


@pytest.mark.databases("sqlite")
def test_the_natural_language_of_schedules_is_read(cart: Any) -> None:
    def my_model(system: str, user: str, schema: Any) -> str:
        return json.dumps({"description": "stand up", "when": {"type": "cron", "cron": "0 8 * * 1-5"}})

    now = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
    exec(BLOCKS["schedules.md"][1], {"cart": cart, "my_model": my_model, "now": now})
    [made] = cart.list_schedules()
    assert (made.cron, made.timezone, made.payload) == ("0 8 * * 1-5", "Europe/Berlin", {"what": "stand up"})
