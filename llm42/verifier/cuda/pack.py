"""One step's inputs as one flat int32 array: packed on the host, copied once, read at fixed offsets by the
graphs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llm42.verifier.runner import SequenceRows
from llm42_kernels.attention_plan import ITEM_FIELDS, Planner

PAD_TOKEN = 0
COUNTS = 8
"""Leading fields: numbers of large, small, combine-large, combine-small items; the rest unused."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of the parts of one bucket's step, in int32 elements. All buckets share one buffer."""

    rows: int
    items: int
    table_capacity: int

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Name -> (offset, length). `logit_rows` is at the same place in all buckets, so that one graph of
        the head serves them all; `tables` is last: only its used part is copied."""
        fields = self.items * ITEM_FIELDS
        lengths = {
            "counts": COUNTS,
            "logit_rows": self.rows,
            "tokens": self.rows,
            "positions": self.rows,
            "slots": self.rows,
            "feed": self.rows,
            "large": fields,
            "small": fields,
            "combine_large": fields,
            "combine_small": fields,
            "tables": self.table_capacity,
        }
        offset, out = 0, {}
        for name, length in lengths.items():
            out[name] = (offset, length)
            offset += -(-length // 64) * 64  # 256-byte alignment
        return out

    @property
    def total(self) -> int:
        """Elements of the whole buffer."""
        offset, length = self.parts["tables"]
        return offset + length

    def views(self, flat: Any) -> dict[str, Any]:
        """Slices of a flat array or tensor by name."""
        return {name: flat[offset : offset + length] for name, (offset, length) in self.parts.items()}


@dataclass(frozen=True, slots=True)
class Packed:
    """What the launch needs to know about a packed step."""

    used: int
    """int32 elements to copy."""
    logit_rows: int
    variant: str
    """Which attention kernels have work: "L" large tiles, "S" small tiles, "c" combine."""


class StepPacker:
    """Fills a pinned host buffer; knows nothing of streams."""

    def __init__(self, layout: Layout, planner: Planner, block_size: int) -> None:
        self.layout, self.planner, self.block_size = layout, planner, block_size
        self._tables_at = layout.parts["tables"][0]

    def pack(self, host: dict[str, NDArray[np.int32]], bucket: int, sequences: list[SequenceRows]) -> Packed:
        """Rows in the order of `sequences`, padded to `bucket` with rows that touch neither cache nor
        attention. host: the parts of the layout, int32. Raises ValueError for longer block tables than it
        holds."""
        size = self.block_size
        count = np.array([s.count for s in sequences])
        start = np.array([s.start for s in sequences])
        first_logit = np.array([s.first_logit for s in sequences])
        row0 = np.cumsum(count) - count
        rows = int(count.sum())
        assert rows <= bucket, f"{rows} rows in a step of {bucket}"
        blocks = [s.block_table[: (s.start + s.count - 1) // size + 1] for s in sequences]
        lengths = np.array([len(b) for b in blocks])
        offset = np.cumsum(lengths) - lengths
        table = np.frombuffer(array("i", chain.from_iterable(blocks)), dtype=np.int32)
        if len(table) > self.layout.table_capacity:
            raise ValueError("block tables of a step exceed their buffer")
        position = np.arange(rows) - np.repeat(row0 - start, count)
        at = table[np.repeat(offset, count) + position // size]
        host["tables"][: len(table)] = table
        tokens = array("i", chain.from_iterable(map(_known_tokens, sequences)))
        for name, values, padding in (
            ("tokens", np.frombuffer(tokens, dtype=np.int32), PAD_TOKEN),
            ("positions", position, 0),
            ("slots", at * size + position % size, -1),
        ):
            host[name][:rows] = values
            host[name][rows:bucket] = padding
        picked = np.flatnonzero(position >= np.repeat(first_logit, count))
        host["logit_rows"][: len(picked)] = picked
        host["logit_rows"][len(picked) : bucket] = 0  # buckets share the buffer: no stale index may remain
        host["feed"][:bucket] = -1
        host["feed"][row0] = np.array([s.feed for s in sequences])
        variant = self._items(host, row0, count, start, offset)
        return Packed(self._tables_at + len(table), len(picked), variant)

    def _items(self, host: dict[str, NDArray[np.int32]], *rows: NDArray[Any]) -> str:
        plan = self.planner.plan(*rows)
        parts = (
            ("large", plan.large),
            ("small", plan.small),
            ("combine_large", plan.combine_large),
            ("combine_small", plan.combine_small),
        )
        for field, (name, items) in enumerate(parts):
            host["counts"][field] = len(items)
            host[name][: items.size] = items.ravel()
        combine = "c" if len(plan.combine_large) or len(plan.combine_small) else ""
        return ("L" if len(plan.large) else "") + ("S" if len(plan.small) else "") + combine


def _known_tokens(s: SequenceRows) -> list[int]:
    """Its rows' tokens; PAD_TOKEN in the place of one that is still on the device."""
    if s.feed < 0:
        return s.tokens[s.start : s.start + s.count]
    return [PAD_TOKEN, *s.tokens[s.start + 1 : s.start + s.count]]


class HostBuffers:
    """A ring of pinned buffers: step k + 1 is packed while the copy of step k may still be reading its
    own."""

    def __init__(self, layouts: Iterable[Layout], depth: int = 3) -> None:
        layouts = list(layouts)
        total = max(layout.total for layout in layouts)
        self._flat = [torch.zeros(total, dtype=torch.int32, pin_memory=True) for _ in range(depth)]
        self._views = [{x.rows: x.views(flat.numpy()) for x in layouts} for flat in self._flat]
        self._copied: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def take(self, bucket: int) -> tuple[int, dict[str, NDArray[np.int32]]]:
        """The next buffer, seen in the layout of a bucket, once its last copy is done (normally long ago)."""
        index = self._next
        self._next = (index + 1) % len(self._flat)
        event = self._copied[index]
        if event is not None:
            event.synchronize()
        return index, self._views[index][bucket]

    def copy(self, index: int, used: int, device: Tensor, stream: torch.cuda.Stream) -> None:
        """Starts the copy of the first `used` elements on the stream."""
        device[:used].copy_(self._flat[index][:used], non_blocking=True)
        event = self._copied[index] or torch.cuda.Event()
        event.record(stream)
        self._copied[index] = event
