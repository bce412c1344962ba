"""The public names have types, and mypy agrees with what ``tests/typing`` says of them."""

import subprocess
import sys
from pathlib import Path

import pytest

import celery_lifecycle
from celery_lifecycle import testing

ROOT = Path(__file__).parents[2]
API = (ROOT / "tests" / "typing" / "api.py").read_text()


@pytest.mark.timeout(600)
def test_a_type_checker_accepts_and_refuses_what_it_should() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "tests/typing"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", [*celery_lifecycle.__all__, *testing.__all__])
def test_every_public_name_has_a_line_there(name: str) -> None:
    assert name in API
