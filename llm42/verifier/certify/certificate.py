"""The certificate: what certification found on a machine, and the files in which it is kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llm42.errors import LLM42Error
from llm42.verifier.known_answers import NO_ANSWERS, KnownAnswers

log = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Told what is being certified."""


class CertificationFailed(LLM42Error):
    """No provider of an operator is row-invariant here; best-effort service is not affected."""

    code = "certification_failed"

    def __init__(self, operator: str, violations: list[str]) -> None:
        self.operator, self.violations = operator, violations
        text = "; ".join(violations)
        super().__init__(f"operator {operator} is not row-invariant on this machine: {text}")


@dataclass(slots=True)
class OperatorReport:
    """One provider of one operator: what was found."""

    operator: str
    provider: str
    passed: bool
    buckets: tuple[int, ...]
    """Step sizes, in rows."""
    violation: str | None = None


@dataclass(slots=True)
class Certificate:
    """The outcome, kept under a key of inputs only."""

    providers: dict[str, str]
    buckets: tuple[int, ...]
    """The step sizes that may be used: configured, and with the reference's bits."""
    reports: list[OperatorReport]
    compared_rows: int
    seconds: float
    row_counts_matter: bool
    """Whether an ordinary product's bits depend on the number of rows here (so best-effort output may
    diverge)."""
    key: str = ""
    cached: bool = False
    plants: tuple[str, ...] = field(default=())
    golden: KnownAnswers = field(default=NO_ANSWERS)
    """In steps of the reference size."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Certificate:
        """The inverse of to_json."""
        reports = [OperatorReport(**{**r, "buckets": tuple(r["buckets"])}) for r in data["reports"]]
        golden = KnownAnswers(data["golden"]["digest"], tuple(map(tuple, data["golden"]["tokens"])))
        tuples = {"buckets": tuple(data["buckets"]), "plants": tuple(data["plants"])}
        return cls(**{**data, "reports": reports, "golden": golden, **tuples})


def load_certificate(directory: str | None, key: str) -> Certificate | None:
    """The certificate kept under `key`, or None (also when the file cannot be read)."""
    if directory is None:
        return None
    try:
        certificate = Certificate.from_json(json.loads((Path(directory) / f"{key}.certificate").read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return replace(certificate, cached=True) if certificate.key == key else None


def save_certificate(directory: str | None, certificate: Certificate) -> None:
    """Keeps a certificate; one with plants is never kept."""
    if directory is None or certificate.plants:
        return
    path = Path(directory)
    temporary = path / f".{certificate.key}.tmp"
    try:
        path.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(certificate.to_json(), indent=1))
        temporary.replace(path / f"{certificate.key}.certificate")
    except OSError as error:  # certified all the same: the next start certifies again
        log.warning("the certificate could not be kept in %s: %s", directory, error)
