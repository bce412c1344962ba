"""Sending while the broker says nothing: neither a push nor beat waits for it for long."""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_lifecycle import Lifecycle, LifecycleObject, lifecycle_job
from celery_lifecycle.migrations.schema import migrate
from celery_lifecycle.model import ObjectRef
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until


@pytest.mark.parametrize("confirm", [False, True], ids=["plain", "confirmed"])
def test_a_push_waits_for_a_silent_broker_for_a_second_at_most(
    broker_url: str, proxy: Callable[[str], Proxy], tmp_path: Path, confirm: bool
) -> None:
    way = proxy(broker_url)
    app = Celery("silent", broker=way.url, set_as_current=False)
    app.conf.task_default_queue = "silent"
    if confirm and broker_url.startswith("amqp"):
        app.conf.broker_transport_options = {"confirm_publish": True}
    lifecycle = Lifecycle(app, database_url=f"sqlite:///{tmp_path}/silent.db")
    migrate(lifecycle.store.database)

    class Cart(LifecycleObject, lifecycle=lifecycle):
        @lifecycle_job
        def go(self, ctx: Any) -> None: ...

    def push(name: str) -> float:
        began = time.monotonic()
        Cart(name).jobs.push("go")
        return time.monotonic() - began

    try:
        push("before")
        way.stall()
        assert max(push("first"), push("second")) < 3
        together: list[float] = []
        threads = [threading.Thread(target=lambda n=n: together.append(push(f"t{n}"))) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(together) == 6
        assert max(together) < 4, "they do not wait for each other's turns"
        way.restore()
        names = itertools.count()

        def goes_out() -> bool:
            name = f"after{next(names)}"
            push(name)
            state = lifecycle.store.objects.find(ObjectRef("cart", name))
            return state is not None and state.sent_count == 1

        wait_until(goes_out, 10, "nothing is sent after the broker is back")
    finally:
        lifecycle.close()
