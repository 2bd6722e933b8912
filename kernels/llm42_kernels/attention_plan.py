"""The shape of paged attention and the cutting of a step's rows into work items (see
attention.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEGMENT = 512
"""Keys per segment: the border up to which a context is one unsplit sum."""
LOG2_E = 1.4426950408889634
ITEM_FIELDS = 8
"""int32 fields of a work item: first row, tokens, first position, table offset, first segment, last segment
(exclusive), partial slot or -1, unused. Of a combine item: first row, tokens, unused x 2, first partial
slot, segments, unused x 2. A partial takes one slot per token."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile height: how it is compiled and how many programs share an SM."""

    block_m: int
    warps: int
    stages: int
    per_sm: int
    load: Literal["pointer", "tma", "hopper"] = "pointer"
    """How keys and values come in: by address (any block size), as tensor-map tiles, or as tensor-map tiles
    loaded by a warp of its own (gpu/attention_hopper.py, 128 or 64 rows)."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model and a cache fix. `order`, `block_n` and `segment` set the bits; everything else only the
    speed."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    block_n: int = 64
    large: Tile = Tile(128, 8, 3, 1)
    small: Tile = Tile(16, 1, 3, 4)
    segment: int = SEGMENT
    order: Literal["segments", "flash"] = "segments"
    """attention.py, or attention_flash.py (key tiles in parts of 64, never split)."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads do not divide into {self.kv_heads} KV heads")
        if self.segment % self.block_n or self.group > self.small.block_m:
            raise ValueError(
                f"no attention tile for key tile {self.block_n} and {self.group} heads in a group"
            )
        whole = self.block_size % self.load_n == 0
        if not whole and self.load_n % self.block_size:
            raise ValueError(
                f"block_size {self.block_size} and key tile {self.load_n} must divide one another"
            )
        if (self.large.load, self.small.load) != ("pointer", "pointer") and not (
            whole and self.dim in (64, 128)
        ):
            raise ValueError(
                "tensor-map tiles need a block_size that the key tile divides and a head size of 64 or 128"
            )

    @property
    def kernels(self) -> str:
        """What is compiled for it: order, keys, and the two tiles' rows and loads. Not the block size."""
        tiles = ", ".join(f"{t.block_m} {t.load}" for t in (self.large, self.small))
        return f"{self.order} of {self.block_n} keys, segments of {self.segment}: {tiles}"

    @property
    def load_n(self) -> int:
        """Keys that are loaded at once."""
        return 64 if self.order == "flash" else self.block_n

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
    """Cuts the rows of a step into work items. `programs` is what runs at once; `partials` bounds the pieces
    of split items, `slots` their tokens (None: enough for tall ones)."""

    shape: AttentionShape
    programs: int
    partials: int
    slots: int | None = None
    _empty: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, ITEM_FIELDS), np.int32))

    def plan(self, row0: NDArray[Any], count: NDArray[Any], start: NDArray[Any], table: NDArray[Any]) -> Plan:
        """All [S] int, per sequence: first row in the step, number of rows, first position, offset of its
        block table."""
        shape, end = self.shape, start + count
        tall, short = shape.large.block_m // shape.group, shape.small.block_m // shape.group
        pieces = int((-(-count // tall) * -(-end // shape.segment)).sum()) * shape.kv_heads
        scarce = pieces <= self.programs  # too little work to fill the device with tall tiles
        unit = short if scarce else tall
        tiles, rest = np.divmod(count, unit)
        tail = np.flatnonzero((rest > 0) & (rest <= short))
        first = tiles[tail] * unit
        small = self._items(row0[tail] + first, rest[tail], start[tail] + first, table[tail])
        tiles = tiles + (rest > short)
        sequence = np.repeat(np.arange(len(count)), tiles)
        first = (np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * unit
        tokens = np.minimum(count[sequence] - first, unit)
        large = self._items(row0[sequence] + first, tokens, start[sequence] + first, table[sequence])
        if scarce:
            small, large = np.concatenate((large, small)), self._empty
        keys = float(_keys(large).sum() + _keys(small).sum()) * shape.kv_heads
        fair = max(shape.segment, keys / self.programs)
        large, combine_large = self._split(large, fair)
        small, combine_small = self._split(small, fair)
        return Plan(large, small, combine_large, combine_small)

    def _items(self, row: Any, tokens: Any, pos: Any, table: Any) -> NDArray[np.int32]:
        if not len(row):
            return self._empty
        items = np.zeros((len(row), ITEM_FIELDS), np.int32)
        items[:, 0], items[:, 1], items[:, 2], items[:, 3] = row, tokens, pos, table
        items[:, 5] = -(-(pos + tokens) // self.shape.segment)
        items[:, 6] = -1
        return items[np.argsort(-_keys(items), kind="stable")]

    def _split(self, items: NDArray[np.int32], fair: float) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Items well over a fair share of the work become one item per segment, as far as the partials
        reach."""
        if not len(items) or _keys(items).max() <= 1.25 * fair:
            return items, self._empty
        segments, slots = items[:, 5], items[:, 5] * items[:, 1]
        over = (_keys(items) > 1.25 * fair) & (segments > 1)
        over &= np.cumsum(np.where(over, segments, 0)) <= self.partials
        if self.slots is not None:
            over &= np.cumsum(np.where(over, slots, 0)) <= self.slots
        chosen = items[over]
        if not len(chosen):
            return items, self._empty
        parts, used = chosen[:, 5], slots[over]
        first = np.cumsum(used) - used
        pieces = np.repeat(chosen, parts, axis=0)
        pieces[:, 4] = np.arange(len(pieces)) - np.repeat(np.cumsum(parts) - parts, parts)
        pieces[:, 5] = pieces[:, 4] + 1
        pieces[:, 6] = np.repeat(first, parts) + pieces[:, 4] * pieces[:, 1]
        combine = np.zeros_like(chosen)
        combine[:, :2], combine[:, 4], combine[:, 5] = chosen[:, :2], first, parts
        return np.concatenate((pieces, items[~over])), combine


def _keys(items: NDArray[np.int32]) -> NDArray[np.int64]:
    return (items[:, 2] + items[:, 1]).astype(np.int64)
