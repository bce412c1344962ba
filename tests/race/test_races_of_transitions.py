"""Every pair of transitions that can meet, on two connections: the loser waits for the row lock, then finds what the winner left.

What comes out must be what comes out when the loser begins after the winner's commit; that is tried beside it, on an object
of its own. Claims and renewals skip a row that is held, and change nothing of it.
"""

from __future__ import annotations

import pytest

from tests.support.comparison import left, told, tried
from tests.support.races import Gate, race
from tests.support.scenes import SCENES, SKIPPING, twins


@pytest.mark.parametrize("name", SCENES)
def test_the_loser_of_two_transitions_does_what_it_does_after_the_winner(name, tables, database):
    one, two, eyes = tables
    play = SCENES[name]
    verbs = {**play.verbs, **play.seldom}
    clock = one.clock
    for nth, (first, second) in enumerate(play.pairs(one_lock=database.kind == "sqlite"), 1):
        begin_at = clock.ms
        raced, apart = twins(f"{first} {second}")
        play.prepare(one, raced)
        clock.ms = begin_at
        play.prepare(one, apart)
        # With SQLite there is one lock for all, which nothing can skip.
        skips = second in SKIPPING and database.kind != "sqlite"
        came = race(
            Gate(one),
            lambda scene=raced, verb=first: tried(verbs[verb], one, scene),
            lambda scene=raced, verb=second: tried(verbs[verb], two, scene),
            None if skips else eyes,
        )
        due = tried(verbs[first], one, apart), None if skips else tried(verbs[second], two, apart)
        what = f"{name}: {first}, then {second}"
        assert told(came[0]) == told(due[0]), what
        if skips:
            assert told(came[1]) in (0, ([], 0, 0)), f"{what}: it took a row that is held"
        else:
            assert told(came[1]) == told(due[1]), what
        assert left(one, raced) == left(one, apart), what
        clock.ms = begin_at + 60_000
        if nth % 20 == 0:
            one.check()
            one.empty()
    one.check()
