"""Planted violations on a GPU. `split-k` needs no code: cuBLAS as it comes is the violation, in a process
that was started without llm42_kernels.cublas.CUBLAS_ENVIRONMENT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llm42.sampling import Draw, Sampled
from llm42.verifier.certify.plants import Plant
from llm42.verifier.certify.steps_cuda import Attention, Span
from llm42_kernels.attention import SEGMENT, AttentionShape, Tile
from llm42_kernels.operators import RMSNorm
from llm42_kernels.sampling import restrict

MakeAttention = Callable[[AttentionShape, torch.device], Attention]


def _one_ulp(norm: RMSNorm, *arguments: Any) -> tuple[Tensor, Tensor]:
    """One element of the last row is off by one unit in the last place."""
    y, r = norm(*arguments)
    y[-1, ..., :1].view(torch.int16).add_(1)
    return y, r


def _coarse_restrict(values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """A float32 scan and border, as a batched sampler might use."""

    def scan(weight: Tensor) -> Tensor:
        return weight.float().cumsum(-1).long()

    return restrict(values, top_k, top_p.float().double(), min_p, scan)


def _topp_scan(sampler: Callable[..., list[Sampled]], logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """More than 4 rows use a less exact top-p border."""
    return sampler(logits, draws, _coarse_restrict if len(draws) > 4 else restrict)


def _attention_split(make: MakeAttention, shape: AttentionShape, device: torch.device) -> Attention:
    """The segments over keys are shorter when the step holds companions."""
    split = replace(shape, order="segments", block_n=64, segment=SEGMENT // 2)
    alone, other = (make(s, device) for s in (shape, split))
    return lambda q, k, v, spans, n: (other if len(spans) > 1 else alone)(q, k, v, spans, n)


def _attention_tile(make: MakeAttention, shape: AttentionShape, device: torch.device) -> Attention:
    """The key tile follows the largest number of query rows in the step."""
    tile = Tile(64, 4, 2, 1)
    block_n = 320 - shape.block_n if shape.order == "flash" else 32  # flash: 128 for 192 and 192 for 128
    narrow = replace(shape, block_n=block_n, large=tile, small=tile)
    alone, other = (make(s, device) for s in (shape, narrow))
    return lambda q, k, v, spans, n: (other if max(c for _, c, _ in spans) > 9 else alone)(q, k, v, spans, n)


def _dirty_tail(make: MakeAttention, shape: AttentionShape, device: torch.device) -> Attention:
    """The value slot behind the last written one is read with weight zero."""
    attention, size = make(shape, device), shape.block_size

    def run(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], programs: int | None) -> Tensor:
        out, row = attention(q, k, v, spans, programs), 0
        for start, count, table in spans:
            row += count
            block, slot = divmod(start + count, size)
            if slot:
                out[row - 1] += 0.0 * v[table[block] * size + slot, 0, 0]
        return out

    return run


PLANTS: dict[str, Plant] = {
    "split-k": Plant("linear", lambda linear, *arguments: linear(*arguments)),
    "one-ulp": Plant("rms_norm", _one_ulp),
    "topp-scan": Plant("sampling", _topp_scan),
    "attention-split": Plant("attention", _attention_split),
    "attention-tile": Plant("attention", _attention_tile),
    "dirty-tail": Plant("attention", _dirty_tail),
}
"""For attention the operator is what makes it, as `device_attention` of steps_cuda.py."""
