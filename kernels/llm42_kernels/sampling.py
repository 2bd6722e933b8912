"""Sampling of many rows on the device: the stages of llm42/sampling.py, batched, without a host
synchronisation.

Every stage is row-invariant by construction: elementwise, or a reduction of one row in chunks of fixed
width merged in a fixed order, or a stable sort (its result is unique), or a sum of integers (exact in any
order): top-p adds weights rounded to 2^-40 as int64, because the order of a device's floating-point scan
follows the shape of the whole tensor. Log-probabilities: float32 exponentials, float64 sums, rounded once
to float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 4096
WEIGHT_ONE = float(1 << 40)
NEG_INF = float("-inf")

Cumsum = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class RowStats:
    """Per row: argmax (lowest id), ln sum exp (float64), ln softmax of the argmax, 1 where NaN or nothing
    finite."""

    token: Tensor  # [R] int32
    log_sum: Tensor  # [R] float64
    logprob: Tensor  # [R] float32
    bad: Tensor  # [R] int32


def row_stats(logits: Tensor, stats: RowStats | None = None) -> RowStats:
    """logits [R, V] float32 (rows contiguous) -> four tensors [R]; `stats` may name the tensors to fill."""
    from llm42_kernels.gpu import sampling as gpu
    from llm42_kernels.gpu.launch import STRICT

    rows, vocab = logits.shape
    chunks, device = -(-vocab // CHUNK), logits.device
    part_max = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    part_id, part_nan = (torch.empty(rows, chunks, dtype=torch.int32, device=device) for _ in range(2))
    part_sum = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    stats = stats or RowStats(
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.float64, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )
    stride = logits.stride(0)
    gpu.stats_kernel[(rows, chunks)](
        logits, part_max, part_id, part_sum, part_nan, vocab, stride, CHUNK=CHUNK, num_warps=8, **STRICT
    )
    gpu.stats_combine_kernel[(rows,)](
        logits, part_max, part_id, part_sum, part_nan, stats.token, stats.log_sum, stats.logprob, stats.bad,
        stride, chunks, BLOCK=_block(chunks), num_warps=1, **STRICT,
    )  # fmt: skip
    return stats


def gumbel_argmax(values: Tensor, keys: Tensor) -> Tensor:
    """values [R, V] float32, keys [R, 6] int32 (noise_keys) -> [R] int32: argmax of value + noise, lowest
    id on ties."""
    from llm42_kernels.gpu import sampling as gpu
    from llm42_kernels.gpu.launch import STRICT

    rows, vocab = values.shape
    chunks = -(-vocab // CHUNK)
    part_max = torch.empty(rows, chunks, dtype=torch.float64, device=values.device)
    part_id = torch.empty(rows, chunks, dtype=torch.int32, device=values.device)
    token = torch.empty(rows, dtype=torch.int32, device=values.device)
    gpu.gumbel_kernel[(rows, chunks)](
        values, keys, part_max, part_id, vocab, values.stride(0), CHUNK=CHUNK, num_warps=8, **STRICT
    )
    gpu.argmax_combine_kernel[(rows,)](
        part_max, part_id, token, chunks, BLOCK=_block(chunks), num_warps=1, **STRICT
    )
    return token


def noise_keys(seeds: Sequence[int], positions: Sequence[int], noisy: Sequence[bool]) -> list[list[int]]:
    """Rows of the `keys` argument: the words of seed and position, and whether noise is added."""
    out = []
    for seed, position, on in zip(seeds, positions, noisy, strict=True):
        words = [seed, seed >> 32, position, position >> 32]
        out.append([_signed(word & 0xFFFFFFFF) for word in words] + [int(on), 0])
    return out


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _block(chunks: int) -> int:
    return max(2, 1 << (chunks - 1).bit_length())


def integer_cumsum(weight: Tensor) -> Tensor:
    """weight [R, V] int64 -> running sums along rows: exact, whatever order the device adds in."""
    return weight.cumsum(-1)


def restrict(
    values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, cumsum: Cumsum = integer_cumsum
) -> Tensor:
    """Stages 4 to 6. values [R, V] float32; top_k [R] int64 (V: off), top_p [R] float64 (1: off), min_p [R]
    float64 (0: off). Returns values with what may not be drawn at -inf. Border ties go to the lowest id
    (stable sort)."""
    ordered, ids = values.sort(dim=-1, descending=True, stable=True)
    return _kept(values, ordered, ids, top_k, top_p, min_p, cumsum)


def restrict_few(values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, most: int) -> Tensor:
    """As `restrict`, with its bits, for rows whose top_k is from 1 to `most`: without a sort of all ids. What
    is beyond top_k weighs exactly nothing there, so `most` and other rows' top_k are in no sum."""
    ids, ordered = top_tokens(values, min(most, values.shape[-1]))
    return _kept(values, ordered, ids, top_k, top_p, min_p, integer_cumsum)


def _kept(
    values: Tensor, ordered: Tensor, ids: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, cumsum: Cumsum
) -> Tensor:
    """ordered [R, n]: each row's n largest values, best first, at `ids`."""
    rank = torch.arange(ordered.shape[-1], device=values.device)
    keep = rank < top_k[:, None]
    share = (ordered - ordered[:, :1]).exp().double()
    weight = torch.where(keep, (share * WEIGHT_ONE).round(), 0.0).long()
    sums = cumsum(weight)  # the last one is the sum of all that top-k has left
    border = torch.where(top_p < 1.0, top_p * sums[:, -1].double(), math.inf)
    keep &= (sums - weight).double() < border[:, None]
    keep &= ordered.double() >= (ordered[:, :1].double() + min_p.log()[:, None])
    kept = torch.where(keep, ordered, NEG_INF)
    return torch.full_like(values, NEG_INF).scatter_(1, ids, kept)


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, best first, ties to the lowest id: ids [R, n] int64, values
    [R, n]."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: -0.0 ties with 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    low = torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)
    ids = (logits.shape[-1] - 1) - ((ordered | low).topk(count, dim=-1).values & 0xFFFFFFFF)
    return ids, logits.gather(1, ids)


def logprobs_of(logits: Tensor, log_sum: Tensor, ids: Tensor) -> Tensor:
    """ln softmax of chosen ids. logits [R, V] float32, log_sum [R] float64, ids [R, n] -> [R, n] float32."""
    return (logits.gather(1, ids.long()).double() - log_sum[:, None]).float()
