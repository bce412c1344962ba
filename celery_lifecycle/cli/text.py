"""Plain text for terminals and pipes: aligned tables, and JSON."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

import click

LONGEST = 60


def width(text: str) -> int:
    """Columns that a terminal gives a text: wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def cut(text: str, longest: int = LONGEST) -> str:
    """The text in one line, shortened with an ellipsis."""
    text = "".join(char if char.isprintable() else " " for char in text)
    if width(text) <= longest:
        return text
    while width(text) > longest - 1:
        text = text[:-1]
    return text + "…"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Print rows under their head, columns aligned, numbers to the right; `empty` if there are none."""
    if not rows:
        click.echo(empty)
        return
    cells = [[cut("-" if cell is None else str(cell)) for cell in row] for row in rows]
    widths = [max(width(row[at]) for row in [list(head), *cells]) for at in range(len(head))]
    right = [all(isinstance(row[at], int) or row[at] is None for row in rows) for at in range(len(head))]
    click.secho(_line([name.upper() for name in head], widths, right), bold=True)
    for row in cells:
        click.echo(_line(row, widths, right))


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = []
    for cell, columns, is_right in zip(cells, widths, right, strict=True):
        gap = " " * (columns - width(cell))
        padded.append(gap + cell if is_right else cell + gap)
    return "  ".join(padded).rstrip()


def pairs(facts: Sequence[tuple[str, Any]], indent: str = "") -> None:
    """Print names and values in two columns; values that are None are left out."""
    shown = [(name, value) for name, value in facts if value is not None]
    columns = max((width(name) for name, _ in shown), default=0)
    for name, value in shown:
        click.echo(f"{indent}{name}{' ' * (columns - width(name))}  {cut(str(value), 300)}")


def heading(text: str) -> None:
    click.echo()
    click.secho(text, bold=True)


def as_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))
