"""Bodies of paged attention on Hopper: one warp loads, and a warpgroup or two compute 64 rows each.

The arithmetic, its order and its rounding are those of gpu/attention.py (`_update`, `merge`), on
the same register layout (64 rows x 4 warps), so the bits are the same. What differs is who waits for whom:
keys and values of a tile are loaded once for 128 rows, by a producer that runs ahead as far as the buffers
reach, and the two warpgroups do not wait for each other, so that one's softmax runs while the other's
products do."""
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

FLOOR = gl.constexpr(-1.0e38)
ITEM = gl.constexpr(8)
HALF_M = gl.constexpr(64)
MAX_REGISTERS = {128: 168, 64: 136}
"""Tile height -> registers per thread at launch: 65536 over 12 warps (64 rows: over 8, of which the consumers
cannot use more than 248); the loader then gives most of its share to the others."""


def descriptor(x, block):
    """Tensor map of a cache [slots, Hk * D] for tiles of `block`."""
    dtype = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}[str(x.dtype)]
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


@gluon.jit
def _span(item, SEGMENT: gl.constexpr):
    """First key and one past the last key of a work item."""
    limit = gl.load(item + 2) + gl.load(item + 1)
    low = gl.load(item + 4) * SEGMENT
    high = gl.minimum(gl.load(item + 5) * SEGMENT, limit)
    return low, high


@gluon.jit
def _load(desc, row, column, step, ready, empty, bufs, STAGES: gl.constexpr):
    """One tile into the ring, once both warpgroups have left its buffer."""
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, column], ready.index(stage), bufs.index(stage))


