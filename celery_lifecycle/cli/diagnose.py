"""Commands that find out what is wrong: health, doctor; and flower."""

from __future__ import annotations

from dataclasses import asdict

import click

from celery_lifecycle.cli import text
from celery_lifecycle.cli.base import Command, deployment, duration, json_option
from celery_lifecycle.doctor import ERROR, INFO, OK, WARNING, examine
from celery_lifecycle.flower import start
from celery_lifecycle.health import MAX_LATENESS, measure

COLORS = {ERROR: "red", WARNING: "yellow", INFO: "blue", OK: "green"}


@click.command(cls=Command)
@click.option(
    "--max-tick-age",
    metavar="DURATION",
    type=duration,
    help="Fail if no beat ticked for longer. Default: 5 s, or two poll intervals.",
)
@click.option("--max-lateness", metavar="DURATION", type=duration, default=MAX_LATENESS, show_default=True,
              help="Fail if an alarm is overdue for longer.")  # fmt: skip
@click.option("--ticks-only", is_flag=True, help="Look at beat's ticks only: for a liveness probe of beat.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing; the exit code tells.")
@json_option
@click.pass_context
def health(
    ctx: click.Context, max_tick_age: float | None, max_lateness: float, ticks_only: bool, quiet: bool, json_: bool
) -> None:
    """Prove that the deployment dispatches: exit code 0 if a beat ticks and nothing is overdue, else 1.

    It never waits for longer than a few seconds, whatever is locked or gone.
    """
    found = measure(deployment(ctx).config, max_tick_age, None if ticks_only else max_lateness)
    if json_:
        text.as_json(found.to_json())
    elif not quiet:
        for problem in found.problems:
            click.secho(f"UNHEALTHY: {problem}", fg="red")
        if found.healthy:
            click.secho("healthy", fg="green")
        text.pairs(found.lines())
    ctx.exit(0 if found.healthy else 1)


@click.command(cls=Command)
@click.option("--strict", is_flag=True, help="Exit with 1 also for warnings.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, strict: bool, json_: bool) -> None:
    """Look for what is wrong with a deployment, without starting anything: exit code 1 if there is an error."""
    found = examine(deployment(ctx, makes=True, checks=False))
    failing = {ERROR, WARNING} if strict else {ERROR}
    if json_:
        text.as_json([asdict(one) for one in found])
    else:
        for one in found:
            label = click.style(f"{one.level:<8}", fg=COLORS[one.level])
            click.echo(f"{label} {click.style(one.subject, bold=True)}: {one.what}")
            for more in (one.why, one.todo and f"→ {one.todo}"):
                if more:
                    click.echo(f"         {more}")
        counts = [f"{sum(one.level == level for one in found)} {level}" for level in COLORS]
        click.echo(", ".join(counts))
    ctx.exit(1 if any(one.level in failing for one in found) else 0)


@click.command(cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="[FLOWER OPTIONS]", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def flower(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Start Flower with Lifecycle pages: objects, their jobs and strikes, dead jobs.

    They are read-only unless Flower has a login (--basic-auth, --auth). All of Flower's own options may follow.
    """
    start(ctx, deployment(ctx), arguments)
