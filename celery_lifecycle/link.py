"""How a link travels in a message: ids only, in one header, as the text of a JSON object.

As text, since AMQP writes and reads a table of headers value by value: with a nested one, headers cost a third more.
`head` marks the first link of a chain as it was sent: its worker is the one that may append `on_alarm`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from celery_lifecycle.model import ALARM, Brief, Link, Shipment

HEADER: Final = "lifecycle"
_text_of = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def header_in(headers: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The link's header among the headers of a message; None: it is no link, whatever else has a header of this name."""
    text = headers.get(HEADER) if headers else None
    return dict(json.loads(text)) if isinstance(text, str) and text.startswith('{"') else None


def header_of(shipment: Shipment, name: str, database: str) -> str:
    """What the header of the first link of a chain holds; `name` is that of its object, spelled out."""
    job = shipment.jobs[0]
    header = {
        "db": database,
        "object": shipment.object_id,
        "name": name,
        "dispatch": shipment.dispatch,
        "token": shipment.token,
        "sent": shipment.sent_ms,
        "all": shipment.all_due,
        "head": True,
        "position": shipment.first_position,
        "job": job.id,
    }
    _add_policy(header, job)
    return _text_of(header)


def link_of(header: Mapping[str, Any], task_id: str, last: bool) -> Link:
    """The link of a header."""
    return Link(
        database=header["db"], object_id=header["object"], dispatch=header["dispatch"], position=header["position"],
        token=header["token"], job=header["job"], task_id=task_id, sent_ms=header["sent"], all_due=header["all"],
        last=last, hung_timeout_ms=header.get("hung"), singleflight=bool(header.get("single")),
    )  # fmt: skip


def rest_header(position: int, job: Brief) -> str:
    """What the header of a link behind the first holds: the rest is filled in by the link before it."""
    header: dict[str, Any] = {"position": position, "job": job.id}
    _add_policy(header, job)
    return _text_of(header)


def _add_policy(header: dict[str, Any], job: Brief) -> None:
    if job.hung_timeout_ms is not None:
        header["hung"] = job.hung_timeout_ms
    if job.singleflight:
        header["single"] = True


def carried_on(
    header: Mapping[str, Any], chain: list[dict[str, Any]], token: str | None, alarm_task: str | None
) -> list[dict[str, Any]]:
    """The rest of a chain (in Celery's reverse order) as the link with `header` hands it on.

    Every link gets the run's token and what all links of the chain have in common; `alarm_task` is appended as the last
    one.
    """
    common = {key: header[key] for key in ("db", "object", "name", "dispatch", "sent", "all")}
    common["token"] = token
    rest = list(chain)
    if alarm_task is not None:
        position = header["position"] + len(rest) + 1
        options = {
            "task_id": f"{header['dispatch']}-{position}",
            "headers": {HEADER: _text_of({"position": position, "job": ALARM})},
            "argsrepr": f"{header['name']}{ALARM}",
        }
        rest.insert(0, {"task": alarm_task, "args": [], "kwargs": {}, "options": options, "immutable": True})
    for link in rest:
        headers = link["options"]["headers"]
        headers[HEADER] = _text_of({**json.loads(headers[HEADER]), **common})
    return rest
