"""The settings, read once into a frozen object; a bad value fails at start and names the setting."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from celery_lifecycle.errors import ConfigurationError

PREFIX = "lifecycle_"


@dataclass(frozen=True)
class Config:
    """All settings of one deployment. In `app.conf` each is written with the prefix `lifecycle_`; durations are in seconds.

    Attributes:
        database_url: SQLAlchemy URL of the job database. Default: `sqlite:///lifecycle.db` in the working directory.
        backup_alarm: within how long a lost message or a lost run is noticed. Leases last two thirds of it, are
            renewed every sixth, and a second look is taken a sixth later. Default 30.
        patience_max: the longest a chain on its way is waited for before it is sent again, but for long queues: twice the
            wait that the object saw last, at most 12 times this. Default 300.
        poll_interval: how often beat looks for alarms that were stored nearer than it slept. Default 0.2.
        claim_batch: objects claimed in one transaction. Default 1000.
        dispatch_window: chains on their way per queue. Default 1000.
        chain_length: due jobs that one chain takes. Default 50.
        max_memory_strikes: deaths at which a loop is sealed, where the object class says nothing. Default 3.
        strike_delay: a struck job waits this times its strikes. Default 30.
        strike_delay_max: and never longer than this. Default 300.
        strike_window: how long the strikes of a line are remembered after its last death. Default 3600.
        suspect_delay: how long a suspect waits for another suspect on the same worker. Default 5.
        unknown_task_grace: how long a job of an unknown task or owner is put back before it is a dead job. Default 600.
        retry_hold: the longest retry delay for which a worker process is held. Default 5.
        hung_timeout: a run longer than this is reported as slow, and stopped if it is singleflight. Default 30.
        keep_alive: how long a keep-alive lasts without renewal; it is renewed every third of it. Default 30.
        dead_job_retention: how long dead jobs are kept. Default 30 days.
        lock_timeout: how long a transaction waits for a row lock. Default 5.
        table_prefix: of all tables. Default `lifecycle_`.
        auto_migrate: create and upgrade the tables at start; default only for the embedded SQLite database.
    """

    database_url: str = ""
    backup_alarm: float = 30
    patience_max: float = 300
    poll_interval: float = 0.2
    claim_batch: int = 1000
    dispatch_window: int = 1000
    chain_length: int = 50
    max_memory_strikes: int = 3
    strike_delay: float = 30
    strike_delay_max: float = 300
    strike_window: float = 3600
    suspect_delay: float = 5
    unknown_task_grace: float = 600
    retry_hold: float = 5
    hung_timeout: float = 30
    keep_alive: float = 30
    dead_job_retention: float = 30 * 86400
    lock_timeout: float = 5
    table_prefix: str = "lifecycle_"
    auto_migrate: bool | None = None

    @property
    def embedded(self) -> bool:
        """Whether no database was named, so that the embedded default is used."""
        return not self.database_url

    @property
    def url(self) -> str:
        return self.database_url or f"sqlite:///{os.path.abspath('lifecycle.db')}"

    @property
    def migrates_itself(self) -> bool:
        return self.embedded if self.auto_migrate is None else self.auto_migrate

    @property
    def backup_ms(self) -> int:
        return round(self.backup_alarm * 1000)

    @property
    def lease_ms(self) -> int:
        return self.backup_ms * 2 // 3

    @property
    def renew_every(self) -> float:
        return self.backup_alarm / 6

    @property
    def doubt_ms(self) -> int:
        return max(1, self.backup_ms // 6)

    @property
    def unknown_grace_ms(self) -> int:
        return round(self.unknown_task_grace * 1000)

    @property
    def patience_max_ms(self) -> int:
        return max(self.backup_ms, round(self.patience_max * 1000))

    @property
    def keep_alive_ms(self) -> int:
        return round(self.keep_alive * 1000)


_RANGES: dict[str, tuple[float, float]] = {
    "backup_alarm": (0.3, 86400),
    "patience_max": (0.3, 86400),
    "poll_interval": (0.01, 60),
    "claim_batch": (1, 10_000),
    "dispatch_window": (1, 10_000_000),
    "chain_length": (1, 1000),
    "max_memory_strikes": (1, 1000),
    "strike_delay": (0, 86400),
    "strike_delay_max": (0, 7 * 86400),
    "strike_window": (1, 365 * 86400),
    "suspect_delay": (0.01, 3600),
    "unknown_task_grace": (0, 365 * 86400),
    "retry_hold": (0, 3600),
    "hung_timeout": (0.1, 365 * 86400),
    "keep_alive": (0.3, 86400),
    "dead_job_retention": (0, 3650 * 86400),
    "lock_timeout": (0.1, 3600),
}


def read_config(settings: Mapping[str, Any]) -> Config:
    """Make a `Config` of settings given without their prefix.

    Raises:
        ConfigurationError: a setting is unknown, of the wrong type or out of range; the message names it.
    """
    known = {field.name: field for field in fields(Config)}
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known:
            raise ConfigurationError(
                f"Unknown setting {PREFIX}{name}. Known are: {', '.join(PREFIX + key for key in sorted(known))}."
            )
        if value is None:
            continue
        values[name] = _checked(name, value)
    return Config(**values)


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if name in _RANGES:
        low, high = _RANGES[name]
        whole = name in ("claim_batch", "dispatch_window", "chain_length", "max_memory_strikes")
        if isinstance(value, str):
            try:
                value = int(value) if whole else float(value)
            except ValueError:
                raise _bad(name, value, f"a number from {low:.15g} to {high:.15g}") from None
        allowed = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
            raise _bad(name, value, f"{'a whole number' if whole else 'seconds'} from {low:.15g} to {high:.15g}")
        return value
    if name == "auto_migrate":
        if not isinstance(value, bool):
            raise _bad(name, value, "True or False")
        return value
    value = value.render_as_string(hide_password=False) if hasattr(value, "render_as_string") else value
    if not isinstance(value, str):
        raise _bad(name, value, "a string")
    if name == "table_prefix" and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,30}", value):
        raise _bad(name, value, "letters, digits and underscores, at most 31, not beginning with a digit")
    return value


def _bad(name: str, value: object, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{PREFIX}{name} is {value!r}: give {allowed}.")
