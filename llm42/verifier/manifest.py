"""The manifest: what the verifier's bits depend on, field by field; its hash is the fingerprint.

`inputs` are known before certification, `complete` adds the outcome. A kept certificate has a key of its own
(`certificate_key`), which holds in addition what certification was run with.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from llm42.config import Settings
from llm42.fingerprint import digest
from llm42.fingerprint.device import device_facts, table_digest
from llm42.fingerprint.environment import steering_variables
from llm42.fingerprint.libraries import library_versions, loaded_libraries, torch_build
from llm42.fingerprint.source import code_hash
from llm42.host.device import device_kind
from llm42.models.weights import LoadedModel
from llm42.verifier.sizes import REFERENCE_ROWS

SCHEDULE_VERSION = 1
"""Raised by hand when the canonical schedule changes in a way that the code hash would not show."""


def inputs(model: LoadedModel, settings: Settings, tokenizer_identity: str) -> dict[str, Any]:
    """Everything known before certification. model: with the rotary table that will be used."""
    kind = device_kind(model.device)
    return {
        "model": model.identity,
        "architecture": model.config.architecture,
        "dequantiser": model.dequantiser,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": settings.model.max_model_len,
        "tokenizer": tokenizer_identity,
        "reference_rows": REFERENCE_ROWS[kind],
        "parallel_size": 1,
        "affinity": settings.verifier.affinity,
        "logits_dtype": "activation" if settings.verifier.rounds_logits else "float32",
        "code": code_hash(),
        "schedule": SCHEDULE_VERSION,
        "device": device_facts(model.device, settings.verifier.threads),
        "rotary": table_digest(model.weights.cos_sin),
        "python": [platform.python_implementation(), platform.python_version(), *platform.libc_ver()],
        "libraries": library_versions(kind),
        "loaded": loaded_libraries(kind),
        "blas": digest(torch_build(kind)),
        "environment": steering_variables(kind),
        **({"attention_tiles": _attention_tiles(model, settings)} if kind == "cuda" else {}),
    }


def _attention_tiles(model: LoadedModel, settings: Settings) -> str:
    """Which kernels attention runs on a GPU. The block size may choose among them, and is else in no bit."""
    from llm42.verifier.cuda.runner import ATTENTION
    from llm42_kernels.cuda import candidates

    c, v = model.config, settings.verifier
    (provider,) = candidates(v.affinity)["attention"]
    return ATTENTION[provider](c.num_heads, c.num_kv_heads, c.head_dim, v.block_size).kernels


def certificate_key(known: Mapping[str, Any], settings: Settings) -> str:
    """The name under which a certificate is kept: `inputs`, and what else certification looks at."""
    v = settings.verifier
    return digest({**known, "configured_rows": list(v.buckets), "block_size": v.block_size})


def complete(known: Mapping[str, Any], providers: Mapping[str, str], golden: str) -> dict[str, Any]:
    """Inputs and outcome of certification, and the digest of the known answers (known_answers.py)."""
    return {**known, "providers": dict(providers), "golden": golden}
