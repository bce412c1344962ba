"""The README is compared with what it speaks of: links, functions, commands, extras, the first program."""

import ast
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from celery_lifecycle.cli import lifecycle as command_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LINKS = re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", README)
COMMANDS = [
    command.strip()
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    for command in line.partition("  #")[0].split("&&")
]
INLINE = re.findall(r"`((?:celery|make|docker) [^`]+)`", README)


def defined_in(path: Path) -> set[str]:
    """Functions, classes and methods of a module, methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("target", sorted({target for _, target in LINKS}))
def test_what_the_readme_links_to_exists(target: str) -> None:
    assert (ROOT / target.partition("#")[0]).exists()


@pytest.mark.parametrize(("text", "target"), sorted({link for link in LINKS if link[0].startswith("`")}))
def test_a_function_that_the_readme_names_is_in_the_file_that_it_links_to(text: str, target: str) -> None:
    name, path = text.strip("`"), ROOT / target
    assert name == target or name == path.name or name in defined_in(path)


def test_the_readme_names_the_whole_path_of_a_job() -> None:
    names = {text.strip("`") for text, _ in LINKS}
    path = [
        "LifecycleScheduler.tick",
        "Claims.claim",
        "Sender.send",
        "LifecycleTask.__call__",
        "Runner.run",
        "Runs.begin",
    ]
    assert {*path, "may_begin", "Runs.finish", "close"} <= names


@pytest.mark.parametrize("command", sorted({*COMMANDS, *INLINE}))
def test_a_command_that_the_readme_names_exists(command: str) -> None:
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    match words:
        case ["make", target]:
            assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["celery", "-A", _, "lifecycle", verb, *_]:
            assert verb in command_line.commands
        case ["celery", "-A", _, "beat", "-S", scheduler, *_]:
            assert scheduler in {entry.name for entry in entry_points(group="celery.beat_schedulers")}
        case ["celery", "-A", _, "worker", *options]:
            assert options in ([], ["--loglevel", "INFO"])
        case ["python", "-m", module]:
            assert (ROOT / f"{module.replace('.', '/')}.py").exists()
        case ["python", "-c", program]:
            compile(program, "README.md", "exec")
        case ["celery", "beat"] | ["python", "shop.py"] | ["export", *_] | ["source", ".venv/bin/activate"]:
            pass
        case ["docker", "compose", *_]:
            assert (ROOT / "docker-compose.yml").exists()
        case ["pip", "install", package]:
            name, extras = re.fullmatch(r"([a-z-]+)\[(.*)\]", package).groups()  # type: ignore[union-attr]
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert name == project["name"]
            assert set(extras.split(",")) <= set(project["optional-dependencies"])
        case _:
            pytest.fail(f"nobody knows the command {command!r}")


def test_verbs_that_the_readme_lists_are_commands() -> None:
    (listed,) = re.findall(r"^- `celery -A shop lifecycle doctor`.*?(?=^$|^- |^## )", README, re.DOTALL | re.MULTILINE)
    verbs = re.findall(r"`([a-z]+)`", listed)
    assert len(verbs) >= 6
    assert set(verbs) <= set(command_line.commands)


def test_the_first_program_defines_its_job_in_twenty_lines(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n# shop\.py\n(.*?)```", README, re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    (tmp_path / "shop.py").write_text(program)
    ask = "import shop; shop.app.finalize(); print('cart.remind' in shop.app.tasks)"
    done = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_the_changelog_has_the_version_that_is_built() -> None:
    from celery_lifecycle import __version__

    versions = re.findall(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", __version__]


def test_commands_that_the_changelog_lists_exist() -> None:
    (listed,) = re.findall(
        r"^- `celery -A … lifecycle`:(.*?)and more", (ROOT / "CHANGELOG.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert set(re.findall(r"`(\w+)`", listed)) <= set(command_line.commands)
