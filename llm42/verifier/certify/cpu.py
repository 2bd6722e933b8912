"""Certification on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llm42.sampling import StepSampler
from llm42.verifier.certify.operator_cases import operator_cases
from llm42.verifier.certify.plants_cpu import PLANTS, with_plants
from llm42.verifier.certify.rows import OperatorCase, Tally, Violation, check_rows
from llm42.verifier.certify.search import Certifier
from llm42.verifier.certify.steps_cpu import check_attention, check_model
from llm42.verifier.cpu.operators import CanonicalSet, canonical_runner, canonical_set
from llm42.verifier.cpu.runner import CPURunner
from llm42_kernels import cpu
from llm42_kernels.operators import Operators


class CPUCertifier(Certifier):
    """Sizes may be dropped: a library's product may have other bits where rows are few."""

    kind, known_plants, drops_sizes = "cpu", PLANTS, True
    providers, attention, sampling = cpu.PROVIDERS, "tiled", "row"

    def cases(self, operator: str, provider: str) -> list[OperatorCase]:
        """In the activation dtype, and in float32, where no final rounding hides a difference."""
        return self._cases(operator, self._operators({operator: provider}).ops)

    def _cases(self, operator: str, ops: Operators) -> list[OperatorCase]:
        dtypes = dict.fromkeys((self.model.dtype, torch.float32))
        return [case for dtype in dtypes for case in operator_cases(self.model, ops, operator, dtype)]

    def check_attention(self) -> Violation | None:
        """Of queries in float32."""
        c, attention = self.model.config, self._operators({}).attention
        heads = (c.num_heads, c.num_kv_heads, c.head_dim)
        return check_attention(attention, *heads, self.settings.block_size, self.model.dtype, self.tally)

    def sampler(self) -> StepSampler:
        """Row by row."""
        return self._operators({}).sampler

    def check_model(self, chosen: Mapping[str, str], sizes: tuple[int, ...]) -> Violation | None:
        """Of logits in float32, whatever the settings round them to."""
        size, config = self.settings.block_size, self.model.config
        blocks, positions = 3 * (-(-96 // size) + 1), self.model.weights.cos_sin.shape[0]
        runner = canonical_runner(self.model, self._operators(chosen), sizes, blocks, size)
        return check_model(runner.logits, runner.kv, blocks, sizes, config.vocab_size, positions, self.tally)

    def runner(self, chosen: Mapping[str, str], sizes: tuple[int, ...], blocks: int) -> CPURunner:
        """With a cache of its own."""
        parts, s = self._operators(chosen), self.settings
        return canonical_runner(self.model, parts, sizes, blocks, s.block_size, s.rounds_logits)

    def row_counts_matter(self) -> bool:
        """Of the fastest product, in steps of 1 to 8 rows."""
        products = self._cases("linear", cpu.cpu_operators())
        return any(check_rows(product, [1, 2, 4, 8], Tally())[1] is not None for product in products)

    def _operators(self, providers: Mapping[str, str]) -> CanonicalSet:
        return with_plants(canonical_set(providers), self.plants)
