"""The text of docs/design.md, which tests hold against the code."""

from pathlib import Path

DESIGN = (Path(__file__).parents[2] / "docs" / "design.md").read_text(encoding="utf-8")
