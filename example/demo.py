"""See it work: the shop with a real worker and a real beat, on SQLite and files or on your servers, for half a minute.

    python -m example.demo
    DATABASE_URL=postgresql+psycopg://localhost/shop BROKER_URL=redis://localhost:6379/0 python -m example.demo

It ends by itself, says what was promised and what was seen, and leaves nothing behind. Exit code: 0 if every promise was
kept, 1 if not, 130 after Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from example.feed import Feed
from example.stage import Stage, StageError

if TYPE_CHECKING:
    from example.screen import Row, Screen
    from example.story import Story

DAY = 6.0
SETTINGS = {
    "lifecycle_strike_delay": 3,
    "lifecycle_backup_alarm": 10,
}
AT_LEAST, AT_MOST, LOOK_EVERY = 32.0, 120.0, 0.2

_interrupts: list[int] = []


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        with Stage(SETTINGS, DAY) as stage:
            return play(stage)
    except KeyboardInterrupt:
        print("Interrupted: worker and beat are stopped, nothing is left behind.", file=sys.stderr)
        return 130


def _leave(number: int, frame: object) -> NoReturn:
    """Python drops an exception that is raised while it runs a destructor or a callback: `_watch` looks here as well."""
    _interrupts.append(number)
    raise KeyboardInterrupt


def play(stage: Stage) -> int:
    """The whole demo, from the first process to the summary."""
    # Imported here: the shop reads the environment that the stage has just made.
    from example.promises import PROMISES
    from example.screen import Screen
    from example.shop import lifecycle
    from example.story import Story

    lifecycle.verify()
    screen, story = Screen(), Story(Feed(stage.feed))
    screen.say(f"A day of this shop lasts {DAY:.0f} s. Worker and beat are starting in {stage.folder} …")
    trouble = None
    try:
        stage.start()
        with screen:
            _watch(stage, story, screen)
    except StageError as error:
        trouble = str(error)
    checked = [(*promise.check(story), promise.text) for promise in PROMISES]
    screen.say("Worker and beat are stopping …\n")
    codes = stage.stop()
    screen.summary([(kept, text, seen) for kept, seen, text in checked])
    kept = sum(kept for kept, _, _ in checked)
    ended = ", ".join(f"{name} ended with {code}" for name, code in codes.items())
    screen.say(f"\n{kept} of {len(checked)} promises kept; {ended}.")
    if kept == len(checked) and trouble is None and not any(codes.values()):
        return 0
    screen.say(f"\n{trouble or 'Something was not as promised.'} The ends of the logs:\n{stage.tail()}")
    return 1


def _watch(stage: Stage, story: Story, screen: Screen) -> None:
    """Play and show until every promise is kept and some time has passed in which it could have been broken."""
    from example.promises import PROMISES

    began = time.monotonic()
    screen.begin()
    while (elapsed := time.monotonic() - began) < AT_MOST:
        if _interrupts:
            raise KeyboardInterrupt
        stage.check()
        story.play(elapsed)
        facts = story.listen()
        kept = [(promise.check(story)[0], promise.text) for promise in PROMISES]
        screen.show(_look(), facts, kept)
        if elapsed >= AT_LEAST and all(is_kept for is_kept, _ in kept):
            break
        time.sleep(LOOK_EVERY)
    story.leave()


def _look() -> list[Row]:
    from example.screen import Row
    from example.shop import lifecycle

    store = lifecycle.store
    return [
        Row(state, store.jobs.list(state.ref, None), len(store.dead.list(state.ref)))
        for state in store.objects.find_many()
    ]


if __name__ == "__main__":
    sys.exit(main())
