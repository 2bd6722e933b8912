"""What the processes of a service hold: memory, descriptors, threads, and what they say of themselves."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.processes import family
from llm42.host.direct import open_url
from llm42.telemetry import metrics as m

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
    "tasks": (m.INGRESS_TASKS, m.REPLICA_TASKS, m.VERIFIER_TASKS),
    "kv": (m.KV_USED, m.VERIFIER_KV_HELD),
    "held": (m.RUNNING, m.QUEUED, m.WAITING, m.VERIFIER_WAITING, m.VERIFIER_ACTIVE, m.VERIFIER_DIRECT),
}
"""What must come back to where it was."""


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process."""

    pid: int
    pss_mib: float
    """Proportional memory: a page that n processes share is an n-th of each."""
    descriptors: int
    threads: int
    age_s: float


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
        round(uptime - int(after_name[19]) / os.sysconf("SC_CLK_TCK"), 1),
    )


def gauges(url: str) -> dict[str, float]:
    """Sums of the metrics page's series. Raises OSError when there is no page, ValueError when it lacks the
    series of one of them: nothing is not zero."""
    with open_url(url, 60, direct=True) as reply:
        return sums(reply.read().decode())


def sums(page: str) -> dict[str, float]:
    """The same of a page that was read."""
    values: dict[str, list[float]] = defaultdict(list)
    for line in page.splitlines():
        if line and not line.startswith("#"):
            values[line.partition("{")[0]].append(float(line.rsplit(" ", 1)[1]))
    found = {}
    for name, metrics in GAUGES.items():
        if missing := [metric.name for metric in metrics if f"ray_{metric.name}" not in values]:
            raise ValueError(f"the metrics page has no {', '.join(missing)}")
        found[name] = sum(sum(values[f"ray_{metric.name}"]) for metric in metrics)
    return found


def summary(found: Mapping[str, list[Held]]) -> dict[str, Any]:
    """For a result's raw part: of each role, the oldest first."""
    return {
        role: {of: [getattr(h, of) for h in them] for of in ("pss_mib", "descriptors", "threads")}
        for role, them in found.items()
    }


def growth(before: Mapping[str, list[Held]], after: Mapping[str, list[Held]], of: str) -> dict[str, float]:
    """By role: the largest growth of `of` in a process that lived through both."""
    found = {}
    for role, them in after.items():
        old = {h.pid: getattr(h, of) for h in before.get(role, ())}
        grown = [getattr(h, of) - old[h.pid] for h in them if h.pid in old]
        if grown:
            found[role] = round(max(grown), 1)
    return found
