"""What beats do: claims, second looks, releases, lost holds, housekeeping; and time goes by."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from celery_lifecycle.model import Phase
from tests.property.store_model.actions import action, often
from tests.property.store_model.breaker import WINDOW
from tests.property.store_model.machine import QUEUES, Beside, Message
from tests.property.store_model.model import BACKUP, DOUBT, PATIENCE_MAX, SECOND, WAITING, Thing, begun_again
from tests.property.store_model.world import DAY, RETENTION, Lost


class Beats(Beside):
    """Several beats may look at the same rows; a look that came too late changes nothing."""

    @action(1, seconds=st.sampled_from([1, 6, 21, 31, 61, 301, 601, 3601]))
    def time_goes_by(self, seconds: int) -> None:
        self.forward(seconds)

    @action(
        6,
        when=lambda self: self.has_alarm,
        seconds=st.sampled_from([0, 0, 6, 31]),
        at_once=st.sampled_from([True, True, False]),
    )
    def tick(self, seconds: int, at_once: bool) -> None:
        self.forward(seconds)
        self.ticked(at_once)

    @property
    def has_alarm(self) -> bool:
        return any(thing.wake is not None for thing in self.things.values())

    def ticked(self, at_once: bool = True) -> None:
        """Claim everything that is due; look into the runs whose lease is over now, or later."""
        for queue in QUEUES:
            for phase in (Phase.OPEN, Phase.SENT, Phase.IDLE):
                self._claim(queue, phase)
        if at_once:
            self.look_into_all()

    def look_into_all(self) -> None:
        looked, self.looked = self.looked, []
        for object_id in looked:
            self._rescue(object_id)

    def _claim(self, queue: str, phase: Phase) -> None:
        self.known()
        claimed = self.table.store.claims.claim(queue, phase, 100)
        chains = {chain.ref.name: chain for chain in claimed.shipments}
        lost, taken = set(), 0
        for thing in list(self.things.values()):
            kind = 2 if thing.run is not None else 1 if thing.sent is not None else 0
            if kind != int(phase) or thing.queue != queue or thing.wake is None or thing.wake > self.now:
                continue
            taken += 1
            if self._is_lost(thing):
                lost.add(thing.id)
                continue
            chain = None
            if thing.run is None:
                chain = thing.dispatch(self.now)
                self.hit(f"claim: {phase.name} {'is sent' if chain else 'is not sent'}")
            elif thing.run.lease > self.now:
                self.hit("claim: a lease was renewed")
            else:
                chain = thing.revive(self.now)
                self.hit(f"revive: {'sent' if chain else 'closed'}")
            self.saved(thing)
            self.shipped(thing, chain, chains.pop(thing.name, None))
        assert not chains
        assert claimed.rows == taken
        assert set(claimed.lost) == lost
        self.looked += sorted(claimed.lost)  # which come in any order if their leases were over at once

    def _is_lost(self, thing: Thing) -> bool:
        return thing.run is not None and thing.run.lease <= self.now and thing.run.flight is not None

    @action(4, when=lambda self: self.looked)
    def look_later(self) -> None:
        """Beat was slow between its claim and its looks."""
        self.look_into_all()

    def _rescue(self, object_id: int) -> None:
        ended = self.table.store.ends.rescue(object_id)
        thing = self.by_id(object_id)
        if thing is None:
            assert ended is None
            return
        if not self._is_lost(thing):
            assert ended is None
            self.hit("rescue: refused")
            self.saved(thing)
            return
        assert thing.run is not None
        flight = thing.in_flight()
        if not thing.run.doubt:
            assert ended is None
            thing.run.doubt, thing.run.lease = True, self.now + DOUBT
            self.hit("rescue: doubt")
            self.saved(thing)
            return
        assert ended is not None
        job = thing.jobs.get(flight.marked)
        if self.world.draining.get(flight.worker):
            assert ended.put_back
            self.hit("rescue: draining")
            if job is not None:
                job.unmark()
                begun_again(job, flight)
        else:
            aboard = self._aboard(flight.worker)
            if aboard.suspect not in (None, (thing.id, flight.job)):
                assert ended.put_back
                self.hit("rescue: a neighbour of a suspect")
                if job is not None:
                    job.suspect = WAITING
                    begun_again(job, flight)
            else:
                assert not ended.put_back
                several = aboard.count > 1 and aboard.suspect is None
                self.hit(f"rescue: {'one of several' if several else 'a suspect' if aboard.suspect else 'alone'}")
                self.struck(thing, flight, ended, "lost", lost=True, suspect=several)
        thing.run = None
        self.saved(thing)

    def _aboard(self, instance: str) -> Lost:
        """Who was aboard. Of several suspects, which two begins of one job can make, the store may take any."""
        known = self.world.lost.get(instance)
        if known is None:
            found = self.world.aboard(instance)
            known = self.world.lost[instance] = Lost(len(found), None, self.now + DAY)
            suspects = [one for one, flight in found.items() if flight.suspect]
            if suspects:
                with self.table.store.database.transaction() as tx:
                    row = tx.row(tx.sql.get_heartbeat, {"kind": "lost", "key": instance})
                told = json.loads(row[5])["suspect"] if row is not None else None
                assert tuple(told) in suspects
                known.suspect = tuple(told)
        return known

    # --- chains that could not be sent

    @action(
        2, when=lambda self: any(message.shipment for message in self.messages + self.delivered), is_right=st.booleans()
    )
    def release(self, data: st.DataObject, is_right: bool) -> None:
        """A chain that could not be sent, as far as its sender knows."""
        sent = [message for message in self.messages + self.delivered if message.shipment is not None]
        newest = [message for message in self.messages[-1:] if message.shipment is not None]
        message = data.draw(st.sampled_from(newest * 2 * len(sent) + sent))
        if is_right and message in self.messages:
            self.messages.remove(message)
        self._release(message)

    def _release(self, message: Message) -> None:
        shipment = message.shipment
        assert shipment is not None
        released = self.table.store.claims.release([shipment], 200)
        thing = self.by_id(shipment.object_id)
        if shipment.token is None:
            mine = thing is not None and thing.sent == shipment.dispatch
        else:
            run = thing.run if thing is not None else None
            here = (shipment.token, shipment.first_position, None)
            mine = run is not None and (run.token, run.step, run.flight) == here
        assert released == int(mine)
        self.either("release" if shipment.token is None else "release of a revival", mine)
        if thing is not None and mine:
            thing.released(self.now, 200)
            self.saved(thing)

    @action(3, when=lambda self: self.messages, waits=st.booleans(), again=st.booleans())
    def a_message_is_lost(self, waits: bool, again: bool) -> None:
        """The broker has lost it: beat sends the chain again, or goes on with its run; if it can."""
        self.messages.pop()
        if waits:
            self.forward(BACKUP // SECOND)
            self.ticked()
            if again and self.messages and self.messages[-1].shipment is not None:
                self._release(self.messages.pop())

    @action(3, when=lambda self: any(message.token for message in self.messages), releases=often(True, False, times=2))
    def a_link_is_lost_between_two(self, releases: bool) -> None:
        """Beat goes on with the run; if it can't send the revived chain, it takes it back."""
        self.messages.remove(next(message for message in self.messages if message.token))
        self.forward(PATIENCE_MAX // SECOND)
        self.ticked()
        revived = [message for message in self.messages if message.shipment is not None and message.token]
        if releases and revived:
            self.messages.remove(revived[-1])
            self._release(revived[-1])

    # --- housekeeping

    @action(1, when=lambda self: any(one.lines or one.not_before for one in self.things.values()))
    def forget_old(self) -> None:
        done = self.table.store.beats.forget_old()
        world, forgotten = self.world, 0
        world.lost = {one: lost for one, lost in world.lost.items() if lost.until >= self.now}
        world.heard = {one: until for one, until in world.heard.items() if until >= self.now}
        world.draining = {one: is_so for one, is_so in world.draining.items() if one in world.heard}
        for thing in list(self.things.values()):
            over = thing.not_before is not None and thing.not_before <= self.now
            old = [line for line, known in thing.lines.items() if known["at"] + WINDOW <= self.now]
            if thing.queue is not None or not (over or old):
                continue
            for line in old:
                del thing.lines[line]
            if over:
                thing.not_before, thing.failures = None, 0
            forgotten += 1
            self.hit("forget_old")
            self.saved(thing)
        assert done == forgotten

    @action(1, when=lambda self: self.world.dead)
    def purge_old(self) -> None:
        old = [one for one in self.world.dead if one.died < self.now - RETENTION]
        assert self.table.store.dead.purge_old() == len(old)
        for dead in old:
            self.purged(dead)
            self.hit("purge_old")
