"""Turns a sentence into a schedule with a language model of yours: the prompt, and a check of its answer.

No model is called from here. The prompt needs nothing; schema and check need pydantic (the extra `prompts`):

    text = my_model(system=schedule_prompt(now, "Europe/Berlin"), user="every weekday at eight")
    call = read_answer(text, now=now, timezone="Europe/Berlin")
    if call.when is not None:
        cart.schedule(call.when, "remind", {"what": call.description}, **call.options)
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from celery_lifecycle.errors import ScheduleInvalid
from celery_lifecycle.timing.cron import parse_cron
from celery_lifecycle.timing.instants import from_millis, resolve_when, to_millis
from celery_lifecycle.timing.zones import load_zone

if TYPE_CHECKING:
    from pydantic import BaseModel

AnswerType = Literal["scheduled", "delayed", "cron", "no-schedule"]

_PROMPT = """\
You turn a request into a schedule. Answer with one JSON object and nothing else: no prose, no code fence.

It is {now} ({weekday}) in the time zone {timezone}.
Dates and times of day in the request are meant in this zone.

The object has exactly two keys:
- "description": what is to be done, in a few words, without the time.
- "when": one of
  {{"type": "scheduled", "date": "{example}"}}
    for one moment: ISO 8601 with an offset from UTC, in the future.
  {{"type": "delayed", "seconds": 600}}
    for a delay such as "in ten minutes": seconds from now, not negative.
  {{"type": "cron", "cron": "0 8 * * 1-5"}}
    for what repeats: five fields (minute, hour, day of month, month, day of week with 0 or 7 = Sunday) in the
    time zone above. If both day fields are set, either one is enough. L is the last day of the month, 5#2 the
    second Friday, L5 the last Friday. No seconds, no years, no @daily.
  {{"type": "no-schedule"}}
    if the request names no time, or one that cannot be expressed in these ways. Never guess one.

Words without a time of day mean: morning 09:00, noon 12:00, afternoon 15:00, evening 18:00, night 21:00.
"""


@dataclass(frozen=True)
class ScheduleCall:
    """A checked answer, as the arguments of `schedule(when, callback, payload, **options)`."""

    description: str
    """What is to be done, in the model's words."""
    type: AnswerType
    when: datetime | float | str | None
    """An aware datetime (UTC), seconds, a cron expression; None for `no-schedule`, nothing to call."""
    timezone: str | None = None
    """The zone whose clocks a cron goes by; None for the other types."""

    @property
    def options(self) -> dict[str, str]:
        """The keyword arguments of the call: `timezone` for a cron, else none."""
        return {} if self.timezone is None else {"timezone": self.timezone}


def schedule_prompt(now: datetime, timezone: str = "UTC") -> str:
    """The system prompt that makes a model answer a request with the JSON that `read_answer` checks.

    `now`: aware datetime. `timezone`: the tz database name of the zone in which the person speaks. Raises
    `TimeInvalid` for a naive `now`, `ScheduleInvalid` for an unknown zone.
    """
    local = from_millis(to_millis(now)).astimezone(load_zone(timezone).tzinfo)
    example = (local + timedelta(days=1)).replace(hour=9, minute=0, second=0, microsecond=0)
    return _PROMPT.format(
        now=local.isoformat(timespec="seconds"),
        # Not strftime: the name of the day must not depend on the process's locale.
        weekday=("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")[local.weekday()],
        timezone=timezone,
        example=example.isoformat(timespec="seconds"),
    )


def answer_schema() -> dict[str, Any]:
    """The JSON Schema of an answer, for models that can be held to one. Needs the extra `prompts`."""
    return _answer_model().model_json_schema()


