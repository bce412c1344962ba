"""The simulated broker: messages are lost, doubled, delayed and overtaken as the plan says."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from celery_lifecycle.dispatch import Refused, Sender
from celery_lifecycle.link import HEADER, header_in
from celery_lifecycle.model import Shipment

if TYPE_CHECKING:
    from tests.simulation.world.simulation import Simulation


class BrokerAway(OSError):
    """The broker does not answer."""


class Broker:
    """Queues of messages; workers take from them when they have a free process."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.away_until = 0
        self.queues: dict[str, deque[str]] = defaultdict(deque)
        self.published = 0
        self.back_at = 0

    @property
    def on_its_way(self) -> int:
        return sum(len(queue) for queue in self.queues.values())

    def publish(self, queue: str, headers: dict[str, Any], body: Any) -> None:
        """Take one message, or raise; what becomes of it afterwards is the plan's."""
        simulation = self.simulation
        world, faults = simulation.world, simulation.faults
        simulation.step("send")
        if self.away_until > world.now:
            raise BrokerAway("simulated: the broker is away")
        self.published += 1
        text = json.dumps([headers, body])
        header = header_in(headers) or {}
        if header:
            simulation.checker.published(queue, header, headers["task"])
        latency = 1 + world.draw("latency", 4)
        copies = [latency]
        if faults.hits("lose") is not None:
            world.say(f"message {headers['id']} is lost")
            copies = []
        again = faults.hits("double")
        if again is not None:
            copies.append(latency + again)
        late = faults.hits("delay")
        if late is not None:
            copies = [copy + late for copy in copies]
        for copy in copies:
            world.at(world.now + copy, lambda: self._arrive(queue, text))
        silent = faults.hits("uncertain")
        if silent is not None:
            until = world.now + silent
            while world.now < until and not simulation.healing:
                world.sleep(min(until - world.now, 200))
            raise BrokerAway("simulated: the connection broke after the message was taken")
        simulation.step("sent")

    def _arrive(self, queue: str, text: str) -> None:
        self.queues[queue].append(text)
        self.simulation.offer()

    def take(self, names: Sequence[str]) -> str | None:
        for name in names:
            if self.queues[name]:
                return self.queues[name].popleft()
        return None

    def flush(self) -> None:
        """A restart of a broker that keeps nothing."""
        for queue in self.queues.values():
            queue.clear()


class SimSender(Sender):
    """The real maker of messages before the simulated broker."""

    def __init__(self, simulation: Simulation, app: Any) -> None:
        super().__init__(app, "db")
        self.simulation = simulation
        self._routes = simulation.routes

    def _message(self, shipment: Shipment) -> dict[str, Any]:
        if self.simulation.spoils("encode", str(shipment.ref)):
            raise ValueError("simulated: a header that no message can have")
        self.simulation.checker.chains.sent(shipment)
        return super()._message(shipment)

    def _ready_producer(self) -> Any:
        return SimProducer(self.simulation)


class SimProducer:
    """A connection to the simulated broker."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def batch(self, max_size: int) -> Any:
        return contextlib.nullcontext()

    def publish(self, body: Any, headers: dict[str, Any], routing_key: str, **message: Any) -> None:
        if self.simulation.spoils("refuse", json.loads(headers[HEADER])["name"]):
            raise Refused("simulated: the broker does not take this one")
        body = json.loads(body) if isinstance(body, str) else body
        self.simulation.broker.publish(routing_key, headers, body)
