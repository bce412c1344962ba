"""Transitions of a chain on its way: claim, dispatch, revive, release."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from celery_lifecycle.config import Config
from celery_lifecycle.model import ObjectState, Shipment
from celery_lifecycle.transitions.derive import Agenda, derive, due_links

QUEUED_AT_MOST = 12
"""Times `lifecycle_patience_max` (5 minutes by default) that a long queue may lengthen the patience to: an hour."""


def patience(state: ObjectState, config: Config, more: int = 0) -> int:
    """How long (ms) a chain is waited for before it is sent again; `more` sendings come on top of those counted.

    A long queue makes it longer, so that copies do not pile up in it; a weekend without workers was no queue.
    """
    doublings = min(max(state.sent_count + more - 1, 0), 30)
    queued = min(2 * state.queue_wait, QUEUED_AT_MOST * config.patience_max_ms)
    return max(min(config.backup_ms << doublings, config.patience_max_ms), queued)


class Claim(NamedTuple):
    """What a claim came to: the new state, a chain to send, or a run whose worker must be looked into."""

    state: ObjectState
    shipment: Shipment | None = None
    lost: bool = False


def dispatch(state: ObjectState, agenda: Agenda, now: int, config: Config, new_id: str) -> Claim:
    """Send the object's due jobs: the state with the chain on its way, or unchanged but for its alarm if nothing is due.

    Guard: no run is open. A row that carries a dispatch gets a new one: the earlier chain counts as lost, and if it
    comes after all it finds either the same work to do or none.
    """
    if state.token is not None:
        return Claim(derive(state, agenda, now))
    links, all_due = due_links(state, agenda, now, config.chain_length)
    if not links:
        return Claim(derive(state.but(dispatch=None, sent_until=None), agenda, now))
    until = now + patience(state, config, more=1)
    queue, count = links[0].queue, state.sent_count + 1
    # `wake_at` is what `derive` will find: beat saves itself a copy of each state.
    state = state.but(dispatch=new_id, sent_count=count, queue=queue, sent_until=until, wake_at=until)
    shipment = Shipment(state.id, state.ref, new_id, None, 0, links, all_due, now)
    return Claim(derive(state, agenda, now), shipment)


def claim(state: ObjectState, agenda: Agenda, now: int, config: Config, new_id: str) -> Claim:
    """What beat makes of an object whose `wake_at` has come."""
    if state.token is None:
        return dispatch(state, agenda, now, config, new_id)
    if state.lease_until is not None and state.lease_until > now:
        return Claim(derive(state, agenda, now))
    if state.in_flight is not None:
        return Claim(state, lost=True)
    return revive(state, agenda, now, config, new_id)


def revive(state: ObjectState, agenda: Agenda, now: int, config: Config, new_id: str) -> Claim:
    """Go on with an open run whose next link got lost on its way: the same token, from the row's step.

    With nothing due, or the object paused or disabled, the run is closed instead. Each revival counts as a sending, so
    a long queue is met by longer patience.
    """
    links, all_due = due_links(state, agenda, now, config.chain_length)
    if not links:
        return Claim(derive(ended(state.but(sent_count=0)), agenda, now))
    lease_until = now + patience(state, config, more=1)
    state = state.but(sent_count=state.sent_count + 1, lease_until=lease_until)
    shipment = Shipment(state.id, state.ref, new_id, state.token, state.step, links, all_due, now)
    return Claim(derive(state, agenda, now), shipment)


def release(state: ObjectState, agenda: Agenda, shipment: Shipment, now: int, back_off: int) -> ObjectState | None:
    """Take back a chain that could not be sent; None if the row is already past it."""
    if shipment.token is None:
        if state.dispatch != shipment.dispatch:
            return None
        state = state.but(sent_until=now + back_off)
    else:
        if state.token != shipment.token or state.in_flight is not None or state.step != shipment.first_position:
            return None
        state = state.but(lease_until=now + back_off)
    return derive(state.but(sent_count=max(state.sent_count - 1, 0)), agenda, now)


def ended(state: ObjectState) -> ObjectState:
    """The state with its run ended: token, lease, doubt and what was in flight are forgotten."""
    return state.but(token=None, lease_until=None, doubt=False, step=0, in_flight=None, worker=None, worker_pid=None)


def destroyed(state: ObjectState) -> ObjectState:
    """The state with all forgotten but a link in flight, whose end is that of its run: the later links end quietly."""
    state = state.but(
        paused=None, disabled=False, not_before=None, not_before_count=0, lines=None, holds=0, stored=False,
        sealed=False, dispatch=None, sent_until=None, sent_count=0,
    )  # fmt: skip
    if state.in_flight is None:
        return ended(state)
    return state.but(in_flight=replace(state.in_flight, final=True))


def close(state: ObjectState, agenda: Agenda, now: int, config: Config, new_id: str) -> Claim:
    """End a run in good order; what is due already is dispatched in the same breath, without beat."""
    return dispatch(ended(state).but(sent_count=0), agenda, now, config, new_id)
