"""The application under test: started as ``celery -A tests.acceptance.app …``, led by environment variables.

======================== ==============================================================
``BROKER_URL``           the broker; without it, this process's memory
``BROKER_OPTIONS``       JSON of ``broker_transport_options``
``DEFAULT_QUEUE``        ``task_default_queue``
``RESULT_BACKEND``       the result backend; without it, none
``DATABASE_URL``         the database of the jobs
``LEDGER``               the file that jobs write their starts and ends into
``SETTINGS``             JSON of further settings, for one test
======================== ==============================================================

What else can be set, for a process that is to die or to fail at a certain point, is in ``sabotage.py``.
"""

import json
import os
import time
from collections.abc import Mapping

from celery import Celery
from celery.signals import beat_init

from celery_lifecycle import Lifecycle
from tests.acceptance.jobs import add_jobs
from tests.acceptance.ledger import Ledger
from tests.acceptance.sabotage import sabotage

BEAT_READY = "beat: ready"


def make_app(environment: Mapping[str, str]) -> Celery:
    """The application as its workers and beats see it, for use in the test process too."""
    app = Celery("acceptance", set_as_current=False)
    app.conf.update(
        broker_url=environment.get("BROKER_URL", "memory://"),
        broker_transport_options=json.loads(environment.get("BROKER_OPTIONS", "{}")),
        broker_connection_retry_on_startup=True,
        task_default_queue=environment.get("DEFAULT_QUEUE", "celery"),
        result_backend=environment.get("RESULT_BACKEND") or None,
        lifecycle_database_url=environment.get("DATABASE_URL") or None,
        **json.loads(environment.get("SETTINGS", "{}")),
    )
    ledger = Ledger(environment.get("LEDGER", os.devnull))
    sabotage(environment, ledger)
    add_jobs(app, Lifecycle(app), ledger)

    @app.task(name="ping", shared=False)
    def ping() -> str:
        return "pong"

    @app.task(name="note", shared=False)
    def note(object: str, job: str, seconds: float = 0) -> str:
        """Stand in the ledger for so long."""
        with ledger.run(object, job):
            time.sleep(seconds)
        return job

    return app


@beat_init.connect
def _say_ready(**_: object) -> None:
    # Beat's own first line comes before its scheduler is built, which a SIGTERM at that time finds half made.
    print(BEAT_READY, flush=True)  # noqa: T201


app = make_app(os.environ)
