"""Commands that look: status, objects, jobs, show, workers, beats, preview."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import click

from celery_lifecycle import describe, validate
from celery_lifecycle.cli import text
from celery_lifecycle.cli.base import Command, Failure, deployment, iso_time, json_option, object_argument, object_name
from celery_lifecycle.model import Job, ObjectRef, Phase, is_protocol_id
from celery_lifecycle.store.watch import FILTERS, Overview, Picture
from celery_lifecycle.timing.instants import to_millis
from celery_lifecycle.timing.preview import preview as preview_times

ALIVE_MS = 60_000
PHASES = {Phase.IDLE: "waiting", Phase.SENT: "on their way", Phase.OPEN: "running"}


@click.command(cls=Command)
@json_option
@click.pass_context
def status(ctx: click.Context, json_: bool) -> None:
    """The job table in numbers: objects, jobs, alarms per queue, dead jobs, beats, workers."""
    lifecycle = deployment(ctx)
    lifecycle.verify()
    watch = lifecycle.store.watch
    seen = watch.overview()
    beats, workers = _seen(watch.beats()), _seen(watch.workers())
    url = lifecycle.store.database.url.render_as_string(hide_password=True)
    facts: dict[str, Any] = {
        "database": url, "database_id": lifecycle.database_id, "now": describe.iso(seen.now), "objects": seen.objects,
        "paused": seen.paused, "disabled": seen.disabled, "sealed": seen.sealed, "jobs": seen.jobs,
        "dead_jobs": seen.dead, "beats": beats, "workers": workers, "queues": _queues(seen),
    }  # fmt: skip
    if json_:
        text.as_json(facts)
        return
    text.pairs(
        [
            ("database", f"{url} (id {lifecycle.database_id})"),
            ("objects", f"{seen.objects} ({seen.paused} paused, {seen.disabled} disabled, {seen.sealed} with seals)"),
            ("jobs", seen.jobs),
            ("dead jobs", ", ".join(f"{count} {reason}" for reason, count in sorted(seen.dead.items())) or "none"),
            ("beats", f"{beats} seen within a minute"),
            ("workers", f"{workers} seen within a minute"),
        ]
    )
    text.heading("Alarms")
    rows = [(one.queue, PHASES[one.phase], one.count, describe.when(one.earliest, seen.now)) for one in seen.alarms]
    text.table(("queue", "phase", "alarms", "earliest"), rows, "none")


def _queues(seen: Overview) -> list[dict[str, Any]]:
    return [
        {"queue": one.queue, "phase": PHASES[one.phase], "alarms": one.count, "earliest": describe.iso(one.earliest)}
        for one in seen.alarms
    ]


def _seen(found: tuple[int, list[dict[str, Any]]]) -> int:
    now, all_of_them = found
    return sum(now - one["seen"] <= ALIVE_MS for one in all_of_them)


@click.command(cls=Command)
@click.option("--kind", help="Only objects of this kind.")
@click.option(
    "--state", type=click.Choice(FILTERS), default="any", show_default=True, help="Only objects in this state."
)
@click.option("--name", "prefix", default="", help="Only objects whose names begin so.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--after", metavar="KIND/NAME", type=object_name, help="Go on behind this object.")
@json_option
@click.pass_context
def objects(
    ctx: click.Context, kind: str | None, state: str, prefix: str, limit: int, after: ObjectRef | None, json_: bool
) -> None:
    """List objects by kind and name, with their state and next alarm."""
    if kind is not None:
        validate.kind(kind)
    now, found = deployment(ctx).store.watch.pick(state, kind, prefix, after, limit)
    if json_:
        text.as_json([{**describe.object_facts(one.state, now), "jobs": one.jobs} for one in found])
        return
    rows = [
        (str(one.state.ref), describe.word(one.state, now), one.jobs, describe.when(one.state.wake_at, now),
         one.state.queue)
        for one in found
    ]  # fmt: skip
    text.table(("object", "state", "jobs", "alarm", "queue"), rows, "No such objects.")
    if len(found) == limit:
        click.echo(f"… more may follow: --after '{found[-1].state.ref}'")


@click.command(cls=Command)
@object_argument
@click.option("--all", "all_", is_flag=True, help="Also the protocol's own jobs, whose ids begin with #.")
@json_option
@click.pass_context
def jobs(ctx: click.Context, ref: ObjectRef, all_: bool, json_: bool) -> None:
    """List the pending jobs of an object in due order."""
    picture = _picture(ctx, ref, 1_000_000)
    shown = [job for job in picture.jobs if all_ or not is_protocol_id(job.id)]
    if json_:
        text.as_json([describe.job_facts(picture.state, job) for job in shown])
        return
    _table_of_jobs(picture, shown)


def _picture(ctx: click.Context, ref: ObjectRef, max_jobs: int = 1000) -> Picture:
    lifecycle = deployment(ctx)
    picture = lifecycle.store.watch.picture(ref, max_jobs=max_jobs)
    if picture is None:
        dead = lifecycle.store.watch.dead(ref, limit=1)
        told = " It has dead jobs: `lifecycle dead list`." if dead else ""
        raise Failure(f"There is no object {ref}: it has no job and nothing to remember.{told}")
    return picture


def _table_of_jobs(picture: Picture, shown: list[Job]) -> None:
    state, now = picture.state, picture.now
    rows = [
        (
            job.id, job.task, describe.when(describe.next_try(state, job), now),
            f"{job.attempt}/{job.retry.max_attempts}", job.strikes,
            ", ".join((["in flight"] if describe.is_in_flight(state, job) else []) + describe.flags(job)),
        )
        for job in shown
    ]  # fmt: skip
    text.table(("job", "task", "due", "attempts", "strikes", "notes"), rows, "No pending jobs.")


@click.command(cls=Command)
@object_argument
@json_option
@click.pass_context
def show(ctx: click.Context, ref: ObjectRef, json_: bool) -> None:
    """Everything about one object: alarm, run, strikes, jobs, storage, keep-alives, dead jobs."""
    picture = _picture(ctx, ref)
    if json_:
        text.as_json(describe.picture_facts(picture))
        return
    state, now = picture.state, picture.now
    click.secho(str(ref), bold=True)
    sent = state.phase is Phase.SENT
    text.pairs(
        [
            ("state", describe.word(state, now)),
            ("", describe.sentence(picture)),
            ("alarm", describe.when(state.wake_at, now) + (f", queue {state.queue}" if state.queue else "")),
            ("paused", state.paused),
            ("disabled", "yes" if state.disabled else None),
            ("held back", describe.when(state.not_before, now) if state.not_before is not None else None),
            ("dispatch", f"{state.dispatch}, sent {state.sent_count} x" if sent else None),
            ("worker", describe.worker(picture)),
            ("run", state.token and f"token {state.token}, lease until {describe.when(state.lease_until, now)}"),
        ],
        "  ",
    )
    text.heading(f"Jobs ({len(picture.jobs)})")
    _table_of_jobs(picture, list(picture.jobs))
    _show_strikes(picture)
    if picture.storage:
        text.heading(f"Storage ({len(picture.storage)} keys)")
        text.table(("key", "size"), picture.storage, "")
    if picture.holds:
        text.heading("Keep-alives and tracked work")
        holds = [(hold.kind, hold.key, hold.job, describe.when(hold.expires_ms, now)) for hold in picture.holds]
        text.table(("kind", "key", "job", "expires"), holds, "")
    if picture.dead:
        text.heading(f"Dead jobs ({len(picture.dead)}, newest first)")
        dead = [
            (one.key, one.job.id, one.reason, describe.when(one.died_ms, now), one.error) for one in picture.dead[:20]
        ]
        text.table(("key", "job", "reason", "died", "error"), dead, "")


def _show_strikes(picture: Picture) -> None:
    state, now = picture.state, picture.now
    struck = describe.strikes(state)
    if struck:
        text.heading("Strikes")
        jobs = {job.line: job for job in picture.jobs}
        rows = []
        for one in struck:
            job = jobs.get(one.line)
            following = state.not_before if job is None else describe.next_try(state, job)
            last = f"{describe.when(one.last_ms, now)}: {one.cause or 'unknown'}"
            rows.append((describe.call(one.line), one.strikes, last, one.told, describe.when(following, now)))
        text.table(("line", "strikes", "last death", "told", "next try"), rows, "")
    for dead in picture.dead:
        if dead.reason == "sealed":
            told = f"{dead.details.get('strikes', '?')} deaths, the last one {dead.details.get('cause', 'unknown')}"
            click.echo(f"{dead.job.id} is sealed after {told}: `lifecycle dead replay {dead.key}` brings it back.")


@click.command(cls=Command)
@json_option
@click.pass_context
def workers(ctx: click.Context, json_: bool) -> None:
    """List worker instances of the last day, the one seen last first."""
    now, found = deployment(ctx).store.watch.workers()
    _heartbeats(now, found, "hostname", json_, "No worker was seen within a day.")


@click.command(cls=Command)
@json_option
@click.pass_context
def beats(ctx: click.Context, json_: bool) -> None:
    """List beats of the last day, the one that ticked last first."""
    now, found = deployment(ctx).store.watch.beats()
    _heartbeats(now, found, "host", json_, "No beat has ticked within a day.")


def _heartbeats(now: int, found: list[dict[str, Any]], host: str, json_: bool, empty: str) -> None:
    if json_:
        facts = [
            {**one, "seen": describe.iso(one["seen"]), "age": describe.seconds(now - one["seen"])} for one in found
        ]
        text.as_json(facts)
        return
    rows = [
        (one.get(host), one.get("pid"), describe.when(one["seen"], now), "draining" if one.get("draining") else "",
         one.get("broker"), one["key"])
        for one in found
    ]  # fmt: skip
    text.table((host, "pid", "seen", "notes", "broker", "instance"), rows, empty)


@click.command(cls=Command)
@click.argument("expression", metavar="EXPRESSION")
@click.option("--timezone", help="Name of a time zone, for instance Europe/Berlin; default: that of the app.")
@click.option("-n", "count", type=click.IntRange(1, 10_000), default=10, show_default=True, help="How many runs.")
@click.option(
    "--from",
    "start",
    metavar="TIME",
    type=iso_time,
    help="Begin behind this time (ISO 8601 with a zone); default: now.",
)
@json_option
@click.pass_context
def preview(
    ctx: click.Context, expression: str, timezone: str | None, count: int, start: datetime | None, json_: bool
) -> None:
    """The next runs of a cron expression, in its zone and in UTC; days on which the clocks change are marked."""
    zone = timezone or str(ctx.obj.app.timezone)
    begin = time.time_ns() // 1_000_000 if start is None else to_millis(start)
    rows = preview_times(expression, zone, begin, count)
    if json_:
        text.as_json([{"utc": row.utc.isoformat(), "local": row.local.isoformat(), "note": row.note} for row in rows])
        return
    shown = [(f"{row.local:%a %Y-%m-%d %H:%M %Z}", f"{row.utc:%Y-%m-%d %H:%M}Z", row.note or "") for row in rows]
    text.table((zone, "UTC", ""), shown, "It never runs again.")
