"""The device as far as bits may depend on it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from llm42.fingerprint.digests import digest


def device_facts(device: str, threads: int) -> dict[str, Any]:
    """The device as far as bits may depend on it."""
    if device == "cpu":
        return {
            "kind": "cpu",
            "name": _cpu_name(),
            "identity": _cpu_identity(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            "threads": threads,
        }
    properties = torch.cuda.get_device_properties(torch.device(device))
    return {
        "kind": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _cpu_identity() -> str:
    """Hash of what a library can choose its kernels by: a virtual machine's model name may say little."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags", "Features", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return digest(platform.processor())
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    named = {key.strip(): sorted(value.split()) for key, value in fields.items()}
    return digest({key: named[key] for key in wanted if key in named})


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    return text.splitlines()[0].strip()
