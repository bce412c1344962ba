"""Bad input: refused at once, with what was given, what is allowed and what to do (issue "main job", Bad input)."""

import json
import math
import time
from datetime import timedelta

import pytest

from celery_lifecycle import validate
from celery_lifecycle.errors import LifecycleError, NameInvalid, PayloadError, PolicyInvalid
from celery_lifecycle.model import RetryPolicy


@pytest.mark.parametrize("good", ["cart", "_x", "shop.tasks.remind", "a:b-c.d_e", "Z9", "a" * 200])
def test_kinds_are_like_task_names(good):
    assert validate.kind(good) == good


@pytest.mark.parametrize("bad", ["", "9a", "-a", "ä", "a b", "a/b", "a\n", "a\x00b", "a" * 201, None, 5, b"cart", "#a"])
def test_other_kinds_are_refused_and_the_message_says_what_is_allowed(bad):
    with pytest.raises(NameInvalid, match="letter or underscore"):
        validate.kind(bad)


@pytest.mark.parametrize(
    "good",
    ["a", "user-42", "Ünïcödé", "a b", " a", "a ", "e\u0301", "é", "a" * 200, "ä" * 100, "日本", "'\";--", "a#b", "%s"],
)
def test_names_are_any_text_of_up_to_200_bytes(good):
    assert validate.name(good) == good


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("", "0 bytes"),
        ("a" * 201, "201 bytes"),
        ("ä" * 101, "202 bytes"),
        ("a\x00b", "control characters"),
        ("a\nb", "control characters"),
        ("\x7f", "control characters"),
        ("\x85", "control characters"),
        ("#a", "protocol"),
        ("\ud800", "surrogate"),
        (None, "NoneType"),
        (5, "int"),
        (b"a", "bytes"),
    ],
)
def test_other_names_are_refused_and_the_message_says_why(bad, said):
    with pytest.raises(NameInvalid, match=said):
        validate.name(bad)


def test_a_message_about_a_name_says_which_argument_was_meant_and_does_not_repeat_a_flood():
    with pytest.raises(NameInvalid, match="storage key") as caught:
        validate.name("x" * 100_000, "storage key")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("good", ["celery", "a b", "#1", "q\t", "x" * 200, "ä" * 127])
def test_queues_are_what_a_column_and_amqp_take(good):
    assert validate.queue(good) == good


@pytest.mark.parametrize("bad", ["", "x" * 201, "ä" * 128, "日" * 100, "a\0b", "\ud800", None, 5], ids=ascii)
def test_other_queues_are_refused(bad):
    with pytest.raises(NameInvalid, match="queue") as caught:
        validate.queue(bad)
    assert len(str(caught.value)) < 300


def test_payloads_are_json_as_it_was_given():
    given = {"a": [1, 2.5, None, True, "ä\u2028", {"b": []}], "": 0, "big": 10**30}
    assert json.loads(validate.payload(given)) == given
    assert validate.payload(None) == "null"


@pytest.mark.parametrize(
    "bad",
    [
        {1: 2},
        {"a": {None: 1}},
        {"a": {1, 2}},
        b"bytes",
        type("Thing", (), {"__repr__": lambda self: "<a thing>"})(),
        math.nan,
        math.inf,
        [-math.inf],
        "\ud800",
        {"k\ud800": 1},
        timedelta(1),
        10**4000,
    ],
    ids=repr,
)
def test_what_is_not_json_is_refused(bad):
    with pytest.raises(PayloadError, match=r"JSON|digits"):
        validate.payload(bad)


def test_a_payload_that_contains_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(PayloadError, match="nested"):
        validate.payload(loop)


