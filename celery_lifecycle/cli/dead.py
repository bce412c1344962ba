"""Commands about dead jobs: list, show, replay, purge."""

from __future__ import annotations

from collections.abc import Callable

import click

from celery_lifecycle import describe
from celery_lifecycle.cli import text
from celery_lifecycle.cli.base import Failure, Group, deployment, json_option, object_name
from celery_lifecycle.errors import DatabaseUnavailable, LifecycleError, LockTimeout
from celery_lifecycle.model import DeadJob, ObjectRef, Why

REASONS = tuple(why.value for why in Why)
keys_argument = click.argument("keys", metavar="KEY...", nargs=-1, type=click.IntRange(1), required=False)


@click.group(cls=Group, invoke_without_command=True)
@click.pass_context
def dead(ctx: click.Context) -> None:
    """Dead jobs: failed for good, sealed, revoked or unknown, kept for people."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_)


@dead.command("list")
@click.argument("ref", metavar="[KIND/NAME]", type=object_name, required=False)
@click.option("--reason", type=click.Choice(REASONS), help="Only those that died of this.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--before", type=click.IntRange(1), help="Go on behind this key.")
@json_option
@click.pass_context
def list_(
    ctx: click.Context,
    ref: ObjectRef | None = None,
    reason: str | None = None,
    limit: int = 50,
    before: int | None = None,
    json_: bool = False,
) -> None:
    """List dead jobs, newest first."""
    watch = deployment(ctx).store.watch
    found = watch.dead(ref, reason, before, limit)
    if json_:
        text.as_json([describe.dead_facts(one) for one in found])
        return
    now = watch.now()
    rows = [
        (one.key, f"{one.job.object}#{one.job.id}", one.reason, describe.when(one.died_ms, now), _last_line(one))
        for one in found
    ]
    text.table(("key", "job", "reason", "died", "error"), rows, "No dead jobs.")
    if len(found) == limit:
        click.echo(f"… more may follow: --before {found[-1].key}")


def _last_line(one: DeadJob) -> str | None:
    lines = (one.error or "").strip().splitlines()
    return lines[-1] if lines else None


@dead.command("show")
@click.argument("key", type=click.IntRange(1))
@json_option
@click.pass_context
def show(ctx: click.Context, key: int, json_: bool) -> None:
    """One dead job with its error, its traceback and what is known of its strikes."""
    watch = deployment(ctx).store.watch
    one = watch.dead_job(key)
    if one is None:
        raise _none(key)
    if json_:
        text.as_json(describe.dead_facts(one))
        return
    job = one.job
    text.pairs(
        [
            ("job", f"{job.object}#{job.id}"),
            ("task", job.task),
            ("reason", one.reason),
            ("died", describe.when(one.died_ms, watch.now())),
            ("attempts", f"{job.attempt} of {job.retry.max_attempts}"),
            ("strikes", None if "strikes" in one.details else job.strikes),
            ("payload", job.payload_json),
            ("error", one.error),
            *describe.dead_details(one),
        ]
    )
    if one.traceback:
        text.heading("Traceback")
        click.echo(one.traceback.rstrip())


@dead.command("replay")
@keys_argument
@click.option("--object", "ref", metavar="KIND/NAME", type=object_name, help="All dead jobs of this object.")
@click.option("--reason", type=click.Choice(REASONS), help="Of these, only those that died of this.")
@click.pass_context
def replay(ctx: click.Context, keys: tuple[int, ...], ref: ObjectRef | None, reason: str | None) -> None:
    """Push dead jobs again, due now, with nothing counted; a seal is lifted."""
    store = deployment(ctx).store

    def one(key: int) -> bool:
        job = store.dead.replay(key)
        if job is not None:
            click.echo(f"Replayed {key} as {job.object}#{job.id}.")
        return job is not None

    if not all(_each(_meant(ctx, keys, ref, reason), one)):
        ctx.exit(1)


@dead.command("purge")
@keys_argument
@click.option("--object", "ref", metavar="KIND/NAME", type=object_name, help="All dead jobs of this object.")
@click.option("--reason", type=click.Choice(REASONS), help="Of these, only those that died of this.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def purge(ctx: click.Context, keys: tuple[int, ...], ref: ObjectRef | None, reason: str | None, yes: bool) -> None:
    """Forget dead jobs; that of a sealed job lifts its seal."""
    store = deployment(ctx).store
    meant = _meant(ctx, keys, ref, reason)
    if not yes:
        click.confirm(f"Forget {len(meant)} dead jobs?", abort=True)
    done = _each(meant, store.dead.purge)
    click.echo(f"Forgot {sum(done)} dead jobs.")
    if not all(done):
        ctx.exit(1)


def _each(keys: list[int], verb: Callable[[int], bool]) -> list[bool]:
    """Whether it was done, for each key. A refusal is told and stops none of the others; an outage stops all."""
    done: list[bool] = []
    for key in keys:
        told = None
        try:
            if not verb(key):
                told = _none(key)
        except LifecycleError as error:
            if isinstance(error, DatabaseUnavailable) and not isinstance(error, LockTimeout):
                raise
            told = Failure(f"{key}: {error}")
        if told is not None:
            told.show()
        done.append(told is None)
    return done


def _meant(ctx: click.Context, keys: tuple[int, ...], ref: ObjectRef | None, reason: str | None) -> list[int]:
    """The keys given, or those of an object or of a reason, oldest first."""
    if bool(keys) == bool(ref or reason):
        raise click.UsageError("Give keys, or --object and --reason.")
    if keys:
        return list(keys)
    watch = deployment(ctx).store.watch
    found: list[int] = []
    before = None
    while page := watch.dead(ref, reason, before, 1000):
        found.extend(one.key for one in page)
        before = page[-1].key
    return sorted(found)


def _none(key: int) -> Failure:
    return Failure(f"There is no dead job {key}; `lifecycle dead list` shows those there are.")
