"""Bodies of paged attention: query tiles over fixed key segments, and the fixed-order combine.

A work item is (one tile of query rows of one sequence) x (segments [first, last)); attention.py has
the plan's layout and says why no other row can change a bit."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

FLOOR = tl.constexpr(-1.0e38)  # "nothing seen yet": finite, so that FLOOR - FLOOR is 0 and not NaN
ITEM = tl.constexpr(8)  # int32 fields of a work item


@triton.jit
def _page_rows(table, n0, limit, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """Cache rows of the keys n0 .. n0 + BLOCK_N - 1, and which of them exist."""
    offs_n = n0 + tl.arange(0, BLOCK_N)
    exists = offs_n < limit
    if PAGE >= BLOCK_N:
        rows = tl.load(table + n0 // PAGE).to(tl.int64) * PAGE + (n0 % PAGE) + tl.arange(0, BLOCK_N)
    elif MASKED:
        rows = tl.load(table + offs_n // PAGE, mask=exists, other=0).to(tl.int64) * PAGE + offs_n % PAGE
    else:
        rows = tl.load(table + offs_n // PAGE).to(tl.int64) * PAGE + offs_n % PAGE
    return rows, exists


@triton.jit
def _update(scores, v, m, den, acc, scale):
    """One online-softmax step in base 2. scores [M, N] raw products with -inf where masked; scale =
    ln-scale * log2 e.

    Every product and sum is written out (tl.fma or separate roundings), so that all variants round alike. A
    tile whose keys are all masked for a row changes nothing: alpha is 1, p is 0, and adding 0 is exact."""
    m_new = tl.maximum(m, tl.max(scores, axis=1) * scale)
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(tl.fma(scores, scale, -m_new[:, None]))
    den = tl.fma(den, alpha, tl.sum(p, axis=1))
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, den, acc


@triton.jit
def _tile(
    q, k_src, v_src, table, head, n0, limit, pos, m, den, acc, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores and values of one key tile. MASKED tiles may reach past a row's position or past the written
    slots."""
    if TMA:
        row = tl.load(table + n0 // PAGE) * PAGE + n0 % PAGE
        k = k_src.load([row, head * DIM])
        v = v_src.load([row, head * DIM])
        if MASKED:
            exists = (n0 + tl.arange(0, BLOCK_N)) < limit
            v = tl.where(exists[:, None], v, tl.zeros_like(v))
        scores = tl.dot(q, k.T, input_precision="ieee")
    else:
        rows, exists = _page_rows(table, n0, limit, PAGE, BLOCK_N, MASKED)
        offs_d = tl.arange(0, BLOCK_D)
        at = rows * (KV_HEADS * DIM) + head * DIM
        if MASKED or DIM != BLOCK_D:
            mask = exists[:, None] & (offs_d < DIM)[None, :]
            k = tl.load(k_src + at[:, None] + offs_d[None, :], mask=mask, other=0.0)
            v = tl.load(v_src + at[:, None] + offs_d[None, :], mask=mask, other=0.0)
        else:
            k = tl.load(k_src + at[:, None] + offs_d[None, :])
            v = tl.load(v_src + at[:, None] + offs_d[None, :])
        scores = tl.dot(q, k.T, input_precision="ieee")
    if MASKED:
        offs_n = n0 + tl.arange(0, BLOCK_N)
        scores = tl.where(offs_n[None, :] <= pos[:, None], scores, float("-inf"))
    return _update(scores, v, m, den, acc, scale)


@triton.jit
def merge(m_a, den_a, acc_a, m_b, den_b, acc_b):
    """Adds segment b to the segments before it; the one formula of the fused and the split path."""
    m = tl.maximum(m_a, m_b)
    a = tl.exp2(m_a - m)
    b = tl.exp2(m_b - m)
    den = tl.fma(den_a, a, den_b * b)
    acc = tl.fma(acc_a, a[:, None], acc_b * b[:, None])
    return m, den, acc


@triton.jit
def attention_kernel(
    q, out, k_src, v_src, tables, items, item_count, part_acc, part_md, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENT: tl.constexpr, PAGE: tl.constexpr,
    TMA: tl.constexpr
):  # fmt: skip
    """Persistent over items x KV heads. q, out [T, HEADS, DIM]; caches [slots, KV_HEADS, DIM] (or
    descriptors)."""
    group: tl.constexpr = HEADS // KV_HEADS
    total = tl.load(item_count) * KV_HEADS
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        item = items + (work // KV_HEADS) * ITEM
        head = work % KV_HEADS
        row0, count, pos0 = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        table = tables + tl.load(item + 3)
        first_seg, last_seg, part = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
        token = offs_m // group
        valid = token < count
        pos = pos0 + tl.where(valid, token, 0)
        limit = pos0 + count
        at = (row0 + token).to(tl.int64) * (HEADS * DIM) + (head * group + offs_m % group) * DIM
        mask = valid[:, None] & (offs_d < DIM)[None, :]
        queries = tl.load(q + at[:, None] + offs_d[None, :], mask=mask, other=0.0)
        m_all = tl.full([BLOCK_M], FLOOR, tl.float32)
        den_all = tl.zeros([BLOCK_M], tl.float32)
        acc_all = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for segment in range(first_seg, last_seg):
            low = segment * SEGMENT
            high = min(low + SEGMENT, limit)
            full = max(low, min(high, (pos0 + 1) // BLOCK_N * BLOCK_N))
            m = tl.full([BLOCK_M], FLOOR, tl.float32)
            den = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for n0 in range(low, full, BLOCK_N):
                m, den, acc = _tile(queries, k_src, v_src, table, head, n0, limit, pos, m, den, acc, scale,
                                  KV_HEADS, DIM, BLOCK_D, BLOCK_N, PAGE, TMA, False)  # fmt: skip
            for n0 in range(full, high, BLOCK_N):
                m, den, acc = _tile(queries, k_src, v_src, table, head, n0, limit, pos, m, den, acc, scale,
                                  KV_HEADS, DIM, BLOCK_D, BLOCK_N, PAGE, TMA, True)  # fmt: skip
            m_all, den_all, acc_all = merge(m_all, den_all, acc_all, m, den, acc)
        if part < 0:
            y = acc_all * (1.0 / den_all)[:, None]
            tl.store(out + at[:, None] + offs_d[None, :], y.to(out.dtype.element_ty), mask=mask)
        else:
            # as many rows as the item has: a decoding row of one token leaves `group` of them
            slot = part.to(tl.int64) * HEADS + head * (count * group) + offs_m
            tl.store(part_acc + slot[:, None] * BLOCK_D + offs_d[None, :], acc_all, mask=valid[:, None])
            tl.store(part_md + slot * 2, m_all, mask=valid)
            tl.store(part_md + slot * 2 + 1, den_all, mask=valid)


@triton.jit
def combine_kernel(
    out, items, item_count, part_acc, part_md,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Persistent over (tiles that were split) x KV heads x row groups: merges the segments in ascending
    order. Tiles have at most BLOCK_M rows; AHEAD segments are read at a time, so that their loads overlap."""
    group: tl.constexpr = HEADS // KV_HEADS
    pieces: tl.constexpr = BLOCK_M // ROWS
    total = tl.load(item_count) * KV_HEADS * pieces
    offs_d = tl.arange(0, BLOCK_D)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        item = items + (work // (KV_HEADS * pieces)) * ITEM
        head = (work // pieces) % KV_HEADS
        offs_m = (work % pieces) * ROWS + tl.arange(0, ROWS)
        row0, count = tl.load(item), tl.load(item + 1)
        part, segments = tl.load(item + 4), tl.load(item + 5)
        token = offs_m // group
        valid = token < count
        segments = tl.where((work % pieces) * ROWS < count * group, segments, 0)
        m_all = tl.full([ROWS], FLOOR, tl.float32)
        den_all = tl.zeros([ROWS], tl.float32)
        acc_all = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for first in range(0, segments, AHEAD):
            for i in tl.static_range(AHEAD):
                there = first + i < segments
                slot = (part + (first + i) * count).to(tl.int64) * HEADS + head * (count * group) + offs_m
                mask = valid & there
                at = slot[:, None] * BLOCK_D + offs_d[None, :]
                acc = tl.load(part_acc + at, mask=mask[:, None], other=0.0)
                m = tl.load(part_md + slot * 2, mask=mask, other=0.0)
                den = tl.load(part_md + slot * 2 + 1, mask=mask, other=0.0)
                m, den, acc = merge(m_all, den_all, acc_all, m, den, acc)
                m_all = tl.where(there, m, m_all)
                den_all = tl.where(there, den, den_all)
                acc_all = tl.where(there, acc, acc_all)
        at = (row0 + token).to(tl.int64) * (HEADS * DIM) + (head * group + offs_m % group) * DIM
        mask = valid[:, None] & (offs_d < DIM)[None, :]
        y = acc_all * (1.0 / tl.where(valid, den_all, 1.0))[:, None]
        tl.store(out + at[:, None] + offs_d[None, :], y.to(out.dtype.element_ty), mask=mask)
