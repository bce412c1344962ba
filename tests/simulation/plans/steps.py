"""Worlds in which processes die, or stop for a while, at the steps that a random moment seldom meets."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.plans.features import bulk, holds, limits, lines, strangers, values
from tests.simulation.plans.writer import ROUGH, Writer, ordinary

STALLS = (500, 8000, 27_000, 45_000)


def _changes(writer: Writer) -> None:
    ordinary(writer)
    writer.some_pushes(writer.within(3, 6), "ok", "yield", "again", share=0.4)
    writer.some_changes(writer.within(8, 12), *ROUGH, "resume", "reschedule", "reschedule")


def _failures(writer: Writer) -> None:
    ordinary(writer)
    writer.names = ["full/f", "plain/a"]
    writer.some_pushes(writer.within(3, 6), "ok", "memory", "fail")
    writer.some_hooks(0.9, "fail")


Part = Callable[[Writer], None]
STEPS: dict[Part, tuple[str, ...]] = {
    holds: (
        "client Holds.hold", "client Holds.let_go", "client Holds.extend", "child Holds.hold", "child Holds.run_by",
        "child Holds.let_go", "child Holds.let_go_by_key", "child Holds.extend", "worker Holds._lost", "worker Holds.extend",
        "beat Holds.expired", "beat Holds._lost",
    ),
    strangers: (
        "child Ends.unknown", "worker Ends._skip", "worker send", "worker sent", "client DeadJobs.list",
        "client DeadJobs.replay", "beat Claims._claim", "beat Claims._heads", "beat Claims.count_sent",
    ),
    values: (
        "child Runs._begin", "child Runs.enter", "child Runs.attempted", "child Runs._finish", "child Objects.get_value",
        "client Objects.put_values", "client Objects.destroy", "beat Ends._rescue", "worker Workers._renew", "child carry",
    ),
    limits: (
        "worker Ends._end", "worker Workers.beat", "child Jobs.push_in", "child send", "child sent", "client Beats.now",
        "client Jobs.revoke", "client Jobs.push_in", "client Claims.count_sent",
    ),
    bulk: (
        "client Jobs.push_many_in", "client Claims._release", "client send", "client sent", "beat Claims._release",
        "child Claims.count_sent", "child Claims._release", "beat send", "beat sent", "beat Beats.ticked",
        "beat Beats.forget_old", "beat DeadJobs.purge_old",
    ),
    lines: ("child Jobs.push_many_in", "client DeadJobs.purge", "worker Ends._end"),
    _changes: (
        "client Objects.change", "client Objects.resume", "client Objects.set_alarm", "client Jobs.cancel_in",
        "client Jobs.reschedule_in", "client Jobs.rearm", "client Claims.claim_one",
    ),
    _failures: ("child Ends.struck_inside", "child Runs._alarm_failed", "child Runs.start_failed"),
}  # fmt: skip
"""Every step that processes come to, by the part of a world in which they do: a verb of the store, or of the broker."""


def steps(writer: Writer) -> None:
    """Something of the other worlds, and a few processes that come no further than to a step."""
    part = writer.pick(*STEPS)
    part(writer)
    plan = writer.plan
    plan.bound = 0
    if part is bulk:  # so that there is something to be taken back
        plan.spoilt += [[on, writer.pick("encode", "refuse"), writer.within(20_000, 50_000)] for on in writer.names[:1]]
    for one in writer.random.sample(STEPS[part], min(len(STEPS[part]), writer.within(6, 9))):
        role, _, step = one.partition(" ")
        if "." in step:
            step = f"{writer.pick('before', 'after')} {step}"
        if writer.flip(0.7):
            plan.faults.append([f"crash {role} at {step}", writer.pick(0, 0, 0, 1), 1])
        else:
            plan.faults.append([f"stall {role} at {step}", writer.pick(0, 0, 0, 1), writer.pick(*STALLS)])
