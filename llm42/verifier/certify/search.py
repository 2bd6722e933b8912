"""Certification: prove on this machine, for this model's shapes, that the verifier's operators are
row-invariant. One search for every device, over the providers that the device has (cpu.py, cuda.py).

For each operator the providers are tried in order of speed over the step sizes of sizes.py; the first that
passes every check is used. If none passes at all of these sizes, a device that may drop sizes uses the first
that passes at the reference size, without the sizes that differ from it. If none passes there either,
CertificationFailed names the operator: deterministic service must not start. Configured sizes have no part in
the choice: they are held against the reference with the providers that were chosen.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import torch

from llm42.cache import BlockPool
from llm42.config import VerifierSettings
from llm42.host.threads import torch_threads
from llm42.models.weights import LoadedModel
from llm42.sampling import StepSampler
from llm42.verifier.certify.certificate import Certificate, CertificationFailed, OperatorReport, Progress
from llm42.verifier.certify.plants import Plant
from llm42.verifier.certify.rows import OperatorCase, Tally, Violation, check_rows, check_sizes
from llm42.verifier.certify.steps import check_sampling
from llm42.verifier.known_answers import KNOWN_ROWS, NO_ANSWERS, KnownAnswers, golden_answers_now
from llm42.verifier.runner import Runner
from llm42.verifier.scheduler import Verifier
from llm42.verifier.sizes import PROVIDER_ROWS, REFERENCE_ROWS, beyond, usable


class Certifier(ABC):
    """The search on one device, for one model. What a device has and how it computes is a subclass's."""

    kind: ClassVar[str]
    """`cpu` or `cuda`, as in sizes.py."""
    known_plants: ClassVar[Mapping[str, Plant]]
    drops_sizes: ClassVar[bool]
    """Whether an operator that no provider computes rightly at all step sizes may be used at some."""
    sampling: ClassVar[str]
    attention: str
    """The providers of the operators that see a whole step: one each."""
    providers: Mapping[str, Iterable[str]]
    """Row-wise operator -> names of its providers, fastest first."""
    runs_steps = True
    """False: a plant keeps the runner from starting, so operators alone are certified."""

    def __init__(
        self,
        model: LoadedModel,
        settings: VerifierSettings,
        plants: Iterable[str] = (),
        progress: Progress = lambda _: None,
    ) -> None:
        """model: as it will be run. Raises ValueError for a plant that the device has not."""
        self.model, self.settings, self.progress = model, settings, progress
        self.plants = tuple(plants)
        for name in self.plants:
            if name not in self.known_plants:
                raise ValueError(f"unknown plant {name!r}; there are {', '.join(self.known_plants)}")
        self.tally, self.reports = Tally(), list[OperatorReport]()
        self.reference = REFERENCE_ROWS[self.kind]
        self.sizes, self.extra = list(PROVIDER_ROWS[self.kind]), beyond(settings.buckets, self.kind)

    @abstractmethod
    def cases(self, operator: str, provider: str) -> Sequence[OperatorCase]:
        """A row-wise operator in every form in which the decoder calls it."""

    @abstractmethod
    def check_attention(self) -> Violation | None:
        """Checks (d) and (e) of rows.py."""

    @abstractmethod
    def sampler(self) -> StepSampler:
        """The sampler, of logits that are on the CPU."""

    @abstractmethod
    def check_model(self, chosen: Mapping[str, str], sizes: tuple[int, ...]) -> Violation | None:
        """Check (f): the whole model in steps of `sizes`, the reference among them."""

    @abstractmethod
    def runner(self, chosen: Mapping[str, str], sizes: tuple[int, ...], blocks: int) -> Runner:
        """A runner as verifiers have it, with `blocks` blocks of KV."""

    def row_counts_matter(self) -> bool:
        """Whether an ordinary product's bits depend on the number of rows; where it is not tried, they do."""
        return True

    @torch.inference_mode()
    def run(self) -> Certificate:
        """Runs every check. Raises CertificationFailed."""
        began = time.monotonic()
        with torch_threads(self.settings.threads):
            chosen = {operator: self._choose(operator) for operator in self.providers}
            chosen["attention"] = self._require("attention", self.attention, self.check_attention)
            chosen["sampling"] = self._require("sampling", self.sampling, self._check_sampling)
            used, golden = self.settings.buckets, NO_ANSWERS
            if self.runs_steps:
                used, golden = self._model(chosen), self._known_answers(chosen)
            return Certificate(
                providers=chosen,
                buckets=used,
                reports=self.reports,
                compared_rows=self.tally.rows,
                seconds=round(time.monotonic() - began, 2),
                row_counts_matter=self.row_counts_matter(),
                golden=golden,
                plants=self.plants,
            )

    def _choose(self, operator: str) -> str:
        """The first provider that passes at every step size; else, where sizes may be dropped, the first that
        passes at the reference size."""
        violations = list[str]()
        for provider in self.providers[operator]:
            self.progress(f"{operator} ({provider})")
            violation = self._refusal(operator, provider)
            self._report(operator, provider, violation, None if violation is None else ())
            if violation is None:
                return self._use(operator, provider)
            violations.append(f"{provider}: {violation}")
        for provider in self.providers[operator] if self.drops_sizes else ():
            self.progress(f"{operator} ({provider}), size by size")
            good, violation = self._check(operator, provider, self.sizes)
            if good:
                self._report(operator, provider, violation, good)
                self.sizes = good
                return self._use(operator, provider)
        raise CertificationFailed(operator, violations)

    def _refusal(self, operator: str, provider: str) -> Violation | None:
        """Why it does not pass at every size. A library's product may differ only at the smallest one, which
        a full check would come to last."""
        if self.drops_sizes:
            for case in self.cases(operator, provider):
                if violation := check_sizes(case, self.sizes, self.tally):
                    return violation
        return self._check(operator, provider, self.sizes, to_the_end=False)[1]

    def _use(self, operator: str, provider: str) -> str:
        """Chooses it, and drops the other configured sizes at which it has not the reference's bits."""
        if self.extra:
            good, _ = self._check(operator, provider, [*self.extra, self.reference])
            self.extra = [rows for rows in self.extra if rows in good]
        return provider

    def _check(
        self, operator: str, provider: str, sizes: Sequence[int], to_the_end: bool = True
    ) -> tuple[list[int], Violation | None]:
        """Checks (a), (b) and (c) of every case: at which sizes all have the bits of the last size, and the
        first violation. to_the_end: else the first violation ends it."""
        good, first = list(sizes), None
        for case in self.cases(operator, provider):
            passed, violation = check_rows(case, sizes, self.tally)
            good = [rows for rows in good if rows in passed]
            first = first or violation
            if first and not to_the_end:
                break
        return good, first

    def _check_sampling(self) -> Violation | None:
        return check_sampling(self.sampler(), self.model.config.vocab_size, self.tally)

    def _require(self, operator: str, provider: str, check: Callable[[], Violation | None]) -> str:
        self.progress(f"{operator} ({provider})")
        violation = check()
        self._report(operator, provider, violation)
        if violation is not None:
            raise CertificationFailed(operator, [f"{provider}: {violation}"])
        return provider

    def _report(
        self, operator: str, provider: str, violation: Violation | None, sizes: Sequence[int] | None = None
    ) -> None:
        """sizes: those at which it passed, () where nobody looked for them; None: all that are looked at."""
        if sizes is None:
            sizes = sorted({*self.sizes, *self.extra})
        text = str(violation) if violation else None
        self.reports.append(OperatorReport(operator, provider, violation is None, tuple(sizes), text))

    def _model(self, chosen: Mapping[str, str]) -> tuple[int, ...]:
        """The whole model in steps of the sizes that may be used. Returns those with the reference's bits."""

        def check(sizes: Sequence[int]) -> Violation | None:
            return self.check_model(chosen, tuple(sorted({*sizes, self.reference})))

        used = usable(self.settings.buckets, {*self.sizes, *self.extra}, self.kind)
        self.progress("model (canonical)")
        if check(used) is None:
            self._report("model", "canonical", None)
            return used
        self._require("model", "canonical", lambda: check(()))
        return usable(used, [rows for rows in used if check((rows,)) is None], self.kind)

    def _known_answers(self, chosen: Mapping[str, str]) -> KnownAnswers:
        self.progress("known answers")
        sizes, size = (self.reference,), self.settings.block_size
        blocks = -(-2 * KNOWN_ROWS // size)
        verifier = Verifier(
            self.runner(chosen, sizes, blocks),
            BlockPool(blocks, size),
            buckets=sizes,
            max_len=self.model.weights.cos_sin.shape[0],
            vocab_size=self.model.config.vocab_size,
            fingerprint="",
        )
        return golden_answers_now(verifier)
