"""A small shop: what an application on celery_lifecycle looks like.

    celery -A example.shop worker --loglevel INFO
    celery -A example.shop beat -S lifecycle
    celery -A example.shop lifecycle status

Jobs are kept in `lifecycle.db` and messages in `queue/`, both in the working directory, unless the environment says
otherwise: DATABASE_URL, BROKER_URL, BROKER_OPTIONS (JSON), RESULT_BACKEND, SETTINGS (JSON of any Celery or lifecycle settings),
and SHOP_DAY, the seconds that a day of this shop has.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_lifecycle import (
    YIELD,
    JobContext,
    Lifecycle,
    LifecycleObject,
    LifecycleTask,
    MemoryLimitContext,
    Reschedule,
    RetryPolicy,
    lifecycle_job,
)

logger = logging.getLogger(__name__)
DAY = float(os.environ.get("SHOP_DAY", 86400))


def broker_options() -> dict[str, Any]:
    """The options that the environment gives; for the embedded broker its folders, which it does not make itself."""
    options: dict[str, Any] = json.loads(os.environ.get("BROKER_OPTIONS", "{}"))
    if "BROKER_URL" not in os.environ and not options:
        messages, control = Path("queue/messages").absolute(), Path("queue/control").absolute()
        for folder in (messages, control):
            folder.mkdir(parents=True, exist_ok=True)
        options = {"data_folder_in": str(messages), "data_folder_out": str(messages), "control_folder": str(control)}
        options["polling_interval"] = 0.1
    return options


app = Celery("shop")
app.conf.update(
    broker_url=os.environ.get("BROKER_URL", "filesystem://"),
    broker_transport_options=broker_options(),
    broker_connection_retry_on_startup=True,
    result_backend=os.environ.get("RESULT_BACKEND"),
    worker_prefetch_multiplier=1,
    # Brokers without an event loop, as the embedded one, make a worker wait this long before it believes in a death.
    worker_lost_wait=1.0,
)
app.conf.update(json.loads(os.environ.get("SETTINGS", "{}")))
lifecycle = Lifecycle(app, database_url=os.environ.get("DATABASE_URL"))


class Cart(LifecycleObject):
    """Whoever leaves a full cart behind gets one reminder, a day after the last touch."""

    def put(self, article: str) -> None:
        """Put something in. The reminder is pushed again under its id, so only the last push counts."""
        articles = [*self.storage.get("articles", []), article]
        self.storage["articles"] = articles
        self.jobs.push("remind", id="remind", delay=DAY, payload={"articles": articles})

    def check_out(self) -> None:
        """Buy it all: the cart is gone, and its reminder with it."""
        self.destroy()

    @lifecycle_job
    def remind(self, ctx: JobContext) -> None:
        send_mail(self.name, f"You forgot {len(ctx.payload['articles'])} things in your cart")


class Subscription(LifecycleObject):
    """A plan that is billed every day until it is stopped."""

    def start(self) -> None:
        """Begin to bill, one day from now. Starting twice is starting once."""
        self.schedule_every(DAY, "bill", id="billing")

    def stop(self) -> None:
        """Bill no more."""
        self.cancel_schedule("billing")

    @lifecycle_job
    def bill(self, ctx: JobContext) -> None:
        period = ctx.storage.get("period", 0) + 1
        ctx.storage["period"] = period
        # If this process dies before the new period is stored, the same period is pushed again under the same id.
        charge.push(id=f"{self.name}-{period}", payload={"subscription": self.name, "period": period})


@lifecycle_job(name="billing.charge", retry=RetryPolicy(max_attempts=5, base_delay=0.5, max_delay=60))
def charge(ctx: JobContext) -> None:
    """A job without a class is an object of its own, gone when it is done."""
    ask_payment_provider(ctx.payload["period"], ctx.attempt)
    Subscription(ctx.payload["subscription"]).storage[f"paid-{ctx.payload['period']}"] = ctx.attempt


@lifecycle_job(name="billing.invoice", retry=RetryPolicy(max_attempts=3, base_delay=0.2))
def invoice(ctx: JobContext) -> None:
    """An address that no attempt can make better: it ends as a dead job, kept for people to look at."""
    raise ValueError(f"{ctx.payload['to']!r} is no mail address")


class CatalogueImport(LifecycleObject, kind="import"):
    """Takes over a supplier's catalogue: its rows in slices, then its pictures, which take long, beside the object."""

    slice = 25

    def begin(self, rows: int, pictures: int) -> None:
        """Start the import, or start it again where it stopped."""
        self.jobs.push("rows", id="rows", payload={"rows": rows, "pictures": pictures})

    @lifecycle_job
    def rows(self, ctx: JobContext) -> Any:
        """One slice, then the others get their turn; whatever dies, the position is that of the last whole slice."""
        position = ctx.storage.get("rows", 0)
        upto = min(position + self.slice, ctx.payload["rows"])
        copy_rows(position, upto)
        ctx.storage["rows"] = upto
        if upto < ctx.payload["rows"]:
            return YIELD
        ctx.jobs.push("pictures", id="pictures", payload=ctx.payload)
        return None

    @lifecycle_job(recovery_loop=True)
    def pictures(self, ctx: JobContext) -> Any:
        """The heartbeat of work that goes on elsewhere: start it where nobody does it, and look again while it is not done."""
        if ctx.storage.get("pictures", 0) >= ctx.payload["pictures"]:
            send_mail("the buyers", f"The catalogue of {self.name} is there")
            return None
        if not ctx.tracked():
            ctx.track(fetch_pictures.si(self.name, ctx.payload["pictures"]))
        return Reschedule(delay=min(60, DAY / 4))


