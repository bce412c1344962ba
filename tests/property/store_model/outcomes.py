"""How links end: with an outcome, with an error, tried again, or dropped before any code ran."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from celery_lifecycle.model import Link, Shipment, Why
from celery_lifecycle.transitions.run import Action, Verdict
from tests.property.store_model.actions import action
from tests.property.store_model.hooks import Hooks
from tests.property.store_model.machine import ALARM_TASK, Message, Playing
from tests.property.store_model.model import ALARM, SECOND, Job, Thing
from tests.property.store_model.workers import places

OUTCOMES = ["complete", "complete", "reschedule", "yield", "again", "dead"]
writes = st.sampled_from([{}, {}, {}, {"k": "2"}, {"k": None}])


class Outcomes(Hooks):
    """An outcome counts once, for the run and the version that it belongs to."""

    @action(8, when=lambda self: self.messages, outcome=st.sampled_from(OUTCOMES), wrote=writes, place=places)
    def run_the_newest(self, outcome: str, wrote: dict[str, str | None], place: int) -> None:
        playing = self.take(place)
        if playing is not None:
            self.play(playing, outcome, wrote)

    @action(3, when=lambda self: self.messages, outcome=st.sampled_from(OUTCOMES))
    def run_all_of_the_newest(self, outcome: str) -> None:
        for _ in range(4):
            playing = self.take() if self.messages else None
            if playing is None:
                return
            self.play(playing, outcome, {})

    @action(6, when=lambda self: self.playing, outcome=st.sampled_from(OUTCOMES), wrote=writes)
    def finish(self, data: st.DataObject, outcome: str, wrote: dict[str, str | None]) -> None:
        self.play(data.draw(st.sampled_from(self.playing)), outcome, wrote)

    def play(self, playing: Playing, outcome: str, wrote: dict[str, str | None]) -> None:
        """The rest of a link's life in its process."""
        if playing.starting and not self.enter(playing):
            return
        self.playing.remove(playing)
        if playing.begun.alarm and outcome in ("again", "dead"):
            self._alarm_fails(playing)
        else:
            self._finish(playing, outcome, wrote)

    def _verdict(self, playing: Playing, outcome: str) -> Verdict:
        job = playing.begun.job
        if playing.begun.alarm or playing.is_hook or job is None:
            return Verdict(Action.COMPLETE, clean=not playing.is_hook)
        return {
            "complete": Verdict(Action.COMPLETE, clean=True, strikes=job.strikes),
            "reschedule": Verdict(Action.RESCHEDULE, delay_ms=20 * SECOND, clean=True, strikes=job.strikes),
            "yield": Verdict(Action.YIELD, strikes=job.strikes),
            "again": Verdict(Action.AGAIN, delay_ms=10 * SECOND, attempt=job.attempt + 1, strikes=job.strikes),
            "dead": Verdict(Action.DEAD, why=Why.FAILED, strikes=job.strikes),
        }[outcome]

    def _finish(self, playing: Playing, outcome: str, wrote: dict[str, str | None]) -> None:
        thing, verdict = self.held(playing), self._verdict(playing, outcome)
        finish = self.table.store.runs.finish
        done = finish(playing.link, playing.begun.token, verdict, wrote)
        assert done.accepted == (thing is not None)
        self.either("finish", thing)
        if thing is None:
            self.hit("finish: refused with storage" if wrote else "finish: refused without")
            return
        flight = thing.in_flight()
        job, clean = thing.jobs.get(flight.job), verdict.clean
        if verdict.action is Action.RESCHEDULE and self._is_tracked(thing, flight.job):
            self.hit("finish: tracked work goes on")
            clean = False
        if job is not None and verdict.strikes is not None and job.strikes > verdict.strikes:
            self.hit("finish: struck meanwhile")
            clean = False
        if clean:
            thing.clear_deaths(flight.line, flight.job)
            if flight.job == ALARM:
                thing.not_before, thing.failures = None, 0
        newer = job is not None and job.version != flight.version
        assert done.discarded == ((job is None and flight.job != ALARM) or (newer and flight.version != 0))
        if done.discarded:
            self.hit("finish: discarded")
        assert thing.run is not None
        thing.look(flight.job)
        thing.wait(self.now)
        if job is not None and newer:
            job.acquit() if clean else job.unmark()
        elif job is not None:
            self._apply(thing, job, verdict, clean)
        closes = playing.link.last or flight.final
        if not flight.final:
            self.write(thing, wrote)
        if closes or wrote:
            thing.answer(flight.alive)
        chain = thing.close(self.now) if closes else None
        self.saved(thing)
        assert done.closed == closes
        self.shipped(thing, chain, done.shipment)
        self.go_on(playing.message, playing.begun.token, closes)
        if playing.begun.job is not None:  # its process may not have heard of it, and asks again
            assert finish(playing.link, playing.begun.token, verdict, {"k": "9"}, playing.begun.job).accepted

    def _is_tracked(self, thing: Thing, job_id: str) -> bool:
        return any(
            (kind, hold.name, hold.job) == ("track", thing.name, job_id) for (kind, _), hold in self.world.holds.items()
        )

    def _apply(self, thing: Thing, job: Job, verdict: Verdict, clean: bool) -> None:
        """The outcome, for the version that ran."""
        ends = verdict.action in (Action.COMPLETE, Action.DEAD)
        after = job.plan.after(self.now) if job.plan is not None and ends else None
        if verdict.action is Action.DEAD:
            occurrence = job.plan.occurrence() if job.plan is not None and after is not None else job.plan
            self.world.bury(thing, replace(job, plan=occurrence), "failed")
        if ends and after is None:
            del thing.jobs[job.id]
            return
        job.acquit() if clean else job.unmark()
        job.version, job.unknown_since = thing.next_version(), None
        job.attempt = verdict.attempt
        job.due = self.now + verdict.delay_ms
        if after is not None:
            job.plan, job.due = after, after.nominal
            self.hit("finish: the next occurrence")

    def _alarm_fails(self, playing: Playing) -> None:
        thing = self.held(playing)
        state = playing.begun.state
        queue = state.queue if state is not None and state.queue else "celery"
        done = self.table.store.runs.alarm_failed(playing.link, playing.begun.token, queue, ALARM_TASK, "no", "")
        assert done.accepted == (thing is not None)
        self.either("alarm_failed", thing)
        if thing is None:
            return
        flight, alarm = thing.in_flight(), thing.jobs.get(ALARM)
        stands = alarm is not None and alarm.version != flight.version
        assert done.discarded == stands
        if alarm is not None and stands:
            alarm.unmark()
        elif not flight.final:
            self.alarm_again(thing, ALARM_TASK, queue, "failed")
        thing.answer(flight.alive)
        thing.wait(self.now)
        chain = thing.close(self.now)
        self.saved(thing)
        self.shipped(thing, chain, done.shipment)

    @action(2, when=lambda self: self.playing)
    def an_attempt_fails(self, data: st.DataObject) -> None:
        """Before the next one in the same run."""
        playing = data.draw(st.sampled_from(self.playing))
        job = playing.begun.job
        if playing.starting or playing.is_hook or playing.begun.alarm or job is None:
            return
        thing = self.held(playing)
        said = self.table.store.runs.attempted(playing.link, playing.begun.token, job, job.attempt + 1)
        assert said == (thing is not None)
        self.either("attempted", thing)
        if thing is not None:
            now = thing.jobs.get(job.id)
            if now is not None and now.version == job.version:
                now.attempt = job.attempt + 1
                playing.begun = replace(playing.begun, job=job._replace(attempt=job.attempt + 1))

    # --- links that no code runs

    @action(2, when=lambda self: self.messages, why=st.sampled_from([Why.REVOKED, Why.UNKNOWN_TASK, Why.UNKNOWN_TASK]))
    def skip(self, data: st.DataObject, why: Why) -> None:
        """The worker's parent drops a message: its task is revoked, or unknown there."""
        self._skip(data.draw(st.sampled_from(self.messages + self.delivered)), why)

    def _skip(self, message: Message, why: Why) -> None:
        link = replace(message.links[0], token=message.token)
        dead, shipment = self.table.store.ends.skip(link, why)
        thing = self.by_id(link.object_id)
        if link.token is None:
            waits = thing is not None and thing.sent == link.dispatch
        else:
            waits = thing is not None and self._refusal(thing, link) is None
        self.either("skip", waits)
        if thing is None or not waits:
            assert (dead, shipment) == (None, None)
            return
        if link.token is None:
            thing.forget_chain()
        self._dropped(thing, link, why, dead is not None, shipment)

    @action(1, when=lambda self: any(one.begun.job is not None and not one.starting for one in self.playing))
    def an_owner_is_unknown(self, data: st.DataObject) -> None:
        able = [one for one in self.playing if one.begun.job is not None and not one.starting and not one.begun.alarm]
        if not able:
            return
        playing = data.draw(st.sampled_from(able))
        self.playing.remove(playing)
        dead, shipment, accepted = self.table.store.ends.unknown(playing.link, playing.begun.token, Why.UNKNOWN_OWNER)
        thing = self.held(playing)
        assert accepted == (thing is not None)
        self.either("unknown owner", thing)
        if thing is not None:
            self._dropped(thing, playing.link, Why.UNKNOWN_OWNER, dead is not None, shipment)

    @action(2, when=lambda self: self.messages, often=st.integers(2, 4), seconds=st.sampled_from([61, 301, 601]))
    def no_worker_knows_a_task(self, often: int, seconds: int) -> None:
        """It is put back, each time for longer, and dead when its grace is over."""
        for _ in range(often):
            if self.messages:
                self._skip(self.messages.pop(), Why.UNKNOWN_TASK)
            self.forward(seconds)
            self.ticked()

    def _dropped(self, thing: Thing, link: Link, why: Why, dead: bool, shipment: Shipment | None) -> None:
        thing.look(link.job)
        died = self.world.skipped(thing, link.job, why.value)
        assert dead == died
        self.hit(f"{why.value}: {'dead' if died else 'put back'}")
        chain = thing.close(self.now)
        self.saved(thing)
        self.shipped(thing, chain, shipment)
