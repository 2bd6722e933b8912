"""SiLU-and-multiply of a gated MLP: round(silu(gate) * up), float32 inside, one rounding. Elementwise: no reduction."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.operators import by_row


def silu_mul_reference(x: Tensor) -> Tensor:
    """float64 version. x [T, 2 I] = gate, up -> [T, I] in x's dtype."""
    gate, up = x.double().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def silu_mul_torch(x: Tensor) -> Tensor:
    """Plain torch, float32 inside."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


CPU_PROVIDERS = {"torch": silu_mul_torch, "row": by_row(silu_mul_torch)}
