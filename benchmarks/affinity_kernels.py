"""Norms with switches, for the search of the arithmetic that a fast path has."""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice


@triton.jit
def norm_kernel(
    x, a, b, weight, normed, total, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TERMS: tl.constexpr, STORE: tl.constexpr,
    ROUND: tl.constexpr, DIVIDE: tl.constexpr
):  # fmt: skip
    """s = x (+ a (+ b)) in float32, rounded first if ROUND; normed = s * rsqrt(mean s^2 + eps) * weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    at = row * WIDTH + columns
    s = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if TERMS >= 2:
        more = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
        if TERMS == 3:
            more += tl.load(b + at, mask=mask, other=0.0).to(tl.float32)
        s += more
    if ROUND:
        s = s.to(normed.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(tl.where(mask, s * s, 0.0), axis=0)
    mean = squares / WIDTH if DIVIDE else squares * (1.0 / WIDTH)
    y = s * tl.rsqrt(mean + eps) * w
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=mask)
    if STORE:
        tl.store(total + at, s.to(total.dtype.element_ty), mask=mask)


def norm(
    terms: tuple[Tensor, ...],
    weight: Tensor,
    eps: float,
    *,
    store: bool,
    rounded: bool = False,
    divide: bool = True,
    warps: int = 1,
    contract: bool = True,
) -> tuple[Tensor, Tensor]:
    """terms: one to three [T, H]; returns normed and, with `store`, the rounded sum."""
    rows, width = terms[0].shape
    out = torch.empty_like(terms[0])
    total = torch.empty_like(out) if store else out
    padded = [*terms, *[terms[0]] * (3 - len(terms))]
    norm_kernel[(rows,)](
        *padded, weight, out, total, eps, WIDTH=width, BLOCK=triton.next_power_of_2(width), TERMS=len(terms),
        STORE=store, ROUND=rounded, DIVIDE=divide, num_warps=warps, enable_fp_fusion=contract,
    )  # fmt: skip
    return out, total


@triton.jit
def silu_kernel(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """Grid (rows, pieces). EXACT: the library's exp instead of the fast one."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(x + row * (2 * WIDTH) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * WIDTH) + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    e = libdevice.exp(-gate) if EXACT else tl.exp(-gate)
    tl.store(out + row * WIDTH + columns, (gate / (e + 1.0) * up).to(out.dtype.element_ty), mask=mask)


def silu_mul(x: Tensor, exact: bool = True) -> Tensor:
    """x [T, 2 I] -> silu(gate) * up, [T, I]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    silu_kernel[(rows, triton.cdiv(width, 1024))](x, out, WIDTH=width, BLOCK=1024, EXACT=exact)
    return out
