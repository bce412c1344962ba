"""Situations in which one guard of the protocol is all that keeps things right: pieces that profiles add to their worlds."""

from __future__ import annotations

from typing import Any

from tests.simulation.plans.writer import Writer


def taken_out(writer: Writer) -> None:
    """Jobs that have died, or whose `on_start` failed, are taken out or replaced while they wait; others come in their place."""
    on = writer.pick("plain/a", "full/g")
    if on == "full/g":
        writer.plan.hooks["g on_start"] = ["fail", "fail", writer.pick("die", "fail"), "fail", "ok"]
    script = [{"ms": 5, "end": writer.pick("die", "memory")}] * 3 + [writer.step("ok")]
    at = writer.within(0, 20_000)
    writer.push(at, on, script, id="h", task="work", delay=0)
    if writer.flip(0.6):
        writer.event(at + writer.pick(writer.within(400, 1000), writer.within(400, 20_000)), "cancel", on=on, id="h")
    writer.push(at + writer.within(500, 60_000), on, script, id="h", task="work", delay=0)
    if on == "full/g" and writer.flip(0.7):
        writer.plan.hooks["g on_alarm"] = ["fail 5 set", "ok 5 set", "fail 5 set", "ok"]
    if on == "full/g":  # what a capability owns is not the host's to touch
        more: dict[str, Any] = {"on": "full/o", "id": "own", "delay": 60}
        writer.push(at, script=[writer.step("ok")], task="assist", capability=True, **more)
        writer.event(at + 5000, writer.pick("cancel", "reschedule"), **more)
        writer.push(at + 6000, script=[writer.step("ok")], task="work", **more)


def late_hooks(writer: Writer) -> None:
    """A hook, or a body that runs out of memory, comes back when its run was given up and the next one is under way."""
    which = writer.pick("on_start", "on_start", "on_alarm", "body")
    first, then = writer.within(3000, 9000), writer.within(90_000, 150_000)
    script = [writer.step("ok")]
    if which == "body":
        script = [{"ms": first, "end": "memory"}, {"ms": then, "end": "ok"}, *script]
    else:
        writer.plan.hooks[f"g {which}"] = [f"{writer.pick('fail', 'memory', 'ok')} {first}", f"ok {then}", "ok"]
    writer.push(0, "full/g", script, id="a", task="work", delay=0)
    how = {"who": "worker", "index": writer.within(0, 1), "all": True, "for": writer.within(100_000, 190_000)}
    writer.event(writer.within(1000, 3000), writer.pick("stall", "cut"), **how)


def late_releases(writer: Writer) -> None:
    """Links are lost, so that runs are revived; whoever sends waits for the broker's answer while they go on, or are over."""
    script = [{"ms": writer.within(1, 2000), "end": "yield"}] * writer.within(1, 3)
    for job in ("x", "y", "z"):
        writer.push(0, "plain/z", [*script, writer.step("ok")], id=job, task="work", delay=1)
    first = writer.within(0, 3)
    for number in (first + 1, first + writer.within(4, 6)):
        writer.plan.faults.append(["lose", number, 1])
    writer.plan.faults.append(["uncertain", first + 2, writer.pick(50, 2000, 15_000, 35_000)])
    writer.some_faults("uncertain", writer.within(0, 3), 20, lambda: writer.pick(50, 2000, 35_000))


def replaced_unheard(writer: Writer, on: str) -> None:
    """Jobs are replaced before anybody hears that they have begun."""
    for job in ("a", "b", "c"):
        writer.push(writer.within(1100, 20_000), on, [writer.step("ok")], id=job, task="work", delay=0)
    writer.plan.faults.append(["unheard child", writer.pick(0, 2, 4), writer.within(5000, 60_000)])


def replaced_suspects(writer: Writer) -> None:
    """A push in place of a suspect leaves it one."""
    for name in writer.names:
        writer.push(writer.within(2000, 90_000), name, [writer.step("ok")], id="job", task="work", delay=1)


def unknown_links(writer: Writer, kind: str) -> None:
    """A task that a worker does not know is that of a run's second link, of which copies come."""
    on = f"{kind}/f" if kind == "full" else "plain/u"
    for at in (0, 8000, 30_000):
        writer.push(at, on, [writer.step("ok")], id="first", task="loop", delay=0)
        writer.push(at, on, [writer.step("ok")], id="second", task="work", delay=0)
    writer.some_faults("double", writer.within(2, 6), 14, lambda: writer.pick(1, 20, 500, 5000))
