"""Writes a plan: the pieces that profiles are made of, every choice made by the seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.simulation.plans.plan import Plan


class Writer:
    """Writes the plan of one seed."""

    def __init__(self, seed: int, profile: str) -> None:
        self.random = Random(f"{seed}:{profile}")
        self.plan = Plan(seed, profile)
        self.names: list[str] = []
        self.pushes = 0

    # --- small helpers

    def within(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def flip(self, chance: float) -> bool:
        return self.random.random() < chance

    def pick(self, *of: Any) -> Any:
        return self.random.choice(of)

    def when(self, share: float = 0.6) -> int:
        return self.within(0, round(self.plan.horizon * share))

    def event(self, at: int, do: str, **more: Any) -> None:
        self.plan.events.append({"at": at, "do": do, **more})

    # --- jobs

    def script(self, *ends: str, steps: int = 3, long: bool = False) -> list[dict[str, Any]]:
        """What a job does call by call; the last step repeats, so it is one that ends."""
        found = []
        for _ in range(self.within(0, steps)):
            found.append(self.step(self.pick(*ends), long))
        return [*found, self.step("ok", long)]

    def step(self, end: str, long: bool = False) -> dict[str, Any]:
        ms = self.within(1, 40)
        if self.flip(0.3):
            ms = self.within(500, 8000)
        if long and self.flip(0.4):
            ms = self.within(8000, 70_000)
        step: dict[str, Any] = {"ms": ms, "end": end}
        if end == "again":
            step["delay"] = self.pick(0, 1, 5, 20)
        if end == "retry":
            step["delay"] = self.pick(1, 8, 30)
        return step

    def push(self, at: int, on: str, script: list[dict[str, Any]], **more: Any) -> None:
        self.pushes += 1
        more.setdefault("id", self.pick("a", "b", "c", "d", "new"))
        more.setdefault("delay", self.pick(0, 0, 0, 1, 5, 20, 40))
        if more["delay"] == 0 and self.flip(0.5):
            more["delay"] = None
        self.event(at, "push", on=on, script=script, n=self.pushes, client=self.within(0, 1), **more)

    def task_of(self, on: str, *, loops: bool = False) -> str:
        kind = on.partition("/")[0]
        if kind == "plain":
            found = ["work", "work", "work", "solo", "single"] + (["loop"] if loops else [])
        elif kind == "full":
            found = ["work", "work"] + (["loop"] if loops else [])
        else:
            found = ["work"]
        return str(self.random.choice(found))

    def some_pushes(self, count: int, *ends: str, long: bool = False, share: float = 0.6) -> None:
        for _ in range(count):
            on = self.pick(*self.names)
            more: dict[str, Any] = {"task": self.task_of(on)}
            if on.startswith("full") and self.flip(0.3):
                more = {"task": "assist", "capability": True, "id": self.pick("x", "y")}
            script = self.script(*(ends or ("ok",)), long=long)
            if self.flip(0.15):
                inner = {
                    "do": "push",
                    "id": self.pick("a", "b", "new"),
                    "script": [self.step("ok")],
                    "n": 1000 + self.pushes,
                }
                if self.flip(0.5):
                    inner["delay"] = self.pick(1, 10)
                script[0][self.pick("first", "then")] = [inner]
            self.push(self.when(share), on, script, **more)

    def some_etas(self, count: int, *ends: str, long: bool = False) -> None:
        """Ordinary tasks with an eta: each keeps the task id that it promised, however often it is sent."""
        for _ in range(count):
            self.pushes += 1
            name, at = f"eta{self.pushes}", self.when(0.5)
            script = self.script(*(ends or ("ok",)), long=long)
            self.event(at, "later", on=f"later/{name}", id=name, delay=self.pick(1, 5, 20), script=script, client=0)
            if self.flip(0.2):
                self.event(
                    at + self.within(10, 40_000), "revoke", on=f"later/{name}", id=name, terminate=self.flip(0.5), client=1
                )  # fmt: skip

    def some_schedules(self, chance: float, *ends: str) -> None:
        for on in self.names:
            if self.flip(chance) and on.startswith("plain"):
                script = self.script(*(ends or ("ok",)))
                seconds = self.pick(15, 30, 60)
                self.event(self.when(0.3), "every", on=on, id="tick", seconds=seconds, script=script, client=0)

    def some_hooks(self, chance: float, *ends: str) -> None:
        """What `on_start` and `on_alarm` of an object do, before they are well again."""
        for name in ("f", "g"):
            for which in ("on_start", "on_alarm", "on_job_error", "on_memory_limit"):
                if self.flip(chance):
                    bad = [self.pick(*ends) for _ in range(self.within(1, 2))]
                    self.plan.hooks[f"{name} {which}"] = [*["ok"] * self.within(0, 2), *bad, "ok"]

    def some_changes(self, count: int, *what: str) -> None:
        """What clients do besides pushing."""
        for _ in range(count):
            at, on, do = self.when(0.7), self.pick(*self.names), self.pick(*what)
            more: dict[str, Any] = {"on": on, "client": self.within(0, 1)}
            if do in ("cancel", "reschedule"):
                more["id"] = self.pick("a", "b", "c", "d", "tick")
            if do == "reschedule":
                more["delay"] = self.pick(0, 3, 30)
            if do == "alarm":
                more.update(on=self.pick("full/f", "full/g"), delay=self.pick(0, 2, 20))
            if do == "delete_alarm":
                more["on"] = self.pick("full/f", "full/g")
            if do == "pause" and self.flip(0.85):
                self.event(at + self.within(10, 30_000), "resume", on=on)
            self.event(at, do, **more)

    def some_faults(self, kind: str, count: int, below: int, extra: Callable[[], Any] | None = None) -> None:
        for _ in range(count):
            self.plan.faults.append([kind, self.within(0, below), extra() if extra else 1])


def ordinary(writer: Writer) -> None:
    """The shape of the deployment and a few of its settings."""
    plan = writer.plan
    plan.beats = writer.pick(1, 1, 2)
    plan.workers = writer.pick(1, 1, 2)
    plan.slots = writer.pick(1, 2, 3)
    plan.restart = writer.pick(500, 2000, 10_000)
    plan.poll = writer.pick(50, 200, 1000)
    plan.settings = {"chain_length": writer.pick(2, 3, 50), "dispatch_window": writer.pick(1, 3, 1000, 1000)}
    # Batches that small are always full, so that beat claims one before it has sent the one before.
    plan.settings["claim_batch"] = 1 if plan.settings["chain_length"] == 3 else 1000
    every = ["plain/a", "plain/b", "full/f", "full/g", "side/s"]
    writer.random.shuffle(every)
    writer.names = every[: writer.within(1, 3)]


GENTLE = ("cancel", "cancel", "reschedule", "pause", "rearm", "alarm", "delete_alarm", "store")
ROUGH = (*GENTLE, "resume", "destroy", "destroy", "disable", "replay")
