"""`docs/operations.md` says what the code says: every setting, command, option, signal and log line, and no others."""

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import click
import pytest

from celery_lifecycle import events, signals
from celery_lifecycle.cli import lifecycle
from celery_lifecycle.config import Config

DOC = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def block(name: str) -> str:
    """What stands in the document between `<!-- name -->` and `<!-- end -->`."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", DOC, re.DOTALL)
    assert found is not None, f"docs/operations.md has no block {name!r}"
    return found[1].strip()


def settings_table() -> str:
    told = re.split(r"\n {4}(\w+): ", inspect.cleandoc(Config.__doc__ or ""))
    words = {name: " ".join(text.split()) for name, text in zip(told[1::2], told[2::2], strict=True)}
    lines = ["| setting | meaning |", "|---|---|"]
    lines += [
        f"| `lifecycle_{field.name}` | {words[field.name][0].upper()}{words[field.name][1:]} |"
        for field in fields(Config)
    ]
    return "\n".join(lines)


def commands_table() -> str:
    lines = ["| command | what it does |", "|---|---|"]
    for words, command in walk(lifecycle, ()):
        usage = [
            *words,
            *(one.metavar or (one.name or "").upper() for one in arguments(command)),
            *map(option, options(command)),
        ]
        told = " ".join((command.help or "").split())
        lines.append(f"| `{' '.join(usage)}` | {told} |".replace("|]", "\\|]"))
    return "\n".join(lines)


def walk(group: click.Group, words: tuple[str, ...]) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += walk(command, (*words, name))
        else:
            found.append(((*words, name), command))
    return found


def arguments(command: click.Command) -> list[click.Argument]:
    return [one for one in command.params if isinstance(one, click.Argument)]


def options(command: click.Command) -> list[click.Option]:
    return [one for one in command.params if isinstance(one, click.Option) and one.name != "help"]


def option(one: click.Option) -> str:
    return f"[{one.opts[0]}]"


def log_lines() -> list[tuple[str, str]]:
    """Level and text of every log line of WARNING and above, with `…` for what is filled in."""
    found = []
    for call in ast.walk(ast.parse(inspect.getsource(events))):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "_say":
            level, text = ast.unparse(call.args[0]).removeprefix("logging."), ast.literal_eval(call.args[1])
            if level in ("WARNING", "ERROR", "CRITICAL"):
                found.append((level.lower(), re.sub(r"%[.\d]*[a-z]", "…", text)))
    return found


@pytest.mark.parametrize(("name", "expected"), [("settings", settings_table()), ("commands", commands_table())])
def test_the_tables_of_settings_and_commands_are_those_of_the_code(name, expected):
    assert block(name) == expected, f"put this into the block {name!r} of docs/operations.md:\n\n{expected}"


def test_every_signal_is_explained():
    told = set(re.findall(r"^\| `(\w+)` \|", block("signals"), re.MULTILINE))
    assert told == set(signals.__all__)


def test_every_log_line_of_warning_and_above_is_explained():
    told = set(re.findall(r"^\| (\w+) \| `(.*?)` \|", block("log"), re.MULTILINE))
    assert told == set(log_lines())


def test_every_option_and_command_has_a_help_text():
    for words, command in walk(lifecycle, ()):
        assert command.help, words
        for one in options(command):
            assert one.help or one.name in ("limit",), (words, one.name)


def test_every_command_named_in_the_text_exists():
    known = {words for words, _ in walk(lifecycle, ())} | {("dead",)}
    named = re.findall(r"lifecycle ((?:[a-z]+ ?)+)", "\n".join(re.findall(r"celery -A shop lifecycle [^\n`]*", DOC)))
    assert named
    for one in named:
        words = tuple(one.split())
        assert words[:1] in known or words[:2] in known, one
