"""Worlds for what the package has beside the alarm: holds, lines over objects, strangers, storage, limits, many at once."""

from __future__ import annotations

from typing import Any

from tests.simulation.plans.writer import ROUGH, Writer, ordinary


def holds(writer: Writer) -> None:
    """Keep-alives and handed off work, whose holders end, die, stall, and come back."""
    ordinary(writer)
    plan = writer.plan
    plan.horizon, plan.slots, plan.restart = 240_000, writer.pick(3, 4), 500
    plan.settings["dispatch_window"] = 1000
    writer.names = ["full/f", "plain/a"][: writer.within(1, 2)]
    for _ in range(writer.within(1, 3)):
        ends = writer.pick(("ok",), ("ok", "fail"), ("die",), ("die", "memory", "ok"), ("lost",))
        script = [_hands_off(writer, *ends) for _ in range(writer.within(1, 4))]
        on = writer.pick(*writer.names)
        writer.push(writer.when(0.3), on, [*script, writer.step("ok")], task="work", id=writer.pick("a", "b"))
    if writer.flip(0.4):
        _comes_back(writer)
    for _ in range(writer.within(0, 3)):
        on = writer.pick(*writer.names)
        writer.event(
            writer.when(0.4),
            "keep_alive",
            on=on,
            client=writer.within(0, 1),
            **{"for": writer.pick(3000, 45_000, 90_000)},
        )
    if writer.flip(0.5):
        step = {"ms": writer.pick(50, 20_000), "end": writer.pick("ok", "fail", "die"), "first": [{"do": "keep"}]}
        if writer.flip(0.7):
            step["then"] = [{"do": "let_go"}]
        writer.push(writer.when(0.3), writer.names[0], [step, writer.step("ok")], task="work", id="c")
    for _ in range(writer.within(0, 2)):
        writer.event(
            writer.when(0.5), writer.pick("stall", "stall", "cut"), who=writer.pick("worker", "worker", "client", "beat"),
            index=writer.within(0, 1), **{"for": writer.pick(15_000, 42_000, 56_000, 75_000, 110_000)},
        )  # fmt: skip
    if writer.flip(0.4):
        writer.event(writer.when(0.5), "kill", who=writer.pick("worker", "child", "client"), index=0)
    if writer.flip(0.3):
        writer.event(writer.when(0.5), writer.pick("destroy", "disable"), on=writer.names[0], client=1)
    if writer.flip(0.2):
        writer.event(writer.when(0.5), "term", index=0, grace=writer.pick(200, 20_000))
    if writer.flip(0.6):
        plan.faults.append(["stall beat at before Holds._lost", writer.within(0, 1), writer.pick(500, 8000, 40_000)])
    writer.some_faults("lose", writer.within(0, 1), 14)
    writer.some_faults("conflict", writer.within(0, 2), 60)


def _comes_back(writer: Writer) -> None:
    """A holder is away for so long that beat is about to give it up when it renews, or gives back, what it holds."""
    at = writer.within(0, 30_000)
    lasts = writer.pick(45_000, 150_000)
    writer.event(at, "keep_alive", on=writer.names[0], client=0, **{"for": lasts})
    away = writer.within(38_000, 62_000)
    writer.event(at + writer.within(100, 9000), "stall", who="client", index=0, **{"for": away})
    writer.plan.faults.append(["stall beat at before Holds._lost", 0, writer.within(3000, 30_000)])


def _hands_off(writer: Writer, *ends: str) -> dict[str, Any]:
    """A job that hands off work and looks again later, as a heartbeat does."""
    errand = {"ms": writer.pick(50, 3000, 30_000, 60_000), "end": writer.pick(*ends)}
    step = writer.step(writer.pick("again", "again", "ok", "yield"))
    return {**step, "ms": writer.pick(10, 300, 4000), "first": [{"do": "track", "script": errand}]}


