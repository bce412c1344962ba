"""A call of one of the store's verbs, as the checks see it: what it was given, and what it came to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Call:
    """One transaction of the store.

    Attributes:
        label: the verb, as its class and its function are named.
        args: what the function of the transaction was given.
        result: what it came to.
        wrote: whether it has written anything.
    """

    __slots__ = ("_frame", "_given", "_kwargs", "_work", "args", "label", "result", "wrote")

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.label = work.__qualname__.replace(".<locals>.work", "").replace(".<locals>.<lambda>", "")
        self.args = args
        self.result: Any = None
        self.wrote = False
        self._work = work
        self._kwargs = kwargs
        self._given: dict[str, Any] | None = None
        # Of whoever called `Database.run` or `look`: a verb, whose arguments are there whatever its guard looks at.
        self._frame = sys._getframe(3)

    def run(self, tx: Any) -> Any:
        self.result = self._work(tx, *self.args, **self._kwargs)
        return self.result

    def __getitem__(self, name: str) -> Any:
        """What the verb was given under this name."""
        if self._given is None:
            self._given = dict(self._frame.f_locals)
        return self._given[name]
