"""Paged causal attention for ragged rows: many sequences in a step, any number of query rows each, grouped queries.

Layout: q, out [T, Hq, D]; k_cache, v_cache [slots, Hk, D] with slot = block * block_size + offset; each sequence has a
block table. A row at position p attends to the keys 0..p of its own sequence.

Reduction order, the same for every row whatever the step:
1. Keys are cut into segments at absolute multiples of SEGMENT, a segment into tiles at absolute multiples of BLOCK_N.
2. Inside a segment, tiles in ascending order: online softmax in base 2, float32, from an empty state. Inside a tile,
   the matrix unit's order over D and over keys, and the warp's fixed order for the row maximum and sum.
3. Segments are merged in ascending order with one formula (`merge`), then one division and one rounding.
Contexts up to SEGMENT keys are thus unsplit. Whether the segments of a tile are computed by one program, which keeps
the merged state in registers, or by one program each and then combined, is a scheduling choice: same formula, same
order, same bits. So it may follow the load.

The heads of a group share a tile: tile row i is (token i // G, head i % G). A tile always has the same number of rows,
padded with zeros, whatever the number of query rows. Two tile heights exist (few rows, many rows); a row of a matrix
product does not depend on the tile's height, which certification checks on the device. Keys past a row's position are
masked to -inf before the softmax; value slots that no row of the sequence has reached are read as zero, and written
values are finite (kernels/kv_write.py), so 0 * NaN cannot occur.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kernels.attention_cpu import attention_reference

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEGMENT = 1024
"""Keys per segment: the border up to which a context is one unsplit sum."""
LOG2_E = 1.4426950408889634
ITEM_FIELDS = 8
"""int32 fields of a work item: first row, tokens, first position, table offset, first segment, last segment (exclusive),
partial slot or -1, unused. Of a combine item: first row, tokens, unused x 2, first partial slot, segments, unused x 2."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile height: how it is compiled and how many programs share an SM."""

    block_m: int
    warps: int
    stages: int
    per_sm: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model and a cache fix. `block_n` and SEGMENT set the bits; everything else only the speed."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    block_n: int = 64
    large: Tile = Tile(128, 8, 3, 1)
    small: Tile = Tile(16, 1, 3, 4)
    tma: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads do not divide into {self.kv_heads} KV heads")
        if SEGMENT % self.block_n or self.group > self.small.block_m:
            raise ValueError(f"unsupported attention tile: block_n {self.block_n}, {self.group} heads in a group")
        if self.tma and (self.block_size % self.block_n or self.dim != self.block_d):
            raise ValueError("TMA tiles need block_size to be a multiple of block_n and a head size of 64 or 128")
        if self.block_size % self.block_n and self.block_n % self.block_size:
            raise ValueError(f"block_size {self.block_size} and key tile {self.block_n} must divide one another")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def block_d(self) -> int:
        """Head size rounded up to a power of two."""
        return 1 << (self.dim - 1).bit_length()

    @property
    def scale(self) -> float:
        """Softmax scale times log2 e, rounded to float32 once."""
        return float(np.float32(self.dim**-0.5 * LOG2_E))


@dataclass(slots=True)
class Plan:
    """Work of one step as int32 arrays [n, ITEM_FIELDS]; heavy items first."""

    large: NDArray[np.int32]
    small: NDArray[np.int32]
    combine_large: NDArray[np.int32]
    combine_small: NDArray[np.int32]


