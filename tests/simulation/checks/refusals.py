"""Checks of the guards: who is not (or no longer) entitled to a write is refused, and who is refused changes nothing.

Whether a call is to be accepted is found out here from the rows as they were before it and from what has happened; the
functions of the package that decide it are not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_lifecycle.model import HOOK_PREFIX, SEALED, Link, ObjectRef, ObjectState, Phase
from tests.simulation.checks.facts import Changes, Facts, Thing
from tests.simulation.checks.runs import RunChecks
from tests.simulation.world.calls import Call


class RefusalChecks:
    """Every call of a verb that can be refused, whether it has written anything or not."""

    def __init__(self, facts: Facts, runs: RunChecks) -> None:
        self.facts = facts
        self.runs = runs
        self.checks: dict[str, Callable[[Call, Changes], None]] = {
            "Runs._begin": self._begin,
            "Runs.enter": self._turn,
            "Runs.attempted": self._turn,
            "Runs._finish": self._finish,
            "Runs._alarm_failed": self._turn,
            "Runs.start_failed": self._turn,
            "Ends.unknown": self._turn,
            "Ends.struck_inside": self._turn,
            "Ends._end": self._end,
            "Ends._rescue": self._rescue,
            "Ends._skip": self._skip,
            "Claims._claim": self._claim,
            "Claims._release": self._release,
            "Claims.claim_one": self._claim_one,
            "Claims.claim_several": self._claim_one,
            "Workers._renew": self._renew,
            "Jobs.cancel_in": self._named_job,
            "Jobs.reschedule_in": self._named_job,
            "Jobs.revoke": self._answered,
            "Objects.change": self._switched,
            "Objects.put_values": self._remembered,
            "Objects.resume": self._answered,
            "Objects.destroy": self._answered,
            "DeadJobs.purge": self._answered,
            "DeadJobs.replay": self._replay,
            "Holds.extend": self._answered,
            "Holds.run_by": self._answered,
            "Holds.let_go": self._answered,
            "Holds._lost": self._answered,
        }

    def check(self, call: Call, changes: Changes) -> None:
        check = self.checks.get(call.label)
        if check is not None:
            check(call, changes)

    # --- what is judged

    def _judge(self, call: Call, entitled: bool, refused: bool, about: Any) -> None:
        if not entitled and not refused:
            self.facts.fail("who is not entitled is refused", f"{call.label} of {about}")
        if entitled and refused:
            self.facts.fail("who is entitled is not refused", f"{call.label} of {about}")
        if refused and call.wrote:
            self.facts.fail("a refused writer changes nothing", f"{call.label} of {about}")

    def _before(self, object_id: int, changes: Changes) -> Thing | None:
        if object_id in changes:
            return changes[object_id][0]
        return self.facts.things.get(object_id)

    def _state(self, object_id: int, changes: Changes) -> ObjectState | None:
        thing = self._before(object_id, changes)
        return thing.state if thing is not None else None

    def _named(self, ref: ObjectRef, changes: Changes) -> Thing | None:
        for before, _ in changes.values():
            if before is not None and before.state.ref == ref:
                return before
        found = (thing for key, thing in self.facts.things.items() if key not in changes)
        return next((thing for thing in found if thing.state.ref == ref), None)

    def _after(self, object_id: int) -> ObjectState | None:
        thing = self.facts.things.get(object_id)
        return thing.state if thing is not None else None

    # --- links

    def _is_turn(self, state: ObjectState | None, link: Link, token: str) -> bool:
        """Whether it is this very link, of this run, in this process, that is in flight."""
        if state is None or state.in_flight is None:
            return False
        process: Any = self.facts.world.process
        there = (state.worker, state.worker_pid) == (process.life.instance, process.pid)
        found = state.token, state.step, state.in_flight.task_id
        return there and found == (token, link.position + 1, link.task_id)

    def _turn(self, call: Call, changes: Changes) -> None:
        link, result = call["link"], call.result
        refused = {"Runs._alarm_failed": lambda: not result.accepted, "Ends.unknown": lambda: not result[2]}
        answered = refused.get(call.label, lambda: result is None or result is False)()
        entitled = self._is_turn(self._state(link.object_id, changes), link, call["token"])
        self._judge(call, entitled, answered, link.task_id)

    def _finish(self, call: Call, changes: Changes) -> None:
        link, token, again, result = call["link"], call["token"], call["again"], call.result
        before = self._state(link.object_id, changes)
        if self._is_turn(before, link, token):
            self._judge(call, True, not result.accepted, link.task_id)
            assert before is not None
            assert before.in_flight is not None
            self._check_closed(call, link.last or before.in_flight.final, link, token)
        elif again is None:
            self._judge(call, False, not result.accepted, link.task_id)
        else:  # its process has not heard what came of its first try
            if call.wrote:
                self.facts.fail("a refused writer changes nothing", f"{call.label} of {link.task_id}")
            if (token, link.position) in self.runs.applied and not result.accepted:
                self.facts.fail("a finish that was committed is acknowledged", link.task_id)

    def _check_closed(self, call: Call, last: bool, link: Link, token: str) -> None:
        after = self._after(link.object_id)
        if last and after is not None and after.token == token:
            self.facts.fail("the last link closes its run", f"{call.label} of {link.task_id}")

    def _begin(self, call: Call, changes: Changes) -> None:
        link, worker, result = call["link"], call["worker"], call.result
        before, after = self._before(link.object_id, changes), self._after(link.object_id)
        state = before.state if before is not None else None
        resumed = call["again"] and state is not None and self._is_mine(state, link, worker)
        entitled = resumed or (before is not None and self._may_begin(before, link))
        refused = result.refused is not None
        if refused and not entitled and link.token is None and state is not None and state.dispatch == link.dispatch:
            self._check_forgets(state, after)
            return
        self._judge(call, entitled, refused, link.task_id)
        if refused:
            return
        if result.job is None and not result.alarm:
            self._check_closed(call, link.last, link, result.token)
        flight = after.in_flight if after is not None else None
        if result.job is not None and (flight is None or flight.version != result.job.version):
            told = f"{result.job.id} v{result.job.version} for {flight}"
            self.facts.fail("what is run is what is in flight", told)

    def _is_mine(self, state: ObjectState, link: Link, worker: Any) -> bool:
        flight, me = state.in_flight, (worker.instance, worker.pid)
        begun = flight is not None and flight.task_id == link.task_id and state.step == link.position + 1
        return begun and (state.worker, state.worker_pid) == me

    def _may_begin(self, before: Thing, link: Link) -> bool:
        state = before.state
        if link.token is not None:
            return (state.token, state.step, state.in_flight) == (link.token, link.position, None)
        if state.token is not None or state.disabled:
            return False
        hooks_only = state.paused == SEALED
        if state.paused and not (hooks_only and link.job.startswith(HOOK_PREFIX)):
            return False
        jobs = [job for job in before.jobs.values() if not hooks_only or job.id == link.job]
        return any(self.facts.effective(state, job) <= self.facts.now for job in jobs)

    def _check_forgets(self, state: ObjectState, after: ObjectState | None) -> None:
        """A first chain that may not open is not waited for any more; nothing else changes but the alarm."""
        if after is None:
            return
        same = ("dispatch", "sent_until", "queue", "wake_at")
        if after.but(**{name: getattr(state, name) for name in same}) != state or after.dispatch is not None:
            self.facts.fail("a refused writer changes nothing", f"begin of {state.ref} but forgot its dispatch")

    # --- ends

    def _end(self, call: Call, changes: Changes) -> None:
        link, worker = call["link"], call["worker"]
        state = self._state(link.object_id, changes)
        entitled = False
        if state is not None and state.in_flight is not None:
            found = state.in_flight.task_id, state.worker, state.worker_pid
            entitled = found == (link.task_id, worker.instance, worker.pid)
        self._judge(call, entitled, call.result is None, link.task_id)

    def _rescue(self, call: Call, changes: Changes) -> None:
        state = self._state(call["object_id"], changes)
        over = state is not None and state.in_flight is not None and (state.lease_until or 0) <= self.facts.now
        entitled = over and state is not None and state.doubt
        if entitled or call.result is not None:
            self._judge(call, entitled, call.result is None, call["object_id"])
            return
        after = self._after(call["object_id"])
        if state is None or after is None:
            self._judge(call, False, True, call["object_id"])
            return
        same = ("queue", "wake_at", "doubt", "lease_until") if over else ("queue", "wake_at")
        if after.but(**{name: getattr(state, name) for name in same}) != state:
            self.facts.fail("a refused writer changes nothing", f"{call.label} of {state.ref}")
        if over and not (after.doubt and after.lease_until == self.facts.now + self.facts.config.doubt_ms):
            self.facts.fail("who is entitled is not refused", f"the first look into {state.ref}")

    def _skip(self, call: Call, changes: Changes) -> None:
        """A link that its worker dropped: only if the row waits for it. What comes back can be nothing also if it does."""
        link, state = call["link"], self._state(call["link"].object_id, changes)
        if state is None:
            entitled = False
        elif link.token is None:
            entitled = state.dispatch == link.dispatch
        else:
            entitled = (state.token, state.step, state.in_flight) == (link.token, link.position, None)
        refused = not call.wrote if call.result == (None, None) else False
        self._judge(call, entitled, refused, link.task_id)
        after = self._after(link.object_id)
        if entitled and after is not None and (after.token is not None or after.dispatch == link.dispatch):
            self.facts.fail("a link that was dropped is not waited for", f"{link.task_id}")

    # --- chains

    def _claim(self, call: Call, changes: Changes) -> None:
        queue, phase = call["queue"], call["phase"]
        for before, _ in changes.values():
            state = before.state if before is not None else None
            due = state is not None and state.wake_at is not None and state.wake_at <= self.facts.now
            if state is None or not due or (state.queue, state.phase) != (queue, phase):
                self.facts.fail("who is not entitled is refused", f"{call.label} of {state and state.ref}")

    def _claim_one(self, call: Call, changes: Changes) -> None:
        """A pusher's claim: of an object with neither a run nor a chain on its way."""
        shipped = call.result if call.label == "Claims.claim_several" else [call.result] if call.result else []
        for before, _ in changes.values():
            if before is None or before.state.phase is not Phase.IDLE:
                self.facts.fail("who is not entitled is refused", f"{call.label} of {before and before.state.ref}")
        if {one.object_id for one in shipped} != changes.keys():
            self.facts.fail("a refused writer changes nothing", f"{call.label} of {sorted(changes)}")

    def _release(self, call: Call, changes: Changes) -> None:
        shipment = call["shipment"]
        state = self._state(shipment.object_id, changes)
        if state is None:
            entitled = False
        elif shipment.token is None:
            entitled = state.dispatch == shipment.dispatch
        else:
            found = state.token, state.step, state.in_flight
            entitled = found == (shipment.token, shipment.first_position, None)
        self._judge(call, entitled, not call.result, shipment.dispatch)

    def _renew(self, call: Call, changes: Changes) -> None:
        """All that runs here and that nobody else holds, and nothing else."""
        held = self.facts.simulation.held_rows()
        mine = set()
        for one in call["running"]:
            state = self._state(one.object_id, changes)
            if state is None or state.in_flight is None or one.object_id in held:
                continue
            if (state.worker, state.worker_pid, state.in_flight.task_id) == (call["instance"], one.pid, one.task_id):
                mine.add(one.object_id)
        if changes.keys() - mine:
            self.facts.fail("who is not entitled is refused", f"{call.label} of {sorted(changes.keys() - mine)}")
        if call.result != len(mine):
            self.facts.fail("who is entitled is not refused", f"{call.label}: {call.result} of {sorted(mine)}")
        for key in mine:
            before, after = self._state(key, changes), self._after(key)
            renewed = before and before.but(doubt=False, lease_until=self.facts.now + self.facts.config.lease_ms)
            if after != renewed:
                self.facts.fail("a renewal changes lease and doubt", f"{before and before.ref}")

    # --- clients

    def _answered(self, call: Call, changes: Changes) -> None:
        """What is found to be there or not by nobody else: only that a refusal is true."""
        if not call.result and call.wrote:
            self.facts.fail("a refused writer changes nothing", f"{call.label}")

    def _switched(self, call: Call, changes: Changes) -> None:
        """What a client has switched stays switched, also where there was no object."""
        self._answered(call, changes)
        if not call.result:
            return
        ref = call["ref"]
        before, after = self._named(ref, changes), self._stored(ref)
        wanted = call["change"](before.state if before is not None else ObjectState(0, *ref))
        found = (after.paused, after.disabled) if after is not None else (None, False)
        if found != (wanted.paused, wanted.disabled):
            self.facts.fail("a row with something to remember stays", f"{call.label} {ref}: {found}")

    def _remembered(self, call: Call, changes: Changes) -> None:
        if any(value is not None for value in call["values"].values()) and self._stored(call["ref"]) is None:
            self.facts.fail("a row with something to remember stays", f"{call.label} {call['ref']}")

    def _stored(self, ref: ObjectRef) -> ObjectState | None:
        return next((thing.state for thing in self.facts.things.values() if thing.state.ref == ref), None)

    def _named_job(self, call: Call, changes: Changes) -> None:
        thing = self._named(call["ref"], changes)
        job = thing.jobs.get(call["job_id"]) if thing is not None else None
        entitled = job is not None and call["owner"] in (None, job.owner)
        self._judge(call, entitled, call.result is None, f"{call['ref']}#{call['job_id']}")

    def _replay(self, call: Call, changes: Changes) -> None:
        if call.result is None and changes:
            self.facts.fail("a refused writer changes nothing", f"{call.label} of {sorted(changes)}")
