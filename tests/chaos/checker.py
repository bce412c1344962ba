"""What must be true after chaos, by the ledger and the tables; nothing here asks the code that was running."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.acceptance.ledger import Run
from tests.chaos.faults import Fault
from tests.chaos.workload import Expected

#: How late a job may begin, in seconds, not counting those in which database or broker were broken. A lost message costs a
#: patience, which is twice the queue's last wait where that is long; a fault every two seconds takes the workers away for
#: half of the time, so the queue is long now and then.
BOUND = 120.0
#: Celery's workers wait 2, 4, 6 … s between their tries to reach a broker, so one that is back is not used at once.
RECONNECTS = 8.0


@dataclass
class Findings:
    """What is wrong (nothing may be), and what was seen."""

    wrong: list[str] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)


def check(
    expected: Sequence[Expected], runs: Sequence[Run], faults: Sequence[Fault], dead: Counter[tuple[str, str, str]]
) -> Findings:
    """Compare what was pushed with what ran and what is dead (object, job, reason)."""
    found = Findings()
    by_job: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        by_job[run.object, run.job].append(run)
    known = {(one.object, one.job) for one in expected}
    found.wrong += [f"ran, but was never pushed: {key}" for key in by_job if key not in known]
    repeats = 0
    for one in expected:
        mine = by_job[one.object, one.job]
        if one.unsure and not mine:
            continue
        ended = [run for run in mine if run.outcome == "ended"]
        raised = [run for run in mine if run.outcome == "raised"]
        if len(ended) < one.ends:
            found.wrong.append(f"lost: {one} ended {len(ended)} of {one.ends} times: {mine}")
        if len(raised) < one.raises:
            found.wrong.append(f"{one} was tried too few times: {mine}")
        extra = max(0, len(ended) - one.ends) + max(0, len(raised) - one.raises)
        repeats += extra
        # At least once: an end that was never stored is repeated, and only a fault keeps it from being stored.
        unstored = [run for run in (*ended, *raised) if may_be_unstored(run, faults)]
        if extra > len(unstored):
            found.wrong.append(f"ran {extra} times too often without a fault: {one}: {mine}")
        deaths = dead.pop((one.object, one.job, "failed"), 0)
        if deaths != one.dies:
            found.wrong.append(f"{deaths} times a dead job: {one}: {mine}")
    found.wrong += [f"a dead job that nobody expects: {key}" for key in dead]
    overlaps = list(overlapping(runs, faults))
    found.wrong += [f"overlap: {one}\n         {other}" for one, other in overlaps]
    found.wrong += out_of_order(expected, by_job, faults)
    begun = [(one, by_job[one.object, one.job][0].started) for one in expected if by_job[one.object, one.job]]
    late = sorted(started - one.due for one, started in begun)
    outages = merged([(fault.began, fault.ended + RECONNECTS) for fault in faults if not fault.pids])
    in_vain = {one: started - one.due - overlap(outages, one.due, started) for one, started in begun}
    for one, seconds in in_vain.items():
        if seconds > BOUND:
            found.wrong.append(f"a job began {seconds:.1f} s late: {one}: {by_job[one.object, one.job]}")
    if late and late[0] < -0.1:
        found.wrong.append(f"a job began {-late[0]:.3f} s early")
    found.figures = {
        "jobs": dict(Counter(one.kind for one in expected)),
        "jobs of which nobody knows whether they were stored": sum(one.unsure for one in expected),
        "runs": len(runs),
        "runs that died": sum(run.outcome == "died" for run in runs),
        "runs repeated because their end was not stored": repeats,
        "lateness of first runs (s)": {
            name: round(late[min(int(share * len(late)), len(late) - 1)], 3)
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1))
        }
        if late
        else {},
        "the same at most, without the time of outages (s)": round(max(in_vain.values(), default=0), 3),
        "faults": dict(Counter(fault.kind for fault in faults)),
    }
    return found


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time without those in which they lie over each other."""
    found: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        else:
            found.append((began, ended))
    return found


def overlap(spans: Sequence[tuple[float, float]], since: float, until: float) -> float:
    """How much of a span of time lies within others, which do not lie over each other."""
    return sum(max(0.0, min(ended, until) - max(began, since)) for began, ended in spans)


def may_be_unstored(run: Run, faults: Sequence[Fault]) -> bool:
    """Whether something was wrong with the database or with the run's own process around the run's end."""
    assert run.ended is not None
    for fault in faults:
        if run.pid in fault.pids or run.parent in fault.pids:
            if fault.began <= run.ended + 10 and run.started <= fault.ended:
                return True
        elif "database" in fault.kind and fault.began - 1 <= run.ended <= fault.ended + 3:
            return True
    return False


def overlapping(runs: Sequence[Run], faults: Sequence[Fault]) -> list[tuple[Run, Run]]:
    """Pairs of runs of one object at one time, but for those of a worker that was stopped for longer than its lease:
    what it does when it goes on is late, and refused."""
    stops = [fault for fault in faults if "for long" in fault.kind]
    found, open_runs = [], defaultdict(list)
    for run in sorted(runs, key=lambda run: run.started):
        before = [other for other in open_runs[run.object] if other.overlaps(run)]
        found += [(other, run) for other in before if not was_stopped(other, stops)]
        open_runs[run.object] = [*before, run]
    return found


def was_stopped(run: Run, stops: Sequence[Fault]) -> bool:
    return any(run.pid in stop.pids and run.started <= stop.began <= (run.ended or stop.began) for stop in stops)


def out_of_order(
    expected: Sequence[Expected], by_job: dict[tuple[str, str], list[Run]], faults: Sequence[Fault]
) -> list[str]:
    """The jobs of an object must begin in due order, unless a death put one of them off, of which the ledger may know
    nothing: it can come before the job's first line."""
    deaths = [fault.began for fault in faults if fault.pids]
    objects: dict[str, list[Expected]] = defaultdict(list)
    for one in expected:
        if one.kind == "chain":
            objects[one.object].append(one)
    wrong = []
    for name, jobs in objects.items():
        jobs.sort(key=lambda one: one.due)
        runs = [by_job[name, one.job] for one in jobs]
        if any(len(mine) != 1 for mine in runs):
            continue
        starts = [mine[0].started for mine in runs]
        if starts != sorted(starts) and not any(jobs[0].due <= death <= max(starts) for death in deaths):
            wrong.append(f"not in due order: {runs}")
    return wrong
