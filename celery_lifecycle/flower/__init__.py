"""Flower with Lifecycle pages: `celery -A <your app> lifecycle flower [Flower's own options]`.

Nothing in Flower is changed for those who start it in the usual way. The pages stand behind Flower's login, and change
things only where Flower has one.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from celery_lifecycle.errors import ConfigurationError
from celery_lifecycle.lifecycle import Lifecycle


def start(ctx: click.Context, lifecycle: Lifecycle, arguments: Sequence[str]) -> None:
    """Run Flower with the pages until it is stopped.

    Raises:
        ConfigurationError: Flower is not installed, or too old.
    """
    try:
        from flower.command import flower
    except ImportError as error:
        raise ConfigurationError(
            f"Flower is not installed ({error}): pip install 'celery-lifecycle[flower]', or Flower 2.0 or newer."
        ) from error
    from celery_lifecycle.flower.pages import install

    lifecycle.verify()
    install(lifecycle)
    ctx.invoke(flower, tornado_argv=tuple(arguments))
