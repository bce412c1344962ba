"""How processes and workers end: struck, hung, put back, renewed, lost alone or with all that they run."""

from __future__ import annotations

from hypothesis import strategies as st

from celery_lifecycle.model import Cause
from celery_lifecycle.store.ends import End
from celery_lifecycle.store.workers import Running
from celery_lifecycle.transitions.run import Worker
from tests.property.store_model.actions import action
from tests.property.store_model.machine import Playing
from tests.property.store_model.model import ALARM, DOUBT, LEASE, SECOND, START, Flight, Thing, begun_again
from tests.property.store_model.outcomes import OUTCOMES, Outcomes, writes
from tests.property.store_model.world import DAY

ENDS = [End.DIED, End.DIED, End.PUT_BACK, End.HUNG, End.TIMED_OUT, End.REVOKED]


class Deaths(Outcomes):
    """A worker's parent sees its processes end; where nobody is left to see it, the leases tell."""

    @action(3, when=lambda self: self.messages, place=st.sampled_from([0, 0, 1]), again=st.booleans())
    def the_newest_kills_its_process(self, place: int, again: bool) -> None:
        playing = self.take(place)
        if playing is not None:
            self.end(playing, End.DIED)
            if again:
                self.end(playing, End.DIED)

    @action(3, when=lambda self: self.playing, end=st.sampled_from(ENDS), other=st.sampled_from([0, 0, 0, 0, 1]))
    def a_process_ends(self, data: st.DataObject, end: End, other: int) -> None:
        """As seen by its own parent, or by one of another process that ran the same message."""
        self.end(data.draw(st.sampled_from(self.playing)), end, other)

    def end(self, playing: Playing, end: End, other: int = 0) -> None:
        worker = Worker(playing.worker.instance, playing.worker.pid + other)
        ended = self.table.store.ends.end(playing.link, worker, end)
        # A parent has no token: task id, instance and pid are all that it knows.
        thing = self.by_id(playing.link.object_id)
        flight = thing.run.flight if thing is not None and thing.run is not None else None
        here = (playing.link.task_id, worker.instance, worker.pid)
        if thing is None or flight is None or (flight.task_id, flight.worker, flight.pid) != here:
            assert ended is None
            self.hit("end: refused")
            return
        assert ended is not None
        self.hit(f"end: {end.value}")
        if playing in self.playing:
            self.playing.remove(playing)
        if end is End.DIED:
            self.struck(thing, flight, ended, "crash")
            thing.run = None
        elif end is End.PUT_BACK:
            self._put_back(thing, flight)
        else:
            died = self._used_up(thing, flight, end)
            assert bool(ended.dead) == died
        self.saved(thing)

    def _put_back(self, thing: Thing, flight: Flight) -> None:
        """What a deploy does: the job stays as it was."""
        job = thing.jobs.get(flight.marked)
        if job is not None:
            job.unmark()
            begun_again(job, flight)
        thing.run = None

    def _used_up(self, thing: Thing, flight: Flight, end: End) -> bool:
        """A hard time limit or a fenced-off hung job uses up an attempt; a revoked one is dead. Whether a job is dead."""
        job = thing.jobs.get(flight.marked)
        mine = job is not None and job.version == flight.version
        if job is not None and not mine:
            job.unmark()
        if flight.job == START and end is not End.REVOKED:
            if job is not None:
                job.unmark()
            thing.start_failed(self.now)
            return False
        thing.look(flight.marked)
        thing.run = None
        if flight.job == ALARM and end is not End.REVOKED:
            died = not flight.final and (job is None or mine)
            died = died and self.alarm_again(thing, flight.task, flight.queue, end.value)
            thing.answer(flight.alive)
            return died
        if job is None:
            return False
        if job.is_hook:
            del thing.jobs[job.id]
            return False
        if not mine:
            return False
        if end is End.REVOKED or job.attempt + 1 >= job.most_attempts:
            self.world.give_up(thing, job, end.value)
            self.hit(f"end: {end.value}, for good")
            return True
        job.attempt += 1
        job.unmark()
        return False

    @action(2, when=lambda self: self.playing, cause=st.sampled_from([Cause.MEMORY_ERROR, Cause.MEMORY_LIMIT]))
    def struck_inside(self, data: st.DataObject, cause: Cause) -> None:
        """A `MemoryError` in the job, in `on_start` or in `on_alarm`; the process goes on."""
        playing = data.draw(st.sampled_from(self.playing))
        if playing.is_hook:
            return
        self.playing.remove(playing)
        thing = self.held(playing)
        ended = self.table.store.ends.struck_inside(playing.link, playing.begun.token, cause, {})
        assert (ended is None) == (thing is None)
        self.either("struck_inside", thing)
        if thing is not None:
            self.struck(thing, thing.in_flight(), ended, cause.value)
            thing.run = None
            self.saved(thing)

    @action(
        2,
        when=lambda self: self.playing,
        outcome=st.sampled_from(OUTCOMES),
        wrote=writes,
        after=st.sampled_from([20, 25, 26]),
    )
    def a_result_comes_late(self, data: st.DataObject, outcome: str, wrote: dict[str, str | None], after: int) -> None:
        """Nobody renewed the lease of a job that ran for long."""
        playing = data.draw(st.sampled_from(self.playing))
        self.forward(20)
        self.ticked()
        self.forward(after - 20)
        self.ticked()
        if playing.starting:
            self.enter(playing)
        elif playing in self.playing:
            self.play(playing, outcome, wrote)

    @action(
        2, when=lambda self: any(one.message.token is None for one in self.playing), outcome=st.sampled_from(OUTCOMES)
    )
    def a_message_that_comes_twice_opens_two_runs(self, data: st.DataObject, outcome: str) -> None:
        """The second run has the same task id at the same step as the first, whose late result must not end it."""
        first = data.draw(st.sampled_from([one for one in self.playing if one.message.token is None]))
        if first.starting and not self.enter(first):
            return
        self.forward(LEASE // SECOND)
        self.deliver(first.message, 1)  # the lease is over, the run is not
        self.ticked()
        self.forward(DOUBT // SECOND)
        self.ticked()
        self.forward(300)
        second = self.deliver(first.message, 1)
        if second is not None and second.link.task_id == first.link.task_id:
            self.hit("a message opens two runs")
        self.play(first, outcome, {})

    # --- workers

    @action(
        3,
        when=lambda self: self.playing,
        seconds=st.sampled_from([0, 5, 21, 27]),
        wrong=st.sampled_from([0, 0, 0, 1]),
        ticks=st.booleans(),
    )
    def renew(self, seconds: int, wrong: int, ticks: bool) -> None:
        """The parents renew what they see running, be it late; none renews what another process runs."""
        self.forward(seconds)
        if ticks:
            self.ticked()
        for instance in self.instances:
            mine = [one for one in self.playing if one.worker.instance == instance]
            running = [
                Running(one.link.object_id, one.link.task_id, one.worker.pid + wrong * (place + 1))
                for place, one in enumerate(mine)
            ]
            renewed, seen = self.table.store.workers.renew(instance, running), 0
            for thing in self.things.values():
                flight = thing.run.flight if thing.run is not None else None
                if flight is None or flight.worker != instance or thing.run is None:
                    continue
                if any(
                    (thing.id, flight.task_id, flight.pid) == (one.object_id, one.task_id, one.pid) for one in running
                ):
                    if thing.run.doubt:
                        self.hit("renew: a doubt is cleared")
                    thing.run.lease, thing.run.doubt = self.now + LEASE, False
                    seen += 1
            assert renewed == seen
            if running:
                self.either("renew", seen)

    @action(1, when=lambda self: self.playing, place=st.sampled_from([0, 1]), draining=st.booleans())
    def heartbeat(self, place: int, draining: bool) -> None:
        self._beat(self.instances[place], draining)

    def _beat(self, instance: str, draining: bool) -> None:
        """A worker tells that it lives, and whether it is on its way out."""
        self.table.store.workers.beat(instance, {"draining": draining})
        self.world.draining[instance] = draining
        self.world.heard[instance] = self.now + DAY
        self.world.lost.pop(instance, None)

    @action(
        3,
        when=lambda self: self.playing or self.messages,
        place=st.sampled_from([0, 0, 0, 1]),
        delivers=st.integers(0, 3),
        draining=st.sampled_from([None, None, None, True, False]),
        again=st.booleans(),
    )
    def a_worker_is_lost(self, place: int, delivers: int, draining: bool | None, again: bool) -> None:
        """With all its processes, after it took some more messages; nobody says a word of it. The next one, too."""
        self._take_and_lose(place, delivers, draining)
        if again:
            self.forward(301)
            self.ticked()
            self._take_and_lose(place, 3, None)

    def _take_and_lose(self, place: int, delivers: int, draining: bool | None) -> None:
        for _ in range(delivers):
            playing = self.take(place) if self.messages else None
            if playing is not None and playing.starting:
                self.enter(playing)
        instance = self.instances[place]
        if draining is not None:
            self._beat(instance, draining)
        aboard = self.world.aboard(instance)
        self.hit(f"a worker is lost with {len(aboard)}")
        self.playing = [one for one in self.playing if one.worker.instance != instance]
        self.lives += 1
        self.instances[place] = f"w{self.lives}"
        for after in (LEASE, DOUBT) if aboard else ():
            self.forward(after // SECOND)
            self.ticked()

    @action(2, when=lambda self: self.has_alarm, delivers=st.integers(2, 6))
    def it_gets_late_and_all_comes_at_once(self, delivers: int) -> None:
        """What was put off is due: one worker takes it all, suspects too."""
        self.forward(301)
        self.ticked()
        for _ in range(delivers):
            if self.messages:
                self.take()
