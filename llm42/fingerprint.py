"""The fingerprint: what the verifier's bits depend on, as a manifest that can be compared field by field,
and its hash.

`inputs` are known before certification and key the certificate cache; `manifest` adds the outcome.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import deployments
import llm42
import llm42_kernels
from llm42.config import Settings
from llm42.models.weights import LoadedModel

SCHEDULE_VERSION = 1
"""Raised by hand when the canonical schedule changes in a way that the code hash would not show."""

LIBRARIES = ("torch", "triton", "numpy", "tokenizers", "jinja2", "gguf", "safetensors")
ENVIRONMENT = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NVIDIA_TF32_OVERRIDE",
)
"""Variables that can change which kernel a library picks."""

CODE = (
    "kernels",
    "models",
    "verifier",
    "sampling.py",
    "noise.py",
    "cache.py",
    "threads.py",
    "tokenizer.py",
    "chat_template.py",
    "text.py",
    "protocol.py",
    "session.py",
    "driver.py",
    "outputs.py",
    "prompt_scores.py",
)


def digest(value: Any) -> str:
    """SHA-256 of a JSON-ready value, 16 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


REQUEST_CODE = ("translate.py", "openai_types.py", "prompts.py", "messages.py")
"""What makes protocol requests of HTTP bodies: defaults, limits, the seeds of several choices."""


def code_hash() -> str:
    """Hash over the source of the kernels and of everything that makes an output of a request."""
    package, service = Path(llm42.__file__).parent, Path(deployments.__file__).parent
    roots = [Path(llm42_kernels.__file__).parent if name == "kernels" else package / name for name in CODE]
    return source_hash([*roots, *(service / name for name in REQUEST_CODE)])


def source_hash(roots: Iterable[Path]) -> str:
    """Hash over Python files and, of folders, all Python files in them: names and contents."""
    hashed = hashlib.sha256()
    for root in roots:
        for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            hashed.update(f"{file.relative_to(root.parent)}\0".encode() + file.read_bytes())
    return hashed.hexdigest()[:16]


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


def inputs(model: LoadedModel, settings: Settings, tokenizer_identity: str) -> dict[str, Any]:
    """Everything known before certification."""
    return {
        "model": model.identity,
        "model_name": settings.model.name,
        "architecture": model.config.architecture,
        "dequantiser": model.dequantiser,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": settings.model.max_model_len,
        "tokenizer": tokenizer_identity,
        "configured_buckets": list(settings.verifier.buckets),
        "block_size": settings.verifier.block_size,
        "parallel_size": 1,
        "affinity": settings.verifier.affinity,
        "logits_dtype": "activation" if settings.verifier.rounds_logits else "float32",
        "code": code_hash(),
        "schedule": SCHEDULE_VERSION,
        "device": device_facts(model.device, settings.verifier.threads),
        "python": [platform.python_implementation(), platform.python_version(), *platform.libc_ver()],
        "libraries": {name: _version(name) for name in LIBRARIES},
        "blas": digest(torch.__config__.show()),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def manifest(
    known: Mapping[str, Any], providers: Mapping[str, str], buckets: tuple[int, ...], golden: str
) -> dict[str, Any]:
    """Inputs and outcome of certification, and the digest of the known answers (verifier/golden.py)."""
    return {**known, "providers": dict(providers), "buckets": list(buckets), "golden": golden}


def fingerprint(full: Mapping[str, Any]) -> str:
    """Equal fingerprints promise equal bits."""
    return f"llm42-{digest(full)}"


def differing_fields(
    a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Field by field comparison of two manifests: dotted name -> (value in a, value in b)."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*a, *b}):
        left, right = a.get(name), b.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found |= differing_fields(left, right, f"{prefix}{name}.")
        elif left != right:
            found[f"{prefix}{name}"] = (left, right)
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
