"""Paged causal attention for ragged rows: many sequences in a step, any number of query rows each, grouped
queries.

Layout: q, out [T, Hq, D]; k_cache, v_cache [slots, Hk, D] with slot = block * block_size + offset; each
sequence has a block table. A row at position p attends to the keys 0..p of its own sequence.

Reduction order, the same for every row whatever the step:
1. Keys are cut into segments at absolute multiples of SEGMENT, a segment into tiles at absolute
   multiples of BLOCK_N.
2. Inside a segment, tiles in ascending order: online softmax in base 2, float32, from an empty state.
   Inside a tile, the matrix unit's order over D and over keys, and the warp's fixed order for the row
   maximum and sum.
3. Segments are merged in ascending order with one formula (`merge`), then one division and one rounding.
Contexts up to SEGMENT keys are thus unsplit. Whether the segments of a tile are computed by one program,
which keeps the merged state in registers, or by one program each and then combined, is a scheduling choice:
same formula, same order, same bits. So it may follow the load.

The heads of a group share a tile: tile row i is (token i // G, head i % G). A tile always has the same
number of rows, padded with zeros, whatever the number of query rows. Two tile heights exist (few rows, many
rows); a row of a matrix product does not depend on the tile's height, which certification checks on the
device. Keys past a row's position are masked to -inf before the softmax; value slots that no row of the
sequence has reached are read as zero, and written values are finite (kv_write.py), so 0 * NaN
cannot occur."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llm42_kernels.attention_cpu import attention_reference
from llm42_kernels.attention_plan import ITEM_FIELDS, SEGMENT, AttentionShape, Plan, Planner, Tile

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ITEM_FIELDS",
    "SEGMENT",
    "AttentionShape",
    "Plan",
    "Planner",
    "Tile",
    "TritonAttention",
    "paged_reference",
]


@dataclass(frozen=True, slots=True)
class Sources:
    """One layer's keys and values in the forms that the tiles' loads need (empty where no tile needs it)."""

    tensors: tuple[Tensor, ...]
    tma: tuple[Any, ...] = ()
    hopper: tuple[Any, ...] = ()


class TritonAttention:
    """Provider `triton`: launches the kernels over plans that lie in device memory (nothing here
    synchronises)."""

    def __init__(
        self, shape: AttentionShape, device: torch.device, partials: int = 512, slots: int | None = None
    ) -> None:
        """partials: pieces of split items in a step; slots: their tokens (None: enough for tall ones)."""
        from llm42_kernels.gpu.launch import multiprocessors

        self.shape = shape
        self.sms = multiprocessors(device)
        self.planner = Planner(shape, self.sms * shape.large.per_sm, partials, slots)
        tall = shape.large.block_m // shape.group
        rows = (partials * tall if slots is None else slots) * shape.heads
        self._acc = torch.empty(rows * shape.block_d, dtype=torch.float32, device=device)
        self._md = torch.empty(rows * 2, dtype=torch.float32, device=device)

    def sources(self, k_cache: Tensor, v_cache: Tensor) -> Sources:
        """Caches [slots, Hk, D] and their tensor maps."""
        loads = {self.shape.large.load, self.shape.small.load}
        width = self.shape.kv_heads * self.shape.dim
        block = [self.shape.load_n, self.shape.dim]
        flat = (k_cache.view(-1, width), v_cache.view(-1, width))
        tma = hopper = None
        if "tma" in loads:
            from triton.tools.tensor_descriptor import TensorDescriptor

            tma = tuple(TensorDescriptor(x, list(x.shape), [width, 1], block) for x in flat)
        if "hopper" in loads:
            from llm42_kernels.gpu.attention_hopper import descriptor

            hopper = tuple(descriptor(x, block) for x in flat)  # type: ignore[no-untyped-call]
        return Sources((k_cache, v_cache), tma or (), hopper or ())

    def attend(self, tile: Tile, q: Tensor, out: Tensor, sources: Sources, *items: Tensor) -> None:
        """Runs the items of one tile height. q, out [T, Hq, D]; items: block tables, work items and their
        number, int32 on the device."""
        from llm42_kernels.gpu import attention as gpu
        from llm42_kernels.gpu.launch import STRICT

        shape, grid = self.shape, (self.sms * tile.per_sm,)
        fixed = dict(
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, DIM=shape.dim, BLOCK_N=shape.block_n,
            SEGMENT=shape.segment, PAGE=shape.block_size, num_warps=tile.warps, **STRICT,
        )  # fmt: skip
        work = (*items, self._acc, self._md, shape.scale)
        if tile.load == "hopper":
            from llm42_kernels.gpu import attention_hopper as hopper

            kernel = {
                128: hopper.attention_hopper_kernel, 64: hopper.attention_hopper_rows_kernel,
            }[tile.block_m]  # fmt: skip
            registers = hopper.MAX_REGISTERS[tile.block_m]
            kernel[grid](q, out, *sources.hopper, *work, STAGES=tile.stages, maxnreg=registers, **fixed)
            return
        keys_values = sources.tma if tile.load == "tma" else sources.tensors
        gpu.attention_kernel[grid](
            q, out, *keys_values, *work, BLOCK_D=shape.block_d, BLOCK_M=tile.block_m, TMA=tile.load == "tma",
            num_stages=tile.stages, **fixed,
        )  # fmt: skip

    def combine(self, tile: Tile, out: Tensor, items: Tensor, count: Tensor, rows: int | None = None) -> None:
        """Merges into out [T, Hq, D] the segments of the tiles that `attend` computed in pieces; items and
        count int32 on the device. rows: the most rows of an item, tokens x heads of a group, a power of two
        (None: the tile's)."""
        from llm42_kernels.gpu import attention as gpu
        from llm42_kernels.gpu.launch import STRICT

        shape, most = self.shape, rows or tile.block_m
        together = min(16, most)
        gpu.combine_kernel[(self.sms * 2,)](
            out, items, count, self._acc, self._md,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, DIM=shape.dim, BLOCK_D=shape.block_d,
            BLOCK_M=most, ROWS=together, AHEAD=min(32, 128 // together), num_warps=4, **STRICT,
        )  # fmt: skip

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        start: list[int],
        count: list[int],
        tables: list[list[int]],
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A whole attention call for rows laid one sequence after the other: plan, copy, launch (tests,
        certification).

        Sequence s has count[s] rows at positions start[s].. and the block table tables[s]. Returns [T, Hq,
        D] in out_dtype (q's if None)."""
        counts, offset = np.array(count), np.cumsum([0, *map(len, tables)])[:-1]
        plan = self.planner.plan(np.cumsum(counts) - counts, counts, np.array(start), offset)
        flat = torch.tensor([b for table in tables for b in table], dtype=torch.int32, device=q.device)
        out, sources = torch.zeros_like(q, dtype=out_dtype), self.sources(k_cache, v_cache)
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
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: list[int],
    count: list[int],
    tables: list[list[int]],
    block: int,
) -> Tensor:
    """float64 version of `TritonAttention.run`, on the CPU: a sequence's keys are gathered, its rows attend.
    q [T, Hq, D], caches [slots, Hk, D] -> [T, Hq, D] of q's dtype."""
    out, row = [], 0
    for first, rows, table in zip(start, count, tables, strict=True):
        keys = torch.arange(first + rows, device=q.device)
        slots = torch.tensor(table, device=q.device)[keys // block] * block + keys % block
        scale = q.shape[-1] ** -0.5
        part = q[row : row + rows].cpu()
        out.append(attention_reference(part, k_cache[slots].cpu(), v_cache[slots].cpu(), first, scale))
        row += rows
    return torch.cat(out).to(q.device)
