"""The natural-language helper: the prompt, the schema, and the strict check of a model's answer."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_lifecycle import prompts
from celery_lifecycle.errors import ScheduleInvalid, TimeInvalid
from celery_lifecycle.prompts import ScheduleCall, answer_schema, read_answer, schedule_prompt
from celery_lifecycle.timing import spec_for

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
BERLIN = "Europe/Berlin"


def answer(description: object = "water the plants", **when: object) -> str:
    return json.dumps({"description": description, "when": when})


def read(text: object) -> ScheduleCall:
    return read_answer(text, now=NOW, timezone=BERLIN)


def test_the_prompt_tells_the_time_and_day_in_the_persons_zone():
    text = schedule_prompt(NOW, BERLIN)
    assert "2026-03-01T13:00:00+01:00 (Sunday) in the time zone Europe/Berlin" in text
    assert "2026-03-02T09:00:00+01:00" in text


def test_every_answer_that_the_prompt_shows_is_accepted():
    shown = [line.strip() for line in schedule_prompt(NOW, BERLIN).splitlines() if line.strip().startswith('{"type"')]
    types = [read(json.dumps({"description": "x", "when": json.loads(when)})).type for when in shown]
    assert types == ["scheduled", "delayed", "cron", "no-schedule"]


def test_the_prompt_needs_no_pydantic_and_the_check_says_how_to_get_it(monkeypatch):
    prompts._answer_model.cache_clear()
    monkeypatch.setitem(sys.modules, "pydantic", None)
    schedule_prompt(NOW, BERLIN)
    for use in (answer_schema, lambda: read(answer(type="no-schedule")), lambda: prompts.ScheduleAnswer):
        with pytest.raises(ImportError, match=r"celery-lifecycle\[prompts\]"):
            use()
    monkeypatch.undo()
    prompts._answer_model.cache_clear()


def test_a_date_becomes_an_aware_datetime():
    call = read(answer(type="scheduled", date="2026-03-29T04:00:00+02:00"))
    assert call == ScheduleCall("water the plants", "scheduled", datetime(2026, 3, 29, 2, tzinfo=timezone.utc))
    assert call.options == {}
    assert spec_for(call.when, **call.options).type == "scheduled"


def test_a_delay_becomes_seconds():
    call = read(answer(type="delayed", seconds=90))
    assert (call.when, call.options) == (90.0, {})


def test_a_cron_becomes_the_expression_and_the_persons_zone():
    call = read(answer(type="cron", cron=" 0 8 * * 1-5 "))
    assert (call.when, call.options) == ("0 8 * * 1-5", {"timezone": BERLIN})
    assert spec_for(call.when, **call.options).timezone == BERLIN


def test_no_schedule_is_nothing_to_call():
    call = read(answer(type="no-schedule"))
    assert (call.description, call.when, call.options) == ("water the plants", None, {})


def test_an_answer_may_be_text_bytes_or_the_object_itself():
    text = answer(type="delayed", seconds=5)
    assert read(text) == read(text.encode()) == read(json.loads(text))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tomorrow at eight", "JSON"),
        ("", "JSON"),
        ("```json\n" + answer(type="no-schedule") + "\n```", "JSON"),
        ("[]", "object"),
        ("null", "object"),
        (b"\xff", "JSON"),
        ({"description": object()}, "JSON"),
        ("{}", "description"),
        (json.dumps({"description": "x", "when": {"type": "no-schedule"}, "why": 1}), "why"),
        (answer(type="no-schedule", cron="* * * * *"), "cron"),
        (answer("", type="no-schedule"), "description"),
        (answer("  ", type="no-schedule"), "description"),
        (answer("x" * 1001, type="no-schedule"), "description"),
        (answer(5, type="no-schedule"), "description"),
        (answer(type="sometimes"), "no-schedule"),
        (answer(), "type"),
        (answer(type="scheduled"), "date"),
        (answer(type="scheduled", date="2026-03-02T08:00:00"), "offset"),
        (answer(type="scheduled", date="2026-03-02"), "ISO 8601"),
        (answer(type="scheduled", date="tomorrow"), "ISO 8601"),
        (answer(type="scheduled", date=1_790_000_000), "ISO 8601"),
        (answer(type="scheduled", date="1790000000"), "ISO 8601"),
        (answer(type="scheduled", date="2026-02-30T08:00:00Z"), "date"),
        (answer(type="scheduled", date="2026-03-01T12:59:59+01:00"), "past"),
        (answer(type="delayed", seconds=-1), "greater than or equal to 0"),
        (answer(type="delayed", seconds=True), "number"),
        (answer(type="delayed", seconds="60"), "number"),
        (answer(type="delayed", seconds=float("nan")), "finite"),
        (answer(type="delayed", seconds=float("inf")), "finite"),
        (answer(type="delayed", seconds=1e18), "year 10000"),
        (answer(type="cron", cron="0 8 * *"), "five"),
        (answer(type="cron", cron="@daily"), "0 0"),
        (answer(type="cron", cron="0 0 30 2 *"), "never match"),
        (answer(type="cron", cron="61 * * * *"), "minute field"),
        (answer(type="cron", cron=5), "string"),
    ],
)
def test_anything_else_is_refused_with_a_reason_for_the_model(text, reason):
    with pytest.raises(ScheduleInvalid) as error:
        read(text)
    assert reason in str(error.value)


def test_a_cron_that_the_clocks_of_the_zone_always_skip_is_refused():
    with pytest.raises(ScheduleInvalid, match="never matches"):
        read_answer(answer(type="cron", cron="0 */24 * 3 sun#2"), now=NOW, timezone="America/Havana")


def test_now_must_be_aware_and_the_zone_known():
    with pytest.raises(TimeInvalid):
        schedule_prompt(datetime(2026, 3, 1))
    with pytest.raises(TimeInvalid):
        read_answer(answer(type="no-schedule"), now=datetime(2026, 3, 1))
    with pytest.raises(ScheduleInvalid, match="Nowhere"):
        schedule_prompt(NOW, "Nowhere")
    with pytest.raises(ScheduleInvalid, match="Nowhere"):
        read_answer(answer(type="no-schedule"), now=NOW, timezone="Nowhere")


def test_the_json_schema_is_strict_and_names_the_four_kinds():
    schema = answer_schema()
    json.dumps(schema)
    assert schema["required"] == ["description", "when"]
    objects = [schema, *schema["$defs"].values()]
    assert all(part["additionalProperties"] is False for part in objects)
    kinds = {part["properties"]["type"]["const"] for part in schema["$defs"].values()}
    assert kinds == {"scheduled", "delayed", "cron", "no-schedule"}


def test_the_pydantic_model_can_be_handed_to_a_client_library():
    model = prompts.ScheduleAnswer
    assert model is prompts.ScheduleAnswer
    parsed = model.model_validate_json(answer(type="scheduled", date="2026-03-29T04:00:00+02:00"))
    assert parsed.when.date - NOW == timedelta(days=27, hours=14)
    with pytest.raises(AttributeError):
        prompts.NoSuchThing  # noqa: B018


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["type", "date", "cron", "seconds", "when", "description"]), inner)
        ),
        max_leaves=8,
    )
)
def test_whatever_a_model_says_is_a_call_or_an_error_of_ours(said):
    for text in (json.dumps(said), answer(type="scheduled", date=said), answer(type="cron", cron=said)):
        try:
            call = read(text)
        except ScheduleInvalid:
            continue
        assert call.when is None or spec_for(call.when, **call.options)


def test_local_times_in_the_prompt_follow_the_zone():
    assert "(Monday)" in schedule_prompt(datetime(2026, 3, 1, 23, 30, tzinfo=timezone.utc), BERLIN)
    local = datetime(2026, 3, 1, 13, 0, tzinfo=ZoneInfo(BERLIN))
    assert schedule_prompt(local, BERLIN) == schedule_prompt(NOW, BERLIN)
