"""Goes from the wall clock of a time zone to instants and back, and says where its clocks skip or repeat.

A wall time is a naive datetime. Instants are in whole seconds since the epoch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from celery_lifecycle.errors import ScheduleInvalid

Seconds = int

_EPOCH = datetime(1970, 1, 1)
_SECOND = timedelta(seconds=1)
# Not in every installation, the same name for different rules, or counted with leap seconds.
_NO_ZONES = ("localtime", "posixrules", "right/")


@dataclass(frozen=True)
class Zone:
    """One time zone of the tz database. Two zones are equal if their names are."""

    name: str
    tzinfo: ZoneInfo = field(compare=False, repr=False)

    def offset(self, at: Seconds) -> Seconds:
        """What the zone's clocks are ahead of UTC at an instant, in seconds."""
        return _seconds((_EPOCH + at * _SECOND).replace(tzinfo=timezone.utc).astimezone(self.tzinfo).utcoffset())

    def wall_offset(self, wall: datetime, fold: int) -> Seconds:
        """The offset of a wall time: before a change of the clocks with fold 0, after it with fold 1.

        They are the same unless the clocks skip this wall time (then the first is smaller) or show it twice
        (then it is larger).
        """
        return _seconds(wall.replace(tzinfo=self.tzinfo, fold=fold).utcoffset())

    def wall(self, at: Seconds) -> datetime:
        """What the zone's clocks show at an instant."""
        return wall_at(at, self.offset(at))

    def gap_end(self, wall: datetime) -> Seconds:
        """The instant at which the clocks jump over a wall time that they skip."""
        before, after = self.wall_offset(wall, 0), self.wall_offset(wall, 1)
        low, high = instant(wall, after), instant(wall, before)
        while high - low > 1:
            middle = (low + high) // 2
            if self.offset(middle) == before:
                low = middle
            else:
                high = middle
        return high


def wall_at(at: Seconds, offset: Seconds) -> datetime:
    """What clocks that are `offset` seconds ahead of UTC show at an instant."""
    return _EPOCH + (at + offset) * _SECOND


def instant(wall: datetime, offset: Seconds) -> Seconds:
    """The instant at which clocks that are `offset` seconds ahead of UTC show a wall time."""
    return (wall - _EPOCH) // _SECOND - offset


@lru_cache(maxsize=1024)
def load_zone(name: str) -> Zone:
    """The zone of a name from the tz database, for instance `Europe/Berlin`.

    Raises `ScheduleInvalid`, naming it, if there is none.
    """
    try:
        if name.startswith(_NO_ZONES):
            raise ValueError(name)
        return Zone(name, ZoneInfo(name))
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ScheduleInvalid(
            f"There is no time zone {name!r}. Give a name of the tz database, like 'Europe/Berlin' or 'UTC'; "
            "on a system without this database install the package tzdata."
        ) from error


def _seconds(offset: timedelta | None) -> Seconds:
    assert offset is not None  # a ZoneInfo has one for every date
    return offset // _SECOND
