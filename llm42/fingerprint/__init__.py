"""The fingerprint: a hash of facts that can be compared field by field (see verifier/manifest.py).

Each module gathers facts of one kind: code, libraries, environment, device, and what the request side adds.
What can change no bit is not among them: a change without cause would cost every client its stored
comparisons.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(value: Any) -> str:
    """SHA-256 of a JSON-ready value, 16 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
