"""What chaos pushes, and what must become of it."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import Celery

from celery_lifecycle.errors import DatabaseUnavailable


@dataclass(frozen=True)
class Expected:
    """One pushed job: when it was due (monotonic), how many ended runs it takes, whether it fails for good.

    ``unsure``: the database was away while it was pushed, so it may be there or not.
    """

    object: str
    job: str
    kind: str
    due: float
    ends: int = 1
    raises: int = 0
    dies: bool = False
    unsure: bool = False


class Workload:
    """Pushes objects of random kinds; ``expected`` is what was stored, or may have been."""

    def __init__(self, app: Celery, random: random.Random) -> None:
        self._app, self._random = app, random
        self._number = 0
        self.expected: list[Expected] = []

    def live(self) -> int:
        """How many objects have something to do still, counted up to a hundred."""
        return len(self._app.lifecycle.store.objects.find_many())

    def push(self) -> None:
        """Push one object."""
        self._number += 1
        kinds = {"one-shot": 6, "chain": 3, "yields": 2, "reschedules": 2, "fails": 2, "dies": 1, "long": 1, "eta": 3}
        kind = self._random.choices([*kinds], [*kinds.values()])[0]
        getattr(self, "_" + kind.replace("-", "_"))(kind, f"{kind}-{self._number}")

    def _one_shot(self, kind: str, name: str) -> None:
        self._push(kind, name, "job", self._random.uniform(0, 4), seconds=self._random.uniform(0, 0.2))

    def _chain(self, kind: str, name: str) -> None:
        delay = self._random.uniform(0.5, 3)
        for number in range(self._random.randint(2, 6)):
            self._push(kind, name, f"job-{number}", delay + number / 1000, seconds=self._random.uniform(0, 0.1))

    def _yields(self, kind: str, name: str) -> None:
        self._push(kind, name, "job", self._random.uniform(0, 2), ends=4, parts=4, seconds=0.05)

    def _reschedules(self, kind: str, name: str) -> None:
        self._push(kind, name, "job", self._random.uniform(0, 2), ends=3, parts=3, seconds=0.05, again=1)

    def _fails(self, kind: str, name: str) -> None:
        self._push(kind, name, "job", self._random.uniform(0, 3), raises=2, failures=2, seconds=0.05)

    def _dies(self, kind: str, name: str) -> None:
        self._push(kind, name, "job", 0.5, ends=0, raises=4, dies=True, failures=99, seconds=0.02)

    def _long(self, kind: str, name: str) -> None:
        self._push(kind, name, "job", 0.5, seconds=self._random.uniform(2, 6))
        self._push(kind, name, "after", 1, seconds=0.01)

    def _eta(self, kind: str, name: str) -> None:
        delay = self._random.uniform(0.2, 4)
        task_id = f"{name}-{self._random.getrandbits(32):08x}"
        task = self._app.tasks["chaos.plain"]
        due = time.monotonic() + delay
        stored = is_stored(lambda: task.apply_async((task_id, 0.05), countdown=delay, task_id=task_id))
        self.expected.append(Expected(f"chaos.plain/{task_id}", task_id, kind, due, unsure=not stored))

    def _push(
        self, kind: str, name: str, job: str, delay: float, ends: int = 1, raises: int = 0, dies: bool = False,
        **payload: Any,
    ) -> None:  # fmt: skip
        subject = self._app.lifecycle.object("subject", name)
        due = time.monotonic() + delay
        stored = is_stored(lambda: subject.jobs.push("step", delay=delay, id=job, payload=payload))
        self.expected.append(Expected(str(subject), job, kind, due, ends, raises, dies, unsure=not stored))


def is_stored(push: Callable[[], object]) -> bool:
    """Push; false if the database was away, so that nobody knows."""
    try:
        push()
    except DatabaseUnavailable:
        return False
    return True
