"""The hooks of a class around its jobs: `on_start` before them, the bare alarm that `on_alarm` leaves if it fails."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.property.store_model.actions import action
from tests.property.store_model.machine import Playing
from tests.property.store_model.model import ALARM, LEASE, RETRIES, SECOND, Thing
from tests.property.store_model.workers import Workers, worker_key


class Hooks(Workers):
    """`on_start` runs in each process that gets a link of the run; what it threw, or died of, holds the object back."""

    @action(5, when=lambda self: any(one.starting for one in self.playing), well=st.sampled_from([True, True, False]))
    def on_start_ends(self, data: st.DataObject, well: bool) -> None:
        playing = data.draw(st.sampled_from([one for one in self.playing if one.starting]))
        if well:
            self.enter(playing)
        else:
            self.fail_start(playing)

    def enter(self, playing: Playing) -> bool:
        """`on_start` has ended well; whether something runs now."""
        thing = self.held(playing)
        entered = self.table.store.runs.enter(playing.link, playing.begun.token, playing.begun)
        assert (entered is None) == (thing is None)
        self.either("enter", thing)
        if thing is None or entered is None:
            self.playing.remove(playing)
            return False
        self.started.add((*worker_key(playing.worker), playing.begun.token))
        flight, found = thing.in_flight(), thing.jobs.get(playing.link.job)
        job = found
        if not playing.begun.alarm and job is not None and job.version != flight.version:
            same = (job.task, job.owner) == (flight.task, flight.owner) and job.plan is None
            job = job if same and thing.is_due(job, self.now) else None
        if flight.final or (job is None and not playing.begun.alarm):
            if found is not None:
                found.unmark()
            self.hit("enter: passed over")
            self.playing.remove(playing)
            assert thing.run is not None
            thing.run.flight, thing.run.step = None, playing.link.position
            self._passed(thing, playing, entered, playing.link.last or flight.final)
            return False
        flight.carrier = None
        if playing.begun.alarm or job is None:
            flight.job = flight.line = ALARM
        else:
            flight.job, flight.version, flight.line, flight.queue = job.id, job.version, job.line, job.queue
        thing.started_well()
        assert thing.run is not None
        thing.run.lease, thing.run.doubt = self.now + LEASE, False
        playing.begun, playing.starting = entered, False
        self.saved(thing)
        return True

    def fail_start(self, playing: Playing) -> None:
        thing = self.held(playing)
        again = self.table.store.runs.start_failed(playing.link, playing.begun.token)
        assert (again is None) == (thing is None)
        self.playing.remove(playing)
        self.either("start_failed", thing)
        if thing is not None:
            job = thing.jobs.get(playing.link.job)
            if job is not None:
                job.unmark()
            thing.start_failed(self.now)
            assert again == (thing.not_before or self.now)
            self.saved(thing)

    def alarm_again(self, thing: Thing, task: str, queue: str, reason: str) -> bool:
        """The bare alarm at 2 s × 2^n, also where jobs had triggered the run; after six retries it is dead."""
        alarm = thing.jobs.get(ALARM)
        failed = (alarm.attempt if alarm else 0) + 1
        due = self.now + 2 * SECOND * 2 ** (failed - 1)
        versions = thing.versions
        again = thing.own_job(ALARM, task, queue, self.now, due)
        again.attempt = failed
        if failed > RETRIES:
            thing.versions = versions
            self.world.bury(thing, again, reason)
            del thing.jobs[ALARM]
            self.hit("on_alarm: dead after its retries")
            return True
        again.suspect = alarm.suspect if alarm else None
        again.unmark()
        return False
