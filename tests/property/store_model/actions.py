"""What a step of an example is: one action, drawn by weight from those that can be done now.

Hypothesis would leave whole rules out of an example, as it does with rules of its own; most examples would then be without
beats, or without workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

F = TypeVar("F", bound=Callable[..., None])


def often(usual: Any, *rare: Any, times: int = 6) -> st.SearchStrategy[Any]:
    """One value much more often than the others."""
    return st.sampled_from([usual] * times + list(rare))


@dataclass(frozen=True)
class Action:
    """A method, how often it is drawn beside the others, when it can be, and its arguments."""

    name: str
    times: int
    when: Callable[[Any], object] | None
    arguments: st.SearchStrategy[dict[str, Any]]
    draws: bool


def action(
    times: int, when: Callable[[Any], object] | None = None, **arguments: st.SearchStrategy[Any]
) -> Callable[[F], F]:
    """Make a method one of the steps. A parameter `data` is given the source of further draws."""

    def mark(method: F) -> F:
        draws = "data" in inspect.signature(method).parameters
        method.action = Action(method.__name__, times, when, st.fixed_dictionaries(arguments), draws)  # type: ignore[attr-defined]
        return method

    return mark


class Acting(RuleBasedStateMachine):
    """A machine whose steps are the actions of its class."""

    @classmethod
    def actions(cls) -> list[Action]:
        methods = [member for _, member in inspect.getmembers(cls, inspect.isfunction)]
        found = [method.action for method in methods if hasattr(method, "action")]
        # Hypothesis draws, and shrinks to, the first ones more often.
        return sorted(found, key=lambda one: (-one.times, one.name))

    def __init__(self) -> None:
        super().__init__()
        self.known_actions = self.actions()

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        able = [one for one in self.known_actions if one.when is None or one.when(self)]
        drawn = data.draw(st.sampled_from([one for one in able for _ in range(one.times)]))
        arguments = data.draw(drawn.arguments)
        note(f"  {drawn.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})")
        getattr(self, drawn.name)(**arguments, **({"data": data} if drawn.draws else {}))
