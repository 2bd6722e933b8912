"""Certification: prove on this machine, for this model's shapes, that the verifier's operators are
row-invariant.

For each operator the providers are tried in order of speed; the first that passes every check is used. If
no provider passes for all configured step sizes, the first that passes for the largest alone is used and
smaller sizes are dropped. If none passes at all, CertificationFailed names the operator: deterministic
service must not start.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from llm42.cache import KVCache
from llm42.config import VerifierSettings
from llm42.models.weights import LoadedModel
from llm42.protocol import LLM42Error
from llm42.sampling import StepSampler, sample_step
from llm42.threads import torch_threads
from llm42.verifier.checks import Tally, Violation, check_rows
from llm42.verifier.cpu_runner import CPURunner
from llm42.verifier.plants import PLANTS
from llm42.verifier.step_checks import check_attention, check_model, check_sampling
from llm42.verifier.subjects import subjects
from llm42_kernels import attention_cpu, cpu
from llm42_kernels.attention_cpu import StepAttention
from llm42_kernels.operators import Operators

log = logging.getLogger(__name__)


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
    violation: str | None = None


@dataclass(slots=True)
class Certificate:
    """The outcome, kept under a key of inputs only."""

    providers: dict[str, str]
    buckets: tuple[int, ...]
    reports: list[OperatorReport]
    compared_rows: int
    seconds: float
    row_counts_matter: bool
    """Whether an ordinary product's bits depend on the number of rows here (so best-effort output may
    diverge)."""
    key: str = ""
    cached: bool = False
    plants: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Certificate:
        """The inverse of to_json."""
        reports = [OperatorReport(**{**r, "buckets": tuple(r["buckets"])}) for r in data["reports"]]
        tuples = {"buckets": tuple(data["buckets"]), "plants": tuple(data["plants"])}
        return cls(**{**data, "reports": reports, **tuples})


@dataclass(frozen=True, slots=True)
class CanonicalSet:
    """The chosen operators, ready for a runner."""

    ops: Operators
    attention: StepAttention
    sampler: StepSampler


def canonical_set(providers: Mapping[str, str], plants: Iterable[str] = ()) -> CanonicalSet:
    """The CPU operators that a certificate names; plants break them (tests only)."""
    ops = cpu.cpu_operators({k: v for k, v in providers.items() if k in cpu.PROVIDERS})
    attention = attention_cpu.CPU_PROVIDERS[providers.get("attention", "tiled")]
    sampler: StepSampler = sample_step
    for name in plants:
        plant = PLANTS[name]
        if plant.operator == "attention":
            attention = plant.wrap(attention)
        elif plant.operator == "sampling":
            sampler = plant.wrap(sampler)
        else:
            ops = replace(ops, **{plant.operator: plant.wrap(getattr(ops, plant.operator))})
    return CanonicalSet(ops, attention, sampler)


Progress = Callable[[str], None]


@torch.inference_mode()
def certify_cpu(
    model: LoadedModel,
    settings: VerifierSettings,
    plants: Iterable[str] = (),
    progress: Progress = lambda _: None,
) -> Certificate:
    """Runs every check. Raises CertificationFailed, ValueError for an unknown plant."""
    plants = tuple(plants)
    for name in plants:
        if name not in PLANTS:
            raise ValueError(f"unknown plant {name!r}; there are {', '.join(PLANTS)}")
    with torch_threads(settings.threads):
        return _Certifier(model, settings, plants, progress).run()


class _Certifier:
    def __init__(
        self, model: LoadedModel, settings: VerifierSettings, plants: tuple[str, ...], progress: Progress
    ) -> None:
        self.model, self.settings, self.plants, self.progress = model, settings, plants, progress
        self.tally, self.reports = Tally(), list[OperatorReport]()
        self.buckets = list(settings.buckets)

    def run(self) -> Certificate:
        began = time.monotonic()
        chosen = {op: self._choose(op, list(cpu.PROVIDERS[op])) for op in cpu.PROVIDERS}
        chosen["attention"] = self._single("attention", "tiled", self._attention)
        chosen["sampling"] = self._single("sampling", "row", self._sampling)
        self._single("model", "canonical", lambda: self._whole(chosen))
        return Certificate(
            providers=chosen,
            buckets=tuple(self.buckets),
            reports=self.reports,
            compared_rows=self.tally.rows,
            seconds=round(time.monotonic() - began, 2),
            row_counts_matter=self._row_counts_matter(),
            plants=self.plants,
        )

    def _choose(self, operator: str, providers: list[str]) -> str:
        """The first provider that passes at every step size; else the first that passes at some."""
        partial: tuple[str, list[int]] | None = None
        violations = []
        for provider in providers:
            self.progress(f"{operator} ({provider})")
            good, first = self._check(operator, provider)
            report = OperatorReport(operator, provider, not first, tuple(good), str(first) if first else None)
            self.reports.append(report)
            if first is None:
                return provider
            violations.append(f"{provider}: {first}")
            if good and partial is None:
                partial = (provider, good)
        if partial is None:
            raise CertificationFailed(operator, violations)
        self.buckets = [b for b in self.buckets if b in partial[1]]
        return partial[0]

    def _check(self, operator: str, provider: str) -> tuple[list[int], Violation | None]:
        good, first = set(self.buckets), None
        ops = canonical_set({operator: provider}, self.plants).ops
        for subject in subjects(self.model, ops, operator):
            passed, violation = check_rows(subject, self.buckets, self.tally)
            good &= set(passed)
            first = first or violation
        return sorted(good), first

    def _single(self, operator: str, provider: str, check: Callable[[], Violation | None]) -> str:
        self.progress(f"{operator} ({provider})")
        violation = check()
        text = str(violation) if violation else None
        self.reports.append(OperatorReport(operator, provider, violation is None, tuple(self.buckets), text))
        if violation is not None:
            raise CertificationFailed(operator, [f"{provider}: {violation}"])
        return provider

    def _attention(self) -> Violation | None:
        c = self.model.config
        attention = canonical_set({}, self.plants).attention
        heads = (c.num_heads, c.num_kv_heads, c.head_dim)
        return check_attention(attention, *heads, self.settings.block_size, self.model.dtype, self.tally)

    def _sampling(self) -> Violation | None:
        return check_sampling(
            canonical_set({}, self.plants).sampler, self.model.config.vocab_size, self.tally
        )

    def _whole(self, chosen: Mapping[str, str]) -> Violation | None:
        c, size = self.model.config, self.settings.block_size
        blocks = 3 * (-(-96 // size) + 1)
        kv = KVCache(c.num_layers, blocks, size, c.num_kv_heads, c.head_dim, self.model.dtype)
        parts = canonical_set(chosen, self.plants)
        buckets = tuple(self.buckets)
        runner = CPURunner(self.model, parts.ops, kv, buckets, parts.attention, parts.sampler)
        positions = self.model.weights.cos_sin.shape[0]
        return check_model(runner.logits, kv, blocks, buckets, c.vocab_size, positions, self.tally)

    def _row_counts_matter(self) -> bool:
        products = subjects(self.model, cpu.cpu_operators(), "linear")
        return any(check_rows(product, [1, 2, 4, 8], Tally())[1] is not None for product in products)


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
