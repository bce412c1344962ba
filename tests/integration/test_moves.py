"""Verbs of the store that move an object from one state to another, as docs/design.md has them: those that worlds seldom show."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

import pytest

from celery_lifecycle import breaker, store, transitions
from celery_lifecycle.config import Config
from celery_lifecycle.store import Store
from tests.support.design import DESIGN
from tests.support.moves import PLAYS, Move, told_moves
from tests.support.protocol import CART, Table, table

STORE = Store(Config(database_url="sqlite://"))
AREAS = {name: type(verbs) for name, verbs in vars(STORE).items() if name not in ("config", "database")}


@pytest.fixture
def t(database_url: str) -> Iterator[Table]:
    with table(database_url) as made:
        yield made


def state_of(t: Table) -> str:
    found = t.store.objects.find(CART)
    return found.phase.name if found is not None else "nothing"


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("move", PLAYS, ids=" ".join)
def test_a_verb_moves_an_object_as_the_table_says(move: Move, t: Table) -> None:
    before, after, verb = move
    area, _, name = verb.partition(".")
    called, original = [], getattr(getattr(t.store, area), name)
    playing = PLAYS[move](t)
    next(playing)
    assert state_of(t) == before
    setattr(getattr(t.store, area), name, lambda *args, **kwargs: (called.append(name), original(*args, **kwargs))[1])
    assert next(playing, None) is None
    assert called == [name]
    assert state_of(t) == after
    t.check()


# --- all verbs


def _functions() -> dict[str, str]:
    """The text of every function of the store and of the transitions that is in no class."""
    found: dict[str, str] = {}
    for package in (store, transitions):
        for one in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for name, function in vars(importlib.import_module(one.name)).items():
                if inspect.isfunction(function):
                    found[name] = inspect.getsource(function)
    return {**found, "strike": inspect.getsource(breaker.strike)}


FUNCTIONS = _functions()


def reached(cls: type, name: str) -> str:
    """The text of a verb and of all that it can come to."""
    texts: dict[tuple[bool, str], str] = {}
    names = [(True, name)]
    while names:
        own, one = names.pop()
        method = inspect.getattr_static(cls, one, None)
        text = (inspect.getsource(method) if inspect.isfunction(method) else None) if own else FUNCTIONS.get(one)
        if text is None or (own, one) in texts:
            continue
        texts[own, one] = text
        names += [(True, called) for called in re.findall(r"\bself\.(\w+)", text)]
        names += [(False, called) for called in re.findall(r"\b(\w+)\(", text)]
    return "".join(texts.values())


def all_verbs() -> dict[str, str]:
    """Every verb of the store, with the text of all that it can come to."""
    found: dict[str, str] = {}
    for area, cls in AREAS.items():
        for name, verb in vars(cls).items():
            if inspect.isfunction(verb) and not name.startswith("_") and not name.endswith("_in"):
                found[f"{area}.{name}"] = reached(cls, name)
    return found


def writes(text: str) -> bool:
    """Whether an object's row is written, and not just its lease."""
    return re.search(r"\.save\(|\.save_with_job\(|\.push_new\(", text) is not None


def aliases() -> dict[str, str]:
    """Verbs that are another one with less to say."""
    return dict(re.findall(r"`(\w+\.\w+)` is `(\w+\.\w+)`", DESIGN))


def listed(opening: str) -> set[str]:
    """The verbs of the list in docs/design.md that opens so; `area.*` stands for all verbs of an area."""
    told = re.search(rf"^- {re.escape(opening)}(?:.|\n)*?\.(?=\n(?:- |\n))", DESIGN, re.MULTILINE)
    assert told is not None, opening
    names = set(re.findall(r"`(\w+\.[\w*]+)`", told[0]))
    whole = {name[:-2] for name in names if name.endswith(".*")}
    return {name for name in names if not name.endswith(".*")} | {
        name for name in all_verbs() if name.partition(".")[0] in whole
    }


def test_each_verb_of_the_store_is_in_the_table_or_in_one_list_of_those_that_move_nothing() -> None:
    verbs = all_verbs()
    moving = {verb for _, _, verb in told_moves()}
    stay, other = listed("write the row and leave the state"), listed("write no object's row")
    assert len(moving) + len(stay) + len(other) + len(aliases()) == len(moving | stay | other | aliases().keys())
    assert moving | stay | other | aliases().keys() == verbs.keys()
    assert {verb for verb in moving | stay if not writes(verbs[verb])} == set()
    assert {verb for verb in other if writes(verbs[verb])} == set()


def test_a_verb_that_is_said_to_be_another_one_calls_it() -> None:
    for one, whose in aliases().items():
        area, _, name = one.partition(".")
        assert re.search(rf"self\.{whose.partition('.')[2]}\b", inspect.getsource(getattr(AREAS[area], name))), one


def test_each_verb_that_writes_an_object_has_its_row_with_the_pure_functions_that_it_asks() -> None:
    verbs = all_verbs()
    rows = re.findall(r"^\| (`[a-z]+\.\w+`[^|]*) \| [^|]+ \|([^|]*)\|[^|]*\|$", DESIGN, re.MULTILINE)
    named: list[str] = []
    for first, functions in rows:
        for verb in re.findall(r"`([\w.]+)`", first):
            named.append(verb)
            for function in re.findall(r"`(\w+)`", functions):
                assert re.search(rf"\b{function}\(", verbs[verb]), f"{verb} never asks {function}"
    assert len(named) == len(set(named))
    wanted = {verb for verb, text in verbs.items() if writes(text)} - aliases().keys()
    assert wanted | {"runs.attempted", "workers.renew"} == set(named)
