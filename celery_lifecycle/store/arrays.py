"""Arrays as PostgreSQL writes them: building them here costs a fraction of what adapting lists costs the driver."""

from __future__ import annotations

from collections.abc import Iterable


def array(values: Iterable[int | str | None]) -> str:
    """The text of an array of integers or strings."""
    return "{" + ",".join(map(_element, values)) + "}"


def _element(value: int | str | None) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(int(value))
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
