"""Root-mean-square norm with residual add: one fused group, float32 inside, one rounding at its end.

    s = x + residual (float32, or x alone);  new_residual = round(s)
    normed = round(s * rsqrt(mean(s^2) + eps) * weight)

The variance uses the unrounded s, as a compiled GPU graph does. Reduction order: along one row only; the row's length
is fixed by the model, so no other row can change it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """float64 version. x, residual [T, H], weight [H] -> (normed [T, H], new residual [T, H]) in x's dtype."""
    s = x.double() if residual is None else x.double() + residual.double()
    normed = s / torch.sqrt(s.square().mean(-1, keepdim=True) + eps) * weight.double()
    return normed.to(x.dtype), s.to(x.dtype)


def rms_norm_torch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Plain torch, float32 inside."""
    s = x.float() if residual is None else x.float() + residual.float()
    scale = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    return (s * scale * weight.float()).to(x.dtype), s.to(x.dtype)


def rms_norm_row(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One call per leading index: the call's shape never changes."""
    rows = x.split(1)
    residuals = [None] * len(rows) if residual is None else residual.split(1)
    out = [
        rms_norm_torch(a.clone(), None if b is None else b.clone(), weight, eps)
        for a, b in zip(rows, residuals, strict=True)
    ]
    return torch.cat([y for y, _ in out]), torch.cat([r for _, r in out])


CPU_PROVIDERS = {"torch": rms_norm_torch, "row": rms_norm_row}
