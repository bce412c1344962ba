"""The checker of chaos must see what it is there for."""

import dataclasses
from collections import Counter

import pytest

from tests.acceptance.ledger import Run
from tests.chaos.checker import BOUND, check
from tests.chaos.faults import Fault
from tests.chaos.workload import Expected

JOB = Expected("subject/a", "job", "one-shot", due=10.0)


def ran(
    started: float, ended: float, outcome: str = "ended", object: str = "subject/a", job: str = "job", pid: int = 7
) -> Run:
    return Run(f"{object}{job}{started}", object, job, pid, pid, started, ended, outcome, {})


def wrong(
    *runs: Run, expected: tuple[Expected, ...] = (JOB,), faults: tuple[Fault, ...] = (), **dead: str
) -> list[str]:
    buried = Counter((f"subject/{name}", "job", reason) for name, reason in dead.items())
    return check(expected, runs, faults, buried).wrong


def test_one_run_that_ended_is_right() -> None:
    assert wrong(ran(10, 11)) == []
    assert wrong(ran(10, 11, "died"), ran(15, 16, pid=8)) == []


@pytest.mark.parametrize("runs", [(), (ran(10, 11, "died"),), (ran(10, 11, "raised"),)])
def test_a_job_that_never_ended_is_lost(runs: tuple[Run, ...]) -> None:
    assert "lost" in wrong(*runs)[0]


def test_a_job_that_may_not_have_been_stored_need_not_run_but_if_it_runs_it_ends() -> None:
    unsure = (dataclasses.replace(JOB, unsure=True),)
    assert wrong(expected=unsure) == []
    assert wrong(ran(10, 11), expected=unsure) == []
    assert "lost" in wrong(ran(10, 11, "died"), expected=unsure)[0]


def test_a_second_end_is_right_only_if_a_fault_may_have_kept_the_first_from_being_stored() -> None:
    twice = ran(10, 11), ran(12, 13, pid=8)
    assert "without a fault" in wrong(*twice)[0]
    assert wrong(*twice, faults=(Fault("child SIGKILL", 11.01, 11.01, (7,)),)) == []
    assert wrong(*twice, faults=(Fault("database away", 9, 11.5),)) == []
    assert "without a fault" in wrong(*twice, faults=(Fault("child SIGKILL", 11.01, 11.01, (99,)),))[0]
    assert "without a fault" in wrong(*twice, faults=(Fault("broker away", 9, 11.5),))[0]


def test_an_overlap_is_seen_unless_its_first_run_was_stopped_for_longer_than_its_lease() -> None:
    runs = ran(10, 13), ran(12, 14, pid=8)
    stop = Fault("worker SIGSTOP for long", 11, 20, (7,))
    assert any("overlap" in one for one in wrong(*runs, faults=(Fault("database away", 9, 14),)))
    assert wrong(*runs, faults=(stop,)) == []
    assert any("overlap" in one for one in wrong(*runs, faults=(Fault("worker SIGSTOP", 11, 12, (7,)),)))


def test_jobs_out_of_due_order_early_late_unknown_or_dead_are_seen() -> None:
    chain = tuple(Expected("subject/a", name, "chain", 10.0 + at) for at, name in ((0.001, "1"), (0.002, "2")))
    assert wrong(ran(11, 12, job="1"), ran(12, 13, job="2"), expected=chain) == []
    turned = ran(12, 13, job="1"), ran(11, 12, job="2")
    assert "due order" in wrong(*turned, expected=chain)[0]
    assert "due order" in wrong(*turned, expected=chain, faults=(Fault("broker away", 10.5, 11),))[0]
    assert wrong(*turned, expected=chain, faults=(Fault("child SIGKILL", 10.5, 10.5, (3,)),)) == []
    assert "early" in wrong(ran(9.5, 11))[0]
    late = ran(11 + BOUND, 12 + BOUND)
    assert "late" in wrong(late)[0]
    assert wrong(late, faults=(Fault("broker away", 10, 12),)) == []
    assert "late" in wrong(late, faults=(Fault("child SIGKILL", 10, 12, (3,)),))[0]
    assert "never pushed" in wrong(ran(10, 11), ran(10, 11, object="subject/b"))[0]
    assert "nobody expects" in wrong(ran(10, 11), b="sealed")[0]
    assert "a dead job" in wrong(ran(10, 11), a="failed")[0]


def test_a_job_that_must_fail_for_good_is_dead_once() -> None:
    doomed = (Expected("subject/a", "job", "dies", 10.0, ends=0, raises=2, dies=True),)
    tries = ran(10, 11, "raised"), ran(11, 12, "raised")
    assert wrong(*tries, expected=doomed, a="failed") == []
    assert "0 times a dead job" in wrong(*tries, expected=doomed)[0]
    assert "too few times" in wrong(tries[0], expected=doomed, a="failed")[0]
