"""Body of the portable matrix product."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    x, weight, bias, out, rows, cols, depth, x_stride, w_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out = x W^T + b. One program per output tile; K is summed in ascending order into one float32
    accumulator."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    group = pid // (GROUP * tiles_n)
    first = group * GROUP
    height = min(tiles_m - first, GROUP)
    m = first + (pid % (GROUP * tiles_n)) % height
    n = (pid % (GROUP * tiles_n)) // height
    offs_m = (m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = (n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    x_at = x + offs_m[:, None] * x_stride + offs_k[None, :]
    w_at = weight + offs_n[None, :] * w_stride + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        inside = offs_k < depth - k
        a = tl.load(x_at + k, mask=(offs_m[:, None] < rows) & inside[None, :], other=0.0)
        b = tl.load(w_at + k, mask=(offs_n[None, :] < cols) & inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + offs_n, mask=offs_n < cols, other=0.0).to(tl.float32)[None, :]
    at = out + offs_m[:, None] * out_stride + offs_n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(offs_m[:, None] < rows) & (offs_n[None, :] < cols))