@dataclass(slots=True)
class Planner:
    """Cuts the rows of a step into work items. `programs` is what runs at once; `partials` bounds the split items."""

    shape: AttentionShape
    programs: int
    partials: int
    _empty: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, ITEM_FIELDS), np.int32))

    def plan(
        self, row0: NDArray[Any], count: NDArray[Any], start: NDArray[Any], table: NDArray[Any]
    ) -> Plan:
        """Per sequence: first row in the step, number of rows, first position, offset of its block table."""
        group = self.shape.group
        tall, short = self.shape.large.block_m // group, self.shape.small.block_m // group
        full, rest = np.divmod(count, tall)
        is_large = rest > short
        tiles = full + is_large
        sequence = np.repeat(np.arange(len(count)), tiles)
        first = (np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tall
        tokens = np.minimum(count[sequence] - first, tall)
        large = self._items(row0[sequence] + first, tokens, start[sequence] + first, table[sequence])
        tail = np.flatnonzero((rest > 0) & ~is_large)
        first = full[tail] * tall
        small = self._items(row0[tail] + first, rest[tail], start[tail] + first, table[tail])
        keys = float(_keys(large).sum() + _keys(small).sum()) * self.shape.kv_heads
        fair = max(SEGMENT, keys / self.programs)
        large, combine_large = self._split(large, fair)
        small, combine_small = self._split(small, fair)
        return Plan(large, small, combine_large, combine_small)

    def _items(self, row: Any, tokens: Any, pos: Any, table: Any) -> NDArray[np.int32]:
        if not len(row):
            return self._empty
        items = np.zeros((len(row), ITEM_FIELDS), np.int32)
        items[:, 0], items[:, 1], items[:, 2], items[:, 3] = row, tokens, pos, table
        items[:, 5] = -(-(pos + tokens) // SEGMENT)
        items[:, 6] = -1
        return items[np.argsort(-_keys(items), kind="stable")]

    def _split(self, items: NDArray[np.int32], fair: float) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Items well over a fair share of the work become one item per segment, as far as the partials reach."""
        if not len(items) or _keys(items[:1])[0] <= 1.25 * fair:
            return items, self._empty
        segments = items[:, 5]
        over = (_keys(items) > 1.25 * fair) & (segments > 1)
        over &= np.cumsum(np.where(over, segments, 0)) <= self.partials
        chosen = items[over]
        if not len(chosen):
            return items, self._empty
        parts = chosen[:, 5]
        first = np.cumsum(parts) - parts
        pieces = np.repeat(chosen, parts, axis=0)
        pieces[:, 6] = np.arange(len(pieces))
        pieces[:, 4] = pieces[:, 6] - np.repeat(first, parts)
        pieces[:, 5] = pieces[:, 4] + 1
        combine = np.zeros_like(chosen)
        combine[:, :2], combine[:, 4], combine[:, 5] = chosen[:, :2], first, parts
        return np.concatenate((pieces, items[~over])), combine


def _keys(items: NDArray[np.int32]) -> NDArray[np.int64]:
    return (items[:, 2] + items[:, 1]).astype(np.int64)


class TritonAttention:
    """Provider `triton`: launches the kernels over plans that lie in device memory (nothing here synchronises)."""

    def __init__(self, shape: AttentionShape, device: torch.device, partials: int = 512) -> None:
        from kernels.gpu.launch import multiprocessors

        self.shape = shape
        self.sms = multiprocessors(device)
        self.planner = Planner(shape, self.sms * shape.large.per_sm, partials)
        rows = partials * shape.kv_heads * shape.large.block_m
        self._acc = torch.empty(rows * shape.block_d, dtype=torch.float32, device=device)
        self._ml = torch.empty(rows * 2, dtype=torch.float32, device=device)

    def sources(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Any, Any]:
        """Caches [slots, Hk, D] as the kernels want them: the tensors, or tensor-map descriptors."""
        if not self.shape.tma:
            return k_cache, v_cache
        from triton.tools.tensor_descriptor import TensorDescriptor

        width, block = self.shape.kv_heads * self.shape.dim, [self.shape.block_n, self.shape.dim]
        k, v = k_cache.view(-1, width), v_cache.view(-1, width)
        return tuple(TensorDescriptor(x, list(x.shape), [width, 1], block) for x in (k, v))  # type: ignore[return-value]

    def attend(
        self, tile: Tile, q: Tensor, out: Tensor, sources: tuple[Any, Any], tables: Tensor, items: Tensor, count: Tensor
    ) -> None:
        """Runs the items of one tile height. q, out [T, Hq, D]; tables, items, count int32 on the device."""
        from kernels.gpu import attention as gpu
        from kernels.gpu.launch import STRICT

        shape = self.shape
        gpu.attention_kernel[(self.sms * tile.per_sm,)](
            q, out, *sources, tables, items, count, self._acc, self._ml, shape.scale,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, DIM=shape.dim, BLOCK_D=shape.block_d,
            BLOCK_M=tile.block_m, BLOCK_N=shape.block_n, SEGMENT=SEGMENT, PAGE=shape.block_size, TMA=shape.tma,
            num_warps=tile.warps, num_stages=tile.stages, **STRICT,
        )  # fmt: skip

    def combine(self, tile: Tile, out: Tensor, items: Tensor, count: Tensor) -> None:
        """Merges the segments of the tiles that `attend` computed in pieces."""
        from kernels.gpu import attention as gpu
        from kernels.gpu.launch import STRICT

        shape = self.shape
        gpu.combine_kernel[(self.sms * 2,)](
            out, items, count, self._acc, self._ml,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, DIM=shape.dim, BLOCK_D=shape.block_d,
            BLOCK_M=tile.block_m, ROWS=16, num_warps=4, **STRICT,
        )  # fmt: skip

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, start: list[int], count: list[int], tables: list[list[int]]
    ) -> Tensor:
        """A whole attention call for rows laid one sequence after the other: plan, copy, launch (tests, certification).

        Sequence s has count[s] rows at positions start[s].. and the block table tables[s]. Returns [T, Hq, D].
        """
        counts, offset = np.array(count), np.cumsum([0, *map(len, tables)])[:-1]
        plan = self.planner.plan(np.cumsum(counts) - counts, counts, np.array(start), offset)
        flat = torch.tensor([b for table in tables for b in table], dtype=torch.int32, device=q.device)
        out, sources = torch.zeros_like(q), self.sources(k_cache, v_cache)
        for tile, items, combine in (
            (self.shape.large, plan.large, plan.combine_large),
            (self.shape.small, plan.small, plan.combine_small),
        ):
            if len(items):
                self.attend(tile, q, out, sources, flat, *_upload(items, q.device))
            if len(combine):
                self.combine(tile, out, *_upload(combine, q.device))
        return out


def _upload(items: NDArray[np.int32], device: torch.device) -> tuple[Tensor, Tensor]:
    count = torch.tensor([len(items)], dtype=torch.int32, device=device)
    return torch.from_numpy(items).to(device), count


def paged_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: list[int], count: list[int], tables: list[list[int]], block: int
) -> Tensor:
    """float64 version of `TritonAttention.run`: gathers each sequence's keys and attends row by row."""
    out, row = [], 0
    for first, rows, table in zip(start, count, tables, strict=True):
        keys = torch.arange(first + rows, device=q.device)
        slots = torch.tensor(table, device=q.device)[keys // block] * block + keys % block
        scale = q.shape[-1] ** -0.5
        part = q[row : row + rows].cpu()
        out.append(attention_reference(part, k_cache[slots].cpu(), v_cache[slots].cpu(), first, scale))
        row += rows
    return torch.cat(out).to(q.device)
