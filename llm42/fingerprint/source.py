"""The hash of the code that makes outputs: of what the code means (syntax.py), not of how it is written.

Every module of the packages counts unless NOT_IN_AN_OUTPUT says why it does not: a new one counts from the
day it is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from llm42.fingerprint.syntax import meaning

PACKAGES = ("llm42", "llm42_serve", "llm42_kernels")
"""What is hashed. Found by name, not imported: the library does not use the service."""

_STARTS = "starts, places, counts and ends processes; what they compute is elsewhere"
_ASKS = "a command: what it asks is in its options, what it prints was computed elsewhere"
_TELLS = "tells what happened; a request and its output pass it unchanged, or not at all"
_COMPARES = "compares stored answers with the verifier's; its findings are no output"
_CHOOSES = "says which way a token is come to, which may be any"
_REFUSES = "decides whether and when a request is answered, not how"

NOT_IN_AN_OUTPUT: dict[str, str] = {
    "llm42/__init__.py": "the version's number",
    "llm42/__main__.py": _ASKS,
    "llm42/errors.py": _REFUSES,
    "llm42/step_times.py": _CHOOSES,
    "llm42/validation.py": "what is said instead of an output",
    "llm42/audit/*": _COMPARES,
    "llm42/cli/*": _ASKS,
    "llm42/config/*": "the values of the settings that count are in the manifest",
    "llm42/engine/*": "engines only propose: every token of a deterministic answer is the verifier's",
    "llm42/fingerprint/*": "says what the bits depend on, and makes none",
    "llm42/telemetry/*": _TELLS,
    "llm42/checkpoint/fetch.py": "brings files, whose contents are in the manifest",
    "llm42/host/cores.py": _STARTS,
    "llm42/host/direct.py": _STARTS,
    "llm42/host/garbage.py": _STARTS,
    "llm42/local/affinity*.py": _COMPARES,
    "llm42/local/demo*.py": _COMPARES,
    "llm42/session/backoff.py": _CHOOSES,
    "llm42/session/policy.py": _CHOOSES,
    "llm42/session/promises.py": _CHOOSES,
    "llm42/session/standing.py": _CHOOSES,
    "llm42/session/ways.py": _CHOOSES,
    "llm42/api/audit_*.py": _COMPARES,
    "llm42/api/docs_page.py": "a page for people",
    "llm42/api/errors.py": "what is said instead of an output",
    "llm42/api/keys.py": _REFUSES,
    "llm42/api/text_routes.py": "ids of texts and texts of ids; no generated output",
    "llm42_serve/app.py": _STARTS,
    "llm42_serve/launch.py": _STARTS,
    "llm42_serve/placement.py": "which replica or verifier answers, which may be any",
    "llm42_serve/preflight.py": _STARTS,
    "llm42_serve/ray_*.py": _STARTS,
    "llm42_serve/ingress/lingering.py": "drops what is left of a request that has its answer",
    "llm42_serve/ingress/proxy_replies.py": "what is said where the application is not there",
    "llm42_serve/ingress/router.py": "which replica answers, which may be any",
    "llm42_serve/replica/admission.py": _REFUSES,
    "llm42_serve/replica/crowding.py": _REFUSES,
    "llm42_serve/replica/spot_check.py": _COMPARES,
    "llm42_serve/replica/supervisor_link.py": _STARTS,
    "llm42_serve/verifiers/load.py": _REFUSES,
    "llm42_serve/verifiers/membership.py": _STARTS,
    "llm42_serve/verifiers/names.py": _STARTS,
    "llm42_serve/verifiers/news.py": _TELLS,
    "llm42_serve/verifiers/scaling.py": _STARTS,
    "llm42_serve/verifiers/supervisor.py": _STARTS,
    "llm42_serve/verifiers/watch.py": _STARTS,
}
"""Modules (patterns of package/path) that cannot change an output, each with the reason."""


@cache
def code_hash() -> str:
    """Hash of everything that makes an output of a request; computed once, of what this process runs."""
    return source_hash(map(folder_of, PACKAGES), NOT_IN_AN_OUTPUT)


def folder_of(package: str) -> Path:
    """Where an installed package's source lies. Raises ModuleNotFoundError for one that is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is not installed, and its code is part of the fingerprint")
    return Path(spec.origin).parent


def source_hash(roots: Iterable[Path], without: Iterable[str] = ()) -> str:
    """Hash of the names and meanings of Python files and, of folders, of all Python files in them; 16 hex
    digits. Names are relative to a root's parent. without: patterns of names that do not count."""
    patterns, hashed = tuple(without), hashlib.sha256()
    for root in roots:
        for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            name = file.relative_to(root.parent).as_posix()
            if not any(fnmatchcase(name, pattern) for pattern in patterns):
                hashed.update(f"{name}\0{meaning(file.read_bytes())}\0".encode())
    return hashed.hexdigest()[:16]
