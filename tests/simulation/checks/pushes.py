"""Checks of pushes of many jobs: all in one transaction, each as it was asked for."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tests.simulation.checks.facts import Facts, Thing


class PushChecks:
    """What `push_many` stores."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.commits: Counter[Any] = Counter()
        """How many transactions each actor has committed."""

    def changed(self, label: str, args: Any, before: Thing | None, after: Thing | None, dead: list[Any]) -> None:
        """Objects are looked at together, once the whole transaction is known."""

    def committed(self, label: str, args: Any) -> None:
        self.commits[self.facts.world.current] += 1
        if label != "Jobs.push_many_in":
            return
        things = {thing.state.ref: thing for thing in self.facts.things.values()}
        body = self.facts.active.get(self.facts.world.process)
        last = {(draft.ref, draft.id): draft for draft in args[0]}
        for (ref, job_id), draft in last.items():
            job = things[ref].jobs.get(job_id) if ref in things else None
            known = job is not None and (job.task, job.owner, job.due_ms, json.loads(job.payload_json)) == (
                draft.task, draft.owner, self.facts.now + draft.delay_ms, json.loads(draft.payload_json),
            )  # fmt: skip
            self.facts.stats["pushed together"] += 1
            if not known or job is None:
                self.facts.fail("push_many stores all that it was given", f"{job_id} of {ref}: {job}")
            elif body is not None and (body.ref.partition("/")[0], job.line) == (draft.task, job_id):
                self.facts.fail("what a job pushes of its own task is of its line", f"{job_id} of {ref}")

    def stored(self, before: int) -> None:
        """A `push_many` has come back: it was one transaction."""
        count = self.commits[self.facts.world.current] - before
        if count != 1:
            self.facts.fail("push_many is one transaction", f"it was {count}")

    def at_end(self) -> None:
        """Nothing is left to be looked at."""
