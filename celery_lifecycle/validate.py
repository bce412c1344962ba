"""Checks of what callers give, before anything is stored: kinds, names, ids, payloads, policies."""

from __future__ import annotations

import json
import re
import struct
import unicodedata
from datetime import timedelta
from typing import Any, Final

from amqp.exceptions import AMQPError
from amqp.serialization import dumps as amqp_text

from celery_lifecycle.errors import NameInvalid, PayloadError, PolicyInvalid, TimeInvalid
from celery_lifecycle.model import RetryPolicy
from celery_lifecycle.timing.instants import delay_to_millis

MAX_PAYLOAD: Final = 2 * 1024 * 1024
MAX_HEADERS: Final = 100_000
_TOO_LARGE: Final = 10**4000
_KIND = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,199}")
_PLAIN = re.compile(r"[A-Za-z0-9_.:@/+=-]{1,200}")


def kind(value: object) -> str:
    """A kind: a letter or underscore, then at most 199 letters, digits, `_ . : -`.

    Raises:
        NameInvalid: it is anything else.
    """
    if not isinstance(value, str) or not _KIND.fullmatch(value):
        raise NameInvalid(
            f"kind {_short(value)}: give a letter or underscore, then at most 199 letters, digits, '_', '.', ':' or '-'."
        )
    return value


def name(value: object, what: str = "name") -> str:
    """A name or id: 1 to 200 bytes of UTF-8 without control characters, not beginning with `#`.

    Raises:
        NameInvalid: it is anything else.
    """
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    text, size = _text(value, what)
    if not 1 <= size <= 200:
        raise NameInvalid(f"{what} {_short(value)} has {size} bytes of UTF-8: give 1 to 200.")
    if any(unicodedata.category(char) == "Cc" for char in text):
        raise NameInvalid(f"{what} {_short(value)}: control characters are not allowed.")
    if text.startswith("#"):
        raise NameInvalid(f"{what} {_short(value)}: a leading '#' is kept for the protocol's own jobs.")
    return text


def queue(value: object) -> str:
    """The name of a queue: 1 to 200 characters and at most 255 bytes of UTF-8, without NUL, as all databases and AMQP take it.

    Raises:
        NameInvalid: it is anything else.
    """
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    text, size = _text(value, "queue")
    if not 1 <= len(text) <= 200 or size > 255 or "\0" in text:
        raise NameInvalid(
            f"queue {_short(value)} has {len(text)} characters, {size} bytes of UTF-8: give 1 to 200 characters of at most 255"
            " bytes, without NUL."
        )
    return text


def _text(value: object, what: str) -> tuple[str, int]:
    """A text, and how many bytes of UTF-8 it has."""
    if not isinstance(value, str):
        raise NameInvalid(f"{what} {_short(value)}: give a str, not {type(value).__name__}.")
    try:
        return value, len(value.encode())
    except UnicodeEncodeError:
        raise NameInvalid(f"{what} {_short(value)}: it is not valid Unicode (a lone surrogate).") from None


def payload(value: Any, what: str = "payload") -> str:
    """The JSON text of a payload of at most 2 MB.

    Raises:
        PayloadError: it is not JSON (None, bool, int, finite float, str, list, dict with str keys), or too large.
    """
    if value is None:
        return "null"
    _check_json(value, what, 0)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except (ValueError, UnicodeEncodeError, RecursionError) as error:
        raise PayloadError(f"{what} is not JSON: {error}. Give finite numbers and valid Unicode.") from None
    if size > MAX_PAYLOAD:
        raise PayloadError(
            f"{what} has {size:,} bytes as JSON, at most {MAX_PAYLOAD:,} are allowed. Store it elsewhere and push its id."
        )
    return text


