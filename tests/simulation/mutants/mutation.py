"""Takes guards out of the protocol's code, and looks whether a seed notices."""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from celery_lifecycle.errors import LifecycleError
from tests.simulation.checks.facts import Violation
from tests.simulation.plans.profiles import plan_of, profile_of
from tests.simulation.world.story import play

PACKAGE = "celery_lifecycle"


@dataclass(frozen=True, slots=True)
class Change:
    """One piece of a function's text, replaced."""

    module: str
    where: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """The protocol without one guard, or without two that cover for each other."""

    name: str
    changes: tuple[Change, ...]
    profiles: tuple[str, ...] = ()


def one(name: str, module: str, where: str, old: str, new: str, *profiles: str) -> Mutant:
    """A mutant that changes one piece of one function."""
    return Mutant(name, (Change(module, where, old, new),), profiles)


class Stale(Exception):
    """The text that a mutant changes is not there (any more)."""


def _mutated(module: Any, where: str, changes: list[Change]) -> tuple[Any, str, Any, Any]:
    """Owner, name, the function as it is and as it becomes."""
    owner: Any = module
    *path, name = where.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name)
    text = textwrap.dedent(inspect.getsource(original.fget if isinstance(original, property) else original))
    for change in changes:
        if change.old not in text:
            raise Stale(f"{change.module}:{where} has no {change.old!r}: bring the mutant up to date.")
        text = text.replace(change.old, change.new)
    for depth, part in enumerate(path):  # so that it keeps its qualified name
        text = "    " * depth + f"class {part}:\n" + textwrap.indent(text, "    " * (depth + 1))
    made: dict[str, Any] = {}
    code = compile(text, f"<mutant of {where}>", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    exec(code, module.__dict__, made)
    for part in path:
        made = dict(vars(made[part]))
    if name not in made:
        raise Stale(f"{module.__name__} was changed since it was imported.")
    return owner, name, original, made[name]


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """The protocol without its guard, within the block."""
    groups: dict[tuple[str, str], list[Change]] = {}
    for change in mutant.changes:
        groups.setdefault((change.module, change.where), []).append(change)
    undo: list[tuple[Any, str, Any]] = []
    try:
        for (module_name, where), changes in groups.items():
            module = importlib.import_module(module_name)
            owner, name, original, changed = _mutated(module, where, changes)
            places = [owner]
            if owner is module:  # who has imported it by name has it too
                loaded = [found for key, found in sorted(sys.modules.items()) if key.startswith(PACKAGE) and found]
                places = [found for found in loaded if found.__dict__.get(name) is original]
            for place in places:
                undo.append((place, name, original))
                setattr(place, name, changed)
        yield
    finally:
        for place, name, original in reversed(undo):
            setattr(place, name, original)


def catches(mutant: Mutant, seed: int) -> Exception | None:
    """What a seed says to the mutant; None if it sees nothing wrong."""
    with mutated(mutant):
        return play(plan_of(seed))[0]


def seed_for(mutant: Mutant, seeds: Iterable[int]) -> tuple[int, Exception] | None:
    """The first seed that catches it, of those whose profile can."""
    for seed in seeds:
        if mutant.profiles and profile_of(seed) not in mutant.profiles:
            continue
        error = catches(mutant, seed)
        # Anything else is a mutant that does not even run.
        if error is not None and not isinstance(error, (Violation, LifecycleError)):
            raise error
        if error is not None:
            return seed, error
    return None
