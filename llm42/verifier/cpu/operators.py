"""The CPU operators that a certificate names, and a runner of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from llm42.cache import BlockPool, KVCache
from llm42.models.weights import LoadedModel
from llm42.sampling import StepSampler, sample_step
from llm42.verifier.certify.plants import PLANTS
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


def canonical_runner(
    model: LoadedModel,
    parts: CanonicalSet,
    buckets: tuple[int, ...],
    kv_tokens: int,
    block_size: int,
    rounds_logits: bool = False,
) -> CPURunner:
    """A runner with a cache of its own. rounds_logits: to the model's dtype, before anything else."""
    c = model.config
    blocks = -(-kv_tokens // block_size)
    kv = KVCache(c.num_layers, blocks, block_size, c.num_kv_heads, c.head_dim, model.dtype)
    ops = rounded_head(parts.ops, model.dtype) if rounds_logits else parts.ops
    return CPURunner(model, ops, kv, buckets, parts.attention, parts.sampler)


def block_pool(kv_tokens: int, block_size: int, name: str = "") -> BlockPool:
    """The pool of a cache of kv_tokens; name: the root of its blocks' keys."""
    return BlockPool(-(-kv_tokens // block_size), block_size, root=name.encode())
