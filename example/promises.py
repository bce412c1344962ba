"""What must come of the demo: each promise is checked against the feed and the database."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from example.shop import DAY, SearchIndex, lifecycle
from example.story import PICTURES, PUSHES, ROWS, Story

PERIODS = 4


@dataclass(frozen=True)
class Promise:
    """What must come true, and how to see whether it has: (kept, what was seen)."""

    text: str
    check: Callable[[Story], tuple[bool, str]]


def one_reminder(story: Story) -> tuple[bool, str]:
    mails = story.said("mail to anna")
    kept = mails == [f"mail to anna: You forgot {PUSHES} things in your cart"]
    return kept, f"{len(mails)} mail, {', '.join(mails)[14:]}"


def none_when_bought(story: Story) -> tuple[bool, str]:
    mails, left = story.said("mail to bert"), story.bought.jobs.list()
    gone = lifecycle.store.objects.find(story.bought.ref) is None
    return (
        story.is_played and not mails and not left and gone,
        f"{len(mails)} mails, the cart is {'gone' if gone else 'still there'}",
    )


def billed_each_period(story: Story) -> tuple[bool, str]:
    starts = [one["at"] for one in story.of("job_started", story.subscription.ref)]
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    paid = sorted(story.subscription.storage.list("paid-"))
    kept = paid == [f"paid-{n + 1}" for n in range(len(paid))] and len(paid) >= PERIODS and min(gaps) >= DAY * 0.99
    told = (
        f"{len(paid)} periods paid, {min(gaps):.1f} to {max(gaps):.1f} s apart" if gaps else f"{len(paid)} periods paid"
    )
    return kept, told


def charged_at_the_third_attempt(story: Story) -> tuple[bool, str]:
    charge = "billing.charge/carla-1"
    attempts = [one["attempt"] for one in story.of("job_started", charge)]
    done = story.of("job_completed", charge)
    return attempts == [1, 2, 3] and len(done) == 1, f"attempts {attempts}, {len(done)} completed"


def dead_invoice(story: Story) -> tuple[bool, str]:
    dead = lifecycle.object("billing.invoice", "dora").dead_jobs()
    attempts = len(story.of("job_started", "billing.invoice/dora"))
    kept = attempts == 3 and [one.reason for one in dead] == ["failed"] and "Traceback" in (dead[0].traceback or "")
    return kept, f"{attempts} attempts, then {dead[0].error}" if dead else f"{attempts} attempts"


def rows_in_slices(story: Story) -> tuple[bool, str]:
    wanted = [f"rows {n + 1} to {n + 25} copied" for n in range(0, ROWS, 25)]
    copied, yields = story.said("rows"), len(story.of("job_yielded", story.supplier.ref))
    return copied == wanted and yields == len(wanted) - 1, f"{len(copied)} slices, {yields} yields"


def pictures_under_a_heartbeat(story: Story) -> tuple[bool, str]:
    beats = len(story.of("job_rescheduled", story.supplier.ref, "pictures"))
    copied, strikes = story.said("picture"), story.of("alarm_memory_limit_reset", story.supplier.ref)
    mails, stored = story.said("mail to the buyers"), story.supplier.storage.get("pictures", 0)
    kept = beats >= 3 and stored == PICTURES and len(strikes) == len(mails) == 1 and len(copied) <= PICTURES + 1
    return kept, f"{beats} heartbeats, {len(strikes)} strike, {len(copied)} pictures copied"


def slowed_then_sealed(story: Story) -> tuple[bool, str]:
    starts = [one["at"] for one in story.of("job_started", story.index.ref, "rebuild")]
    strikes = story.of("alarm_memory_limit_reset", story.index.ref)
    seen = [(one["strikes"], one["sealed"], one["cause"]) for one in strikes]
    gaps = [start - strike["at"] for start, strike in zip(starts[1:], strikes, strict=False)]
    slowed = all(
        start >= datetime.fromisoformat(strike["next_time"]).timestamp()
        for start, strike in zip(starts[1:], strikes, strict=False)
    )
    dead = [one.reason for one in story.index.dead_jobs()]
    wanted = [(n, n == SearchIndex.max_memory_strikes, "memory_limit") for n in (1, 2, 3)]
    kept = seen == wanted and len(starts) == 3 and slowed and dead == ["sealed"]
    told = ", ".join(f"+{gap:.1f} s" for gap in gaps)
    return kept, f"{len(starts)} starts ({told}), {len(seen)} strikes, {', '.join(dead) or 'not sealed'}"


def operators_were_told(story: Story) -> tuple[bool, str]:
    mails = story.said("mail to the operators")
    return len(mails) == 3 and mails[-1].endswith("given up"), f"{len(mails)} mails"


def refresh_unharmed(story: Story) -> tuple[bool, str]:
    runs = [one["at"] for one in story.of("job_rescheduled", story.index.ref, "refresh")]
    marks = [one["at"] for one in story.of("alarm_memory_limit_reset", story.index.ref)]
    between = [sum(begin < run < end for run in runs) for begin, end in pairwise([*marks, float("inf")])]
    return len(marks) == 3 and all(between), f"{len(runs)} runs, after each strike {between}"


def killed_once(story: Story) -> tuple[bool, str]:
    starts = len(story.of("job_started", story.parcel.ref))
    strikes = [one["cause"] for one in story.of("alarm_memory_limit_reset", story.parcel.ref)]
    labels = story.parcel.storage.get("labels", 0)
    kept = starts == 2 and len(strikes) == 1 and labels == 1 and not story.parcel.dead_jobs()
    return kept, f"{starts} starts, strikes {strikes}, {labels} label(s)"


def nobody_else_was_struck(story: Story) -> tuple[bool, str]:
    struck = {one["object"] for one in story.facts if one["fact"] == "alarm_memory_limit_reset"}
    others = struck - {str(guilty.ref) for guilty in (story.index, story.parcel, story.supplier)}
    return bool(struck) and not others, f"struck besides: {', '.join(sorted(others)) or 'none'}"


PROMISES = [
    Promise(f"A reminder pushed {PUSHES} times under one id is sent once", one_reminder),
    Promise("A cart that is bought takes its reminder along", none_when_bought),
    Promise("A subscription is billed every day, each period once", billed_each_period),
    Promise("A charge that fails twice is retried, and works", charged_at_the_third_attempt),
    Promise("An invoice that can't work becomes a dead job", dead_invoice),
    Promise("An import goes on slice by slice", rows_in_slices),
    Promise("Long work elsewhere is killed, and goes on where it was", pictures_under_a_heartbeat),
    Promise("A rebuild that runs out of memory is slowed, then sealed", slowed_then_sealed),
    Promise("The operators hear of each strike", operators_were_told),
    Promise("The other jobs of that object go on meanwhile", refresh_unharmed),
    Promise("A job whose process is killed runs again, and works", killed_once),
    Promise("No other object is struck", nobody_else_was_struck),
]
