"""How a link travels in a message: ids only, in one header.

`head` marks the first link of a chain as it was sent: its worker is the one that may append `on_alarm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from celery_lifecycle.model import Brief, Link, Shipment

HEADER: Final = "lifecycle"


def header_of(shipment: Shipment, position: int, job: Brief, database: str) -> dict[str, Any]:
    """What the header of one link holds."""
    header: dict[str, Any] = {
        "db": database,
        "object": shipment.object_id,
        "name": str(shipment.ref),
        "dispatch": shipment.dispatch,
        "position": position,
        "token": shipment.token,
        "job": job.id,
        "sent": shipment.sent_ms,
        "all": shipment.all_due,
    }
    if position == shipment.first_position:
        header["head"] = True
    if job.hung_timeout_ms is not None:
        header["hung"] = job.hung_timeout_ms
    if job.singleflight:
        header["single"] = True
    return header


def link_of(header: Mapping[str, Any], task_id: str, last: bool) -> Link:
    """The link of a header."""
    return Link(
        database=header["db"], object_id=header["object"], dispatch=header["dispatch"], position=header["position"],
        token=header["token"], job=header["job"], task_id=task_id, sent_ms=header["sent"], all_due=header["all"],
        last=last, hung_timeout_ms=header.get("hung"), singleflight=bool(header.get("single")),
    )  # fmt: skip


def following_header(header: Mapping[str, Any], job_id: str, ahead: int, token: str | None) -> dict[str, Any]:
    """The header of a link `ahead` positions behind another one of the same chain."""
    kept = {key: header[key] for key in ("db", "object", "name", "dispatch", "sent", "all")}
    return {**kept, "position": header["position"] + ahead, "token": token, "job": job_id}
