"""The command line: `celery -A <your app> lifecycle …`."""

from __future__ import annotations

import click

from celery_lifecycle.cli import change, dead, diagnose, look
from celery_lifecycle.cli.base import Group

__all__ = ["lifecycle"]


@click.group(cls=Group)
def lifecycle() -> None:
    """Objects, their alarms and jobs; what is wrong with a deployment; whether it dispatches."""


for _command in (
    change.migrate, look.status, look.objects, look.jobs, look.show, change.push, change.cancel, change.reschedule,
    change.pause, change.resume, change.disable, change.rearm, change.destroy, dead.dead, look.workers, look.beats,
    look.preview, diagnose.health, diagnose.doctor, diagnose.flower,
):  # fmt: skip
    lifecycle.add_command(_command)
