"""The CPU operators that a certificate names, and a runner of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llm42.cache import KVCache
from llm42.models.weights import LoadedModel
from llm42.sampling import StepSampler, sample_step
from llm42.verifier.cpu.runner import CPURunner
from llm42_kernels import attention_cpu, cpu
from llm42_kernels.attention_cpu import StepAttention
from llm42_kernels.operators import Operators, rounded_head


@dataclass(frozen=True, slots=True)
class CanonicalSet:
    """The chosen operators, ready for a runner."""

    ops: Operators
    attention: StepAttention
    sampler: StepSampler


def canonical_set(providers: Mapping[str, str]) -> CanonicalSet:
    """The CPU operators that a certificate names."""
    ops = cpu.cpu_operators({k: v for k, v in providers.items() if k in cpu.PROVIDERS})
    attention = attention_cpu.CPU_PROVIDERS[providers.get("attention", "tiled")]
    return CanonicalSet(ops, attention, sample_step)


def canonical_runner(
    model: LoadedModel,
    parts: CanonicalSet,
    buckets: tuple[int, ...],
    blocks: int,
    block_size: int,
    rounds_logits: bool = False,
) -> CPURunner:
    """A runner with a cache of its own, of `blocks` blocks. rounds_logits: to the model's dtype, before
    anything else."""
    c = model.config
    kv = KVCache(c.num_layers, blocks, block_size, c.num_kv_heads, c.head_dim, model.dtype)
    ops = rounded_head(parts.ops, model.dtype) if rounds_logits else parts.ops
    return CPURunner(model, ops, kv, buckets, parts.attention, parts.sampler)