def test_payloads_may_have_two_megabytes_and_not_one_byte_more():
    fits = "x" * (validate.MAX_PAYLOAD - 2)
    assert len(validate.payload(fits).encode()) == validate.MAX_PAYLOAD
    with pytest.raises(PayloadError, match=r"2,097,153 bytes.*at most 2,097,152.*Store it elsewhere"):
        validate.payload(fits + "x")
    with pytest.raises(PayloadError, match="bytes"):
        validate.payload("ä" * (validate.MAX_PAYLOAD // 2))


def test_a_payload_of_many_numbers_costs_little_to_check():
    numbers = list(range(100_000))
    began = time.process_time()
    validate.payload(numbers)
    assert time.process_time() - began < 2


def test_an_integer_may_have_4000_digits_of_either_sign():
    largest = 10**4000 - 1
    assert validate.payload([largest, -largest]) == f"[{largest},{-largest}]"
    with pytest.raises(PayloadError, match="digits"):
        validate.payload(-(10**4000))


def test_a_subclass_is_stored_as_what_it_is_in_json():
    class Count(int):
        pass

    assert validate.payload({"n": Count(3)}) == '{"n":3}'


@pytest.mark.parametrize(
    "bad",
    [
        {"max_attempts": 0},
        {"max_attempts": -1},
        {"max_attempts": 1.5},
        {"max_attempts": True},
        {"max_attempts": "3"},
        {"base_delay": -0.1},
        {"max_delay": math.nan},
        {"max_delay": math.inf},
        {"base_delay": None},
    ],
    ids=repr,
)
def test_a_bad_retry_policy_is_refused_and_the_message_names_the_option(bad):
    with pytest.raises(PolicyInvalid, match=next(iter(bad))):
        RetryPolicy(**bad)


def test_a_retry_policy_survives_its_row():
    given = RetryPolicy(7, 0.25, 60)
    assert RetryPolicy.from_json(given.to_json()) == given
    assert RetryPolicy.from_json(None) == RetryPolicy(3, 0.1, 3.0)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"priority": 0},
        {"priority": 255, "queue": "q"},
        {"exchange": "", "routing_key": "ä" * 127},
        {"headers": {"k" * 255: [2**63 - 1, -(2**63), {"deep": [None, True, 1.5, "ä"]}]}},
        {"headers": {"large": "x" * 99_000}},
    ],
    ids=repr,
)
def test_options_are_what_a_message_can_carry(given):
    assert json.loads(validate.options(given) or "{}") == given


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"priority": 256}, "priority=256: give a whole number from 0 to 255"),
        ({"priority": -1}, "priority=-1"),
        ({"priority": 2.5}, "priority=2.5"),
        ({"priority": "high"}, "priority='high'"),
        ({"priority": True}, "priority=True"),
        ({"exchange": "x" * 256}, "exchange=.*255 bytes"),
        ({"exchange": 5}, "exchange=5"),
        ({"routing_key": "ä" * 128}, "routing_key=.*255 bytes"),
        ({"headers": [1]}, "headers=.*give a dict, not list"),
        ({"headers": {"n": 2**63}}, "headers=.*64 bits"),
        ({"headers": {"n": {"deep": [-(2**70)]}}}, "headers=.*64 bits"),
        ({"headers": {"ä" * 128: 1}}, "headers=.*255 bytes"),
        ({"headers": {"deep": {"k" * 256: 1}}}, "headers=.*255 bytes"),
        ({"headers": {"large": "x" * 100_001}}, "at most 100,000"),
        ({"headers": {"many": [1] * 20_000}}, "at most 100,000"),
    ],
    ids=repr,
)
def test_options_that_no_message_can_carry_are_refused(bad, said):
    with pytest.raises(PolicyInvalid, match=said) as caught:
        validate.options(bad)
    assert len(str(caught.value)) < 400


def test_headers_that_are_not_json_are_a_bad_payload():
    for bad in ({1: 2}, {"a": {1, 2}}, {"a": b"x"}, {"a": "\ud800"}):
        with pytest.raises(PayloadError, match="options"):
            validate.options({"headers": bad})


@pytest.mark.parametrize("bad", [3, {"max_attempts": 3}, "3"])
def test_a_retry_that_is_no_policy_is_refused(bad):
    with pytest.raises(PolicyInvalid, match="RetryPolicy"):
        validate.retry(bad)


@pytest.mark.parametrize("bad", [1, "yes", 0])
def test_a_flag_is_true_or_false(bad):
    with pytest.raises(PolicyInvalid, match="exclusive="):
        validate.flag(bad, "exclusive")


@pytest.mark.parametrize(("given", "ms"), [(1, 1000), (0.0001, 1), (timedelta(minutes=2), 120_000), (None, None)])
def test_a_timeout_is_seconds_or_a_timedelta(given, ms):
    assert validate.seconds(given, "hung_timeout") == ms


@pytest.mark.parametrize("bad", [0, -1, "5", math.nan, True])
def test_another_timeout_is_refused_with_its_name(bad):
    with pytest.raises(PolicyInvalid, match="hung_timeout"):
        validate.seconds(bad, "hung_timeout")


@pytest.mark.parametrize(
    ("given", "size"), [("512M", 512 << 20), ("2g", 2 << 30), ("1 GiB", 1 << 30), (1 << 20, 1 << 20), (None, None)]
)
def test_a_memory_limit_is_bytes_or_a_size(given, size):
    assert validate.memory(given) == size


@pytest.mark.parametrize("bad", ["", "M", "-1M", "1.5G", "lots", 0, 1023, True, 1.5, "1K", 1 << 60, "9" * 16])
def test_another_memory_limit_is_refused(bad):
    with pytest.raises(PolicyInvalid, match="memory_limit"):
        validate.memory(bad)


def test_all_of_them_are_one_kind_of_error_and_errors_of_value():
    for error in (NameInvalid, PayloadError, PolicyInvalid):
        assert issubclass(error, LifecycleError)
        assert issubclass(error, ValueError)
        assert str(error()).endswith(".")
