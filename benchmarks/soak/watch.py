"""What the processes of a service hold: memory, descriptors, threads, and what they say of themselves."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llm42.host.direct import open_url

ROLES = {
    "ingress": re.compile(r"^ray::ServeReplica:\w+:Ingress"),
    "replica": re.compile(r"^ray::ServeReplica:\w+:FastPath"),
    "verifier": re.compile(r"^ray::VerifierActor"),
    "supervisor": re.compile(r"^ray::Supervisor"),
    "proxy": re.compile(r"^ray::ProxyActor"),
    "controller": re.compile(r"^ray::ServeController"),
    "raylet": re.compile(r"raylet/raylet"),
    "gcs": re.compile(r"gcs_server"),
}
"""Processes by their titles, as Ray sets them."""
GAUGES = {
    "tasks": re.compile(r"^ray_llm42_(?:ingress|replica|verifier)_tasks\{"),
    "kv": re.compile(r"^ray_llm42_(?:fastpath_kv_used_tokens|verifier_kv_held_blocks)\{"),
    "held": re.compile(
        r"^ray_llm42_(?:requests_running|requests_queued|fastpath_waiting|verifier_waiting|verifier_active"
        r"|verifier_direct_requests)\{"
    ),
}
"""Series of the metrics page that must come back to where they were."""


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process."""

    pid: int
    pss_mib: float
    """Proportional memory: a page that n processes share is an n-th of each."""
    descriptors: int
    threads: int
    age_s: float


def family(root: int) -> set[int]:
    """A process and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found = {root}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def processes(root: int) -> dict[str, list[Held]]:
    """What every process of the service holds, by role; the oldest of a role first."""
    found: dict[str, list[Held]] = defaultdict(list)
    for pid in family(root):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            role = next((name for name, pattern in ROLES.items() if pattern.search(title)), None)
            if role:
                found[role].append(_held(pid))
        except OSError:  # it has just ended
            continue
    return {role: sorted(them, key=lambda h: -h.age_s) for role, them in found.items()}


def _held(pid: int) -> Held:
    here = Path(f"/proc/{pid}")
    pss = re.search(r"^Pss:\s+(\d+)", (here / "smaps_rollup").read_text(), re.M)
    after_name = (here / "stat").read_text().rsplit(")", 1)[1].split()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return Held(
        pid,
        round(int(pss[1]) / 1024 if pss else 0.0, 1),
        len(list((here / "fd").iterdir())),
        int(after_name[17]),
        round(uptime - int(after_name[19]) / 100, 1),  # ticks of 10 ms, whatever the kernel's own
    )


def gauges(url: str) -> dict[str, float]:
    """Sums of the metrics page's series. Raises OSError when there is no page."""
    with open_url(url, 60, direct=True) as reply:
        lines = reply.read().decode().splitlines()
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if pattern.search(line))
        for name, pattern in GAUGES.items()
    }


def as_json(found: Mapping[str, list[Held]]) -> dict[str, Any]:
    """For a result's raw part."""
    return {role: [asdict(h) for h in them] for role, them in found.items()}


def growth(before: Mapping[str, list[Held]], after: Mapping[str, list[Held]], of: str) -> dict[str, float]:
    """By role: the largest growth of `of` in a process that lived through both."""
    found = {}
    for role, them in after.items():
        old = {h.pid: getattr(h, of) for h in before.get(role, ())}
        grown = [getattr(h, of) - old[h.pid] for h in them if h.pid in old]
        if grown:
            found[role] = round(max(grown), 1)
    return found
