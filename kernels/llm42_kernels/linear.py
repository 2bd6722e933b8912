"""Matrix product y = x W^T + b.

CPU: activations are widened to float32, the product runs in float32 on float32 weights, and is rounded
once to the activation dtype. Providers, fastest first:

`mkl`      one sgemm over all rows. A closed library: it is row-invariant only where certification finds
           it so (it groups row counts into classes that differ from machine to machine).
`mkl-tile` sgemm calls of exactly TILE_ROWS rows, the last one padded with zeros: the call's shape never
           changes, so only a row's place in the tile could matter.
`row`      one sgemv-shaped call per row: the same call for every row whatever the step.

CUDA: 16-bit operands, float32 accumulator, one rounding. Providers, fastest first:

`cublas`   one library product, with split-K ruled out by an environment without workspace (cublas.py). Which
           kernel a shape picks is the library's choice: certification compares the bits.
`triton`   K in ascending order into one accumulator per output element: row-invariant by construction, and
           with any tile size the same bits as `cublas` where that sums K in order too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from llm42_kernels.operators import Operators

TILE_ROWS = 16


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float64 product, rounded once to x's dtype. x [T, K], weight [N, K], bias [N] or None -> [T, N]."""
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def _finish(y: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (y if bias is None else y + bias.float()).to(dtype)


def linear_mkl(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One float32 product over all T rows. x [T, K], weight [N, K] float32, bias [N] or None -> [T, N]."""
    return _finish(F.linear(x.float(), weight), bias, x.dtype)


def _product_tiled(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.shape[0]
    padded = F.pad(x.float(), (0, 0, 0, -rows % TILE_ROWS))
    tiles = [F.linear(tile, weight) for tile in torch.split(padded, TILE_ROWS)]
    return torch.cat(tiles)[:rows]


def linear_mkl_tile(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Like linear_mkl, in products of TILE_ROWS rows."""
    return _finish(_product_tiled(x, weight), bias, x.dtype)


def _product_rows(x: Tensor, weight: Tensor) -> Tensor:
    # clone(): every call sees its row at the start of a fresh, equally aligned buffer
    return torch.cat([F.linear(row.clone(), weight) for row in torch.split(x.float(), 1)])


def linear_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Like linear_mkl, one product per row."""
    return _finish(_product_rows(x, weight), bias, x.dtype)


def lm_head_mkl(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like linear_mkl, but the logits stay in float32. x [R, H], weight [V, H] -> [R, V] float32."""
    return _finish(F.linear(x.float(), weight), bias, torch.float32)


def lm_head_mkl_tile(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like linear_mkl_tile, logits in float32."""
    return _finish(_product_tiled(x, weight), bias, torch.float32)


def lm_head_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like linear_row, logits in float32."""
    return _finish(_product_rows(x, weight), bias, torch.float32)


CPU_PROVIDERS = {"mkl": linear_mkl, "mkl-tile": linear_mkl_tile, "row": linear_row}
CPU_LM_HEAD_PROVIDERS = {"mkl": lm_head_mkl, "mkl-tile": lm_head_mkl_tile, "row": lm_head_row}


def linear_cublas(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """cuBLAS. x [T, K] A, weight [N, K] A, bias [N] A or None -> [T, N] A."""
    return F.linear(x, weight, bias)


def lm_head_cublas_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """cuBLAS with float32 output. x [R, H] A, weight [V, H] A, out [R, V] float32."""
    torch.mm(x, weight.T, out_dtype=torch.float32, out=out)


def lm_head_triton_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """K-ordered product with float32 output. Shapes as lm_head_cublas_into."""
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
    """K-ordered product. Shapes as linear_cublas."""
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


def rounded_head(ops: Operators, dtype: torch.dtype) -> Operators:
    """`ops` whose logits are rounded to `dtype` (and kept in float32)."""
    head = ops.lm_head
    return replace(ops, lm_head=lambda x, weight, bias: head(x, weight, bias).to(dtype).float())


def round_in_place(logits: Tensor, dtype: torch.dtype) -> None:
    """Rounds contiguous float32 CUDA logits to `dtype`."""
    import triton.language as tl

    from llm42_kernels.gpu.elementwise import round_kernel

    block, kind = 4096, {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    size = logits.numel()
    round_kernel[(-(-size // block),)](logits, DTYPE=kind, SIZE=size, BLOCK=block, num_warps=8)


CUDA_PROVIDERS = {"cublas": linear_cublas, "triton": linear_triton}
CUDA_LM_HEAD_INTO = {"cublas": lm_head_cublas_into, "triton": lm_head_triton_into}
CUDA_LM_HEAD_PROVIDERS = {name: _allocating(into) for name, into in CUDA_LM_HEAD_INTO.items()}


def linear_split_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product that sums K in one piece for a single row and in two pieces for more: what GPU libraries
    do. For the demonstration on machines whose own products do not depend on the batch."""
    if x.shape[0] == 1:
        return linear_mkl(x, weight, bias)
    half = x.shape[1] // 2
    y = F.linear(x[:, :half].float(), weight[:, :half]) + F.linear(x[:, half:].float(), weight[:, half:])
    return _finish(y, bias, x.dtype)


def batch_dependent(ops: Operators) -> Operators:
    """`ops` with linear_split_by_rows as its product."""
    providers = (*(p for p in ops.providers if p[0] != "linear"), ("linear", "split-by-rows"))
    return replace(ops, linear=linear_split_by_rows, providers=providers)
