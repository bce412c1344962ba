"""What kinds of worlds there are: each seed plays in one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.plans.features import bulk, holds, limits, lines, strangers, twins, values
from tests.simulation.plans.plan import Plan
from tests.simulation.plans.situations import (
    late_hooks,
    late_releases,
    replaced_suspects,
    replaced_unheard,
    taken_out,
    unknown_links,
)
from tests.simulation.plans.steps import steps
from tests.simulation.plans.writer import GENTLE, ROUGH, Writer, ordinary


def calm(writer: Writer) -> None:
    """Nothing fails: what is due runs on time, and once."""
    ordinary(writer)
    writer.plan.horizon = 60_000
    writer.plan.slots, writer.plan.workers = 6, 1
    writer.plan.settings["dispatch_window"] = 1000
    writer.plan.bound = writer.plan.poll + 300
    writer.some_schedules(0.15, "ok", "fail", "again")
    writer.some_pushes(writer.within(2, 9), "ok", "yield", "again", "fail")
    if writer.flip(0.5):
        writer.some_changes(writer.within(1, 3), *GENTLE)
    if writer.flip(0.3):
        writer.some_etas(writer.within(1, 3), "ok", "yield")


def messages(writer: Writer) -> None:
    """Messages are lost, doubled, delayed and overtaken."""
    ordinary(writer)
    writer.some_schedules(0.15, "ok", "fail", "again")
    writer.some_pushes(writer.within(2, 8), "ok", "yield", "again", "fail", long=writer.flip(0.3))
    if writer.flip(0.5):
        writer.some_changes(writer.within(1, 4), *GENTLE)
    if writer.flip(0.4):
        writer.some_hooks(0.4, "fail")
    writer.some_faults("lose", writer.within(0, 4), 14)
    writer.some_faults("double", writer.within(0, 8), 14, lambda: writer.pick(0, 1, 20, 3000, 40_000))
    writer.some_faults("delay", writer.within(0, 5), 14, lambda: writer.pick(5, 200, 5000, 45_000, 100_000))
    if writer.flip(0.2):
        writer.event(writer.when(), "flush")


def switches(writer: Writer) -> None:
    """Clients change everything while chains are on their way."""
    ordinary(writer)
    writer.names = writer.names[:2]
    writer.some_pushes(writer.within(3, 9), "ok", "ok", "yield", "fail", share=0.4)
    writer.some_changes(writer.within(2, 8), *ROUGH)
    writer.some_faults("double", writer.within(0, 4), 14, lambda: writer.pick(0, 5, 500, 20_000))
    writer.some_faults("delay", writer.within(0, 6), 14, lambda: writer.pick(5, 500, 5000, 40_000))
    writer.some_faults("lose", writer.within(0, 2), 14)


def deaths(writer: Writer) -> None:
    """Children, workers, beats and clients die between any two steps."""
    ordinary(writer)
    writer.some_schedules(0.15, "ok", "fail", "again")
    writer.some_pushes(writer.within(2, 6), "ok", "yield", "again", "fail", long=writer.flip(0.4))
    if writer.flip(0.4):
        writer.some_changes(writer.within(1, 4), *ROUGH)
    if writer.flip(0.3):
        writer.some_etas(writer.within(1, 2), "ok", "yield", "fail")
    if writer.flip(0.5):
        writer.some_hooks(0.5, "fail", "die")
    for role, most, below in (("child", 4, 40), ("beat", 3, 60), ("client", 2, 20)):
        if writer.flip(0.6):
            writer.some_faults(f"crash {role}", writer.within(1, most), below)
    for _ in range(writer.within(0, 3)):
        writer.event(
            writer.when(), "kill", who=writer.pick("beat", "worker", "worker", "child"), index=writer.within(0, 1),
            nth=writer.within(0, 2),
        )  # fmt: skip
    if writer.flip(0.4):
        writer.some_faults("double", writer.within(1, 4), 14, lambda: writer.pick(0, 5, 500, 30_000))
    if writer.flip(0.3):
        taken_out(writer)
    if writer.flip(0.5):
        writer.some_faults("crash worker", writer.within(1, 2), 30)


def outages(writer: Writer) -> None:
    """The database goes away, answers get lost, workers stall past their lease and come back."""
    ordinary(writer)
    writer.some_schedules(0.15, "ok", "fail", "again")
    writer.some_pushes(writer.within(2, 6), "ok", "yield", "again", "fail", long=True)
    if writer.flip(0.3):
        writer.some_changes(writer.within(1, 4), *ROUGH)
    if writer.flip(0.5):
        writer.some_etas(writer.within(1, 2), "ok", "yield", long=True)
    for _ in range(writer.within(0, 3)):
        writer.event(writer.when(), "away", **{"for": writer.pick(100, 3000, 22_000, 31_000, 60_000)})
    for _ in range(writer.within(0, 2)):
        writer.event(
            writer.when(), "stall", who=writer.pick("worker", "worker", "child", "beat"), index=writer.within(0, 1),
            all=writer.flip(0.7), **{"for": writer.pick(300, 8000, 26_000, 50_000)},
        )  # fmt: skip
    if writer.flip(0.4):
        writer.event(
            writer.when(),
            "cut",
            who=writer.pick("worker", "child", "beat"),
            **{"for": writer.pick(5000, 30_000, 60_000)},
        )
    if writer.flip(0.4):
        for _ in range(writer.within(1, 3)):
            on = writer.pick(*writer.names)
            writer.event(writer.within(5000, 90_000), "hold", on=on, **{"for": writer.pick(2000, 8000, 24_000, 60_000)})
    writer.some_faults("unheard", writer.within(0, 4), 40, lambda: writer.pick(0, 0, 5000, 45_000))
    writer.some_faults("conflict", writer.within(0, 3), 60)
    writer.some_faults("double", writer.within(0, 4), 14, lambda: writer.pick(0, 5, 500, 25_000, 35_000, 60_000))


def returns(writer: Writer) -> None:
    """Workers and children that were given up come back late, while others do their work."""
    ordinary(writer)
    plan = writer.plan
    plan.horizon, plan.workers, plan.slots = 400_000, 2, writer.pick(1, 1, 2)
    plan.settings = {}
    writer.names = [writer.pick("plain/a", "full/f")]
    writer.pick(_some_return, _same_task_id, _lost_answers, _without_beat, _late_attempts, _two_doubts, _held)(writer)
    if writer.flip(0.3):
        writer.some_changes(writer.within(1, 3), "cancel", "reschedule", "destroy", "pause")
    if writer.flip(0.3):
        late_hooks(writer)


def _some_return(writer: Writer) -> None:
    if writer.flip(0.6):
        writer.some_etas(writer.within(1, 2), "ok", "ok", "yield", long=True)
    for _ in range(writer.within(1, 3)):
        at, on = writer.when(0.1), writer.names[0]
        script = [{"ms": writer.within(2000, 90_000), "end": writer.pick("ok", "fail", "yield", "again"), "delay": 1}]
        script += [{"ms": writer.within(2000, 90_000), "end": writer.pick("ok", "fail")}] * 2
        writer.push(
            at, on, [*script, writer.step("ok")], task=writer.pick("work", "loop"), id=writer.pick("a", "b", "c")
        )
    for _ in range(writer.within(1, 4)):
        event: dict[str, Any] = {"who": writer.pick("worker", "worker", "child"), "index": writer.within(0, 1)}
        event["all"], event["for"] = writer.flip(0.7), writer.pick(24_000, 40_000, 70_000, 110_000, 160_000)
        writer.event(writer.within(1000, 150_000), writer.pick("stall", "stall", "cut"), **event)
    writer.some_faults("unheard child", writer.within(0, 2), 12, lambda: writer.pick(0, 35_000, 50_000, 80_000))
    writer.some_faults("double", writer.within(0, 3), 10, lambda: writer.pick(0, 500, 25_000, 60_000, 100_000))
    writer.some_faults("delay", writer.within(0, 2), 10, lambda: writer.pick(500, 25_000, 60_000))


def _same_task_id(writer: Writer) -> None:
    """A task with an eta runs again under its id while the process that was given up still runs it."""
    for number in range(writer.within(1, 2)):
        ends = ("ok", "ok", "fail", "yield")
        script = [{"ms": writer.within(10_000, 60_000), "end": writer.pick(*ends)} for _ in range(4)]
        script.append(writer.step("ok"))
        name = f"eta{number}"
        writer.event(writer.within(0, 2000), "later", on=f"later/{name}", id=name, delay=1, script=script)
    for index in (0, 1):
        how = {"index": index, "who": writer.pick("worker", "worker", "child"), "all": writer.flip(0.8)}
        what, at = writer.pick("stall", "stall", "cut"), writer.within(4000, 30_000)
        writer.event(at, what, **how, **{"for": writer.within(50_000, 160_000)})
        if writer.flip(0.6):
            break


def _lost_answers(writer: Writer) -> None:
    """A finish was committed, its process hears of it much later, when the run has gone on without it."""
    on = writer.names[0]
    for job in ("a", "b", "c"):
        script = [{"ms": writer.within(5, 60_000), "end": writer.pick("ok", "ok", "yield", "fail")}, writer.step("ok")]
        writer.push(writer.within(0, 20), on, script, id=job, task="work", delay=1)
    writer.some_faults("unheard child", writer.within(1, 2), 8, lambda: writer.within(25_000, 90_000))
    for job in ("a", "b", "c"):
        if writer.flip(0.4):  # gone before anybody hears that it has begun
            writer.event(writer.within(1100, 60_000), writer.pick("cancel", "cancel", "destroy"), on=on, id=job)
    if writer.flip(0.8):
        replaced_unheard(writer, on)


def _without_beat(writer: Writer) -> None:
    """Nobody looks after a run whose lease is over, and a copy of its first link comes."""
    on = writer.names[0]
    writer.plan.beats = 1
    for job in ("a", "b"):
        script = [{"ms": writer.within(30_000, 90_000), "end": writer.pick("ok", "yield")}, writer.step("ok")]
        writer.push(writer.within(0, 20), on, script, id=job, task="work", delay=writer.pick(None, 1))
    writer.event(writer.within(3000, 8000), "stall", who="beat", index=0, **{"for": writer.within(40_000, 160_000)})
    for index in (0, 1):
        writer.event(
            writer.within(3000, 12_000), writer.pick("stall", "cut"), who="worker", index=index, all=writer.flip(0.2),
            **{"for": writer.within(30_000, 100_000)},
        )  # fmt: skip
    writer.some_faults("double", 3, 3, lambda: writer.within(20_000, 70_000))


def _two_doubts(writer: Writer) -> None:
    """A long run is doubted, renewed, and doubted again."""
    script = [{"ms": writer.within(80_000, 140_000), "end": writer.pick("ok", "yield")}, writer.step("ok")]
    writer.push(0, writer.names[0], script, id="a", task="work", delay=0)
    what = writer.pick("stall", "cut", "away")
    for at in (3000, 40_000, 80_000):
        how = {} if what == "away" else {"who": "worker", "index": writer.within(0, 1), "all": True}
        low, high = (26_000, 32_000) if what == "away" else (17_000, 25_500)
        writer.event(at + writer.within(0, 9000), what, **how, **{"for": writer.within(low, high)})


def _held(writer: Writer) -> None:
    """Callers hold the row of a long run again and again, for longer than its lease."""
    on = writer.names[0]
    script = [{"ms": writer.within(150_000, 300_000), "end": writer.pick("ok", "yield")}, writer.step("ok")]
    writer.push(0, on, script, id="a", task="work", delay=0)
    for at in range(3000, 300_000, 35_000):
        writer.event(at + writer.within(0, 5000), "hold", on=on, **{"for": writer.within(21_000, 30_000)})


def _late_attempts(writer: Writer) -> None:
    """A job waits for its next attempt while its run is given up."""
    on = writer.names[0]
    script = [{"ms": writer.within(5, 500), "end": "fail"} for _ in range(writer.within(10, 30))]
    writer.push(0, on, [*script, writer.step("ok")], id="a", task="work", delay=0, retry=[40, 4, 5])
    script = [{"ms": writer.within(20_000, 60_000), "end": "ok"}]
    writer.push(writer.within(10, 5000), on, script, id="b", task="work", delay=0)
    for index in (0, 1):
        how = {"index": index, "all": writer.flip(0.2)}
        writer.event(writer.within(1000, 8000), "stall", who="worker", **how, **{"for": writer.within(30_000, 60_000)})
        if writer.flip(0.5):
            break


def broker(writer: Writer) -> None:
    """The broker goes away, or breaks after it has taken a message."""
    ordinary(writer)
    writer.plan.slots, writer.plan.workers = 6, 1
    writer.plan.settings["dispatch_window"] = 1000
    writer.some_pushes(writer.within(2, 8), "ok", "yield", "fail", "again")
    for _ in range(writer.within(0, 3)):
        writer.event(writer.when(), "broker_away", **{"for": writer.pick(100, 3000, 22_000)})
    if writer.flip(0.5):
        writer.plan.bound = writer.plan.poll + 2500
    else:
        writer.some_faults("uncertain", writer.within(1, 3), 14)
        if writer.flip(0.6):
            late_releases(writer)


def doomed(writer: Writer) -> None:
    """Jobs that always die, among jobs that never do."""
    ordinary(writer)
    plan = writer.plan
    plan.horizon = 900_000
    plan.workers, plan.slots = writer.pick(1, 1, 2), writer.pick(2, 4)
    plan.restart = 500
    fatal = writer.pick("die", "die", "lost", "memory")
    names = ["plain/a", "plain/b", "full/f", "plain/c"]
    writer.names = names[: writer.within(2, 4)]
    for number in range(writer.within(1, 2)):
        on = writer.names[number % len(writer.names)]
        step: dict[str, Any] = {"ms": writer.within(1, 2000), "end": fatal}
        script = [step]
        shape = writer.pick("plain", "self", "line", "line", "yields", "fails", "unlucky")
        more: dict[str, Any] = {"task": writer.pick("work", "loop"), "id": f"doom{number}"}
        if shape == "self":
            step["first"] = [
                {"do": "push", "id": f"doom{number}", "task": more["task"], "script": [step.copy()], "n": 0}
            ]
        if shape == "line":
            more["root"] = f"root{number}"
            step["first"] = [_next_of_line(more, step, 4)]
        if shape == "yields":
            script = [{"ms": 5, "end": "yield"}, step] * 6 + [step]
        if shape == "fails":
            more["retry"] = [50, 10, 20]
            script = [{"ms": 5, "end": "fail"}, step] * 8
        if shape == "unlucky":
            script = [step, {"ms": 5, "end": "again", "delay": writer.pick(0, 5)}] * 5 + [writer.step("ok")]
        writer.push(writer.within(0, 5000), on, script, **more)
    for _ in range(writer.within(2, 6)):
        on = writer.pick(*writer.names)
        script = writer.script("ok", "yield", "fail", steps=1)
        writer.push(writer.when(0.2), on, script, id=writer.pick("a", "b", "c", "d"), task="work")
    for number in range(2):
        # From inside of a run nobody brings back what was sealed.
        again = {"do": "push", "id": f"doom{number}", "task": "work", "script": [writer.step("ok")], "n": 2000}
        script = [{"ms": 5, "end": "ok", "first": [again]}]
        on = writer.names[number % len(writer.names)]
        writer.push(writer.within(150_000, 800_000), on, script, id="again", task="work", delay=0)
    if "full/f" in writer.names and writer.flip(0.6):
        which = writer.pick("on_memory_limit", "on_start", "on_alarm")
        plan.hooks[f"f {which}"] = ["ok"] * writer.within(0, 2) + [writer.pick("die", "die", "fail")] * 3
    if writer.flip(0.3):
        plan.settings["strike_delay_max"] = 45
    if "full/f" in writer.names and writer.flip(0.3):
        # It dies, fails for good, and a hook says what becomes of it: that is no clean end.
        script = [{"ms": 5, "end": end} for end in ("die", "fail", "fail", "fail", "ok")]
        writer.push(writer.within(0, 5000), "full/f", script, id="x", task="assist", capability=True)


def _next_of_line(more: dict[str, Any], step: dict[str, Any], depth: int) -> dict[str, Any]:
    """A push of a new id of the same task, which does the same before it dies."""
    dies = dict(step)
    if depth:
        dies["first"] = [_next_of_line(more, step, depth - 1)]
    return {"do": "push", "id": "new", "task": more["task"], "script": [dies], "n": 0, "root": more["root"]}


def suspects(writer: Writer) -> None:
    """A worker with many runs is killed whole by one of them, always."""
    ordinary(writer)
    plan = writer.plan
    plan.horizon, plan.beats = 1_500_000, writer.pick(1, 2)
    plan.workers, plan.slots, plan.restart = writer.pick(1, 1, 2), writer.pick(4, 6), 500
    plan.settings = {}
    plan.poll = 200
    count = writer.within(3, 6)
    writer.names = [f"{writer.pick('plain', 'plain', 'side')}/{letter}" for letter in "abcdefgh"[:count]]
    culprits = writer.pick(1, 1, 1, 2)
    for number, name in enumerate(writer.names):
        if number < culprits:
            script = [{"ms": writer.within(1500, 3000), "end": "lost"}]
        else:
            first = {"ms": writer.within(5000, 9000), "end": writer.pick("ok", "again"), "delay": 5}
            script = [first, {"ms": 500, "end": writer.pick("again", "yield"), "delay": 5}, writer.step("ok")]
        writer.push(writer.within(0, 300), name, script, id="job", task="work", delay=None)
    for name in writer.names[culprits:]:
        # Neighbours of a suspect that were not there when it became one.
        script = [{"ms": writer.within(20_000, 60_000), "end": "ok"}]
        writer.push(writer.within(60_000, 400_000), name, script, id="late", task="work", delay=0)
    if writer.flip(0.3):
        writer.event(writer.when(0.3), "kill", who="worker", index=0)
    if writer.flip(0.4):
        replaced_suspects(writer)


def deploys(writer: Writer) -> None:
    """SIGTERM, a grace period, SIGKILL; tasks that a worker does not know yet."""
    ordinary(writer)
    plan = writer.plan
    plan.horizon = 200_000
    writer.some_pushes(writer.within(2, 6), "ok", "yield", "fail", "again", long=True)
    for _ in range(writer.within(1, 4)):
        at, index = writer.when(), writer.within(0, 1)
        writer.event(at, "term", index=index, grace=writer.pick(200, 3000, 20_000))
        if writer.flip(0.4):
            writer.event(at + writer.within(1, 3000), "kill", who="child", index=index, nth=writer.within(0, 2))
    if writer.flip(0.3):
        writer.event(writer.when(), "away", **{"for": writer.pick(100, 3000, 31_000)})
    if writer.flip(0.3):
        task = writer.pick("plain.work", "full.work", "plain.solo", "full.on_alarm")
        plan.unknown.append([task, writer.within(0, 1), writer.within(10_000, 100_000)])
        if plan.unknown[-1][2] < 60_000:
            plan.settings["unknown_task_grace"] = 5
    writer.some_faults("crash child", writer.within(0, 1), 30)
    if plan.unknown:
        unknown_links(writer, plan.unknown[0][0].partition(".")[0])


def windows(writer: Writer) -> None:
    """More objects than the dispatch window takes, queues that nobody serves for a while."""
    ordinary(writer)
    plan = writer.plan
    plan.settings = {"dispatch_window": writer.pick(1, 2, 3), "chain_length": 2}
    plan.horizon = writer.pick(100_000, 600_000)
    plan.workers, plan.slots = 1, writer.pick(1, 2)
    writer.names = [f"plain/{letter}" for letter in "abcdef"[: writer.within(2, 6)]] + ["side/s", "side/t"]
    plan.queues = [[writer.pick("celery", "side")]] if writer.flip(0.5) else [["celery", "side"]]
    for name in writer.names:
        for _ in range(writer.within(1, 2)):
            writer.push(
                writer.within(0, 20_000), name, [writer.step("ok")], id=writer.pick("a", "b"), task="work", delay=0
            )
    unserved = len(plan.queues[0]) == 1
    if unserved and writer.flip(0.6):
        plan.served = plan.queues[0]
        return
    if writer.flip(0.5):
        writer.event(0, "stall", who="worker", index=0, **{"for": writer.within(20_000, plan.horizon)})
    writer.some_faults("lose", writer.within(0, 3), 8)
    if writer.flip(0.5):
        plan.settings["patience_max"] = 30


def chaos(writer: Writer) -> None:
    """Everything at once."""
    for part in writer.random.sample([messages, switches, deaths, outages, broker, deploys], 3):
        part(writer)
    writer.plan.horizon, writer.plan.bound = 200_000, 0


FAULTS = (calm, messages, switches, deaths, outages, returns, broker, doomed, suspects, deploys, windows, chaos)
FEATURES = (holds, steps, lines, strangers, steps, values, limits, twins, bulk)
PROFILES: dict[str, Callable[[Writer], None]] = {one.__name__: one for one in (*FAULTS, *FEATURES)}


def profile_of(seed: int) -> str:
    """The profiles take turns: three rounds of faults, then as many turns for the features."""
    count = len(FAULTS)
    turn, place = divmod(seed, count)
    if turn % 4 < 3:
        return FAULTS[place].__name__
    return FEATURES[(turn // 4 * count + place) % len(FEATURES)].__name__


def plan_of(seed: int, profile: str | None = None) -> Plan:
    """The plan of a seed."""
    profile = profile or profile_of(seed)
    writer = Writer(seed, profile)
    PROFILES[profile](writer)
    writer.plan.events.sort(key=lambda event: event["at"])
    return writer.plan
