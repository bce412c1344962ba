"""From a sentence to a schedule, the whole way, with a stand-in for the language model: run it as it is.

    python example/natural_language.py
    python example/natural_language.py "water the plants every Monday at 7"

Replace `stand_in_model` by a call of your own model, and `Agent` by a `LifecycleObject` of yours: its
`schedule` takes exactly these arguments.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_lifecycle.errors import ScheduleInvalid
from celery_lifecycle.prompts import ScheduleCall, read_answer, schedule_prompt
from celery_lifecycle.timing import preview, to_millis

Model = Callable[[str, list[str]], str]
"""Takes the system prompt and the conversation so far, gives the next answer."""

SENTENCES = [
    "remind me in ten minutes to take out the pizza",
    "call Anna tomorrow at three in the afternoon",
    "send the digest every weekday at eight",
    "what a lovely day",
]


class Agent:
    """Stands in for a LifecycleObject: shows what it is asked to schedule."""

    def schedule(self, when: Any, callback: str, payload: dict[str, Any], **options: Any) -> None:
        arguments = [repr(when), repr(callback), repr(payload)]
        arguments += [f"{name}={value!r}" for name, value in options.items()]
        print(f"    agent.schedule({', '.join(arguments)})")


def understand(sentence: str, model: Model, *, now: datetime, timezone: str, tries: int = 3) -> ScheduleCall:
    """Ask the model, check its answer, and hand a refusal back to it until it gets it right."""
    conversation = [sentence]
    while True:
        answer = model(schedule_prompt(now, timezone), conversation)
        print(f"    model: {answer}")
        try:
            return read_answer(answer, now=now, timezone=timezone)
        except ScheduleInvalid as error:
            tries -= 1
            if not tries:
                raise
            print(f"    refused: {error}")
            conversation += [answer, f"That is not allowed: {error} Answer again."]


def plan(agent: Agent, sentence: str, model: Model, *, now: datetime, timezone: str) -> None:
    """The whole way of one sentence."""
    print(f"\n{sentence!r}")
    call = understand(sentence, model, now=now, timezone=timezone)
    if call.when is None:
        print("    nothing to schedule")
        return
    agent.schedule(call.when, "remind", {"what": call.description}, **call.options)
    if isinstance(call.when, str):
        for row in preview(call.when, timezone, to_millis(now), 3):
            print(f"      {row.local:%a %d %b %H:%M %Z}  {row.note or ''}".rstrip())


def stand_in_model(prompt: str, conversation: list[str]) -> str:
    """Answers like a model that has read the prompt, the first time sometimes as carelessly as one."""
    sentence, again = conversation[0].lower(), len(conversation) > 1
    found = re.search(r"It is (\S+)", prompt)
    assert found is not None
    now = datetime.fromisoformat(found[1])
    if minutes := re.search(r"in (ten|\d+) minutes", sentence):
        when: dict[str, Any] = {"type": "delayed", "seconds": 60 * int(minutes[1].replace("ten", "10"))}
    elif "tomorrow" in sentence:
        moment = (now + timedelta(days=1)).replace(hour=15, minute=0, second=0)
        # Without its offset at first: a naive date is refused, the message says so, the second answer has it.
        when = {"type": "scheduled", "date": moment.isoformat() if again else f"{moment:%Y-%m-%dT%H:%M:%S}"}
    elif "every" in sentence:
        hour = re.search(r"at (\d+)", sentence)
        days = "1-5" if "weekday" in sentence else "1" if "monday" in sentence else "*"
        when = {"type": "cron", "cron": f"0 {hour[1] if hour else 8} * * {days}"}
    else:
        when = {"type": "no-schedule"}
    return json.dumps({"description": conversation[0], "when": when})


def main() -> None:
    now = datetime.now(timezone.utc)
    for sentence in sys.argv[1:] or SENTENCES:
        plan(Agent(), sentence, stand_in_model, now=now, timezone="Europe/Berlin")


if __name__ == "__main__":
    main()
