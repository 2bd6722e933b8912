"""Certification on a CUDA device: the checks of llm42/verifier/certify/cpu.py over the providers of
llm42_kernels/cuda.py.

For each operator the providers are tried in order of speed and the first that passes at every step size of
sizes.py is used: a K-ordered provider exists for every operator. If none passes, CertificationFailed names
the operator. A configured size that is none of these and has other bits than the reference is not used.
Plants break one operator; `split-k` needs no code: start the process without
llm42_kernels.cublas.CUBLAS_ENVIRONMENT (and say so with plants=("split-k",)), and cuBLAS itself is the
violation: no other product is tried then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llm42.cache import BlockPool, KVCache
from llm42.models.weights import LoadedModel
from llm42.sampling import Draw, Sampled
from llm42.verifier.certify.cpu import Certificate, CertificationFailed, Certifier, Progress
from llm42.verifier.certify.rows import RowSubject, Violation, check_rows
from llm42.verifier.certify.steps import check_sampling
from llm42.verifier.certify.steps_cuda import (
    Attention,
    check_attention_device,
    check_model_device,
    device_attention,
    reads_dirty_tail,
    split_with_companions,
    tile_by_neighbour,
)
from llm42.verifier.cuda.runner import ATTENTION, CudaRunner
from llm42.verifier.cuda.sampler import sample_step_device
from llm42.verifier.known_answers import KNOWN_ROWS, NO_ANSWERS, KnownAnswers, golden_answers_now
from llm42.verifier.scheduler import Verifier
from llm42_kernels import cuda
from llm42_kernels.attention import AttentionShape
from llm42_kernels.cublas import check_cublas_environment
from llm42_kernels.operators import Operators, RMSNorm
from llm42_kernels.rmsnorm import launch_sum_norm
from llm42_kernels.sampling import restrict

ATTENTION_PLANTS: dict[str, Callable[[AttentionShape, torch.device], Attention]] = {
    "attention-split": split_with_companions,
    "attention-tile": tile_by_neighbour,
    "dirty-tail": reads_dirty_tail,
}
PLANTS = ("split-k", "one-ulp", "topp-scan", *ATTENTION_PLANTS)
MODEL_ROWS = 640
"""Prompt length of the whole-model check: more than one attention segment."""


@dataclass(frozen=True, slots=True)
class CudaSettings:
    """What a CUDA certificate depends on besides the model."""

    buckets: tuple[int, ...]
    block_size: int
    max_len: int
    affinity: str = "none"
    round_logits: bool = False


@torch.inference_mode()
def certify_cuda(
    model: LoadedModel,
    settings: CudaSettings,
    plants: Iterable[str] = (),
    progress: Progress = lambda _: None,
) -> Certificate:
    """Runs every check. Raises CertificationFailed, CublasEnvironmentError, ValueError for an unknown
    plant."""
    plants = tuple(plants)
    for name in plants:
        if name not in PLANTS:
            raise ValueError(f"unknown plant {name!r}; there are {', '.join(PLANTS)}")
    if "split-k" not in plants:
        check_cublas_environment()
    return _Certifier(model, settings, plants, progress).run()


class _Certifier(Certifier):
    kind = "cuda"

    def __init__(
        self, model: LoadedModel, settings: CudaSettings, plants: tuple[str, ...], progress: Progress
    ) -> None:
        super().__init__(settings.buckets, plants, progress)
        self.model, self.settings = model, settings
        self.device = model.weights.embed.device
        c = model.config
        self.names = cuda.candidates(settings.affinity)
        if "split-k" in plants:  # the library as it comes is on trial: nothing stands in for it
            self.names |= {"linear": ("cublas",), "lm_head": ("cublas",)}
        (self.attention,) = self.names["attention"]
        heads = (c.num_heads, c.num_kv_heads, c.head_dim)
        self.shape = ATTENTION[self.attention](*heads, settings.block_size)

    def run(self) -> Certificate:
        began = time.monotonic()
        chosen = {op: self._choose(op, self.names[op]) for op in cuda.PROVIDERS}
        chosen["attention"] = self._single("attention", self.attention, self._attention)
        chosen["sampling"] = self._single("sampling", "triton", self._sampling)
        used, golden = self.configured, NO_ANSWERS
        if "split-k" not in self.plants:  # the runner refuses to start in that environment
            used, golden = self._model(chosen), self._known_answers(chosen)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # steps of the reference size may need more than those that will be used
        return Certificate(
            providers=chosen,
            buckets=used,
            reports=self.reports,
            compared_rows=self.tally.rows,
            seconds=round(time.monotonic() - began, 2),
            row_counts_matter=True,
            golden=golden,
            plants=self.plants,
        )

    def _choose(self, operator: str, providers: Sequence[str]) -> str:
        violations = []
        for provider in providers:
            violation = self._check(operator, provider)
            self._report(operator, provider, violation)
            if violation is None:
                self.extra = self._agreeing(operator, provider)
                return provider
            violations.append(f"{provider}: {violation}")
        raise CertificationFailed(operator, violations)

    def _check(self, operator: str, provider: str) -> Violation | None:
        self.progress(f"{operator} ({provider})")
        for subject in self._subjects(operator, provider):
            _, violation = check_rows(subject, self.sizes, self.tally)
            if violation is not None:
                return violation
        return None

    def _agreeing(self, operator: str, provider: str) -> list[int]:
        """The other configured sizes at which the chosen provider has the reference's bits."""
        good = set(self.extra)
        for subject in self._subjects(operator, provider) if good else ():
            good &= set(check_rows(subject, [*self.extra, self.reference], self.tally)[0])
        return sorted(good)

    def _subjects(self, operator: str, provider: str) -> list[RowSubject]:
        ops = cuda.cuda_operators({operator: provider})
        if operator == "rms_norm" and "one-ulp" in self.plants:
            ops = replace(ops, rms_norm=partial(_one_ulp_more, ops.rms_norm))
        return _subjects(self.model, ops, operator)

    def _attention(self) -> Violation | None:
        make = next((ATTENTION_PLANTS[p] for p in self.plants if p in ATTENTION_PLANTS), device_attention)
        attention = make(self.shape, self.device)
        return check_attention_device(attention, self.shape, self.model.dtype, self.device, self.tally)

    def _sampling(self) -> Violation | None:
        def sampler(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
            scan = len(draws) > 4 and "topp-scan" in self.plants
            narrowed = _coarse_restrict if scan else restrict
            return sample_step_device(logits.to(self.device), draws, narrowed)

        return check_sampling(sampler, self.model.config.vocab_size, self.tally)

    def _whole(self, chosen: Mapping[str, str], used: Sequence[int]) -> Violation | None:
        blocks = 3 * (-(-MODEL_ROWS // self.settings.block_size))
        sizes = tuple(sorted({*used, self.reference}))
        runner = self._runner(chosen, sizes, blocks)
        rows = min(MODEL_ROWS, self.model.weights.cos_sin.shape[0])
        vocab = self.model.config.vocab_size
        return check_model_device(runner.logits, runner.kv, sizes, vocab, rows, self.tally)

    def _known_answers(self, chosen: Mapping[str, str]) -> KnownAnswers:
        self.progress("known answers")
        sizes, size = (self.reference,), self.settings.block_size
        blocks = -(-2 * KNOWN_ROWS // size)
        verifier = Verifier(
            self._runner(chosen, sizes, blocks),
            BlockPool(blocks, size),
            buckets=sizes,
            max_len=self.settings.max_len,
            vocab_size=self.model.config.vocab_size,
            fingerprint="",
        )
        return golden_answers_now(verifier)

    def _runner(self, chosen: Mapping[str, str], sizes: tuple[int, ...], blocks: int) -> CudaRunner:
        c, s = self.model.config, self.settings
        kv = KVCache(
            c.num_layers, blocks, s.block_size, c.num_kv_heads, c.head_dim, self.model.dtype, str(self.device)
        )
        ops = cuda.cuda_operators({op: name for op, name in chosen.items() if op in cuda.PROVIDERS})
        return CudaRunner(
            self.model, ops, kv, sizes, MODEL_ROWS,
            shape=self.shape, round_logits=s.round_logits, graphs=False,
        )  # fmt: skip


def _one_ulp_more(norm: RMSNorm, *args: Any) -> tuple[Tensor, Tensor]:
    y, r = norm(*args)
    y[-1, ..., :1].view(torch.int16).add_(1)
    return y, r


def _coarse_restrict(values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Plant: a float32 scan and border, as a batched sampler might use for many rows."""

    def scan(weight: Tensor) -> Tensor:
        return weight.float().cumsum(-1).long()

    return restrict(values, top_k, top_p.float().double(), min_p, scan)


def _subjects(model: LoadedModel, ops: Operators, operator: str) -> list[RowSubject]:
    """The operator at each of the model's real shapes, with the first layer's weights; inputs made on the
    device."""
    c, w, layer = model.config, model.weights, model.weights.layers[0]
    device, dtype, eps = w.embed.device, model.dtype, c.rms_norm_eps

    def random(rows: int, gen: torch.Generator, *shape: int) -> Tensor:
        seed = int(torch.randint(2**31, (1,), generator=gen))
        own = torch.Generator(device).manual_seed(seed)
        return torch.randn(rows, *shape, generator=own, device=device).to(dtype)

    def product(run: Any, weight: Tensor, bias: Tensor | None) -> RowSubject:
        n, k = weight.shape
        return RowSubject(
            operator, f"N={n}, K={k}", lambda r, g: (random(r, g, k),), lambda x: (run(x, weight, bias),)
        )

    def norm(weight: Tensor, add: bool, *lead: int) -> RowSubject:
        shape = (*lead, weight.shape[0])
        return RowSubject(
            operator,
            f"{list(shape)}{' with residual' if add else ''}",
            lambda r, g: (random(r, g, *shape), random(r, g, *shape)),
            lambda x, r: ops.rms_norm(x, r if add else None, weight, eps)[: 1 + add],
        )

    def three_terms() -> RowSubject:
        def run(y: Tensor, o: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
            normed, summed = torch.empty_like(y), torch.empty_like(y)
            launch_sum_norm((y, o, r), layer.input_norm, normed, summed, eps)
            return normed, summed

        def make(rows: int, gen: torch.Generator) -> tuple[Tensor, ...]:
            return tuple(random(rows, gen, c.hidden_size) for _ in range(3))

        return RowSubject(operator, f"[{c.hidden_size}] of three terms", make, run)

    def rotary(rows: int, gen: torch.Generator) -> tuple[Tensor, ...]:
        at = torch.randint(0, w.cos_sin.shape[0], (rows,), generator=gen).to(device)
        return random(rows, gen, c.num_heads, c.head_dim), random(rows, gen, c.num_kv_heads, c.head_dim), at

    if operator == "linear":
        matrices = [
            (layer.qkv, layer.qkv_bias),
            (layer.o, layer.o_bias),
            (layer.gate_up, layer.gate_up_bias),
            (layer.down, layer.down_bias),
        ]
        return [product(ops.linear, weight, bias) for weight, bias in matrices]
    if operator == "lm_head":
        return [product(ops.lm_head, w.lm_head, None)]
    if operator == "rms_norm":
        pairs = ((layer.q_norm, c.num_heads), (layer.k_norm, c.num_kv_heads))
        heads = [norm(weight, False, count) for weight, count in pairs if weight is not None]
        carried = [three_terms()] if dict(ops.providers)["rms_norm"] == "carried" else []
        return [norm(layer.input_norm, True), norm(layer.input_norm, False), *carried, *heads]
    if operator == "rotary":
        shape = f"D={c.head_dim}"
        return [RowSubject(operator, shape, rotary, lambda q, k, p: ops.rotary(q, k, p, w.cos_sin))]
    width = c.intermediate_size
    make = lambda r, g: (random(r, g, 2 * width),)  # noqa: E731
    return [RowSubject(operator, f"I={width}", make, lambda x: (ops.silu_mul(x),))]
