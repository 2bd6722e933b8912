"""Certification on a GPU. With the plant `split-k` cuBLAS is as it comes, in a process that was started
without llm42_kernels.cublas.CUBLAS_ENVIRONMENT, and no other product is tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from llm42.config import VerifierSettings
from llm42.models.weights import LoadedModel
from llm42.sampling import StepSampler
from llm42.verifier.certify.certificate import Certificate, Progress
from llm42.verifier.certify.operator_cases import operator_cases
from llm42.verifier.certify.plants import broken
from llm42.verifier.certify.plants_cuda import PLANTS
from llm42.verifier.certify.rows import OperatorCase, Violation
from llm42.verifier.certify.search import Certifier
from llm42.verifier.certify.steps_cuda import check_attention, check_model, device_attention
from llm42.verifier.cuda.runner import ATTENTION, CudaRunner, cuda_runner
from llm42.verifier.cuda.sampler import sample_step_device
from llm42_kernels import cuda
from llm42_kernels.cublas import check_cublas_environment

MODEL_ROWS = 640
"""Prompt length of the whole-model check: more than one attention segment."""


class CUDACertifier(Certifier):
    """No sizes are dropped: a K-ordered provider exists for every operator."""

    kind, known_plants, drops_sizes = "cuda", PLANTS, False
    sampling = "triton"

    def __init__(
        self,
        model: LoadedModel,
        settings: VerifierSettings,
        plants: Iterable[str] = (),
        progress: Progress = lambda _: None,
    ) -> None:
        """Raises CublasEnvironmentError too."""
        super().__init__(model, settings, plants, progress)
        self.device = self.model.weights.embed.device
        names = cuda.candidates(self.settings.affinity)
        self.runs_steps = "split-k" not in self.plants  # a runner refuses to start in that environment
        if self.runs_steps:
            check_cublas_environment()
        else:  # the library as it comes is on trial: nothing stands in for it
            names |= {"linear": ("cublas",), "lm_head": ("cublas",)}
        self.providers = {operator: names[operator] for operator in cuda.PROVIDERS}
        (self.attention,) = names["attention"]

    def run(self) -> Certificate:
        """Frees memory: steps of the reference size may need more than those that will be used."""
        certificate = super().run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return certificate

    def cases(self, operator: str, provider: str) -> list[OperatorCase]:
        """In the activation dtype."""
        ops = cuda.cuda_operators({operator: provider})
        run = broken(PLANTS, self.plants, operator, getattr(ops, operator))
        return operator_cases(self.model, replace(ops, **{operator: run}), operator, self.model.dtype)

    def check_attention(self) -> Violation | None:
        """Of the kernels that a runner launches, before their last rounding."""
        c = self.model.config
        shape = ATTENTION[self.attention](c.num_heads, c.num_kv_heads, c.head_dim, self.settings.block_size)
        attention = broken(PLANTS, self.plants, "attention", device_attention)(shape, self.device)
        return check_attention(attention, shape, self.model.dtype, self.device, self.tally)

    def sampler(self) -> StepSampler:
        """A runner's, of all rows at once."""
        step = broken(PLANTS, self.plants, "sampling", sample_step_device)
        return lambda logits, draws: step(logits.to(self.device), draws)

    def check_model(self, chosen: Mapping[str, str], sizes: tuple[int, ...]) -> Violation | None:
        """Of logits as the settings round them."""
        runner = self.runner(chosen, sizes, 3 * (-(-MODEL_ROWS // self.settings.block_size)))
        rows = min(MODEL_ROWS, self.model.weights.cos_sin.shape[0])
        return check_model(runner.logits, runner.kv, sizes, self.model.config.vocab_size, rows, self.tally)

    def runner(self, chosen: Mapping[str, str], sizes: tuple[int, ...], blocks: int) -> CudaRunner:
        """With a cache of its own, without graphs."""
        return cuda_runner(self.model, chosen, self.settings, sizes, blocks, MODEL_ROWS, graphs=False)
