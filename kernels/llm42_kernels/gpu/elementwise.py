"""Bodies of the pointwise and row-reduction kernels: RMSNorm, SiLU-multiply, rotary + KV write, embedding
rows, rounding."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def rms_norm_kernel(
    x, residual, weight, normed, new_residual, x_stride, eps, inv_width,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KEEP_SUM: tl.constexpr
):  # fmt: skip
    """One program per row; the order of the sum of squares is a function of BLOCK and the warp count
    alone."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    s = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    if KEEP_SUM:
        tl.store(new_residual + row * WIDTH + columns, s.to(new_residual.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(s * s, axis=0) * inv_width + eps)
    tl.store(normed + row * WIDTH + columns, (s * scale * w).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_kernel(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LIBRARY_EXP: tl.constexpr):
    """Grid (rows, ceil(WIDTH / BLOCK)). silu(g) = g / (1 + exp(-g)). LIBRARY_EXP: CUDA's expf in
    place of the hardware's approximation."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(x + row * (2 * WIDTH) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * WIDTH) + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    e = libdevice.exp(-gate) if LIBRARY_EXP else tl.exp(-gate)
    y = gate / (1.0 + e) * up
    tl.store(out + row * WIDTH + columns, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_of_terms(x, a, b, at, mask, TERMS: tl.constexpr):
    """x, x + a or x + (a + b), float32."""
    s = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if TERMS == 1:
        return s
    more = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    if TERMS == 3:
        more += tl.load(b + at, mask=mask, other=0.0).to(tl.float32)
    return s + more


@triton.jit(do_not_specialize=["rows"])
def sum_norm_kernel(
    x, a, b, weight, normed, total, rows, eps,
    WIDTH: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK: tl.constexpr, TERMS: tl.constexpr,
    KEEP_SUM: tl.constexpr
):  # fmt: skip
    """BLOCK_X rows a program. The order of the sum of squares follows from BLOCK_X, BLOCK and the warp count:
    rows wider than BLOCK are summed column-wise over blocks first."""
    row = (tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)[:, None]).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = row < rows
    squares = tl.zeros([BLOCK_X, BLOCK], tl.float32)
    if WIDTH <= BLOCK:
        mask = (columns < WIDTH) & inside
        at = row * WIDTH + columns
        s = _sum_of_terms(x, a, b, at, mask, TERMS)
        w = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        squares = tl.where(mask, s * s, 0.0)
        scale = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / WIDTH + eps)
        tl.store(normed + at, (s * scale * w).to(normed.dtype.element_ty), mask=mask)
        if KEEP_SUM:
            tl.store(total + at, s.to(total.dtype.element_ty), mask=mask)
    else:
        for first in tl.range(0, WIDTH, BLOCK):
            mask = (first + columns < WIDTH) & inside
            s = _sum_of_terms(x, a, b, row * WIDTH + first + columns, mask, TERMS)
            squares = tl.where(mask, squares + s * s, squares)
        scale = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / WIDTH + eps)
        for first in tl.range(0, WIDTH, BLOCK):
            mask = (first + columns < WIDTH) & inside
            at = row * WIDTH + first + columns
            s = _sum_of_terms(x, a, b, at, mask, TERMS)
            w = tl.load(weight + first + columns, mask=first + columns < WIDTH, other=0.0).to(tl.float32)
            tl.store(normed + at, (s * scale * w).to(normed.dtype.element_ty), mask=mask)
            if KEEP_SUM:
                tl.store(total + at, s.to(total.dtype.element_ty), mask=mask)


@triton.jit
def round_kernel(x, DTYPE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rounds float32 numbers in place to what DTYPE can hold."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    value = tl.load(x + at, mask=mask, other=0.0)
    tl.store(x + at, value.to(DTYPE).to(tl.float32), mask=mask)


@triton.jit
def rotary_kernel(
    x, out, positions, cos_sin, x_stride, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr
):
    """Grid (rows, HEADS): one head of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    mask = d < DIM // 2
    source = x + row * x_stride + head * DIM
    a = tl.load(source + d, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + DIM // 2 + d, mask=mask, other=0.0).to(tl.float32)
    angle = cos_sin + tl.load(positions + row) * DIM
    cos = tl.load(angle + d, mask=mask, other=0.0)
    sin = tl.load(angle + DIM // 2 + d, mask=mask, other=0.0)
    target = out + (row * HEADS + head) * DIM
    tl.store(target + d, (a * cos - b * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(target + DIM // 2 + d, (b * cos + a * sin).to(out.dtype.element_ty), mask=mask)


@triton.jit
def kv_write_kernel(k, v, slots, k_cache, v_cache, k_stride, v_stride, HEADS: tl.constexpr, DIM: tl.constexpr,
                    BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows, HEADS). A value row that is not finite is stored as zeros with its key as NaN
    (kv_write.py)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        d = tl.arange(0, BLOCK)
        mask = d < DIM
        key = tl.load(k + row * k_stride + head * DIM + d, mask=mask, other=0.0)
        value = tl.load(v + row * v_stride + head * DIM + d, mask=mask, other=0.0)
        wide = value.to(tl.float32)
        bad = tl.max((wide - wide != 0.0).to(tl.int32), axis=0) > 0
        target = (slot * HEADS + head) * DIM + d
        tl.store(k_cache + target, tl.where(bad, float("nan"), key.to(tl.float32)).to(key.dtype), mask=mask)
        tl.store(v_cache + target, tl.where(bad, 0.0, wide).to(value.dtype), mask=mask)


@triton.jit
def _normed(a, b, weight, d, mask, eps, inv_dim, HALF_DIM: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm over one head given as its two halves, rounded to dtype: the order of q/k norm in the
    decoder."""
    scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) * inv_dim + eps)[:, None]
    wa = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)[None, :]
    wb = tl.load(weight + HALF_DIM + d, mask=mask, other=0.0).to(tl.float32)[None, :]
    return (a * scale * wa).to(dtype).to(tl.float32), (b * scale * wb).to(dtype).to(tl.float32)


@triton.jit
def qkv_kernel(
    qkv, q_out, k_cache, v_cache, positions, slots, cos_sin, q_norm, k_norm, eps, inv_dim,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Grid (rows, head blocks over Q_HEADS + KV_HEADS): q/k norm, rotary, and the KV write, each rounded as
    apart.

    A block holds HEADS_BLOCK heads of [queries, keys]; the block that rotates a key also copies its value.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    d = tl.arange(0, HALF)
    half: tl.constexpr = DIM // 2
    column = d < half
    is_q = heads < Q_HEADS
    is_k = (heads >= Q_HEADS) & (heads < Q_HEADS + KV_HEADS)
    q_mask = is_q[:, None] & column[None, :]
    mask = (is_q | is_k)[:, None] & column[None, :]
    dtype: tl.constexpr = q_out.dtype.element_ty
    source = qkv + row * ((Q_HEADS + 2 * KV_HEADS) * DIM)
    at = heads[:, None] * DIM + d[None, :]
    a = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + at + half, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        qa, qb = _normed(a, b, q_norm, d, column, eps, inv_dim, half, dtype)
        ka, kb = _normed(a, b, k_norm, d, column, eps, inv_dim, half, dtype)
        a = tl.where(is_q[:, None], qa, ka)
        b = tl.where(is_q[:, None], qb, kb)
    angle = cos_sin + tl.load(positions + row).to(tl.int64) * DIM
    cos = tl.load(angle + d, mask=column, other=0.0)[None, :]
    sin = tl.load(angle + half + d, mask=column, other=0.0)[None, :]
    low = a * cos - b * sin
    high = b * cos + a * sin
    q_at = q_out + row * (Q_HEADS * DIM) + at
    tl.store(q_at, low.to(dtype), mask=q_mask)
    tl.store(q_at + half, high.to(dtype), mask=q_mask)
    slot = tl.load(slots + row).to(tl.int64)
    kv_mask = (is_k & (slot >= 0))[:, None] & column[None, :]
    va = tl.load(source + at + KV_HEADS * DIM, mask=kv_mask, other=0.0).to(tl.float32)
    vb = tl.load(source + at + KV_HEADS * DIM + half, mask=kv_mask, other=0.0).to(tl.float32)
    wrong = (va - va != 0.0) | (vb - vb != 0.0)
    bad = (tl.max(wrong.to(tl.int32), axis=1) > 0)[:, None]
    target = slot * (KV_HEADS * DIM) + (heads[:, None] - Q_HEADS) * DIM + d[None, :]
    tl.store(k_cache + target, tl.where(bad, float("nan"), low).to(dtype), mask=kv_mask)
    tl.store(k_cache + target + half, tl.where(bad, float("nan"), high).to(dtype), mask=kv_mask)
    tl.store(v_cache + target, tl.where(bad, 0.0, va).to(dtype), mask=kv_mask)
    tl.store(v_cache + target + half, tl.where(bad, 0.0, vb).to(dtype), mask=kv_mask)
