"""Reads the five fields of a cron expression: checks each item strictly, then lets croniter expand it.

croniter accepts more than cron means, and expands some of it otherwise than cron does: `5-5` as the whole
field, `22-5/3` with the wrong phase after midnight, `*/99999` as one value, `*/1` in a day field as a
restriction. Items are therefore checked and put into a plain form here, before croniter sees them, and every
error names the field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from croniter import croniter

from celery_lifecycle.errors import ScheduleInvalid

MAX_LENGTH = 255
"""The longest expression that is accepted, in characters."""

_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


@dataclass(frozen=True)
class _Rule:
    """What one field may hold: its values from `low` to `high`, and names for them."""

    name: str
    low: int
    high: int
    names: dict[str, int]

    @property
    def allowed(self) -> str:
        names = f", {next(iter(self.names))}-{list(self.names)[-1]}" if self.names else ""
        return f"{self.low}-{self.high}{names}"


_MINUTE = _Rule("minute", 0, 59, {})
_HOUR = _Rule("hour", 0, 23, {})
_DAY = _Rule("day of month", 1, 31, {})
_MONTH = _Rule("month", 1, 12, {name: at for at, name in enumerate(_MONTHS, 1)})
_WEEKDAY = _Rule("day of week", 0, 7, {name: at for at, name in enumerate(_WEEKDAYS)})
_RULES = (_MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)

_ITEM = re.compile(r"(?:(?P<star>\*)|(?P<low>[0-9]+|[a-z]+)(?:-(?P<high>[0-9]+|[a-z]+))?)(?:/(?P<step>[0-9]+))?")
_NTH = re.compile(r"(?P<days>[^#]+)#(?P<nth>[0-9]+)")
_LAST_WEEKDAY = re.compile(r"l([0-7])|([0-7])l")


@dataclass(frozen=True)
class Fields:
    """What an expression means, field by field; weekdays count from 0 = Sunday to 6 = Saturday."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    last_day: bool
    months: frozenset[int]
    weekdays: frozenset[int]
    nth_weekdays: frozenset[tuple[int, int]]
    """(weekday, n): the n-th of its kind in the month; n = 0 stands for the last one."""
    any_day: bool
    """The day of month field is `*`; if neither day field is, a day that matches one of them will do."""
    any_weekday: bool
    by_elapsed_time: bool
    """The hour field has a wildcard or a step: what clocks skip is not run, what they repeat runs again."""


def read_fields(expression: str) -> Fields:
    """The meaning of a five-field cron expression.

    Raises `ScheduleInvalid`, naming the field, for whatever is outside the grammar, and for expressions that
    can never match, such as `0 0 30 2 *`.
    """
    texts = _split(expression)
    items = [_read_items(rule, text, expression) for rule, text in zip(_RULES, texts, strict=True)]
    special = [item for item in items[4] if "#" in item or "l" in item]
    plain = [item for item in items[4] if item not in special]
    lists = [",".join(field) for field in (*items[:4], plain or ["*"])]
    minutes, hours, days, months, weekdays = _expand(" ".join(lists), expression)[0]
    nth = _expand("* * * * " + ",".join(special), expression)[1] if special else {}
    fields = Fields(
        minutes=tuple(sorted(_values(_MINUTE, minutes))),
        hours=tuple(sorted(_values(_HOUR, hours))),
        days=frozenset(_values(_DAY, days)),
        last_day="l" in days,
        months=frozenset(_values(_MONTH, months)),
        weekdays=frozenset(_values(_WEEKDAY, weekdays) if plain else ()),
        nth_weekdays=frozenset((day, 0 if n == "l" else int(n)) for day, ns in nth.items() for n in ns),
        any_day="*" in items[2],
        any_weekday="*" in items[4],
        by_elapsed_time="*" in texts[1] or "/" in texts[1],
    )
    _refuse_impossible(fields, expression)
    return fields


def _split(expression: str) -> list[str]:
    texts = re.findall(r"[^ \t]+", expression.strip().lower())
    if len(expression) > MAX_LENGTH:
        longest = max(range(len(texts[:5])), key=lambda at: len(texts[at]), default=0)
        raise ScheduleInvalid(
            f"The cron expression has {len(expression)} characters; at most {MAX_LENGTH} are allowed. "
            f"Its {_RULES[longest].name} field is the longest: write ranges and steps instead of long lists."
        )
    if texts and texts[0].startswith("@"):
        instead = f"Write {_ALIASES[texts[0]]!r}." if texts[0] in _ALIASES else "Write the five fields."
        raise ScheduleInvalid(f"Names such as {expression!r} stand for no cron expression here. {instead}")
    if len(texts) != 5:
        raise ScheduleInvalid(
            f"The cron expression {expression!r} has {len(texts)} fields; it must have five: "
            "minute, hour, day of month, month, day of week (no seconds, no years)."
        )
    return texts


