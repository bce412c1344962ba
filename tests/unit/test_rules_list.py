"""``docs/rules.md`` and the tests that it names are held together, both ways."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADING = re.compile(r"^## .*: `(tests/[a-z_/]+\.py)`$")


def rules() -> dict[str, list[list[str]]]:
    """The tests of each line of each section's table, by the file that the section names."""
    found: dict[str, list[list[str]]] = {}
    lines: list[list[str]] = []
    for line in (ROOT / "docs" / "rules.md").read_text().splitlines():
        if line.startswith("## "):
            heading = HEADING.match(line)
            assert heading is not None, f"name the file of its tests: {line}"
            lines = found.setdefault(heading[1], [])
        elif line.startswith("| ") and not line.startswith("| rule "):
            lines.append(re.findall(r"`(test_\w+)`", line.rpartition("|")[0].rpartition(" | ")[2]))
    return found


def defined_in(path: str) -> list[str]:
    return re.findall(r"^def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", rules())
def test_every_rule_names_tests_that_exist_each_once(path: str) -> None:
    there = set(defined_in(path))
    named = [name for tests in rules()[path] for name in tests]
    assert all(rules()[path])
    assert [name for name in named if name not in there] == []
    assert len(named) == len(set(named))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests" / "integration").glob("test_rules_*.py")), ids=lambda path: path.stem
)
def test_every_test_of_a_rule_is_named_by_one(path: Path) -> None:
    named = {name for tests in rules()[str(path.relative_to(ROOT))] for name in tests}
    assert [name for name in defined_in(str(path.relative_to(ROOT))) if name not in named] == []
