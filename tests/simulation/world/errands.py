"""Work that jobs hand off, and what processes hold: Celery's part in it, and the threads that renew it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from celery.app.task import Context

from celery_lifecycle import holds, tracked
from celery_lifecycle.holds import TRACKED
from tests.simulation.world import application
from tests.simulation.world.engine import Event, Process

if TYPE_CHECKING:
    from tests.simulation.world.processes import Child
    from tests.simulation.world.simulation import Simulation


class Threads:
    """The `threading` module as what holds something sees it: a thread is an actor of its process."""

    Lock = staticmethod(threading.Lock)

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def Thread(self, target: Any, **_: Any) -> Any:
        return SimpleNamespace(start=lambda: self._process.start(target))

    def Event(self) -> Event:
        return Event(self._simulation.world, self._process)

    @property
    def _process(self) -> Process:
        process = self._simulation.world.process
        assert process is not None
        return process


def holder_of(process: Process) -> Any:
    """What renews the holds of a process."""
    if process.holding is None:
        process.holding = holds._Renewer()
    return process.holding


class ErrandRequest:
    """The parent's side of a tracked task."""

    def __init__(self, headers: dict[str, Any], child: Child) -> None:
        self.id = headers["id"]
        self.request_dict = headers
        self.time_start = 0.0
        self.child = child

    def on_failure(self, exc_info: Any) -> None:
        """Celery's request does this for a process that is gone."""
        application.errand.request_stack.push(Context(id=self.id, headers=self.request_dict))
        try:
            tracked._on_failure(sender=application.errand, task_id=self.id, exception=exc_info.exception)
        finally:
            application.errand.request_stack.pop()


def run_errand(simulation: Simulation, headers: dict[str, Any], body: Any) -> None:
    """What Celery's tracer does with the message of a task that is no link."""
    task, task_id, state = application.errand, headers["id"], "FAILURE"
    task.request_stack.push(Context(id=task_id, task=task.name, headers=headers, called_directly=False))
    try:
        tracked._on_prerun(task=task, task_id=task_id)
        try:
            task(*body[0])
            state = "SUCCESS"
        except Exception as error:
            simulation.failed(error)
        tracked._on_postrun(task=task, task_id=task_id, state=state)
    finally:
        task.request_stack.pop()


class Requests:
    """`celery.worker.state` as the thread that renews tracked tasks sees it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    @property
    def requests(self) -> dict[str, Any]:
        process: Any = self._simulation.world.process
        found = [child.request for child in process.children if isinstance(child.request, ErrandRequest)]
        return {request.id: request for request in found}


def is_errand(headers: dict[str, Any]) -> bool:
    return TRACKED in headers
