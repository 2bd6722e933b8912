"""The fingerprint: what the verifier's bits depend on, as a manifest that can be compared field by field,
and its hash.

`inputs` are known before certification and key the certificate cache; `manifest` adds the outcome.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from llm42.config import Settings
from llm42.fingerprint.device import device_facts
from llm42.fingerprint.digests import digest
from llm42.fingerprint.environment import steering_variables
from llm42.fingerprint.libraries import library_versions
from llm42.fingerprint.source import code_hash, source_hash
from llm42.models.weights import LoadedModel

__all__ = [
    "SCHEDULE_VERSION",
    "code_hash",
    "device_facts",
    "differing_fields",
    "digest",
    "fingerprint",
    "inputs",
    "manifest",
    "source_hash",
]

SCHEDULE_VERSION = 1
"""Raised by hand when the canonical schedule changes in a way that the code hash would not show."""


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
        "libraries": library_versions(),
        "blas": digest(torch.__config__.show()),
        "environment": steering_variables(),
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
