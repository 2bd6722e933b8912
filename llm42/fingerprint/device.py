"""The device as far as bits may depend on it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm42.fingerprint import digest
from llm42.host.linked import mapped_file
from llm42.host.threads import usable_threads

CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")
NVML = "libnvidia-ml.so.1"

DISPATCH_FLAGS = (
    # x86: MKL, oneDNN, OpenBLAS, ATen, SLEEF and glibc's functions choose by these
    "sse*", "ssse3", "avx*", "fma*", "f16c", "xop", "bmi?", "abm", "movbe", "popcnt", "amx*",
    # Arm
    "fp", "fphp", "asimd*", "sve*", "sme*", "bf16", "i8mm", "fcma", "fhm",
)  # fmt: skip
"""Of a processor's flags those by which libraries choose their kernels. A kernel update adds others."""


def device_facts(device: str, threads: int) -> dict[str, Any]:
    """The device. threads: as configured; a CPU's facts have how many run."""
    if device == "cpu":
        text = _cpuinfo()
        return {
            "kind": "cpu",
            "name": _cpu_name(text),
            "identity": cpu_identity(text) if text else digest(platform.processor()),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            "threads": usable_threads(threads),
        }
    properties = torch.cuda.get_device_properties(torch.device(device))
    return {
        "kind": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
    }


def table_digest(table: Tensor) -> str:
    """Of the rotary table [P, D], which a GPU's model may have from the host's CPU: 16 hex digits."""
    return hashlib.sha256(table.contiguous().cpu().numpy().tobytes()).hexdigest()[:16]


def _cpuinfo() -> str:
    try:
        return CPUINFO.read_text()
    except OSError:
        return ""


def _cpu_name(cpuinfo: str) -> str:
    names = (line.split(":", 1)[1] for line in cpuinfo.splitlines() if line.startswith("model name"))
    return next(names, platform.processor()).strip()


def cpu_identity(cpuinfo: str) -> str:
    """Hash of what a library can choose its kernels by, of the first processor of a /proc/cpuinfo text: a
    virtual machine's model name may say little."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "cache size", "CPU implementer", "CPU part")
    lines = (line.split(":", 1) for line in cpuinfo.split("\n\n", 1)[0].splitlines() if ":" in line)
    fields = {key.strip(): value.split() for key, value in lines}
    flags = {flag for key in ("flags", "Features") for flag in fields.get(key, [])}
    known = sorted(flag for flag in flags if any(fnmatchcase(flag, pattern) for pattern in DISPATCH_FLAGS))
    return digest({key: fields[key] for key in wanted if key in fields} | {"flags": known})


def driver_version() -> str | None:
    """The NVIDIA driver's full version (`570.124.06`): of NVML, of the kernel module, or of the name of the
    driver's library; else what the CUDA API says of it. WSL2 and gVisor have no /proc/driver/nvidia."""
    return _nvml_version() or _module_version() or _library_version() or _api_version()


def _nvml_version() -> str | None:
    try:
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2():
            return None
        try:
            text = ctypes.create_string_buffer(96)
            failed = nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if failed else text.value.decode(errors="replace") or None


def _module_version() -> str | None:
    try:
        return version_in(DRIVER.read_text().splitlines()[0])
    except (OSError, IndexError):
        return None


def _library_version() -> str | None:
    file = mapped_file("libcuda.so")
    return version_in(os.path.realpath(file)) if file else None


def version_in(text: str) -> str | None:
    """The first thing that looks like a driver's version."""
    found = re.search(r"(?<!\d)\d{3,}\.\d+(?:\.\d+)?", text)
    return found.group() if found else None


def _api_version() -> str | None:
    try:
        value = ctypes.c_int(0)
        failed = ctypes.CDLL(mapped_file("libcuda.so") or "libcuda.so.1").cuDriverGetVersion(
            ctypes.byref(value)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else f"CUDA {value.value // 1000}.{value.value % 1000 // 10}"