def lines(writer: Writer) -> None:
    """A line goes on over several objects, each of which has one job, and dies on each."""
    ordinary(writer)
    plan = writer.plan
    plan.horizon, plan.restart = 600_000, 500
    plan.workers, plan.slots = writer.pick(1, 1, 2), writer.pick(2, 3)
    plan.settings = {"dispatch_window": 1000}
    fatal = writer.pick("die", "die", "memory", "lost")
    for number in range(writer.within(1, 2)):
        name, step = f"line{number}", {"ms": writer.within(5, 900), "end": fatal}
        dies = writer.pick(4, 5)
        script = [_goes_on(writer, name, step, writer.within(1, 4)) for _ in range(dies)]
        if writer.flip(0.4):  # its first job ends well in the end, so that its own deaths are taken back
            script = [step] * writer.within(1, 2) + [{**script[0], "end": "ok"}]
        writer.event(writer.within(0, 5000), "own", on=f"own/{name}", id=name, script=script, n=0, root=name)
        again, on = writer.within(200_000, 500_000), f"own/{name}"
        if writer.flip(0.5):
            for _ in range(writer.within(1, 2)):
                writer.event(again + writer.within(0, 20_000), "replay", on=on, nth=0, client=writer.within(0, 1))
        else:
            anew = {"id": name, "script": [step, step, writer.step("ok")], "n": 1, "root": f"{name}-again"}
            writer.event(again, "purge", on=on, anew=anew)
    for number in range(writer.within(1, 3)):
        script = writer.script("ok", "yield", "again", steps=1)
        writer.event(writer.when(0.5), "own", on=f"own/well{number}", id=f"well{number}", script=script, delay=1)
    if writer.flip(0.3):
        writer.event(writer.when(0.5), "kill", who=writer.pick("worker", "child"), index=0)


def _goes_on(writer: Writer, root: str, step: dict[str, Any], depth: int) -> dict[str, Any]:
    """What a job of a line does: it pushes the next one, or the next two together, and dies."""
    if not depth:
        return dict(step)
    script = [_goes_on(writer, root, step, depth - 1)]
    if writer.flip(0.3):
        ids = [["new", writer.pick(1, 5)] for _ in range(2)]
        following = {"do": "push_many", "task": "own", "ids": ids, "script": script, "root": root, "on": "own/x"}
    else:
        following = {
            "do": "own",
            "id": "new",
            "delay": writer.pick(1, 5),
            "script": script,
            "root": root,
            "on": "own/x",
        }
    return {**step, "first": [following]}


def strangers(writer: Writer) -> None:
    """Tasks that no worker knows for a while, jobs whose owner is gone for good; dead jobs are replayed."""
    ordinary(writer)
    plan = writer.plan
    plan.horizon = 140_000
    plan.settings["unknown_task_grace"] = writer.pick(5, 20, 40)
    writer.names = ["full/f", "plain/a", "plain/b"][: writer.within(1, 3)]
    writer.some_pushes(writer.within(2, 5), "ok", "yield", "again", share=0.3)
    for task in ("plain.work", "full.work", "full.on_alarm", "full.helper.assist"):
        if writer.flip(0.5):
            until = writer.pick(10_000, 40_000, 80_000)
            plan.unknown += [[task, index, until] for index in range(writer.pick(1, 2, 2))]
    for number in range(writer.within(1, 3)):
        on = writer.pick(*writer.names)
        writer.event(writer.when(0.3), "orphan", on=on, id=f"o{number}", delay=writer.pick(None, 1, 5), client=0)
        if writer.flip(0.3):
            plan.faults.append(["stall child at before Ends.unknown", writer.within(0, 2), writer.pick(30_000, 60_000)])
    for _ in range(writer.within(1, 2)):
        fails = [{"ms": writer.within(1, 40), "end": "fail"} for _ in range(writer.pick(3, 4))]
        if writer.flip(0.4):  # what it has died of before it failed for good does not count when it is replayed
            dies = {"ms": 5, "end": "die"}
            fails = [dies, *fails[:3], dies, dies]
        writer.push(writer.when(0.3), writer.pick(*writer.names), [*fails, writer.step("ok")], task="work", id="f")
    writer.some_etas(writer.within(0, 2), "fail", "ok")
    if writer.flip(0.4):
        writer.event(writer.when(0.3), "alarm", on="full/f", delay=2)
    both = writer.within(20_000, 120_000)
    for number in range(writer.within(2, 5)):
        on, at = writer.pick(*writer.names), writer.within(20_000, 120_000)
        writer.event(
            both + number if writer.flip(0.3) else at, "replay", on=on, nth=writer.within(0, 2), client=number % 2
        )
    for what in ("purge", "disable", "destroy"):
        if writer.flip(0.2):
            at = writer.within(20_000, 110_000)
            writer.event(at, what, on=writer.names[-1])
            writer.event(at + writer.within(1000, 20_000), "replay", on=writer.names[-1])


