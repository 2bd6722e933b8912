"""SiLU-and-multiply of a gated MLP: round(silu(gate) * up), float32 inside, one rounding. Elementwise: no
reduction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llm42_kernels.operators import by_row


def silu_mul_reference(x: Tensor) -> Tensor:
    """float64 version. x [T, 2 I] = gate, up -> [T, I] in x's dtype."""
    gate, up = x.double().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def silu_mul_torch(x: Tensor) -> Tensor:
    """Plain torch, float32 inside. x [T, 2 I] -> [T, I] in x's dtype."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


CPU_PROVIDERS = {"torch": silu_mul_torch, "row": by_row(silu_mul_torch)}


def silu_mul_triton(x: Tensor) -> Tensor:
    """One program per piece of a row. x [T, 2 I] contiguous -> [T, I] in x's dtype."""
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    launch_silu_mul(x, out)
    return out


def silu_mul_library_exp(x: Tensor) -> Tensor:
    """silu_mul_triton with the exponential of CUDA's library, as a compiled graph calls it.
    x [T, 2 I] contiguous -> [T, I]."""
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    launch_silu_mul(x, out, library_exp=True)
    return out


def launch_silu_mul(x: Tensor, out: Tensor, library_exp: bool = False) -> None:
    """Into a given buffer: x [T, 2 I] contiguous -> out [T, I]."""
    from llm42_kernels.gpu.elementwise import silu_mul_kernel
    from llm42_kernels.gpu.launch import STRICT, interpreted

    rows, width = out.shape
    block = min(2048, 1 << (width - 1).bit_length())
    silu_mul_kernel[(rows, -(-width // block))](
        x, out, WIDTH=width, BLOCK=block, LIBRARY_EXP=library_exp and not interpreted(), num_warps=8, **STRICT
    )


CUDA_PROVIDERS = {"triton": silu_mul_triton, "torch": silu_mul_torch, "library-exp": silu_mul_library_exp}
