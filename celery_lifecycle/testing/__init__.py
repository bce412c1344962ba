"""A test harness for your own tests: the real job table, a clock of its own, a broker and a worker inside the test.

    with Harness(lifecycle) as harness:
        Cart("anna").put("book")
        harness.advance(20)
        harness.assert_ran("remind", times=1)

What is simulated is the broker (a list), the clock, and the death of processes. Everything else is what runs in production:
messages are built, encoded and decoded, links run through Celery's own request and tracer, beat claims what is due.
"""

from celery_lifecycle.testing.broker import Message
from celery_lifecycle.testing.harness import Fact, Harness, HarnessError, Ran

__all__ = ["Fact", "Harness", "HarnessError", "Message", "Ran"]
