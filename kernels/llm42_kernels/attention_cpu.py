"""Canonical attention on CPU: query tiles anchored at absolute positions.

A row at position p belongs to tile j = p // TILE and is computed as row p % TILE of a product whose shape,
[TILE queries] x [TILE * (j + 1) keys], is a function of j alone; tile rows that are not asked for are
zeros. So neither the other sequences, nor a window's start or length, nor how the prefix was cached can
change the call that computes a row. Keys beyond p are masked to -inf before the softmax; values that are
not finite are read as zero, so that unwritten slots and NaN of later tokens cannot reach an earlier row
through 0 * NaN (a NaN key still shows in its own row).

Reduction order: that of one float32 library product per tile over all keys, in one thread; softmax over
the TILE * (j + 1) scores in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 8
FUTURE = torch.ones(TILE, TILE, dtype=torch.bool).triu(1)
"""Keys of a row's own tile that lie ahead of it; no other keys do."""


def attention_reference(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """float64 causal attention. q [T, Hq, D] at positions start.., k and v [start + T, Hk, D] -> [T, Hq,
    D]."""
    rows, heads, _ = q.shape
    groups = heads // k.shape[1]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), keys) * scale
    positions = torch.arange(start, start + rows)
    future = torch.arange(k.shape[0])[None, :] > positions[:, None]
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, values).to(q.dtype)


@dataclass(frozen=True, slots=True)
class QueryRows:
    """One sequence's consecutive query rows: positions start..start + count - 1; `table` [B] int64 lists
    the KV blocks of positions 0.. up to the end of the last row's tile (padding entries may name any
    block)."""

    start: int
    count: int
    table: Tensor


StepAttention = Callable[[Tensor, Tensor, Tensor, Sequence[QueryRows], float], Tensor]


def attention_step(
    q: Tensor, keys: Tensor, values: Tensor, groups: Sequence[QueryRows], scale: float
) -> Tensor:
    """All rows of a step over one layer's cache. q [T, Hq, D] holds the groups' rows one after another;
    keys and values [blocks, block_size, Hk, D]. Returns [T, Hq, D] in q's dtype. Each group is computed by
    itself."""
    out = []
    for part, group in zip(torch.split(q, [g.count for g in groups]), groups, strict=True):
        k, v = keys[group.table].flatten(0, 1), values[group.table].flatten(0, 1)
        out.append(attention_tiled(part, k, v, group.start, scale))
    return torch.cat(out)


CPU_PROVIDERS: dict[str, StepAttention] = {"tiled": attention_step}


def attention_tiled(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """One sequence: q [T, Hq, D] at positions start..start+T-1; k, v [S, Hk, D] gathered from the cache, S
    >= start + T rounded up to a tile, where slots beyond start + T may hold anything. Returns [T, Hq, D]
    in q's dtype."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    keys = k.float().permute(1, 2, 0)  # [Hk, D, S]; the strides do not depend on S
    values = v.float().nan_to_num_(0.0, 0.0, 0.0).permute(1, 0, 2)  # [Hk, S, D]
    queries = (q.float() * scale).view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    out = torch.empty(rows, kv_heads, heads // kv_heads, dim)
    for j in range(start // TILE, (start + rows - 1) // TILE + 1):
        low, high = max(start, j * TILE), min(start + rows, (j + 1) * TILE)
        tile = torch.zeros(kv_heads, heads // kv_heads, TILE, dim)
        tile[:, :, low - j * TILE : high - j * TILE] = queries[:, :, low - start : high - start]
        mixed = _tile(tile, keys, values, j)[:, :, low - j * TILE : high - j * TILE]
        out[low - start : high - start] = mixed.permute(2, 0, 1, 3)
    return out.view(rows, heads, dim).to(q.dtype)


def _tile(tile: Tensor, keys: Tensor, values: Tensor, j: int) -> Tensor:
    """Tile j of the queries, [Hk, G, TILE, D] -> the same of the output."""
    kv_heads, group, _, dim = tile.shape
    context = TILE * (j + 1)
    scores = torch.bmm(tile.view(kv_heads, -1, dim), keys[:, :, :context]).view(kv_heads, -1, TILE, context)
    scores[..., context - TILE :].masked_fill_(FUTURE, float("-inf"))
    weights = scores.softmax(-1).view(kv_heads, -1, context)
    return torch.bmm(weights, values[:, :context]).view(kv_heads, group, TILE, dim)