@gluon.jit
def _produce(
    k_desc, v_desc, tables, items, total, k_bufs, v_bufs, bars,
    KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    SEGMENT: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Loads the key and value tiles of every item in order, into a ring of STAGES buffers."""
    k_ready, v_ready, k_empty, v_empty = bars
    k_step = 0
    v_step = 0
    for work in range(gl.program_id(0), total, gl.num_programs(0)):
        item = items + (work // KV_HEADS) * ITEM
        column = (work % KV_HEADS) * DIM
        table = tables + gl.load(item + 3)
        low, high = _span(item, SEGMENT)
        row = 0
        for n0 in range(low, high, BLOCK_N):
            row = gl.load(table + n0 // PAGE) * PAGE + n0 % PAGE
            _load(k_desc, row, column, k_step, k_ready, k_empty, k_bufs, STAGES)
            k_step += 1
            _load(v_desc, row, column, v_step, v_ready, v_empty, v_bufs, STAGES)
            v_step += 1
        # the warpgroups start a tile's scores before the last one's softmax; past the end they need
        # something to read
        _load(k_desc, row, column, k_step, k_ready, k_empty, k_bufs, STAGES)
        k_step += 1


@gluon.jit
def _scores(queries, k_step, k_ready, k_bufs, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Starts the raw scores of the next key tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    stage = k_step % STAGES
    mbarrier.wait(k_ready.index(stage), (k_step // STAGES) & 1)
    empty = gl.zeros([HALF_M, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(queries, k_bufs.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def _softmax(scores, m, den, n0, pos, scale, acc_layout: gl.constexpr, MASKED: gl.constexpr):
    """The online-softmax step of gpu/attention.py `_update`: (weights, factor for the sums so far,
    m, den)."""
    layout: gl.constexpr = scores.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    if MASKED:
        offs_n = n0 + gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))
        keep = offs_n[None, :] <= gl.convert_layout(pos, gl.SliceLayout(1, layout))[:, None]
        scores = gl.where(keep, scores, float("-inf"))
    top = gl.convert_layout(gl.max(scores, axis=1), row_layout)
    m_new = gl.maximum(m, top * scale)
    alpha = gl.exp2(m - m_new)
    shift = gl.convert_layout(-m_new, gl.SliceLayout(1, layout))[:, None]
    factor = gl.full(scores.shape, scale, gl.float32, layout)
    p = gl.exp2(gl.fma(scores, factor, shift.broadcast_to(scores.shape)))
    den = gl.fma(den, alpha, gl.convert_layout(gl.sum(p, axis=1), row_layout))
    return p, alpha, m_new, den


@gluon.jit
def _step(
    queries, weights, m, den, acc, n0, pos, scale, k_step, v_step, k_bufs, v_bufs, bars,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds the values of one tile, given its weights, and computes the weights of the next tile, which
    starts at n0.

    The values' product runs on the matrix unit while the next softmax is computed.
    """
    k_ready, v_ready, k_empty, v_empty = bars
    acc_layout: gl.constexpr = acc.type.layout
    stage = v_step % STAGES
    mbarrier.wait(v_ready.index(stage), (v_step // STAGES) & 1)
    scores = _scores(queries, k_step, k_ready, k_bufs, BLOCK_N, STAGES)
    acc = warpgroup_mma(weights, v_bufs.index(stage), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(k_step % STAGES))
    p, alpha, m, den = _softmax(scores, m, den, n0, pos, scale, acc_layout, MASKED)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(stage))
    weights = gl.convert_layout(p.to(queries.dtype), gl.DotOperandLayout(0, acc_layout, 2))
    return weights, m, den, acc * alpha[:, None]


@gluon.jit
def _last_step(
    queries, weights, acc, n0, limit, k_step, v_step, k_bufs, v_bufs, v_own, bars,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Adds the values of a segment's last tile (it starts at n0) and computes the raw scores of the tile
    after it."""
    k_ready, v_ready, k_empty, v_empty = bars
    stage = v_step % STAGES
    values = v_bufs.index(stage)
    mbarrier.wait(v_ready.index(stage), (v_step // STAGES) & 1)
    if n0 + BLOCK_N > limit:
        # slots past the last row of the sequence may hold anything: 0 * NaN
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        offs_n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, wide))
        v_own.store(gl.where((offs_n < limit)[:, None], values.load(wide), 0.0))
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(weights, v_own, acc)
    else:
        acc = warpgroup_mma(weights, values, acc)
    scores = _scores(queries, k_step, k_ready, k_bufs, BLOCK_N, STAGES)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(stage))
    mbarrier.arrive(k_empty.index(k_step % STAGES))
    return scores, acc


@gluon.jit
def _consume(
    q, out, tables, items, part_acc, part_md, total, scale, k_bufs, v_bufs, v_own, kept, bars,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    SEGMENT: gl.constexpr,
    STAGES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Rows [64 HALF, 64 HALF + 64) of every item's tile."""
    group: gl.constexpr = HEADS // KV_HEADS
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    k_ready, _v_ready, k_empty, _v_empty = bars
    k_step = 0
    v_step = 0
    for work in range(gl.program_id(0), total, gl.num_programs(0)):
        item = items + (work // KV_HEADS) * ITEM
        head = work % KV_HEADS
        row0 = gl.load(item)
        count = gl.load(item + 1)
        pos0 = gl.load(item + 2)
        first_seg = gl.load(item + 4)
        last_seg = gl.load(item + 5)
        part = gl.load(item + 6)
        limit = pos0 + count
        # queries: loaded in 16-byte pieces, then to the layout of the products' left operand
        rows = HALF * HALF_M + gl.arange(0, HALF_M, gl.SliceLayout(1, wide))
        offs_d = gl.arange(0, DIM, gl.SliceLayout(0, wide))
        at = (row0 + rows // group) * (HEADS * DIM) + (head * group + rows % group) * DIM
        loaded = gl.load(q + at[:, None] + offs_d[None, :], mask=(rows // group < count)[:, None], other=0.0)
        score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
        queries = gl.convert_layout(loaded, gl.DotOperandLayout(0, score_layout, 2))
        offs_m = HALF * HALF_M + gl.arange(0, HALF_M, row_layout)
        token = offs_m // group
        valid = token < count
        pos = pos0 + gl.where(valid, token, 0)
        m_all = gl.full([HALF_M], FLOOR, gl.float32, row_layout)
        den_all = gl.zeros([HALF_M], gl.float32, row_layout)
        scores = _scores(queries, k_step, k_ready, k_bufs, BLOCK_N, STAGES)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(k_step % STAGES))
        k_step += 1
        for segment in range(first_seg, last_seg):
            low = segment * SEGMENT
            high = gl.minimum(low + SEGMENT, limit)
            full = gl.maximum(low, gl.minimum(high, (pos0 + 1) // BLOCK_N * BLOCK_N))
            m = gl.full([HALF_M], FLOOR, gl.float32, row_layout)
            den = gl.zeros([HALF_M], gl.float32, row_layout)
            acc = gl.zeros([HALF_M, DIM], gl.float32, acc_layout)
            p, _, m, den = _softmax(scores, m, den, low, pos, scale, acc_layout, True)
            weights = gl.convert_layout(p.to(q.dtype.element_ty), gl.DotOperandLayout(0, acc_layout, 2))
            for n0 in range(low + BLOCK_N, full, BLOCK_N):
                weights, m, den, acc = _step(queries, weights, m, den, acc, n0, pos, scale, k_step, v_step,
                                           k_bufs, v_bufs, bars, BLOCK_N, STAGES, False)  # fmt: skip
                k_step += 1
                v_step += 1
            for n0 in range(gl.maximum(full, low + BLOCK_N), high, BLOCK_N):
                weights, m, den, acc = _step(queries, weights, m, den, acc, n0, pos, scale, k_step, v_step,
                                           k_bufs, v_bufs, bars, BLOCK_N, STAGES, True)  # fmt: skip
                k_step += 1
                v_step += 1
            last = (high - 1) // BLOCK_N * BLOCK_N
            scores, sums = _last_step(queries, weights, acc, last, limit, k_step, v_step,
                                      k_bufs, v_bufs, v_own, bars, BLOCK_N, STAGES)  # fmt: skip
            k_step += 1
            v_step += 1
            # gpu/attention.py `merge`; the sums so far wait in shared memory
            if segment > first_seg:
                before = kept.load(acc_layout)
            else:
                before = gl.zeros([HALF_M, DIM], gl.float32, acc_layout)
            m_new = gl.maximum(m_all, m)
            a = gl.exp2(m_all - m_new)
            b = gl.exp2(m - m_new)
            den_all = gl.fma(den_all, a, den * b)
            sums = gl.fma(before, a[:, None].broadcast_to([HALF_M, DIM]), sums * b[:, None])
            m_all = m_new
            if segment + 1 < last_seg:
                kept.store(sums)
            else:
                _finish(out, part_acc, part_md, m_all, den_all, sums, row0, count, token, head, offs_m, valid,
                        part, HEADS, KV_HEADS, DIM)  # fmt: skip


@gluon.jit
def _finish(
    out, part_acc, part_md, m, den, acc, row0, count, token, head, offs_m, valid, part,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Writes the rows' result, or the item's partial sums."""
    group: gl.constexpr = HEADS // KV_HEADS
    columns = gl.arange(0, DIM, gl.SliceLayout(0, acc.type.layout))[None, :]
    if part < 0:
        y = (acc * (1.0 / den)[:, None]).to(out.dtype.element_ty)
        target = (row0 + token) * (HEADS * DIM) + (head * group + offs_m % group) * DIM
        gl.store(out + target[:, None] + columns, y, mask=valid[:, None])
    else:
        slot = part * HEADS + head * (count * group) + offs_m
        gl.store(part_acc + slot[:, None] * DIM + columns, acc, mask=valid[:, None])
        gl.store(part_md + slot * 2, m, mask=valid)
        gl.store(part_md + slot * 2 + 1, den, mask=valid)


@gluon.jit
def attention_hopper_kernel(
    q, out, k_desc, v_desc, tables, items, item_count, part_acc, part_md, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    SEGMENT: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Persistent over items x KV heads. Shapes as gpu/attention.py `attention_kernel`, tiles of 128
    rows."""
    layout: gl.constexpr = k_desc.layout
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, DIM], layout)
    v_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, DIM], layout)
    v_low = gl.allocate_shared_memory(k_desc.dtype, [BLOCK_N, DIM], layout)
    v_high = gl.allocate_shared_memory(k_desc.dtype, [BLOCK_N, DIM], layout)
    wide: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    kept_low = gl.allocate_shared_memory(gl.float32, [HALF_M, DIM], wide)
    kept_high = gl.allocate_shared_memory(gl.float32, [HALF_M, DIM], wide)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    bars = (k_ready, v_ready, k_empty, v_empty)
    total = gl.load(item_count) * KV_HEADS
    gl.warp_specialize([
        (_consume, (q, out, tables, items, part_acc, part_md, total, scale, k_bufs, v_bufs, v_low, kept_low,
                    bars, HEADS, KV_HEADS, DIM, BLOCK_N, SEGMENT, STAGES, 0)),
        (_consume, (q, out, tables, items, part_acc, part_md, total, scale, k_bufs, v_bufs, v_high, kept_high,
                    bars, HEADS, KV_HEADS, DIM, BLOCK_N, SEGMENT, STAGES, 1)),
        (_produce, (k_desc, v_desc, tables, items, total, k_bufs, v_bufs, bars,
                    KV_HEADS, DIM, BLOCK_N, SEGMENT, PAGE, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def attention_hopper_rows_kernel(
    q, out, k_desc, v_desc, tables, items, item_count, part_acc, part_md, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    SEGMENT: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The same for tiles of 64 rows, one warpgroup: for decoding, which waits for memory. The loader runs
    ahead over the borders of segments and items as far as STAGES tiles reach."""
    layout: gl.constexpr = k_desc.layout
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, DIM], layout)
    v_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, DIM], layout)
    v_own = gl.allocate_shared_memory(k_desc.dtype, [BLOCK_N, DIM], layout)
    wide: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    kept = gl.allocate_shared_memory(gl.float32, [HALF_M, DIM], wide)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    fence_async_shared()
    bars = (k_ready, v_ready, k_empty, v_empty)
    total = gl.load(item_count) * KV_HEADS
    gl.warp_specialize([
        (_consume, (q, out, tables, items, part_acc, part_md, total, scale, k_bufs, v_bufs, v_own, kept,
                    bars, HEADS, KV_HEADS, DIM, BLOCK_N, SEGMENT, STAGES, 0)),
        (_produce, (k_desc, v_desc, tables, items, total, k_bufs, v_bufs, bars,
                    KV_HEADS, DIM, BLOCK_N, SEGMENT, PAGE, STAGES)),
    ], [1], [24])  # fmt: skip