@app.task(base=LifecycleTask)
def fetch_pictures(supplier: str, pictures: int) -> None:
    """Long work outside any run: the import's other jobs go on meanwhile, and its storage says how far it is."""
    storage = CatalogueImport(supplier).storage
    for number in range(storage.get("pictures", 0), pictures):
        copy_picture(number)
        storage["pictures"] = number + 1


class SearchIndex(LifecycleObject):
    """Has a rebuild that needs more memory than it may have, and a refresh that must not suffer from it."""

    max_memory_strikes = 3

    def open(self) -> None:
        """Keep the index fresh, and rebuild it once."""
        self.schedule_every(DAY / 3, "refresh", id="refresh")
        self.jobs.push("rebuild", id="rebuild")

    def close(self) -> None:
        self.cancel_schedule("refresh")

    @lifecycle_job
    def refresh(self, ctx: JobContext) -> None:
        ctx.storage["refreshed"] = ctx.storage.get("refreshed", 0) + 1

    @lifecycle_job(recovery_loop=True, memory_limit="256M")
    def rebuild(self, ctx: JobContext) -> None:
        index = bytearray()
        while True:
            index += bytes(8 << 20)

    def on_memory_limit(self, context: MemoryLimitContext) -> None:
        """Called after the fact, in a job of its own: time to tell somebody."""
        then = "given up" if context.sealed else f"tried again at {context.next_time:%H:%M:%S}"
        send_mail("the operators", f"Strike {context.strikes} of {context.limit} ({context.cause}), {then}")


class Parcel(LifecycleObject):
    """Something to be sent. Its printer is slow, so there is time for an accident."""

    @lifecycle_job
    def label(self, ctx: JobContext) -> None:
        time.sleep(2)
        ctx.storage["labels"] = ctx.storage.get("labels", 0) + 1


# The world outside, played.


def send_mail(to: str, text: str) -> None:
    logger.info("mail to %s: %s", to, text)


def ask_payment_provider(period: int, attempt: int) -> None:
    if period == 1 and attempt <= 2:
        raise ConnectionError("the payment provider does not answer")


def copy_rows(start: int, end: int) -> None:
    time.sleep(0.3)
    logger.info("rows %d to %d copied", start + 1, end)


def copy_picture(number: int) -> None:
    time.sleep(0.5)
    logger.info("picture %d copied", number + 1)
