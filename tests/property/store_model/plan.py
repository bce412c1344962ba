"""When a scheduled job is run, moved on or given up: the misfire rule for delays, intervals and grids."""

from __future__ import annotations

from dataclasses import dataclass, replace

LONGEST_GRACE = 60_000


@dataclass(frozen=True)
class Plan:
    """A schedule: `once` (a delay), `date`, `every` (from the end of the last run) or `grid` (fixed rate)."""

    kind: str
    every: int
    misfire: str
    nominal: int = 0
    anchor: int = 0
    begun: bool = False
    catch_up: bool = False

    @property
    def recurs(self) -> bool:
        return self.kind in ("every", "grid")

    def is_same(self, other: Plan) -> bool:
        """Neither the policy nor the place are part of what a schedule is; of a delay not even its length."""
        return self.kind == other.kind and (not self.recurs or self.every == other.every)

    def saved(self, now: int) -> Plan:
        return replace(self, nominal=now + self.every, anchor=now)

    def after(self, now: int) -> Plan | None:
        """What comes after a run that ended at `now`."""
        fresh = replace(self, begun=False, catch_up=False)
        if not self.recurs:
            return None
        if self.kind == "every":
            return replace(fresh, nominal=now + self.every)
        following = self.nominal + self.every
        if following <= now:
            following = self.anchor + ((now - self.anchor) // self.every + 1) * self.every
        return replace(fresh, nominal=following)

    def occurrence(self, nominal: int | None = None) -> Plan:
        """The one run that a recurring schedule stood for."""
        at = self.nominal if nominal is None else nominal
        return Plan("date", 0, "run_once", nominal=at) if self.recurs else self


@dataclass(frozen=True)
class Woken:
    """What a link of a scheduled job finds: run it (as `plan` then says), move it on, or give it up."""

    runs: bool
    plan: Plan
    over: bool = False
    stored: bool = False
    dropped: tuple[int, int, int] | None = None


def woken(plan: Plan, due: int, unknown: bool, attempt: int, now: int) -> Woken:
    """What is moved on purpose, or has begun, is run as it is; else the misfire rule decides by nominal times."""
    if plan.begun or attempt > 0 or (not unknown and due != plan.nominal):
        return Woken(True, plan)
    if now < plan.nominal:
        return Woken(False, plan)
    latest, grace = plan.nominal, LONGEST_GRACE
    if plan.kind == "grid":
        latest = max(latest, plan.anchor + (now - plan.anchor) // plan.every * plan.every)
        grace = min(grace, plan.every // 2)
    missed = (latest - plan.nominal) // plan.every if plan.kind == "grid" else 0
    late = now - latest > grace
    if plan.misfire == "skip" and late:
        dropped = (missed + 1, plan.nominal, latest)
        if not plan.recurs:
            return Woken(False, plan, over=True, dropped=dropped)
        following = now + plan.every if plan.kind == "every" else latest + plan.every
        return Woken(False, replace(plan, nominal=following, catch_up=False), dropped=dropped)
    catch_up = plan.catch_up or (plan.misfire == "run_once" and (late or missed > 0))
    stored = plan.misfire == "skip" or catch_up or latest != plan.nominal
    run = replace(plan, nominal=latest, begun=True, catch_up=catch_up) if stored else plan
    gone = (missed, plan.nominal, latest - plan.every) if missed else None
    return Woken(True, run, stored=stored, dropped=gone)
