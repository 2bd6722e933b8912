"""Matrix product y = x W^T + b on a GPU: 16-bit operands, float32 accumulator, one rounding. A: the dtype of
activations and weights. Providers, fastest first:

`cublas`   one library product, with split-K ruled out by an environment without workspace (cublas.py). Which
           kernel a shape picks is the library's choice: certification compares the bits.
`triton`   K in ascending order into one accumulator per output element: row-invariant by construction, and
           with any tile size the same bits as `cublas` where that sums K in order too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cublas(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """cuBLAS. x [T, K] A, weight [N, K] A, bias [N] A or None -> [T, N] A."""
    return F.linear(x, weight, bias)


def lm_head_cublas_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """cuBLAS with float32 output. x [R, H] A, weight [V, H] A, out [R, V] float32."""
    torch.mm(x, weight.T, out_dtype=torch.float32, out=out)


def lm_head_triton_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """K-ordered product with float32 output. x [R, H] A, weight [V, H] A, out [R, V] float32."""
    _product_triton(x, weight, None, out)


def _product_triton(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    from llm42_kernels.gpu.launch import STRICT
    from llm42_kernels.gpu.matmul import matmul_kernel

    rows, cols = out.shape
    block_m, block_n, block_k = (128 if rows > 64 else 64 if rows > 16 else 16), 128, 64
    grid = (-(-rows // block_m) * -(-cols // block_n),)
    matmul_kernel[grid](
        x, weight, out if bias is None else bias, out, rows, cols, x.shape[1],
        x.stride(0), weight.stride(0), out.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=8, HAS_BIAS=bias is not None,
        num_warps=8 if block_m == 128 else 4, num_stages=3, **STRICT,
    )  # fmt: skip
    return out


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """K-ordered product. x [T, K] A, weight [N, K] A, bias [N] A or None -> [T, N] A."""
    return _product_triton(x, weight, bias, x.new_empty(x.shape[0], weight.shape[0]))


def _allocating(
    into: Callable[[Tensor, Tensor, Tensor], None],
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    def lm_head(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is None, "a bias in the output layer is refused by the model's allow-list"
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
        into(x, weight, out)
        return out

    return lm_head


def round_in_place(logits: Tensor, dtype: torch.dtype) -> None:
    """Rounds contiguous CUDA logits [R, V] float32 to `dtype` (and keeps them in float32)."""
    import triton.language as tl

    from llm42_kernels.gpu.elementwise import round_kernel

    block, kind = 4096, {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    size = logits.numel()
    round_kernel[(-(-size // block),)](logits, DTYPE=kind, SIZE=size, BLOCK=block, num_warps=8)


CUDA_PROVIDERS = {"cublas": linear_cublas, "triton": linear_triton}
CUDA_LM_HEAD_INTO = {"cublas": lm_head_cublas_into, "triton": lm_head_triton_into}
CUDA_LM_HEAD_PROVIDERS = {name: _allocating(into) for name, into in CUDA_LM_HEAD_INTO.items()}
