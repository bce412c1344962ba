"""What all commands share: one line for an error, objects and times as arguments, the deployment that is meant."""

from __future__ import annotations

import json
import os
import re
import traceback
from datetime import datetime
from typing import Any

import click
from kombu.exceptions import KombuError
from sqlalchemy.exc import SQLAlchemyError

from celery_lifecycle import validate
from celery_lifecycle.errors import ConfigurationError, LifecycleError, NameInvalid, TimeInvalid
from celery_lifecycle.lifecycle import Lifecycle, lifecycle_of
from celery_lifecycle.model import ObjectRef
from celery_lifecycle.timing.instants import to_millis

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Failure(click.ClickException):
    """An error as people see it: one line, exit code 1."""

    def show(self, file: Any = None) -> None:
        told = " ".join(self.message.split())
        click.secho(f"Error: {told}", err=True, fg="red" if file is None else None)


class Command(click.Command):
    """A command whose errors are one line; `LIFECYCLE_TRACEBACK=1` in the environment shows where they come from."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (LifecycleError, KombuError, SQLAlchemyError, OSError) as error:
            raise _failure(str(error) or repr(error)) from error
        except Exception as error:  # the edge of the process: people get a line, not a traceback
            raise _failure(f"{type(error).__name__}: {error} (LIFECYCLE_TRACEBACK=1 shows where)") from error


class Group(click.Group):
    """A group of such commands, listed in the order in which they were added."""

    command_class = Command
    group_class = type

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _failure(message: str) -> Failure:
    if os.environ.get("LIFECYCLE_TRACEBACK"):
        click.echo(traceback.format_exc(), err=True)
    return Failure(message)


def object_name(value: str | ObjectRef) -> ObjectRef:
    """`KIND/NAME`; the name may have slashes, a kind has none."""
    if isinstance(value, ObjectRef):
        return value
    kind, slash, name = value.partition("/")
    if not slash:
        raise click.BadParameter(f"{value!r} is no object: write KIND/NAME, for instance cart/user-42.")
    try:
        return ObjectRef(validate.kind(kind), validate.name(name))
    except NameInvalid as error:
        raise click.BadParameter(str(error)) from error


def iso_time(value: str | datetime) -> datetime:
    """An aware ISO 8601 time."""
    try:
        at = value if isinstance(value, datetime) else datetime.fromisoformat(re.sub("[zZ]$", "+00:00", value))
        to_millis(at)
    except TimeInvalid as error:
        raise click.BadParameter(
            f"{value!r} has no time zone: write for instance 2026-01-31T08:00:00+01:00, or 2026-01-31T07:00:00Z."
        ) from error
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no ISO 8601 time: write for instance 2026-01-31T08:00:00Z.") from error
    return at


def duration(value: str | float) -> float:
    """Seconds, or a number with a unit: `90`, `1.5h`, `15m`, `7d`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value).strip())
    if found is None:
        raise click.BadParameter(f"{value!r} is no duration: write seconds that are not negative, or 90s, 15m, 2h, 7d.")
    return float(found[1]) * UNITS[found[2]]


def json_value(value: str) -> Any:
    """Any JSON value."""
    try:
        return json.loads(value)
    except ValueError as error:
        raise click.BadParameter(
            f'not JSON: {error}. Quote it for the shell, for instance \'{{"template": "forgot"}}\'.'
        ) from error


object_argument = click.argument("ref", metavar="KIND/NAME", type=object_name)
json_option = click.option("--json", "json_", is_flag=True, help="Print JSON.")


def deployment(ctx: click.Context, makes: bool = False, checks: bool = True) -> Lifecycle:
    """The deployment of the app given by `-A`, with its tasks and classes imported.

    Args:
        makes: the command may make the embedded database; others would only be told of an empty one.
        checks: the settings are read here, so that a bad one is told at once.
    """
    app = ctx.obj.app
    app.loader.import_default_modules()
    app.finalize()
    lifecycle = lifecycle_of(app)
    if checks and lifecycle.config.embedded and not makes and not os.path.exists("lifecycle.db"):
        raise ConfigurationError(
            f"No lifecycle_database_url is set, and there is no lifecycle.db in {os.getcwd()}. Go to the directory where"
            " beat and workers run, or set lifecycle_database_url; give the app with `celery -A <your app> lifecycle …`."
        )
    return lifecycle
