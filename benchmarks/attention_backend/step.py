"""One step of a fast path as work items of our attention: planned on the host, copied, launched.

Knows nothing of vLLM: query starts and sequence lengths on the host, block tables on the device. A step in
which every sequence has one row (`decode`) always launches the same two kernels, over buffers that stay where
they are, so it may be captured into a CUDA graph; how many items there are is read from device memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llm42_kernels.attention import Sources, TritonAttention
from llm42_kernels.attention_plan import ITEM_FIELDS, AttentionShape, Plan, Planner, Tile

PIECES, SLOTS = 4096, 8192
"""Pieces of split contexts in a step, and their tokens: partial sums of 32 heads of 128 take 134 MB."""
WAVES = 4
"""A decoding step's contexts are split until there are this many items for each multiprocessor."""
COUNTS = 64
"""int32 fields before the items: the numbers of small, combine-small, large and combine-large ones."""
SMALL = {
    "hopper": Tile(64, 4, 4, 1, "hopper"),
    "tma": Tile(64, 4, 3, 2, "tma"),
    "pointer": Tile(64, 4, 3, 2),
}
"""Ways to load a decoding row's context; the bits are the same."""


def shape_of(heads: int, kv_heads: int, dim: int, block_size: int, small: str = "hopper") -> AttentionShape:
    """The verifier's tiles for these heads (llm42/verifier/cuda/runner.py), but for how short ones load."""
    if small == "pointer":
        return AttentionShape(heads, kv_heads, dim, block_size, large=SMALL[small], small=SMALL[small])
    return AttentionShape(
        heads, kv_heads, dim, block_size, large=Tile(128, 4, 3, 1, "hopper"), small=SMALL[small]
    )


@dataclass(slots=True)
class Step:
    """What a layer needs to know. `variant`: letters of the kernels that have work, as in the verifier
    (L large tiles, S small ones, C and c their combining)."""

    variant: str
    decode: bool
    tables: Tensor
    """int32, block tables; items hold offsets into it."""


class StepAttention:
    """Plans and runs steps of at most `rows` rows and `sequences` sequences."""

    def __init__(self, shape: AttentionShape, device: torch.device, rows: int, sequences: int) -> None:
        self.shape, self.device = shape, device
        self.attention = TritonAttention(shape, device, PIECES, SLOTS)
        sms = self.attention.sms
        self._mixed = self.attention.planner
        self._decode = Planner(shape, sms * WAVES, PIECES, SLOTS)
        short = shape.small.block_m // shape.group
        items = -(-rows // short) + 2 * sequences + PIECES
        lengths = {"small": items, "combine_small": PIECES, "large": items, "combine_large": PIECES}
        self._parts: dict[str, tuple[int, int]] = {}
        offset = COUNTS
        for name, length in lengths.items():
            self._parts[name] = (offset, offset + length * ITEM_FIELDS)
            offset += length * ITEM_FIELDS
        self._flat = torch.zeros(offset, dtype=torch.int32, device=device)
        self._views = {name: self._flat[a:b] for name, (a, b) in self._parts.items()}
        most = 1
        while most < shape.group:
            most *= 2
        self._decode_rows = most

    def plan(self, starts: NDArray[np.int32], ends: NDArray[np.int32], tables: Tensor, decode: bool) -> Step:
        """starts [S + 1]: first row of each sequence; ends [S]: its length with those rows; tables
        [S, blocks] int32 on the device, contiguous. decode: no sequence has more than one row. Sequences
        without rows are left out. Queues copies; nothing waits."""
        count = np.diff(starts)
        live = np.flatnonzero((count > 0) & (ends >= count))
        planner = self._decode if decode else self._mixed
        if len(live):
            plan = planner.plan(
                starts[live].astype(np.int64), count[live].astype(np.int64),
                (ends[live] - count[live]).astype(np.int64), live * tables.stride(0),
            )  # fmt: skip
        else:
            empty = np.zeros((0, ITEM_FIELDS), np.int32)
            plan = Plan(empty, empty, empty, empty)
        assert not (decode and len(plan.large)), "a decoding row took a tall tile"
        letters = (("S", plan.small), ("c", plan.combine_small), ("L", plan.large), ("C", plan.combine_large))
        self._send(plan)
        return Step("".join(x for x, items in letters if len(items)), decode, tables)

    def _send(self, plan: Plan) -> None:
        head = np.zeros(COUNTS + plan.small.size, np.int32)
        head[:4] = [len(getattr(plan, name)) for name in self._parts]
        head[COUNTS:] = plan.small.ravel()
        self._copy(head, 0)
        for name in ("combine_small", "large", "combine_large"):
            items = getattr(plan, name)
            if len(items):
                self._copy(np.ascontiguousarray(items).ravel(), self._parts[name][0])

    def _copy(self, values: NDArray[np.int32], at: int) -> None:
        host = torch.from_numpy(values)
        if self.device.type == "cuda":
            host = host.pin_memory()
        self._flat[at : at + len(values)].copy_(host, non_blocking=True)

    def run(self, step: Step, q: Tensor, out: Tensor, sources: Sources) -> None:
        """One layer. q, out [T, Hq, D] contiguous."""
        shape, views, attention = self.shape, self._views, self.attention
        if step.decode:
            attention.attend(shape.small, q, out, sources, step.tables, views["small"], self._flat)
            attention.combine(shape.small, out, views["combine_small"], self._flat[1:], self._decode_rows)
            return
        heights: tuple[tuple[str, str, str, Tile, int], ...] = (
            ("L", "C", "large", shape.large, 2), ("S", "c", "small", shape.small, 0),
        )  # fmt: skip
        for letter, combined, name, tile, field in heights:
            if letter in step.variant:
                attention.attend(tile, q, out, sources, step.tables, views[name], self._flat[field:])
            if combined in step.variant:
                attention.combine(tile, out, views["combine_" + name], self._flat[field + 1 :])


def split_cache(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [slots, Hk, D] of a cache [2, blocks, block size, Hk, D]."""
    keys, values = kv_cache.unbind(0)
    return keys.flatten(0, 1), values.flatten(0, 1)


def facts(shape: AttentionShape) -> dict[str, Any]:
    """What a result says about the kernels."""
    return {"kernels": shape.kernels, "block_size": shape.block_size, "pieces": PIECES, "waves": WAVES}
