"""Random operations of clients, beats and workers at the real store, against a model of the design in plain Python.

Links may be delivered late, twice, in any order or never; workers of several processes die, are lost with all that they run,
drain, put back, or come back late. After every step all tables are compared with the model (`store_model`).
"""

from __future__ import annotations

import os
import random
import uuid
from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.store_model.clients import Clients
from tests.property.store_model.faults import FAULTS
from tests.property.store_model.holds import Holds
from tests.property.store_model.model import LENGTH
from tests.property.store_model.world import RETENTION
from tests.support.protocol import Clock, Table

EXAMPLES = {"sqlite": 60, "postgresql": 30, "mariadb": 30}
TIMES = int(os.environ.get("LIFECYCLE_MODEL_TIMES", "1"))
STEPS = 120


class StoreAgainstModel(Clients, Holds):
    """All rules together."""

    def teardown(self) -> None:
        self.table.check()


def run_machine(table: Table, examples: int, *, shrinks: bool = True, derandomize: bool = False) -> Counter[str]:
    """Play so many examples; how often what has happened with effect."""
    fired: Counter[str] = Counter()
    machine = type("Machine", (StoreAgainstModel,), {"table": table, "fired": fired})
    phases = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if shrinks else [])]
    how = settings(
        max_examples=examples, stateful_step_count=STEPS, deadline=None, phases=phases, derandomize=derandomize,
        database=None, print_blob=shrinks, suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    # Ids of jobs that were given none come from the source that Hypothesis seeds, so that an example can be played again.
    with mock.patch.object(uuid, "uuid4", side_effect=lambda: uuid.UUID(int=random.getrandbits(128))):
        run_state_machine_as_test(machine, settings=how)
    return fired


def with_table(url: str, work: Callable[[Table], object]) -> None:
    table = Table(url, clock=Clock(), chain_length=LENGTH, dead_job_retention=RETENTION / 1000)
    try:
        work(table)
    finally:
        table.close()


# What happens in each run of all examples on SQLite, beside much that is rarer.
HAPPENS = (
    "a chain is sent", "a worker is lost with 1", "a worker is lost with 2", "alarm_failed: accepted",
    "begin: NOTHING_DUE", "begin: NO_OBJECT", "begin: RUN_OPEN", "begin: RUN_OVER", "begin: a suspect",
    "begin: accepted", "cancel: accepted", "cancel: refused", "claim: IDLE is sent", "claim: SENT is sent", "destroy",
    "end: died", "end: refused", "enter: accepted", "finish: accepted", "finish: refused", "finish: refused without",
    "finish: tracked work goes on", "hold: track", "hold: track by a job", "lost hold: strikes nobody",
    "passed: gone or not due", "pause", "purge: another", "push from inside: new", "push: OwnerConflict",
    "push: kept", "push: new", "push_many: accepted", "release: accepted", "release: refused", "renew: accepted",
    "reschedule: accepted", "reschedule: refused", "rescue: alone", "rescue: doubt",
    "rescue: one of several", "resume: not paused", "revive: sent", "revoke: refused", "set_alarm: accepted",
    "skip: accepted", "skip: refused", "storage from outside", "strike of #alarm", "strike of #start",
    "strike of a job", "strike of a job: sealed", "struck_inside: accepted", "unknown task: put back",
    "release of a revival: accepted",
)  # fmt: skip


def test_random_operations_leave_the_tables_as_the_model_says(database):
    def play(table: Table) -> None:
        # The same ones each time, so that a change that breaks something is told by it; new ones if more are asked for.
        fired = run_machine(table, EXAMPLES[database.kind] * TIMES, derandomize=TIMES == 1)
        if database.kind == "sqlite":
            assert not [what for what in HAPPENS if not fired[what]], "the examples have grown too tame"

    with_table(database.url, play)


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("name", FAULTS)
def test_the_model_finds_a_guard_that_is_taken_out(name, database, monkeypatch):
    fault = FAULTS[name]
    monkeypatch.setattr(fault.place, fault.name, fault.instead)

    def finds(table: Table) -> None:
        with pytest.raises(Exception) as caught:
            run_machine(table, 400, shrinks=False, derandomize=True)
        assert not isinstance(caught.value, (TypeError, AttributeError, NameError)), caught.value

    with_table(database.url, finds)
