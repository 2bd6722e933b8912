"""Root-mean-square norm with residual add: one fused group, float32 inside, one rounding at its end.

    s = x + residual (float32, or x alone);  new_residual = round(s)
    normed = round(s * rsqrt(mean(s^2) + eps) * weight)

The variance uses the unrounded s, as a compiled GPU graph does. Reduction order: along one row only; the
row's length is fixed by the model, so no other row can change it.

Provider `carried` goes one step further, as graphs that torch.compile makes of a whole decoder layer do: the
sum after attention is not stored, and the next norm adds the MLP's output to it unrounded,

    s = y + (o + residual)   (float32; y the MLP's output, o the attention's)

so that the residual is rounded once per layer. Its launch shape follows from the row's length by the rules of
that compiler (torch 2.11), because the order of the sum of squares does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """float64 version. x, residual [T, H], weight [H] -> (normed [T, H], new residual [T, H]) in x's
    dtype."""
    s = x.double() if residual is None else x.double() + residual.double()
    normed = s / torch.sqrt(s.square().mean(-1, keepdim=True) + eps) * weight.double()
    return normed.to(x.dtype), s.to(x.dtype)


def rms_norm_torch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Plain torch, float32 inside. x, residual [T, H], weight [H] -> normed, new residual [T, H] in x's
    dtype."""
    s = x.float() if residual is None else x.float() + residual.float()
    scale = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    return (s * scale * weight.float()).to(x.dtype), s.to(x.dtype)


def rms_norm_row(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Like rms_norm_torch, one call per leading index: the call's shape never changes. x, residual
    [T, ..., H], weight [H] -> normed, new residual [T, ..., H] in x's dtype."""
    rows = torch.split(x, 1)
    residuals = [None] * len(rows) if residual is None else torch.split(residual, 1)
    out = [
        rms_norm_torch(a.clone(), None if b is None else b.clone(), weight, eps)
        for a, b in zip(rows, residuals, strict=True)
    ]
    return torch.cat([y for y, _ in out]), torch.cat([r for _, r in out])


CPU_PROVIDERS = {"torch": rms_norm_torch, "row": rms_norm_row}


def rms_norm_triton(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One program per row; the order of the sum follows from the row's length alone. x [..., H], residual
    [T, H], weight [H] -> normed, new residual [..., H] in x's dtype."""
    shape, width = x.shape, x.shape[-1]
    x = x.reshape(-1, width)
    normed = torch.empty_like(x)
    summed = x if residual is None else torch.empty_like(x)
    launch_rms_norm(x, residual, weight, normed, summed, eps)
    return normed.view(shape), summed.view(shape)


def launch_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, normed: Tensor, summed: Tensor, eps: float
) -> None:
    """Into given buffers [T, H]; `summed` may be `residual` itself and is not written when residual is
    None."""
    from llm42_kernels.gpu.elementwise import rms_norm_kernel
    from llm42_kernels.gpu.launch import STRICT

    rows, width = x.shape
    block = 1 << (width - 1).bit_length()
    has = residual is not None
    rms_norm_kernel[(rows,)](
        x, residual if has else x, weight, normed, summed, x.stride(0), eps, 1.0 / width,
        WIDTH=width, BLOCK=block, HAS_RESIDUAL=has, KEEP_SUM=has,
        num_warps=min(8, max(1, block // 512)), **STRICT,
    )  # fmt: skip


TIMED_BEYOND = 2048
"""Columns. For longer rows that compiler times several launches when it starts and takes the fastest, so that
the order could differ between two starts; told to be deterministic, it takes the one of `carried_launch`."""


def carried_launch(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps."""
    block = 1 << (width - 1).bit_length()
    if block <= 1024:
        return min(1024 // block, 8), block, 1
    return (2 if width <= TIMED_BEYOND else 1), 2048, 16


def launch_sum_norm(
    terms: tuple[Tensor, ...],
    weight: Tensor,
    normed: Tensor,
    summed: Tensor | None,
    eps: float,
    launch: tuple[int, int, int] | None = None,
) -> None:
    """Norm of the sum of one to three [T, H] terms, t0 + (t1 + t2), into normed [T, H]; the rounded sum goes
    to `summed` (may be one of the terms) unless that is None. launch: instead of carried_launch's."""
    from llm42_kernels.gpu.elementwise import sum_norm_kernel

    rows, width = terms[0].shape
    block_x, block, warps = launch or carried_launch(width)
    padded = [*terms, *[terms[0]] * (3 - len(terms))]
    # the compiler may contract multiplications and additions here: so does the one that is followed
    sum_norm_kernel[(-(-rows // block_x),)](
        *padded, weight, normed, normed if summed is None else summed, rows, eps,
        WIDTH=width, BLOCK_X=block_x, BLOCK=block, TERMS=len(terms), KEEP_SUM=summed is not None,
        num_warps=warps, num_stages=1,
    )  # fmt: skip


def rms_norm_carried(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Provider `carried` in the form of the other providers. x [..., H], residual [T, H], weight [H] ->
    normed, new residual [..., H] in x's dtype."""
    flat = x.reshape(-1, x.shape[-1])
    normed = torch.empty_like(flat)
    summed = flat if residual is None else torch.empty_like(flat)
    terms = (flat,) if residual is None else (flat, residual)
    launch_sum_norm(terms, weight, normed, None if residual is None else summed, eps)
    return normed.view(x.shape), summed.view(x.shape)


CUDA_PROVIDERS = {"triton": rms_norm_triton, "torch": rms_norm_torch, "carried": rms_norm_carried}
