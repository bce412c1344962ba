"""Commands that change: migrate, push, cancel, reschedule, pause, resume, disable, rearm, destroy."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from celery_lifecycle import describe
from celery_lifecycle.cli import text
from celery_lifecycle.cli.base import (
    Command,
    Failure,
    deployment,
    duration,
    iso_time,
    json_option,
    json_value,
    object_argument,
)
from celery_lifecycle.errors import UnknownJob
from celery_lifecycle.migrations.revision import current
from celery_lifecycle.model import Job, ObjectRef
from celery_lifecycle.queue import when

job_argument = click.argument("job_id", metavar="JOB")
at_option = click.option(
    "--at", metavar="TIME", type=iso_time, help="When (ISO 8601 with a zone); a past time is due at once."
)
delay_option = click.option(
    "--delay", metavar="DURATION", type=duration, help="From now: seconds, or 90s, 15m, 2h, 7d."
)


@click.command(cls=Command)
@click.option("--revision", default="head", show_default=True, help="The revision to upgrade to.")
@json_option
@click.pass_context
def migrate(ctx: click.Context, revision: str, json_: bool) -> None:
    """Make or upgrade the tables. Safe to run again, and by several at once."""
    database = deployment(ctx, makes=True).store.database
    from celery_lifecycle.migrations import schema  # loads Alembic

    before = current(database)
    reached = schema.migrate(database, revision)
    url = database.url.render_as_string(hide_password=True)
    if json_:
        text.as_json({"database": url, "before": before, "revision": reached})
    elif before == reached:
        click.echo(f"The tables in {url} are at revision {reached} already.")
    else:
        click.echo(f"The tables in {url} are at revision {reached} now (before: {before or 'none'}).")


@click.command(cls=Command)
@object_argument
@click.argument("task", metavar="TASK")
@click.option("--payload", metavar="JSON", type=json_value, help="JSON, given to the job as ctx.payload.")
@delay_option
@at_option
@click.option("--id", "job_id", help="A stable id: a pending job of this id is replaced.")
@json_option
@click.pass_context
def push(
    ctx: click.Context, ref: ObjectRef, task: str, payload: Any, delay: float | None, at: datetime | None,
    job_id: str | None, json_: bool,
) -> None:  # fmt: skip
    """Push a job to an object. TASK is a method of its class, or a full task name."""
    lifecycle = deployment(ctx, makes=True)
    handle = lifecycle.object(ref.kind, ref.name)
    job = handle.jobs.push(task, payload=payload, delay=delay, at=at, id=job_id)
    _tell_job(job, "Pushed", lifecycle.store.watch.now(), json_)


def _tell_job(job: Job, done: str, now: int, json_: bool) -> None:
    if json_:
        facts = {"object": str(job.object), "id": job.id, "task": job.task, "queue": job.queue, "version": job.version}
        text.as_json({**facts, "due_at": describe.iso(job.due_ms)})
        return
    click.echo(f"{done} {job.object}#{job.id} (task {job.task}), due {describe.when(job.due_ms, now)}.")


@click.command(cls=Command)
@object_argument
@job_argument
@click.pass_context
def cancel(ctx: click.Context, ref: ObjectRef, job_id: str) -> None:
    """Cancel a pending job, whoever owns it. A run of it that is under way goes on; its outcome is discarded."""
    if deployment(ctx).store.jobs.cancel(ref, job_id, None) is None:
        raise _no_job(ref, job_id)
    click.echo(f"Cancelled {ref}#{job_id}.")


@click.command(cls=Command)
@object_argument
@job_argument
@delay_option
@at_option
@json_option
@click.pass_context
def reschedule(
    ctx: click.Context, ref: ObjectRef, job_id: str, delay: float | None, at: datetime | None, json_: bool
) -> None:
    """Move a pending job to another time, whoever owns it."""
    if at is None and delay is None:
        raise click.UsageError("Give --at or --delay.")
    store = deployment(ctx).store
    job = store.jobs.reschedule(ref, job_id, None, *when(at, delay))
    if job is None:
        raise _no_job(ref, job_id)
    _tell_job(job, "Moved", store.watch.now(), json_)


def _no_job(ref: ObjectRef, job_id: str) -> UnknownJob:
    return UnknownJob(f"{ref} has no pending job {job_id!r}; `lifecycle jobs '{ref}'` lists those it has.")


@click.command(cls=Command)
@object_argument
@click.option("--reason", default="paused", show_default=True, help="Why, for those who look later.")
@click.pass_context
def pause(ctx: click.Context, ref: ObjectRef, reason: str) -> None:
    """Stop new runs of an object until `resume`; a run that is open goes on to its end."""
    deployment(ctx, makes=True).object(ref.kind, ref.name).pause(reason)
    click.echo(f"Paused {ref}.")


@click.command(cls=Command)
@object_argument
@click.pass_context
def resume(ctx: click.Context, ref: ObjectRef) -> None:
    """Let runs begin again; strikes, suspicion, delays and seals of the memory breaker are cleared."""
    if not deployment(ctx).object(ref.kind, ref.name).resume():
        raise _no_object(ref)
    click.echo(f"Resumed {ref}.")


@click.command(cls=Command)
@object_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def disable(ctx: click.Context, ref: ObjectRef, yes: bool) -> None:
    """Disable an object's alarms for good: nothing wakes it, a push raises. Only `destroy` ends that."""
    lifecycle = deployment(ctx, makes=True)
    if not yes:
        click.confirm(f"Disable the alarms of {ref} for good?", abort=True)
    lifecycle.object(ref.kind, ref.name).disable_alarms()
    click.echo(f"Disabled {ref}.")


@click.command(cls=Command)
@object_argument
@click.pass_context
def rearm(ctx: click.Context, ref: ObjectRef) -> None:
    """Derive an object's alarm from its jobs anew. It does not enable what `disable` disabled."""
    lifecycle = deployment(ctx)
    lifecycle.object(ref.kind, ref.name).rearm_alarm()
    picture = lifecycle.store.watch.picture(ref)
    if picture is None:
        raise _no_object(ref)
    click.echo(f"Rearmed {ref}: {describe.sentence(picture)}.")


@click.command(cls=Command)
@object_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def destroy(ctx: click.Context, ref: ObjectRef, yes: bool) -> None:
    """Delete an object: jobs, storage, keep-alives, switches and strikes."""
    lifecycle = deployment(ctx)
    picture = lifecycle.store.watch.picture(ref)
    if picture is None:
        raise _no_object(ref)
    if not yes:
        told = f"{len(picture.jobs)} jobs and {len(picture.storage)} storage keys"
        click.confirm(f"Destroy {ref} with {told}?", abort=True)
    lifecycle.object(ref.kind, ref.name).destroy()
    click.echo(f"Destroyed {ref}.")


def _no_object(ref: ObjectRef) -> Failure:
    return Failure(f"There is no object {ref}: it has no job and nothing to remember.")
