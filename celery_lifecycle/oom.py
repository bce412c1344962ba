"""Tells a kernel's OOM kill from any other SIGKILL: by the counters that the kernel keeps."""

from __future__ import annotations

from pathlib import Path

V2 = "memory.events"
V1 = "memory.oom_control"


class OomCounter:
    """The `oom_kill` counter of this process's own cgroup (v2, else v1), else of the whole machine.

    It is read when it is made and again at each death: moved means that the kernel killed for memory in between.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._files = [*_own_cgroup(proc, cgroups), proc / "vmstat"]
        self._last = self.read()

    def read(self) -> int | None:
        """The counter now; None if this machine has none that can be read."""
        for path in self._files:
            value = _oom_kill(path)
            if value is not None:
                return value
        return None

    def has_moved(self) -> bool:
        """Whether it has moved since it was last looked at."""
        before, self._last = self._last, self.read()
        return before is not None and self._last is not None and self._last > before


def _own_cgroup(proc: Path, cgroups: Path) -> list[Path]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inner = path.lstrip("/")
        if not controllers:
            found += [cgroups / inner / V2, cgroups / V2]
        elif "memory" in controllers.split(","):
            found += [cgroups / "memory" / inner / V1, cgroups / "memory" / V1]
    return found


def _oom_kill(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        return None
    return None
