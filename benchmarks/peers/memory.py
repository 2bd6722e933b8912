"""What a system holds: of the GPU as its driver tells it, and of the machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.lib.processes import family

QUERY = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits"
TOTAL = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"


def host_mib(root: int) -> int:
    """Resident memory of a process and all that descend from it; shared pages count each time."""
    total = 0
    for pid in family(root):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return total // 1024


def gpu_mib(root: int) -> int | None:
    """Of a process and all that descend from it; None where the driver does not name them."""
    mine, found = family(root), dict[int, int]()
    for line in _lines(QUERY):
        pid, _, mib = line.partition(",")
        if mib.strip().isdigit():
            found[int(pid)] = int(mib)
    held = [mib for pid, mib in found.items() if pid in mine]
    return sum(held) if held else None


def gpu_total_mib() -> int | None:
    """Of all processes on the GPU."""
    lines = _lines(TOTAL)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(command: str) -> list[str]:
    try:
        told = subprocess.run(command.split(), capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return told.stdout.splitlines() if told.returncode == 0 else []
