"""Keep-alives and tracked work: held, renewed, handed to a worker, given back, lost."""

from __future__ import annotations

from hypothesis import strategies as st

from celery_lifecycle.model import Cause
from celery_lifecycle.store.ends import End
from tests.property.store_model.actions import action
from tests.property.store_model.clients import names
from tests.property.store_model.deaths import Deaths
from tests.property.store_model.machine import ALARM_TASK, QUEUES, Playing
from tests.property.store_model.model import ALIVE, Flight
from tests.property.store_model.world import Hold

LASTS = 30_000
KINDS = st.sampled_from(["alive", "track", "track"])


class Holds(Deaths):
    """An object is kept by what holds it; a holder that dies wakes it, and strikes the job that handed its work off."""

    @action(2, name=names, kind=KINDS, nth=st.sampled_from([1, 2]), wakes=st.booleans())
    def hold(self, name: str, kind: str, nth: int, wakes: bool) -> None:
        thing = self.made(name)
        flight = thing.run.flight if thing.run is not None else None
        job = None if kind == "alive" else flight.job if flight is not None else "a"
        key = f"{kind}-{name}{nth}"
        data = {"wake": [ALARM_TASK, QUEUES[0]] if wakes else None}
        under = self.table.store.holds.hold(self.ref(name), kind, key, job, data, LASTS)
        assert under == key
        known = self.world.holds.get((kind, under))
        if known is None:
            thing.holds += 1
        kept: Flight | None = flight if flight is not None and flight.job == job else None
        # Held again under the same key it keeps the job that it was first held by.
        first = known.job if known is not None else job
        copied = Flight(**vars(kept)) if kept is not None else None
        self.world.holds[kind, under] = Hold(name, first, self.now + LASTS, copied, None, wakes)
        self.hit(f"hold: {kind}{' by a job' if kept else ''}")
        self.saved(thing)

    @action(2, when=lambda self: self.playing, then=st.sampled_from(["goes on", "dies", "is lost"]))
    def a_job_hands_work_off(self, data: st.DataObject, then: str) -> None:
        """And looks again later, while the work goes on or dies: no clean end of a struck job."""
        playing = data.draw(
            st.sampled_from(sorted(self.playing, key=lambda one: -one.begun.job.strikes if one.begun.job else 0))
        )
        self._hand_off(playing, then)

    @action(2, when=lambda self: self.messages)
    def a_struck_job_hands_work_off(self) -> None:
        """As long as the work goes on, looking again is no clean end: the strike stays."""
        struck = self.take()
        if struck is None or (struck.starting and not self.enter(struck)):
            return
        self.end(struck, End.DIED)
        self.forward(61)
        self.ticked()
        playing = self.take() if self.messages else None
        if playing is not None:
            self._hand_off(playing, "goes on")

    def _hand_off(self, playing: Playing, then: str) -> None:
        if self.held(playing) is None or playing.begun.job is None or playing.is_hook:
            return
        if playing.starting and not self.enter(playing):
            return
        self.hold(playing.name, "track", 1, True)
        key = f"track-{playing.name}1"
        if then == "is lost":
            assert self.table.store.holds.run_by(key, self.instances[1], LASTS)
            hold = self.world.holds["track", key]
            hold.worker, hold.expires = self.instances[1], self.now + LASTS
            self._lost("track", key, Cause.LOST, hold.expires)
        elif then == "dies":
            self._lost("track", key, Cause.CRASH, None)
        self.play(playing, "reschedule", {})

    @action(
        2,
        when=lambda self: self.world.holds,
        what=st.sampled_from(["extend", "run_by", "run_by", "let_go"]),
        gone=st.sampled_from([0, 0, 0, 1]),
    )
    def use_a_hold(self, data: st.DataObject, what: str, gone: int) -> None:
        kind, key = data.draw(st.sampled_from(sorted(self.world.holds)))
        holds, hold = self.table.store.holds, self.world.holds[kind, key]
        if gone:
            assert not holds.extend(kind, "nobody", LASTS)
            assert not holds.let_go(self.ref(hold.name), kind, "nobody")
            return
        self.hit(f"{what}: {kind}")
        if what == "extend":
            assert holds.extend(kind, key, LASTS)
            hold.expires = self.now + LASTS
        elif what == "run_by":
            assert holds.run_by(key, self.instances[0], LASTS) == (kind == "track")
            if kind == "track":
                hold.worker, hold.expires = self.instances[0], self.now + LASTS
        else:
            assert holds.let_go_by_key(kind, key)
            assert not holds.let_go(self.ref(hold.name), kind, key)
            del self.world.holds[kind, key]
            thing = self.things[hold.name]
            thing.holds -= 1
            self.saved(thing)

    @action(
        2,
        when=lambda self: self.world.holds,
        cause=st.sampled_from([None, Cause.CRASH, Cause.CRASH, Cause.MEMORY_ERROR]),
    )
    def a_holder_dies(self, data: st.DataObject, cause: Cause | None) -> None:
        """As its worker's parent sees it."""
        kind, key = data.draw(st.sampled_from(sorted(self.world.holds)))
        self._lost(kind, key, cause if kind == "track" else None, None)

    @action(
        2,
        when=lambda self: self.world.holds,
        seconds=st.sampled_from([0, 31, 31]),
        renewed=st.sampled_from([False, False, True]),
    )
    def beat_looks_for_expired_holds(self, seconds: int, renewed: bool) -> None:
        """A hold that is renewed between beat's look and its verdict is not lost."""
        self.forward(seconds)
        expired = self.table.store.holds.expired()
        told = {which for which, hold in self.world.holds.items() if hold.expires < self.now}
        assert {(one.kind, one.key) for one in expired} == told
        for one in expired:
            if renewed:
                assert self.table.store.holds.extend(one.kind, one.key, LASTS)
                self.world.holds[one.kind, one.key].expires = self.now + LASTS
            self._lost(one.kind, one.key, Cause.LOST if one.kind == "track" else None, one.expires_ms)

    def _lost(self, kind: str, key: str, cause: Cause | None, expires: int | None) -> None:
        lost = self.table.store.holds.lost(kind, key, cause, None, expires)
        hold = self.world.holds[kind, key]
        if expires is not None and expires != hold.expires:
            assert lost is None
            self.hit("lost hold: renewed meanwhile")
            return
        assert lost is not None
        del self.world.holds[kind, key]
        thing = self.things[hold.name]
        thing.holds -= 1
        by_nobody = cause is Cause.LOST and (hold.worker is None or self.world.draining.get(hold.worker, False))
        if cause is not None and hold.flight is not None and not by_nobody:
            self.hit(f"lost hold: {cause.value} strikes")
            self.struck(thing, hold.flight, lost, cause.value, lost=cause is Cause.LOST)
        else:
            assert lost.context is None
            self.hit("lost hold: strikes nobody")
        if hold.wakes and not thing.disabled:
            thing.own_job(ALIVE, ALARM_TASK, QUEUES[0], self.now)
        self.saved(thing)
