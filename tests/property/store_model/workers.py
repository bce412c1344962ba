"""What workers do with messages: each link begins, is passed over, or ends quietly."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from celery_lifecycle.model import Link
from celery_lifecycle.store.runs import Begun, Calling
from celery_lifecycle.transitions.run import Worker
from tests.property.store_model.actions import action
from tests.property.store_model.beats import Beats
from tests.property.store_model.machine import ALARM_TASK, HOOK_TASK, TRAITS, Message, Playing
from tests.property.store_model.model import (
    ALARM,
    ALIVE,
    HOOK,
    HOST,
    LEASE,
    START,
    Flight,
    Run,
    Thing,
)
from tests.property.store_model.plan import woken

PIDS = (1, 2, 3)
places = st.sampled_from([0, 0, 0, 1])


class Workers(Beats):
    """Links may come late, twice, in any order or never, to any process of any worker."""

    def free(self, place: int) -> Worker | None:
        """A process of a worker that runs nothing."""
        instance = self.instances[place]
        busy = {one.worker.pid for one in self.playing if one.worker.instance == instance}
        pid = next((pid for pid in PIDS if pid not in busy), None)
        return Worker(instance, pid) if pid is not None else None

    def take(self, place: int = 0) -> Playing | None:
        """Deliver the newest message that has not come yet; what runs now."""
        message = self.messages.pop()
        self.delivered = [*self.delivered, message][-6:]
        return self.deliver(message, place)

    @action(9, when=lambda self: self.messages, place=places)
    def deliver_the_newest(self, place: int) -> None:
        self.take(place)

    @action(3, when=lambda self: self.messages or self.delivered, place=places)
    def deliver_late_or_again(self, data: st.DataObject, place: int) -> None:
        self.deliver(data.draw(st.sampled_from(self.messages + self.delivered)), place)

    # --- begin

    def deliver(self, message: Message, place: int) -> Playing | None:
        worker = self.free(place)
        if worker is None:
            return None
        link, traits = replace(message.links[0], token=message.token), TRAITS[message.name]
        starts = traits.starts and not link.job.startswith(HOOK)
        starts = starts and (*worker_key(worker), link.token or "") not in self.started
        calling = Calling(ALARM_TASK, traits.limit, HOOK_TASK if traits.hook else None, starts)
        begun = self.table.store.runs.begin(link, calling, worker)
        thing = self.by_id(link.object_id)
        refusal = self._refusal(thing, link)
        assert (begun.refused.name if begun.refused else None) == refusal
        self.hit(f"begin: {refusal or 'accepted'}")
        if refusal is not None or thing is None:
            if thing is not None and link.token is None and thing.sent == link.dispatch:
                thing.forget_chain()
                self.saved(thing)
            return None
        if link.token is None:
            thing.run = Run(begun.token, self.now)
            thing.queue_wait = max(0, self.now - link.sent_ms)
            thing.forget_chain()
        flight = self._flight(thing, link, calling, worker)
        playing = Playing(message, replace(link, token=begun.token), begun, worker, calling, starts)
        if flight is None:
            self._passed(thing, playing, begun, link.last)
            return None
        assert thing.run is not None
        thing.run.flight, thing.run.doubt, thing.run.lease = flight, False, self.now + LEASE
        thing.run.step += 1
        thing.queue = thing.queue or flight.queue
        assert (begun.job.id if begun.job else ALARM) == flight.marked or begun.alarm
        self.saved(thing)
        self.playing.append(playing)
        return playing

    def _own_due(self, thing: Thing, link: Link) -> bool:
        ids = (ALARM, ALIVE) if link.job == ALARM else (link.job,)
        return any(thing.is_due(thing.jobs.get(one), self.now) for one in ids)

    def _refusal(self, thing: Thing | None, link: Link) -> str | None:
        """Why a link ends quietly: the message is only a hint, the table decides."""
        if thing is None:
            return "NO_OBJECT"
        run = thing.run
        if link.token is not None:
            if run is None or run.token != link.token:
                return "RUN_OVER"
            return "PASSED" if run.step != link.position else "BUSY" if run.flight is not None else None
        hook_of_sealed = thing.paused == "sealed" and not thing.disabled and link.job.startswith(HOOK)
        if run is not None:
            return "RUN_OPEN"
        if (thing.paused or thing.disabled) and not hook_of_sealed:
            return "PAUSED"
        something = self._own_due(thing, link) or (not thing.paused and thing.chain(self.now) is not None)
        return None if something else "NOTHING_DUE"

    def _flight(self, thing: Thing, link: Link, calling: Calling, worker: Worker) -> Flight | None:
        """What is in flight now; None: the link is passed over, for its job is gone, not due, expired or held back."""
        if link.job == ALARM:
            return self._alarm_flight(thing, link, calling, worker)
        job = thing.jobs.get(link.job)
        if job is None or not thing.is_due(job, self.now):
            self.hit("passed: gone or not due")
            return None
        if job.expires is not None and job.expires <= self.now:
            self.world.bury(thing, job, "expired")
            del thing.jobs[job.id]
            self.hit("passed: expired")
            return None
        if job.plan is not None:
            found = woken(job.plan, job.due, job.unknown_since is not None, job.attempt, self.now)
            if not found.runs:
                self.world.woken(thing, job, found)
                self.hit(f"passed: misfired{' for good' if found.over else ''}")
                return None
            if found.dropped is not None:
                self.world.misfired(thing, job, found.dropped)
                self.hit("begin: stands for missed occurrences")
            if found.stored:
                job.due = found.plan.nominal if job.due == job.plan.nominal else job.due
                job.plan = found.plan
        marked = job.suspect is not None
        if not self.world.boards(thing, job, worker.instance):
            self.hit("passed: another suspect is aboard")
            return None
        if marked:
            self.hit("begin: a suspect")
        return Flight(
            START if calling.starts else job.id, job.version, link.task_id, START if calling.starts else job.line,
            job.owner, job.task, job.queue, calling.limit, calling.hook, worker.instance, worker.pid,
            recovery=job.recovery, suspect=marked, carrier=job.id if calling.starts else None,
        )  # fmt: skip

    def _alarm_flight(self, thing: Thing, link: Link, calling: Calling, worker: Worker) -> Flight | None:
        alarm, alive = (thing.jobs.get(one) for one in (ALARM, ALIVE))
        own = [job for job in (alarm, alive) if job is not None and thing.is_due(job, self.now)]
        if link.token is None and not own:
            self.hit("passed: another one's chain")
            return None
        triggered = alarm if alarm in own else None
        marked = triggered is not None and triggered.suspect is not None
        if triggered is not None and not self.world.boards(thing, triggered, worker.instance):
            self.hit("passed: another suspect is aboard")
            return None
        return Flight(
            START if calling.starts else ALARM, triggered.version if triggered else 0, link.task_id,
            START if calling.starts else ALARM, HOST, calling.task, thing.queue or "", calling.limit, calling.hook,
            worker.instance, worker.pid, alive=alive.version if alive is not None and alive in own else None,
            suspect=marked, carrier=ALARM if calling.starts else None,
        )  # fmt: skip

    def _passed(self, thing: Thing, playing: Playing, begun: Begun, last: bool) -> None:
        assert begun.job is None
        assert not begun.alarm
        assert begun.closed == last
        chain = thing.passed(self.now, last)
        self.saved(thing)
        self.shipped(thing, chain, begun.shipment)
        self.go_on(playing.message, begun.token, last)


def worker_key(worker: Worker) -> tuple[str, int]:
    return worker.instance, worker.pid