def read_answer(answer: str | bytes | Mapping[str, Any], *, now: datetime, timezone: str = "UTC") -> ScheduleCall:
    """Check a model's answer strictly and turn it into the arguments of `schedule(…)`.

    `answer`: the model's text, or the object that it stands for. `now`: aware datetime; a date before it is
    refused. `timezone`: the zone of the prompt; a cron goes by its clocks.

    Raises `ScheduleInvalid` for anything else than the schema, with a message that can be handed back to the
    model: other keys, naive or past dates, negative delays, expressions that are not allowed or can never
    match. Needs the extra `prompts`.
    """
    model = _answer_model()
    from pydantic import ValidationError

    load_zone(timezone)
    context = {"now": to_millis(now), "timezone": timezone}
    try:
        text = answer if isinstance(answer, (str, bytes)) else json.dumps(answer)
        checked: Any = model.model_validate_json(text, context=context)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc'])) or 'the answer'}: "
            + fault["msg"].removeprefix("Value error, ").rstrip(".")
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise ScheduleInvalid(f"The answer is no schedule. {'; '.join(faults)}.") from error
    except (TypeError, ValueError) as error:
        raise ScheduleInvalid(f"The answer is no JSON object: {error}.") from error
    description, choice = checked.description, checked.when
    if choice.type == "scheduled":
        return ScheduleCall(description, "scheduled", from_millis(to_millis(choice.date)))
    if choice.type == "delayed":
        return ScheduleCall(description, "delayed", choice.seconds)
    if choice.type == "cron":
        return ScheduleCall(description, "cron", choice.cron, timezone)
    return ScheduleCall(description, "no-schedule", None)


def __getattr__(name: str) -> Any:
    """`ScheduleAnswer`, the pydantic model of an answer, made when it is first asked for."""
    if name == "ScheduleAnswer":
        return _answer_model()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@lru_cache(maxsize=1)
def _answer_model() -> "type[BaseModel]":
    try:
        from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
    except ImportError as error:
        raise ImportError(
            "Checking a model's answer needs pydantic, which is not installed. "
            "Install it with: pip install 'celery-lifecycle[prompts]'"
        ) from error

    class Strict(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True, frozen=True, str_strip_whitespace=True)

    class Scheduled(Strict):
        """One moment."""

        type: Literal["scheduled"]
        date: datetime = Field(strict=False, description="ISO 8601 with an offset from UTC, in the future")

        @field_validator("date", mode="before")
        @classmethod
        def is_text(cls, value: object) -> object:
            # pydantic would take a number, also one in a string, for seconds since the epoch.
            if isinstance(value, str) and "-" in value and ":" in value:
                return value
            raise ValueError("a date must be an ISO 8601 string with an offset, such as 2026-01-31T08:00:00+01:00")

        @field_validator("date")
        @classmethod
        def is_aware_and_not_past(cls, value: datetime, info: ValidationInfo) -> datetime:
            if value.utcoffset() is None:
                raise ValueError("the date has no offset from UTC; write one, such as 2026-01-31T08:00:00+01:00")
            now = (info.context or {}).get("now")
            if now is not None and to_millis(value) < now:
                raise ValueError(f"the date is past; it is {from_millis(now).isoformat()} now")
            return value

    class Delayed(Strict):
        """Seconds from now."""

        type: Literal["delayed"]
        seconds: float = Field(ge=0, allow_inf_nan=False, description="seconds from now")

        @field_validator("seconds")
        @classmethod
        def is_within_reach(cls, value: float, info: ValidationInfo) -> float:
            resolve_when((info.context or {}).get("now") or 0, delay=value)
            return value

    class CronAnswer(Strict):
        """Again and again."""

        type: Literal["cron"]
        cron: str = Field(description="minute, hour, day of month, month, day of week")

        @field_validator("cron")
        @classmethod
        def can_match(cls, value: str, info: ValidationInfo) -> str:
            context = info.context or {}
            cron = parse_cron(value, context.get("timezone") or "UTC")
            if cron.next_after(context.get("now") or 0) is None:
                raise ValueError("the expression never matches: the clocks always skip the time it names")
            return cron.expression

    class NoSchedule(Strict):
        """No time was named."""

        type: Literal["no-schedule"]

    class ScheduleAnswer(Strict):
        """What is to be done, and when."""

        description: str = Field(min_length=1, max_length=1000, description="what is to be done")
        when: Annotated[Scheduled | Delayed | CronAnswer | NoSchedule, Field(discriminator="type")]

    return ScheduleAnswer