def values(writer: Writer) -> None:
    """Runs write to their object's storage, and end late, badly, under a newer change, or on a destroyed object."""
    ordinary(writer)
    plan = writer.plan
    plan.horizon = 160_000
    for _ in range(writer.within(3, 7)):
        script = writer.script("ok", "yield", "fail", "again", "die", "retry", long=writer.flip(0.3))
        for step in script:
            for where in ("first", "then"):
                if writer.flip(0.5):
                    step[where] = [_writing(writer) for _ in range(writer.within(1, 2))]
        on = writer.pick(*writer.names)
        task = "work" if on.startswith("side") else writer.pick("work", "work", "loop")
        at = writer.when(0.5)
        writer.push(at, on, script, task=task)
        if writer.flip(0.3):  # while it runs
            script[0]["ms"] = writer.within(3000, 8000)
            writer.event(at + writer.within(500, 3000), "destroy", on=on, client=1)
    for _ in range(writer.within(0, 3)):
        key, value = writer.pick("k", "l"), writer.pick(None, 1, 2)
        writer.event(
            writer.when(0.7), "store", on=writer.pick(*writer.names), key=key, value=value, client=writer.within(0, 1)
        )
    if writer.flip(0.5):
        writer.some_changes(writer.within(1, 3), "destroy", "destroy", "reschedule", "cancel")
    for _ in range(writer.within(0, 2)):
        plan.faults.append(["stall child at before Runs._finish", writer.within(0, 5), writer.pick(35_000, 60_000)])
    writer.some_faults("unheard child", writer.within(0, 2), 12, lambda: writer.pick(0, 0, 35_000, 50_000))
    writer.some_faults("conflict", writer.within(0, 2), 60)
    if writer.flip(0.4):  # a newer change while it runs: its outcome is discarded, what it has written is not
        at, on = writer.when(0.5), writer.names[0]
        script = [{"ms": 4000, "end": "ok", "first": [_writing(writer)], "then": [_writing(writer)]}, writer.step("ok")]
        writer.push(at, on, script, id="r", task="work", delay=0)
        writer.event(at + writer.within(500, 3500), "reschedule", on=on, id="r", delay=writer.pick(1, 20))


def _writing(writer: Writer) -> dict[str, Any]:
    return {"do": "write", "key": writer.pick("k", "l", "m"), "value": writer.pick(None, 1, 2, [3], "four")}


def limits(writer: Writer) -> None:
    """Time limits, jobs that expire, that ask for a retry, that are revoked; an object whose jobs go to two queues."""
    ordinary(writer)
    plan = writer.plan
    plan.horizon = 200_000
    plan.slots = writer.pick(2, 3)
    writer.names = ["plain/a", "full/f", "plain/b"][: writer.within(1, 3)]
    for number in range(writer.within(1, 3)):
        on = writer.pick(*writer.names)
        task = "limited" if on.startswith("plain") else "brief"
        script = [{"ms": writer.pick(5, 14_000, 40_000), "end": "ok"} for _ in range(writer.within(1, 2))]
        at, job = writer.when(0.4), writer.pick("l", f"l{number}")
        writer.push(at, on, [*script, writer.step("ok")], task=task, id=job, delay=writer.pick(0, 5))
        if writer.flip(0.4):
            writer.event(at + writer.within(6000, 18_000), "reschedule", on=on, id=job, delay=30)
    for number in range(writer.within(1, 3)):
        name, more = f"eta{number}", {}
        if writer.flip(0.6):
            more["expires"] = writer.pick(2, 7, 30)
        if writer.flip(0.4):
            more["time_limit"] = writer.pick(2, 9)
        script = writer.script("ok", "retry", "retry", "yield", long=writer.flip(0.3))
        writer.event(
            writer.when(0.4), "later", on=f"later/{name}", id=name, delay=writer.pick(1, 6, 20), script=script, **more
        )
        if writer.flip(0.4):
            writer.event(writer.within(30_000, 150_000), "replay", on=f"later/{name}")
        if writer.flip(0.3):
            at = writer.within(10, 100_000)
            writer.event(at, "revoke", on=f"later/{name}", id=name, terminate=writer.flip(0.7), client=1)
    writer.some_pushes(writer.within(1, 4), "ok", "retry", "fail", "yield")
    for _ in range(writer.within(0, 3)):
        if "plain/a" in writer.names:
            writer.push(writer.when(0.5), "plain/a", writer.script("ok", "yield"), task=writer.pick("aside", "work"))
    if writer.flip(0.3):
        plan.hooks["f on_start"] = ["ok"] * writer.within(0, 1) + ["hang"] + ["ok"]
    if writer.flip(0.3):  # so that links wait, or come too late
        writer.event(writer.when(0.4), "stall", who="worker", index=0, **{"for": writer.pick(3000, 12_000, 40_000)})
    if writer.flip(0.3):
        writer.some_changes(writer.within(1, 3), *ROUGH)
    writer.some_faults("delay", writer.within(0, 3), 10, lambda: writer.pick(500, 5000, 25_000))


