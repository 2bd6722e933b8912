"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_ROOT, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that the affinity mask allows, and no more than the container's CPU limit pays for; 1 or more."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def cpu_quota(own: Path = OWN_CGROUP, root: Path = CGROUP_ROOT) -> float | None:
    """The least CPU limit, in cores, of this process's control group and those above it; None without one.

    Reads version 2 (cpu.max) and version 1 (cpu.cfs_quota_us). What cannot be read counts as no limit.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    found = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if not controllers:
            found += [_limit(place, "cpu.max") for place in _upwards(root, path)]
        elif "cpu" in controllers.split(","):
            for base in (root / controllers, root / "cpu"):
                found += [_limit(p, "cpu.cfs_quota_us", "cpu.cfs_period_us") for p in _upwards(base, path)]
    return min((limit for limit in found if limit), default=None)


def _upwards(base: Path, path: str) -> list[Path]:
    """The group's directory and those above it. Inside a container the group's own may be the root."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [base.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _limit(place: Path, *files: str) -> float | None:
    """Cores by a group's quota and period, which are in these files; a quota of "max" or -1 is none."""
    try:
        quota, period = (word for name in files for word in (place / name).read_text().split())
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
