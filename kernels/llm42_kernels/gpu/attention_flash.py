"""Body of paged attention in the order of FlashAttention 3 (Shah et al., arXiv 2407.08608) on one warpgroup.

What sets the bits, and differs from gpu/attention.py: key tiles of 64 * PARTS keys at absolute
multiples, taken from the last one down to the first; the maximum is kept unscaled; the sum of a row is kept
in four pieces, one for each thread that holds the row in the matrix unit's layout (columns 8 j + 2 t and
8 j + 2 t + 1 belong to piece t), each added column by column, and the pieces are joined at the end.
attention_flash.py says for which calls of that library this holds."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

FLOOR = tl.constexpr(-1.0e38)
ITEM = tl.constexpr(8)
PART = tl.constexpr(64)


@triton.jit
def _halves(x, COLUMNS: tl.constexpr):
    """x [M, 4, COLUMNS] -> its first and its last columns, two of [M, 4, COLUMNS / 2]."""
    halves = x.reshape([x.shape[0], 4, 2, COLUMNS // 2])
    return tl.permute(halves, (0, 1, 3, 2)).split()


@triton.jit
def _add_columns(den, alpha, even, odd, COLUMNS: tl.constexpr, FIRST: tl.constexpr):
    """den [M, 4, 1] plus the columns of even and odd [M, 4, COLUMNS] in the order even 0, odd 0, even 1, ...;
    FIRST scales den by alpha within the first addition."""
    if COLUMNS == 1:
        den = tl.fma(den, alpha, even) if FIRST else den + even
        den += odd
    else:
        even_low, even_high = _halves(even, COLUMNS)
        odd_low, odd_high = _halves(odd, COLUMNS)
        den = _add_columns(den, alpha, even_low, odd_low, COLUMNS // 2, FIRST)
        den = _add_columns(den, alpha, even_high, odd_high, COLUMNS // 2, False)
    return den


@triton.jit
def _add_part(den, alpha, p, FIRST: tl.constexpr):
    """den [M, 4, 1] plus the probabilities p [M, 64] of one part."""
    columns = tl.permute(p.reshape([p.shape[0], 8, 4, 2]), (0, 2, 1, 3))  # [M, 4, 8, 2]
    even, odd = columns.split()
    return _add_columns(den, alpha, even, odd, 8, FIRST)


@triton.jit
def _total(den):
    """den [M, 4, 1] -> (piece 0 + piece 2) + (piece 1 + piece 3)."""
    low, high = tl.permute(den.reshape([den.shape[0], 2, 2]), (0, 2, 1)).split()
    a, b = (low + high).split()
    return a + b


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _load(k_src, v_src, table, head, n0, limit, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
          PAGE: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Keys and values n0 .. n0 + 63 of a sequence; values from `limit` on are zero where MASKED."""
    offs_n = n0 + tl.arange(0, PART)
    exists = offs_n < limit
    if TMA:
        first = tl.minimum(n0, (limit - 1) // PART * PART) if MASKED else n0  # stays inside the block table
        row = tl.load(table + first // PAGE) * PAGE + first % PAGE
        k = k_src.load([row, head * DIM])
        v = v_src.load([row, head * DIM])
        if MASKED:
            v = tl.where(exists[:, None], v, tl.zeros_like(v))
    else:
        if MASKED:
            rows = tl.load(table + offs_n // PAGE, mask=exists, other=0).to(tl.int64) * PAGE + offs_n % PAGE
        else:
            rows = tl.load(table + offs_n // PAGE).to(tl.int64) * PAGE + offs_n % PAGE
        at = (rows * (KV_HEADS * DIM) + head * DIM)[:, None] + tl.arange(0, DIM)[None, :]
        if MASKED:
            k = tl.load(k_src + at, mask=exists[:, None], other=0.0)
            v = tl.load(v_src + at, mask=exists[:, None], other=0.0)
        else:
            k = tl.load(k_src + at)
            v = tl.load(v_src + at)
    return k, v


@triton.jit
def _scores(q, k, n0, pos, MASKED: tl.constexpr):
    scores = tl.dot(q, k.T, input_precision="ieee")
    if MASKED:
        offs_n = n0 + tl.arange(0, PART)
        scores = tl.where(offs_n[None, :] <= pos[:, None], scores, float("-inf"))
    return scores


@triton.jit
def _part(scores, v, base, scale, den, alpha, acc, FIRST: tl.constexpr):
    p = tl.exp2(tl.fma(scores, scale, base))
    den = _add_part(den, alpha, p, FIRST)
    return den, tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit
def _step(q, k_src, v_src, table, head, n0, limit, pos, m, den, acc, scale,
          KV_HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr,
          TMA: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """One key tile. A tile whose keys are all masked for a row changes nothing: alpha is 1 and p is 0."""
    k0, v0 = _load(k_src, v_src, table, head, n0, limit, KV_HEADS, DIM, PAGE, TMA, MASKED)
    k1, v1 = _load(k_src, v_src, table, head, n0 + PART, limit, KV_HEADS, DIM, PAGE, TMA, MASKED)
    s0 = _scores(q, k0, n0, pos, MASKED)
    s1 = _scores(q, k1, n0 + PART, pos, MASKED)
    top = tl.maximum(tl.max(s0, axis=1), tl.max(s1, axis=1))
    if PARTS == 3:
        k2, v2 = _load(k_src, v_src, table, head, n0 + 2 * PART, limit, KV_HEADS, DIM, PAGE, TMA, MASKED)
        s2 = _scores(q, k2, n0 + 2 * PART, pos, MASKED)
        top = tl.maximum(top, tl.max(s2, axis=1))
    m_new = tl.maximum(m, top)
    alpha = tl.exp2((m - m_new) * scale)
    base = -(m_new * scale)[:, None]
    acc = acc * alpha[:, None]
    four = alpha[:, None, None]
    den, acc = _part(s0, v0, base, scale, den, four, acc, True)
    den, acc = _part(s1, v1, base, scale, den, four, acc, False)
    if PARTS == 3:
        den, acc = _part(s2, v2, base, scale, den, four, acc, False)
    return m_new, den, acc


@triton.jit
def flash_kernel(
    q, out, k_src, v_src, tables, items, item_count, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Persistent over items x KV heads; the layout of gpu/attention.py, whole contexts only."""
    group: tl.constexpr = HEADS // KV_HEADS
    tile: tl.constexpr = PART * PARTS
    total = tl.load(item_count) * KV_HEADS
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, DIM)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        item = items + (work // KV_HEADS) * ITEM
        head = work % KV_HEADS
        row0, count, pos0 = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        table = tables + tl.load(item + 3)
        token = offs_m // group
        valid = token < count
        pos = pos0 + tl.where(valid, token, 0)
        limit = pos0 + count
        at = (row0 + token).to(tl.int64) * (HEADS * DIM) + (head * group + offs_m % group) * DIM
        queries = tl.load(q + at[:, None] + offs_d[None, :], mask=valid[:, None], other=0.0)
        m = tl.full([BLOCK_M], FLOOR, tl.float32)
        den = tl.zeros([BLOCK_M, 4, 1], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        whole = (pos0 + 1) // tile  # tiles that every row sees in full
        tiles = (limit + tile - 1) // tile
        for i in range(0, tiles - whole):
            n0 = (tiles - 1 - i) * tile
            m, den, acc = _step(queries, k_src, v_src, table, head, n0, limit, pos, m, den, acc, scale,
                                KV_HEADS, DIM, PARTS, PAGE, TMA, True)  # fmt: skip
        for i in range(0, whole):
            n0 = (whole - 1 - i) * tile
            m, den, acc = _step(queries, k_src, v_src, table, head, n0, limit, pos, m, den, acc, scale,
                                KV_HEADS, DIM, PARTS, PAGE, TMA, False)  # fmt: skip
        sums = _total(den)
        inverse = _reciprocal(sums) if EXACT else 1.0 / sums
        y = acc * inverse[:, None]
        tl.store(out + at[:, None] + offs_d[None, :], y.to(out.dtype.element_ty), mask=valid[:, None])