def _read_items(rule: _Rule, text: str, expression: str) -> list[str]:
    """The items of one field in a form that croniter and cron understand alike."""
    plain: list[str] = []
    for item in text.split(","):
        plain += _read_item(rule, item, expression)
    return ["*"] if "*" in plain else plain


def _read_item(rule: _Rule, item: str, expression: str) -> list[str]:
    if rule is _DAY and item == "l":
        return ["l"]
    if rule is _DAY and item.endswith("-l"):
        item = item[:-1] + "31"
    if rule is _WEEKDAY:
        if last := _LAST_WEEKDAY.fullmatch(item):
            return [f"l{int(last[1] or last[2]) % 7}"]
        if nth := _NTH.fullmatch(item):
            if nth["nth"] not in {"1", "2", "3", "4", "5"}:
                raise _refused(rule, item, expression, "the number after # must be 1 to 5")
            return [f"{day}#{nth['nth']}" for day in _plain_days(rule, nth["days"], expression)]
    match = _ITEM.fullmatch(item)
    if match is None:
        raise _refused(rule, item, expression, "it is no value, range or step")
    step = _step(rule, match["step"], item, expression)
    if match["star"]:
        return ["*" if step == 1 else f"*/{step}"]
    low = _value(rule, match["low"], item, expression)
    if match["high"] is None:
        # `5/15` means "from 5 on, every 15".
        return _range(rule, low, _top(rule), step) if match["step"] else [str(low)]
    return _range(rule, low, _value(rule, match["high"], item, expression), step)


def _plain_days(rule: _Rule, days: str, expression: str) -> list[str]:
    match = _ITEM.fullmatch(days)
    if match is None or match["star"] or match["step"]:
        raise _refused(rule, days, expression, "before # stands one weekday or a range of them")
    values = _values(rule, _expand("* * * * " + ",".join(_read_item(rule, days, expression)), expression)[0][4])
    return [str(value) for value in sorted(values)]


def _range(rule: _Rule, low: int, high: int, step: int) -> list[str]:
    """`low-high/step`; one that runs backwards goes on at the beginning of the field, in step."""
    top = _top(rule)
    if rule is _WEEKDAY:
        # Sunday is 0 and 7; mon-7 is mon-0, which runs backwards, and 0-7 is the whole week.
        low, high = (0, 6) if (low, high) == (0, 7) else (low % 7, high % 7)
    if low == high:
        return [str(low)]
    if low < high:
        return [f"{low}-{high}/{step}"]
    head = [str(low)] if low == top else [f"{low}-{top}/{step}"]
    start = rule.low + (step - 1 - (top - low) % step)
    if start > high:
        return head
    return [*head, str(start) if start == high else f"{start}-{high}/{step}"]


def _top(rule: _Rule) -> int:
    return 6 if rule is _WEEKDAY else rule.high


def _value(rule: _Rule, text: str, item: str, expression: str) -> int:
    if text in rule.names:
        return rule.names[text]
    if not text.isdigit() or len(text) > 2 or not rule.low <= int(text) <= rule.high:
        raise _refused(rule, item, expression, f"{text} is not one of {rule.allowed}")
    return int(text)


def _step(rule: _Rule, text: str | None, item: str, expression: str) -> int:
    if text is None:
        return 1
    most = _top(rule) - rule.low + 1
    if len(text) > 2 or not 1 <= int(text) <= most:
        raise _refused(rule, item, expression, f"the step must be 1 to {most}")
    return int(text)


def _refused(rule: _Rule, item: str, expression: str, reason: str) -> ScheduleInvalid:
    more = {_DAY.name: ", L", _WEEKDAY.name: ", L and #"}.get(rule.name, "")
    return ScheduleInvalid(
        f"The {rule.name} field of the cron expression {expression!r} is not allowed: {item!r}, {reason}. "
        f"Allowed are {rule.allowed}, *, lists, ranges, steps{more}."
    )


def _expand(plain: str, expression: str) -> tuple[list[list[Any]], dict[int, set[Any]]]:
    try:
        expanded: tuple[list[list[Any]], dict[int, set[Any]]] = croniter.expand(plain)
    except ValueError as error:  # pragma: no cover - whatever croniter refuses was refused above
        raise ScheduleInvalid(f"The cron expression {expression!r} is not allowed: {error}") from error
    return expanded


def _values(rule: _Rule, expanded: list[Any]) -> set[int]:
    if expanded == ["*"]:
        return set(range(rule.low, _top(rule) + 1))
    return {value for value in expanded if isinstance(value, int)}


def _refuse_impossible(fields: Fields, expression: str) -> None:
    if fields.any_day or not fields.any_weekday or fields.last_day:
        return
    longest = max(29 if month == 2 else 30 if month in {4, 6, 9, 11} else 31 for month in fields.months)
    if min(fields.days) > longest:
        raise ScheduleInvalid(
            f"The cron expression {expression!r} can never match: its day of month field begins at "
            f"{min(fields.days)}, and no month in its month field is that long."
        )
