"""Certification: prove on this machine, for this model's shapes, that the verifier's operators are
row-invariant.

For each operator the providers are tried in order of speed over the step sizes of sizes.py; the first that
passes every check is used. If none passes at all of these sizes, the first that passes at the reference size
is used, and sizes that differ from it are dropped. If none passes there either, CertificationFailed names the
operator: deterministic service must not start. Configured sizes have no part in the choice: they are held
against the reference with the providers that were chosen.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from llm42.config import VerifierSettings
from llm42.errors import LLM42Error
from llm42.host.threads import torch_threads
from llm42.models.weights import LoadedModel
from llm42.verifier.certify.plants import PLANTS
from llm42.verifier.certify.rows import Tally, Violation, check_rows
from llm42.verifier.certify.steps import check_attention, check_model, check_sampling
from llm42.verifier.certify.subjects import subjects
from llm42.verifier.cpu.operators import block_pool, canonical_runner, canonical_set
from llm42.verifier.known_answers import KNOWN_ROWS, NO_ANSWERS, KnownAnswers, golden_answers_now
from llm42.verifier.scheduler import Verifier
from llm42.verifier.sizes import PROVIDER_ROWS, REFERENCE_ROWS, beyond, usable
from llm42_kernels import cpu

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


Progress = Callable[[str], None]


class Certifier:
    """What certification is on every device: `_whole` runs the model in steps of some sizes and the
    reference."""

    kind: str

    def __init__(self, configured: Sequence[int], plants: tuple[str, ...], progress: Progress) -> None:
        self.configured, self.plants, self.progress = tuple(configured), plants, progress
        self.tally, self.reports = Tally(), list[OperatorReport]()
        self.reference = REFERENCE_ROWS[self.kind]
        self.sizes, self.extra = list(PROVIDER_ROWS[self.kind]), beyond(configured, self.kind)

    def _whole(self, chosen: Mapping[str, str], used: Sequence[int]) -> Violation | None:
        raise NotImplementedError

    def _single(self, operator: str, provider: str, check: Callable[[], Violation | None]) -> str:
        self.progress(f"{operator} ({provider})")
        violation = check()
        self._report(operator, provider, violation)
        if violation is not None:
            raise CertificationFailed(operator, [f"{provider}: {violation}"])
        return provider

    def _report(self, operator: str, provider: str, violation: Violation | None) -> None:
        sizes = tuple(sorted({*self.sizes, *self.extra}))
        text = str(violation) if violation else None
        self.reports.append(OperatorReport(operator, provider, violation is None, sizes, text))

    def _model(self, chosen: Mapping[str, str]) -> tuple[int, ...]:
        """The whole model in steps of the sizes that may be used. Returns those with the reference's bits."""
        used = usable(self.configured, {*self.sizes, *self.extra}, self.kind)
        self.progress("model (canonical)")
        violation = self._whole(chosen, used)
        if violation is None:
            self._report("model", "canonical", None)
            return used
        self._single("model", "canonical", lambda: self._whole(chosen, ()))
        agreeing = [rows for rows in used if self._whole(chosen, (rows,)) is None]
        return usable(used, agreeing, self.kind)


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


class _Certifier(Certifier):
    kind = "cpu"

    def __init__(
        self, model: LoadedModel, settings: VerifierSettings, plants: tuple[str, ...], progress: Progress
    ) -> None:
        super().__init__(settings.buckets, plants, progress)
        self.model, self.settings = model, settings

    def run(self) -> Certificate:
        began = time.monotonic()
        chosen = {op: self._choose(op, list(cpu.PROVIDERS[op])) for op in cpu.PROVIDERS}
        chosen["attention"] = self._single("attention", "tiled", self._attention)
        chosen["sampling"] = self._single("sampling", "row", self._sampling)
        return Certificate(
            providers=chosen,
            buckets=self._model(chosen),
            reports=self.reports,
            compared_rows=self.tally.rows,
            seconds=round(time.monotonic() - began, 2),
            row_counts_matter=self._row_counts_matter(),
            golden=self._known_answers(chosen),
            plants=self.plants,
        )

    def _choose(self, operator: str, providers: list[str]) -> str:
        """The first provider that passes at every step size; else the first that passes at some."""
        partial: tuple[str, list[int]] | None = None
        violations = []
        for provider in providers:
            self.progress(f"{operator} ({provider})")
            good, first = self._check(operator, provider, self.sizes)
            report = OperatorReport(operator, provider, not first, tuple(good), str(first) if first else None)
            self.reports.append(report)
            if first is None:
                return self._hold_extra(operator, provider)
            violations.append(f"{provider}: {first}")
            if good and partial is None:
                partial = (provider, good)
        if partial is None:
            raise CertificationFailed(operator, violations)
        self.sizes = [b for b in self.sizes if b in partial[1]]
        return self._hold_extra(operator, partial[0])

    def _hold_extra(self, operator: str, provider: str) -> str:
        """Drops the other configured sizes at which the chosen provider has not the reference's bits."""
        if self.extra:
            good, _ = self._check(operator, provider, [*self.extra, self.reference])
            self.extra = [b for b in self.extra if b in good]
        return provider

    def _check(
        self, operator: str, provider: str, sizes: Sequence[int]
    ) -> tuple[list[int], Violation | None]:
        good, first = set(sizes), None
        ops = canonical_set({operator: provider}, self.plants).ops
        for subject in subjects(self.model, ops, operator):
            passed, violation = check_rows(subject, sizes, self.tally)
            good &= set(passed)
            first = first or violation
        return sorted(good), first

    def _attention(self) -> Violation | None:
        c = self.model.config
        attention = canonical_set({}, self.plants).attention
        heads = (c.num_heads, c.num_kv_heads, c.head_dim)
        return check_attention(attention, *heads, self.settings.block_size, self.model.dtype, self.tally)

    def _sampling(self) -> Violation | None:
        return check_sampling(
            canonical_set({}, self.plants).sampler, self.model.config.vocab_size, self.tally
        )

    def _whole(self, chosen: Mapping[str, str], used: Sequence[int]) -> Violation | None:
        c, size = self.model.config, self.settings.block_size
        blocks = 3 * (-(-96 // size) + 1)
        buckets = tuple(sorted({*used, self.reference}))
        parts = canonical_set(chosen, self.plants)
        runner = canonical_runner(self.model, parts, buckets, blocks * size, size)
        positions = self.model.weights.cos_sin.shape[0]
        return check_model(runner.logits, runner.kv, blocks, buckets, c.vocab_size, positions, self.tally)

    def _known_answers(self, chosen: Mapping[str, str]) -> KnownAnswers:
        self.progress("known answers")
        sizes, size = (self.reference,), self.settings.block_size
        parts, rounds = canonical_set(chosen, self.plants), self.settings.rounds_logits
        tokens = 2 * KNOWN_ROWS
        verifier = Verifier(
            canonical_runner(self.model, parts, sizes, tokens, size, rounds),
            block_pool(tokens, size),
            buckets=sizes,
            max_len=self.model.weights.cos_sin.shape[0],
            vocab_size=self.model.config.vocab_size,
            fingerprint="",
        )
        return golden_answers_now(verifier)

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