def twins(writer: Writer) -> None:
    """A promised task id in two processes at once: of two workers, whose processes have the same number, or of one."""
    ordinary(writer)
    plan = writer.plan
    plan.horizon, plan.beats, plan.settings = 260_000, 1, {"dispatch_window": 1000}
    plan.workers, plan.slots = writer.pick((2, 1), (2, 1), (1, 2))
    plan.restart = 500
    how = writer.pick(_given_up_twin, _given_up_twin, _refused_twin)
    how(writer)


def _given_up_twin(writer: Writer) -> None:
    """The first process is given up, goes on under the same task id beside the second one, and dies."""
    script = [{"ms": writer.within(90_000, 200_000), "end": "ok"} for _ in range(3)]
    writer.event(0, "later", on="later/eta", id="eta", delay=1, script=script)
    at, away = writer.within(1500, 6000), writer.within(27_000, 45_000)
    what = {"who": "worker", "all": writer.flip(0.5), "for": away}
    for index in range(writer.plan.workers):
        writer.event(at, writer.pick("cut", "cut", "stall"), index=index, **what)
    for _ in range(writer.within(1, 3)):
        index = writer.within(0, writer.plan.workers - 1)
        writer.event(writer.within(75_000, 200_000), "kill", who="child", index=index, nth=writer.within(0, 1))


def _refused_twin(writer: Writer) -> None:
    """A copy of the message comes to another process, which can't reach the database at first."""
    script = [{"ms": writer.within(8000, 30_000), "end": writer.pick("ok", "yield")}, writer.step("ok")]
    writer.event(0, "later", on="later/eta", id="eta", delay=1, script=script)
    writer.plan.faults += [["double", 0, writer.within(1500, 4000)], ["double", 1, writer.within(1500, 4000)]]
    for index in range(writer.plan.workers):
        writer.event(writer.within(1200, 2500), "cut", who="worker", index=index, **{"for": writer.within(2000, 6000)})


def bulk(writer: Writer) -> None:
    """Many jobs in one transaction; objects whose message nobody can send, beside others that are on time all the same."""
    ordinary(writer)
    plan = writer.plan
    plan.horizon, plan.slots, plan.workers = 60_000, 6, 1
    plan.settings["dispatch_window"] = 1000
    plan.bound = plan.poll + 2500
    writer.names = ["plain/a", "full/f", "plain/b", "side/s"][: writer.within(2, 4)]
    for _ in range(writer.within(1, 3)):
        ids = [
            [writer.pick("a", "b", "c", "d", "e", f"m{n}"), writer.pick(0, 0, 1, 5, 20)]
            for n in range(writer.within(1, 6))
        ]
        on, script = writer.pick(*writer.names), [writer.step("ok")]
        writer.event(writer.when(0.5), "push_many", on=on, ids=ids, script=script, client=writer.within(0, 1))
    if writer.flip(0.6):
        ids = [[f"own{number}", writer.pick(0, 1, 5)] for number in range(writer.within(2, 5))]
        writer.event(
            writer.when(0.5), "push_many", on="own/x", task="own", ids=ids, script=[writer.step("ok")], client=0
        )
    writer.some_pushes(writer.within(2, 6), "ok", "yield", "again")
    for on in writer.names[: writer.within(0, 2)]:
        how = writer.pick("encode", "refuse")
        plan.spoilt.append([on, how, writer.within(5000, 50_000)])
    if plan.spoilt:  # what is due together is claimed together
        at = writer.within(2000, 20_000)
        for on in writer.names:
            writer.push(at, on, [writer.step("ok")], task="work", id="together", delay=2)
