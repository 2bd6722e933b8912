"""Bodies of the sampling kernels: per-row maximum, its lowest id and the log-sum; Gumbel noise and its
argmax."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def stats_kernel(logits, part_max, part_id, part_sum, part_nan, vocab, stride, CHUNK: tl.constexpr):
    """Grid (rows, chunks). Maximum, its lowest id, sum of exp(x - maximum) (float32 terms, float64 sum),
    NaN flag."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    x = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    isnan = tl.max((x != x).to(tl.int32), axis=0)
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, axis=0)
    first = tl.min(tl.where(x == top, ids, NO_ID), axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(x - safe).to(tl.float64), axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(part_max + at, top)
    tl.store(part_id + at, first)
    tl.store(part_sum + at, total)
    tl.store(part_nan + at, isnan)


@triton.jit
def stats_combine_kernel(
    logits,
    part_max,
    part_id,
    part_sum,
    part_nan,
    token,
    log_sum,
    logprob,
    bad,
    stride,
    chunks,
    BLOCK: tl.constexpr,
):
    """Grid (rows). `bad` is 1 where the row holds NaN or its maximum is not finite."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < chunks
    at = row * chunks + c
    tops = tl.load(part_max + at, mask=inside, other=float("-inf"))
    top = tl.max(tops, axis=0)
    ids = tl.load(part_id + at, mask=inside, other=NO_ID)
    best = tl.min(tl.where(tops == top, ids, NO_ID), axis=0)
    isnan = tl.max(tl.load(part_nan + at, mask=inside, other=0), axis=0)
    safe = tl.where(tl.abs(top) == float("inf"), 0.0, top).to(tl.float64)
    weight = tl.exp(tl.where(inside, tops.to(tl.float64) - safe, float("-inf")))
    total = tl.sum(tl.load(part_sum + at, mask=inside, other=0.0) * weight, axis=0)
    lse = tl.log(total) + safe
    wrong = (isnan > 0) | (tl.abs(top) == float("inf"))
    tl.store(token + row, tl.where(wrong, 0, best))
    tl.store(log_sum + row, lse)
    tl.store(logprob + row, (top.to(tl.float64) - lse).to(tl.float32))
    tl.store(bad + row, wrong.to(tl.int32))


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 with the key words given apart (tl.philox takes them packed, in an order of its own)."""
    for _ in tl.static_range(10):
        h0 = tl.umulhi(c0, 0xD2511F53)
        l0 = c0 * 0xD2511F53
        h1 = tl.umulhi(c2, 0xCD9E8D57)
        l1 = c2 * 0xCD9E8D57
        c0 = h1 ^ c1 ^ k0
        c1 = l1
        c2 = h0 ^ c3 ^ k1
        c3 = l0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel_kernel(values, keys, part_max, part_id, vocab, stride, CHUNK: tl.constexpr):
    """Grid (rows, chunks). Argmax of value + noise in float64, lowest id on ties; keys [rows, 6] int32 words:
    seed low, seed high, position low, position high, noise on, unused (llm42/noise.py defines the noise)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    x = tl.load(values + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float64)
    key = keys + row * 6
    zero = tl.zeros([CHUNK], tl.uint32)
    k0 = zero + tl.load(key).to(tl.uint32, bitcast=True)
    k1 = zero + tl.load(key + 1).to(tl.uint32, bitcast=True)
    c1 = zero + tl.load(key + 2).to(tl.uint32, bitcast=True)
    c2 = zero + tl.load(key + 3).to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = _philox((ids // 4).to(tl.uint32), c1, c2, zero, k0, k1)
    lane = ids % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    noise = -tl.log(-tl.log(u))
    x = tl.where(tl.load(key + 4) > 0, x + noise, x)
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(part_max + at, top)
    tl.store(part_id + at, tl.min(tl.where((x == top) & inside, ids, NO_ID), axis=0))


@triton.jit
def argmax_combine_kernel(part_max, part_id, token, chunks, BLOCK: tl.constexpr):
    """Grid (rows). token [rows]: of the chunks' maxima the largest one's id, the lowest on ties."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < chunks
    tops = tl.load(part_max + row * chunks + c, mask=inside, other=float("-inf"))
    ids = tl.load(part_id + row * chunks + c, mask=inside, other=NO_ID)
    best = tl.min(tl.where(tops == tl.max(tops, axis=0), ids, NO_ID), axis=0)
    tl.store(token + row, tl.where(best == NO_ID, 0, best))
