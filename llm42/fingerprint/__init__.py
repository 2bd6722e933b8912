"""The fingerprint: what the verifier's bits depend on, as a manifest that can be compared field by field,
and its hash.

`inputs` are known before certification, `manifest` adds the outcome. What can change no bit is not in it: a
change without cause would cost every client its stored comparisons. A kept certificate has a key of its own
(`certificate_key`), which holds in addition what certification was run with.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from llm42.config import Settings
from llm42.fingerprint.device import device_facts, table_digest
from llm42.fingerprint.digests import digest
from llm42.fingerprint.environment import steering_variables
from llm42.fingerprint.libraries import library_versions, loaded_libraries, torch_build
from llm42.fingerprint.request import process_facts, request_facts
from llm42.fingerprint.source import code_hash, source_hash
from llm42.models.weights import LoadedModel
from llm42.verifier.manifest import SCHEDULE_VERSION, certificate_key, inputs, manifest
from llm42.verifier.sizes import REFERENCE_ROWS, device_kind

__all__ = [
    "SCHEDULE_VERSION",
    "certificate_key",
    "code_hash",
    "device_facts",
    "differing_fields",
    "digest",
    "fingerprint",
    "inputs",
    "manifest",
    "process_facts",
    "request_facts",
    "source_hash",
]


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
