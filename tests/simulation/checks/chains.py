"""Checks of chains on their way: what is in them, how often they are sent, how late their runs begin."""

from __future__ import annotations

from collections import Counter
from typing import Any

from celery_lifecycle.model import ALARM, ALIVE, HOOK_PREFIX, ObjectState, Shipment
from tests.simulation.checks.facts import CLOSERS, Facts, Thing
from tests.simulation.world.engine import EPOCH


class ChainChecks:
    """What is sent, when, and how often."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.expected: dict[str, tuple[tuple[str, ...], bool]] = {}
        self.all_due: dict[str, bool] = {}
        self.ready: dict[int, int] = {}
        self.sendings: Counter[int] = Counter()

    def changed(self, label: str, old: ObjectState | None, new: ObjectState) -> None:
        """Patience doubles with each sending, and is twice the last wait in the queue."""
        sent = new.dispatch is not None and (old is None or old.dispatch != new.dispatch)
        closed = label == "Claims._claim" and old is not None and old.token is not None and new.token is None
        if closed:
            self.sendings[new.id] = 0
        revived = label == "Claims._claim" and new.token is not None and new.lease_until != (old and old.lease_until)
        over = sent or (old is not None and old.token is not None) or new.sent_count == 0
        if label in CLOSERS and new.token is None and new.sent_count <= 1 and over:
            self.sendings[new.id] = 0
        if label == "Claims._release":
            self.sendings[new.id] = max(0, self.sendings[new.id] - 1)
            until = new.lease_until if new.token is not None else new.sent_until
            if until is None or until > self.facts.now + 1000:
                self.facts.fail("a chain that could not be sent is soon sent again", f"{new.ref}")
        if label == "Objects.destroy":
            self.sendings[new.id] = 0
        if new.token is not None and new.dispatch is not None:
            self.facts.fail("a chain on its way or an open run, not both", f"{label} {new.ref}")
        if not sent and not revived:
            return
        waits = old is not None and old.dispatch is not None and (old.sent_until or 0) > self.facts.now
        if sent and waits and label not in CLOSERS:
            self.facts.fail("what is on its way is not sent again before its time", f"{label} {new.ref}")
        self.sendings[new.id] += 1
        self.facts.stats["sendings"] += 1
        until = new.lease_until if revived else new.sent_until
        wait = self.facts.times.patience(self.sendings[new.id], new.queue_wait)
        if until != self.facts.now + wait:
            self.facts.fail(
                "patience doubles with each sending", f"{new.ref}: {until} for sending {self.sendings[new.id]}"
            )
        self._check_window(label, new)

    def _check_window(self, label: str, new: ObjectState) -> None:
        if label not in ("Claims._claim", "Jobs.push_in", "Claims.claim_one") or new.token is not None:
            return
        sent = [
            thing.state
            for thing in self.facts.things.values()
            if thing.state.dispatch and thing.state.queue == new.queue
        ]
        # Each process counts for itself, and looks again after a second.
        counting = self.facts.simulation.plan.beats + 2
        self.facts.stats["most sent"] = max(self.facts.stats["most sent"], len(sent))
        if (
            len(sent)
            > self.facts.config.dispatch_window * counting
            + self.facts.simulation.plan.slots * self.facts.simulation.plan.workers
        ):
            self.facts.fail("the dispatch window holds", f"{len(sent)} chains on their way in {new.queue}")

    def check_punctual(self, label: str, old: ObjectState | None, after: Thing | None) -> None:
        """How long an object whose jobs are due waits for its run, where nothing fails and a process is free."""
        if not self.facts.simulation.plan.bound:
            return
        state = after.state if after else None
        key = state.id if state else old.id if old else 0
        if state is not None and state.token is not None and (old is None or old.token is None):
            began = self.ready.pop(key, None)
            spoilt = (until for one, _, until in self.facts.simulation.plan.spoilt if one == str(state.ref))
            back = max(self.facts.simulation.broker.back_at, *spoilt, 0)
            if began is not None and self.facts.world.now - max(began, back) > self.facts.simulation.plan.bound:
                late = (self.facts.world.now - max(began, back)) / 1000
                self.facts.fail("what is due runs on time", f"{state.ref} is {late:g} s late")
        if after is None or state is None or state.token is not None or state.paused or state.disabled:
            self.ready.pop(key, None)
            return
        due = min((self.facts.effective(state, job) for job in after.jobs.values()), default=None)
        if due is None:
            self.ready.pop(key, None)
        elif due - EPOCH > self.facts.world.now or key not in self.ready:
            self.ready[key] = max(due - EPOCH, self.facts.world.now)
        else:
            self.ready[key] = min(self.ready[key], max(due - EPOCH, self.facts.world.now))

    def remember(self, label: str, old: ObjectState | None, after: Thing) -> None:
        state = after.state
        if state.dispatch is not None and (old is None or old.dispatch != state.dispatch):
            self.expected[state.dispatch] = self._due(after)
        if label == "Claims._claim" and state.token is not None and state.in_flight is None:
            self.expected[state.token] = self._due(after)

    def _due(self, thing: Thing) -> tuple[tuple[str, ...], bool]:
        state = thing.state
        live = [job for job in thing.jobs.values() if not state.paused or job.id.startswith(HOOK_PREFIX)]
        due = sorted((job.due_ms, job.id) for job in live if self.facts.effective(state, job) <= self.facts.now)
        ids = [one for _, one in due]
        exclusive = [one for one in ids if thing.jobs[one].exclusive]
        links = [one for one in exclusive or ids if one not in (ALARM, ALIVE)]
        if not links:
            return (ALARM,) if ids else (), bool(ids)
        alone = all(one.startswith(HOOK_PREFIX) for one in links)
        return tuple(links), not alone and len(links) <= self.facts.config.chain_length

    def sent(self, shipment: Shipment) -> None:
        links = tuple(job.id for job in shipment.jobs), shipment.all_due
        wanted = self.expected.get(shipment.token or shipment.dispatch, ((), False))
        if len(wanted[0]) <= self.facts.config.chain_length:
            right = links == wanted
        else:  # which of them come first is a matter of the delays that strikes brought
            length = self.facts.config.chain_length
            order = [wanted[0].index(one) for one in links[0] if one in wanted[0]]
            right = not links[1] and len(order) == len(links[0]) == length and order == sorted(order)
        if not right:
            self.facts.fail("a chain holds what is due, in due order", f"{shipment.ref}: {links}, not {wanted}")
        self.all_due[shipment.dispatch] = shipment.all_due

    def claimed(self, args: Any, result: Any) -> None:
        """What was due in that queue and phase is dealt with: none of it is claimed again by the next tick."""
        queue, phase, limit = args
        held = self.facts.simulation.held_rows()
        if result.rows >= limit:
            return
        for thing in self.facts.things.values():
            state = thing.state
            there = (state.queue, state.phase) == (queue, phase) and state.id not in (*result.lost, *held)
            if there and state.wake_at is not None and state.wake_at <= self.facts.now:
                self.facts.fail("a claim moves the alarm on", f"{state.ref}")
