"""Paged attention with the arithmetic that FlashAttention 3 has for single query rows without splits, so that
a verifier has the bits of a fast path that decodes with it (vLLM on Hopper).

Reduction order (gpu/attention_flash.py): key tiles at absolute multiples of 192 (head size 64) or 128
(head size 128), from the last down to the first, online softmax in base 2; no splits, whatever the context.
The order follows from the row's position alone: row-invariant by construction, like attention.py.

That library chooses its tiles by the largest number of query rows in the batch: at head size 64, 192 keys up
to 64 rows x heads of a group, 128 beyond. A fast path that mixes prompt chunks with decoding thus leaves this
arithmetic for contexts of more than 128 keys; at head size 128 it does not. It splits the context of small
batches unless told not to (in vLLM: attention_config.flash_attn_max_num_splits_for_cuda_graph = 1)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from llm42_kernels.attention import Sources, TritonAttention
from llm42_kernels.attention_plan import LOG2_E, AttentionShape, Tile

KEY_TILE = {64: 192, 128: 128}
"""Head size -> keys in a tile."""
NEVER = 192 << 16
"""Keys per segment: more than any context, so that none is split."""


class UnsupportedHeadSize(ValueError):
    """No tile of this head size is known."""


def flash_shape(heads: int, kv_heads: int, dim: int, block_size: int) -> AttentionShape:
    """Tiles for a model and a block size. Raises UnsupportedHeadSize."""
    if dim not in KEY_TILE:
        known = " and ".join(map(str, KEY_TILE))
        raise UnsupportedHeadSize(
            f"verifier.affinity 'vllm' knows the attention of head sizes {known}; the model has {dim}: "
            "set verifier.affinity to 'none'"
        )
    tile = Tile(64, 4, 2, 2, "tma" if block_size % 64 == 0 else "pointer")
    return AttentionShape(
        heads, kv_heads, dim, block_size, KEY_TILE[dim], large=tile, small=tile, segment=NEVER, order="flash"
    )


class FlashOrderAttention(TritonAttention):
    """Provider `flash-order`: work items and plans of TritonAttention, another kernel."""

    def __init__(
        self, shape: AttentionShape, device: torch.device, partials: int = 1, slots: int | None = None
    ) -> None:
        super().__init__(shape, device, 1)  # nothing is split
        # rounded twice, as the library does: the scale to float32, then its product with log2 e
        self.scale = float(np.float32(float(np.float32(shape.dim**-0.5)) * LOG2_E))

    def attend(self, tile: Tile, q: Tensor, out: Tensor, sources: Sources, *items: Tensor) -> None:
        """Runs the items. Arguments as TritonAttention.attend."""
        from llm42_kernels.gpu.attention_flash import flash_kernel
        from llm42_kernels.gpu.launch import STRICT, interpreted

        shape = self.shape
        keys_values = sources.tma if tile.load == "tma" else sources.tensors
        flash_kernel[(self.sms * tile.per_sm,)](
            q, out, *keys_values, *items, self.scale,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, DIM=shape.dim, BLOCK_M=tile.block_m,
            PARTS=shape.block_n // 64, PAGE=shape.block_size, TMA=tile.load == "tma",
            EXACT=not interpreted(), num_warps=tile.warps, num_stages=tile.stages, **STRICT,
        )  # fmt: skip


def make_attention(
    shape: AttentionShape, device: torch.device, partials: int = 512, slots: int | None = None
) -> TritonAttention:
    """The provider that computes a shape's order. partials, slots: as of TritonAttention."""
    make = FlashOrderAttention if shape.order == "flash" else TritonAttention
    return make(shape, device, partials, slots)
