"""KV write: rotated keys and values of a step's rows go to their slots of the paged cache.

k_cache, v_cache [slots, Hk, D]; slot = block * block_size + offset; a negative slot (padding row) is
skipped. No arithmetic, one exception: a value row (one token, one head) that is not finite is stored as
zeros, and its key as NaN. Every row that attends to it then gets NaN through its score, as it should, while
an earlier row, for which the score is masked, multiplies its zero weight with a finite value: without this,
0 * NaN would let a token change rows before it.

`launch_qkv` does q/k norm, rotary and the write in one kernel with the rounding points of the separate
operators, and with their bits (a q/k norm sums its squares in an order of its own).
"""

from __future__ import annotations

import torch
from torch import Tensor


def kv_write_torch(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Plain version. k, v [T, Hk, D], slots [T] int, caches [slots, Hk, D] of k's dtype, written in place."""
    keep = slots >= 0
    k, v, at = k[keep], v[keep], slots[keep].long()
    bad = ~v.isfinite().all(-1, keepdim=True)
    k_cache[at] = torch.where(bad, torch.full_like(k, float("nan")), k)
    v_cache[at] = torch.where(bad, torch.zeros_like(v), v)


def kv_write_triton(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """One kernel. k, v [T, Hk, D], slots [T] int, caches [slots, Hk, D] of k's dtype, written in place."""
    from llm42_kernels.gpu.elementwise import kv_write_kernel
    from llm42_kernels.gpu.launch import STRICT

    rows, heads, dim = k.shape
    assert k.stride(1) == v.stride(1) == dim and k.stride(2) == v.stride(2) == 1
    kv_write_kernel[(rows, heads)](
        k, v, slots, k_cache, v_cache, k.stride(0), v.stride(0),
        HEADS=heads, DIM=dim, BLOCK=1 << (dim - 1).bit_length(), num_warps=1, **STRICT,
    )  # fmt: skip


def launch_qkv(
    qkv: Tensor, q_out: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, slots: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
) -> None:  # fmt: skip
    """qkv [T, (Hq + 2 Hk) D] -> rotated q_out [T, Hq, D] and the caches [slots, Hk, D]; q_norm, k_norm [D]
    or None."""
    from llm42_kernels.gpu.elementwise import qkv_kernel
    from llm42_kernels.gpu.launch import STRICT

    rows, q_heads, dim = q_out.shape
    kv_heads = k_cache.shape[-2]
    norm, heads_block = q_norm is not None and k_norm is not None, 8
    qkv_kernel[(rows, -(-(q_heads + kv_heads) // heads_block))](
        qkv, q_out, k_cache, v_cache, positions, slots, cos_sin,
        q_norm if norm else qkv, k_norm if norm else qkv, eps, 1.0 / dim,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim, HALF=1 << (dim // 2 - 1).bit_length(),
        HEADS_BLOCK=heads_block, NORM=norm, num_warps=4, **STRICT,
    )  # fmt: skip


CUDA_PROVIDERS = {"triton": kv_write_triton, "torch": kv_write_torch}