def _check_json(value: Any, what: str, depth: int) -> None:
    if depth > 200:
        raise PayloadError(f"{what} is nested more than 200 levels deep. Store it elsewhere and push its id.")
    if value is None or isinstance(value, (str, bool, float)):
        return
    if isinstance(value, int):
        if not -_TOO_LARGE < value < _TOO_LARGE:
            raise PayloadError(f"{what} holds an integer of more than 4,000 digits.")
        return
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_json(item, what, depth + 1)
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise PayloadError(f"{what} has the key {_short(key)}: JSON keys are str. Convert it.")
            _check_json(item, what, depth + 1)
        return
    raise PayloadError(
        f"{what} holds {_short(value)} of type {type(value).__name__}, which is not JSON. Allowed are None, bool, int,"
        " float, str, list and dict."
    )


def retry(value: RetryPolicy | None) -> str | None:
    """A retry policy as JSON.

    Raises:
        PolicyInvalid: it is no `RetryPolicy`.
    """
    if value is None:
        return None
    if not isinstance(value, RetryPolicy):
        raise PolicyInvalid(f"retry={_short(value)}: give a RetryPolicy(max_attempts=…, base_delay=…, max_delay=…).")
    return value.to_json()


def options(value: dict[str, Any]) -> str | None:
    """What the message of a job is to have of its own, as JSON: priority, headers, exchange, routing key and the like.

    All brokers are held to what AMQP can carry: what it can't would be sent again and again, and never go out.

    Raises:
        PolicyInvalid: it is more than a message can carry.
        PayloadError: it is not JSON.
    """
    if not value:
        return None
    priority(value.get("priority"))
    for what in ("exchange", "routing_key"):
        if value.get(what) is not None:
            _address(value[what], what)
    text = payload(value, "options")
    if "headers" in value:
        _check_headers(value["headers"])
    return text


def priority(value: object) -> None:
    """The priority of a message, if it has one: 0 to 255.

    Raises:
        PolicyInvalid: it is anything else.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise PolicyInvalid(f"priority={_short(value)}: give a whole number from 0 to 255.")


def _address(value: object, what: str) -> None:
    if not isinstance(value, str) or len(value.encode(errors="surrogatepass")) > 255:
        raise PolicyInvalid(f"{what}={_short(value)}: give a str of at most 255 bytes of UTF-8.")


def _check_headers(value: object) -> None:
    if not isinstance(value, dict):
        raise PolicyInvalid(f"headers={_short(value)}: give a dict, not {type(value).__name__}.")
    try:
        size = len(amqp_text("F", [value]))
    except (struct.error, OverflowError, AMQPError) as error:
        raise PolicyInvalid(
            f"headers={_short(value)} can't be written into a message ({error}): keys have at most 255 bytes of UTF-8, whole"
            " numbers at most 64 bits."
        ) from None
    if size > MAX_HEADERS:
        raise PolicyInvalid(
            f"headers have {size:,} bytes in a message, at most {MAX_HEADERS:,} are allowed. Put large data into the payload."
        )


def flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise PolicyInvalid(f"{what}={_short(value)}: give True or False.")
    return value


def seconds(value: float | timedelta | None, what: str) -> int | None:
    """A positive duration in milliseconds."""
    if value is None:
        return None
    try:
        millis = delay_to_millis(value)
    except TimeInvalid as error:
        raise PolicyInvalid(f"{what}={_short(value)}: {error}") from None
    if millis == 0:
        raise PolicyInvalid(f"{what}={_short(value)}: give more than 0 seconds.")
    return millis


def memory(value: str | int | None) -> int | None:
    """A memory limit in bytes: an int, or a str like `"512M"`.

    Raises:
        PolicyInvalid: it is anything else, or less than 1 MB.
    """
    if value is None:
        return None
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    limit = None
    if isinstance(value, int) and not isinstance(value, bool):
        limit = value
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,15})\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
        limit = int(match[1]) * units[match[2].upper()] if match else None
    if limit is None or not 1 << 20 <= limit < 1 << 60:
        raise PolicyInvalid(f"memory_limit={_short(value)}: give bytes, or a string like '512M' or '2G'; at least 1M.")
    return limit


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
