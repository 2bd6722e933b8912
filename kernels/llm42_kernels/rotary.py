"""Rotary position embedding (Su et al., RoFormer), half-split layout as in HF Llama checkpoints.

For each head, with (a, b) the two halves:  a' = a cos - b sin,  b' = b cos + a sin;  cos and sin are a
float32 table of [positions, D] with cos in the first half of a row and sin in the second. float32 inside,
one rounding. Elementwise: no reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cos_sin_table(inv_freq: Tensor, positions: int, attention_factor: float = 1.0) -> Tensor:
    """inv_freq [D/2] float64 -> [positions, D] float32, computed in float64 and rounded once."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inv_freq.double()[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul(attention_factor).float()


def cos_sin_table_rounded(
    inv_freq: Tensor, positions: int, attention_factor: float, dtype: torch.dtype
) -> Tensor:
    """The table of an engine that makes it in float32 on the device and keeps it in the activation dtype.
    inv_freq [D/2] float32 on the device -> [positions, D] float32 holding values of `dtype`."""
    steps = torch.arange(positions, dtype=torch.float32, device=inv_freq.device)
    angles = torch.einsum("i,j -> ij", steps, inv_freq)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (table if attention_factor == 1.0 else table * attention_factor).to(dtype).float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rotary_torch(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D], k [T, Hk, D], positions [T] int64, cos_sin [P, D] float32 -> rotated q, k in their
    dtype."""
    cos, sin = cos_sin[positions][:, None, :].chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def rotary_reference(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """rotary_torch in float64. q [T, Hq, D], k [T, Hk, D], positions [T] int64, cos_sin [P, D] -> rotated q,
    k in their dtype."""
    cos, sin = cos_sin[positions].double()[:, None, :].chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def rotary_row(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """rotary_torch, one call per row: the call's shape never changes. q [T, Hq, D], k [T, Hk, D], positions
    [T] int64, cos_sin [P, D] float32 -> rotated q, k in their dtype."""
    rows = zip(torch.split(q, 1), torch.split(k, 1), torch.split(positions, 1), strict=True)
    out = [rotary_torch(a.clone(), b.clone(), p, cos_sin) for a, b, p in rows]
    return torch.cat([a for a, _ in out]), torch.cat([b for _, b in out])


CPU_PROVIDERS = {"torch": rotary_torch, "row": rotary_row}


def _rotate_triton(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    from llm42_kernels.gpu.elementwise import rotary_kernel
    from llm42_kernels.gpu.launch import STRICT

    rows, heads, dim = x.shape
    if x.stride(2) != 1 or x.stride(1) != dim:
        x = x.contiguous()
    out = torch.empty(rows, heads, dim, dtype=x.dtype, device=x.device)
    half = 1 << (dim // 2 - 1).bit_length()
    rotary_kernel[(rows, heads)](
        x, out, positions, cos_sin, x.stride(0), HEADS=heads, DIM=dim, HALF=half, num_warps=1, **STRICT
    )
    return out


def rotary_triton(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D], k [T, Hk, D], positions [T] int64, cos_sin [P, D] float32 -> rotated q, k. a cos and b
    sin are rounded apart (no fused multiply-add), as plain torch does."""
    return _rotate_triton(q, positions, cos_sin), _rotate_triton(k, positions, cos_sin)


CUDA_PROVIDERS = {"triton": rotary_triton, "torch": rotary_torch}
