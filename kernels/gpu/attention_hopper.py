"""Body of paged attention for many query rows on Hopper: one warp loads, two warpgroups compute 64 rows each.

The arithmetic, its order and its rounding are those of kernels/gpu/attention.py (`_update`, `merge`), on the same
register layout (64 rows x 4 warps), so the bits are the same. What differs is who waits for whom: keys and values of a
tile are loaded once for 128 rows, by a producer that runs ahead as far as the buffers reach, and the two warpgroups do
not wait for each other, so that one's softmax runs while the other's products do.
"""
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FLOOR = gl.constexpr(-1.0e38)
ITEM = gl.constexpr(8)
HALF_M = gl.constexpr(64)
MAX_REGISTERS = 168
"""Per thread at launch: 65536 registers over 12 warps; the loader then gives most of its share to the others."""


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
def _produce(
    k_desc, v_desc, tables, items, total, k_bufs, v_bufs, bars,
    KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, SEGMENT: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Loads the key and value tiles of every item in order, into a ring of STAGES buffers."""
    k_ready, v_ready, k_empty, v_empty = bars
    step = 0
    for work in range(gl.program_id(0), total, gl.num_programs(0)):
        item = items + (work // KV_HEADS) * ITEM
        column = (work % KV_HEADS) * DIM
        table = tables + gl.load(item + 3)
        low, high = _span(item, SEGMENT)
        for n0 in range(low, high, BLOCK_N):
            row = gl.load(table + n0 // PAGE) * PAGE + n0 % PAGE
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [row, column], k_ready.index(stage), k_bufs.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [row, column], v_ready.index(stage), v_bufs.index(stage))
            step += 1


@gluon.jit
def _tile(
    queries, m, l, acc, n0, limit, pos, scale, step, k_bufs, v_bufs, v_own, bars,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One key tile of one warpgroup: kernels/gpu/attention.py `_tile` and `_update`."""
    k_ready, v_ready, k_empty, v_empty = bars
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = acc.type.layout
    stage = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(k_ready.index(stage), phase)
    empty = gl.zeros([HALF_M, BLOCK_N], gl.float32, scores_layout)
    scores = warpgroup_mma(queries, k_bufs.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(stage))
    if MASKED:
        offs_n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout))
        keep = offs_n[None, :] <= gl.convert_layout(pos, gl.SliceLayout(1, scores_layout))[:, None]
        scores = gl.where(keep, scores, float("-inf"))
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    top = gl.convert_layout(gl.max(scores, axis=1), row_layout)
    m_new = gl.maximum(m, top * scale)
    alpha = gl.exp2(m - m_new)
    shift = gl.convert_layout(-m_new, gl.SliceLayout(1, scores_layout))
    p = gl.exp2(gl.fma(scores, gl.full([HALF_M, BLOCK_N], scale, gl.float32, scores_layout), shift[:, None].broadcast_to([HALF_M, BLOCK_N])))
    l = gl.fma(l, alpha, gl.convert_layout(gl.sum(p, axis=1), row_layout))
    weights = gl.convert_layout(p.to(queries.dtype), gl.DotOperandLayout(0, acc_layout, 2))
    acc = acc * alpha[:, None]
    mbarrier.wait(v_ready.index(stage), phase)
    if MASKED:
        # slots past the last row of the sequence may hold anything: 0 * NaN
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        v = v_bufs.index(stage).load(wide)
        offs_n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, wide))
        gl.thread_barrier()
        v_own.store(gl.where((offs_n < limit)[:, None], v, 0.0))
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(weights, v_own, acc, is_async=True)
    else:
        acc = warpgroup_mma(weights, v_bufs.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(stage))
    return m_new, l, acc


@gluon.jit
def _consume(
    q, out, tables, items, part_acc, part_ml, total, scale, k_bufs, v_bufs, v_own, bars,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, SEGMENT: gl.constexpr,
    STAGES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Rows [64 HALF, 64 HALF + 64) of every item's tile."""
    group: gl.constexpr = HEADS // KV_HEADS
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    step = 0
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
        l_all = gl.zeros([HALF_M], gl.float32, row_layout)
        acc_all = gl.zeros([HALF_M, DIM], gl.float32, acc_layout)
        for segment in range(first_seg, last_seg):
            low = segment * SEGMENT
            high = gl.minimum(low + SEGMENT, limit)
            full = gl.maximum(low, gl.minimum(high, (pos0 + 1) // BLOCK_N * BLOCK_N))
            m = gl.full([HALF_M], FLOOR, gl.float32, row_layout)
            l = gl.zeros([HALF_M], gl.float32, row_layout)
            acc = gl.zeros([HALF_M, DIM], gl.float32, acc_layout)
            for n0 in range(low, full, BLOCK_N):
                m, l, acc = _tile(queries, m, l, acc, n0, limit, pos, scale, step, k_bufs, v_bufs, v_own, bars,
                                  BLOCK_N, STAGES, False)  # fmt: skip
                step += 1
            for n0 in range(full, high, BLOCK_N):
                m, l, acc = _tile(queries, m, l, acc, n0, limit, pos, scale, step, k_bufs, v_bufs, v_own, bars,
                                  BLOCK_N, STAGES, True)  # fmt: skip
                step += 1
            m_new = gl.maximum(m_all, m)
            a = gl.exp2(m_all - m_new)
            b = gl.exp2(m - m_new)
            l_all = gl.fma(l_all, a, l * b)
            acc_all = gl.fma(acc_all, a[:, None].broadcast_to([HALF_M, DIM]), acc * b[:, None])
            m_all = m_new
        columns = gl.arange(0, DIM, gl.SliceLayout(0, acc_layout))
        if part < 0:
            y = (acc_all * (1.0 / l_all)[:, None]).to(out.dtype.element_ty)
            target = (row0 + token) * (HEADS * DIM) + (head * group + offs_m % group) * DIM
            gl.store(out + target[:, None] + columns[None, :], y, mask=valid[:, None])
        else:
            slot = (part * KV_HEADS + head) * (2 * HALF_M) + offs_m
            gl.store(part_acc + slot[:, None] * DIM + columns[None, :], acc_all)
            gl.store(part_ml + slot * 2, m_all)
            gl.store(part_ml + slot * 2 + 1, l_all)


@gluon.jit
def attention_hopper_kernel(
    q, out, k_desc, v_desc, tables, items, item_count, part_acc, part_ml, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, SEGMENT: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Persistent over items x KV heads. Shapes as kernels/gpu/attention.py `attention_kernel`, tiles of 128 rows."""
    layout: gl.constexpr = k_desc.layout
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, DIM], layout)
    v_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, DIM], layout)
    v_low = gl.allocate_shared_memory(k_desc.dtype, [BLOCK_N, DIM], layout)
    v_high = gl.allocate_shared_memory(k_desc.dtype, [BLOCK_N, DIM], layout)
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
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = gl.load(item_count) * KV_HEADS
    gl.warp_specialize([
        (_consume, (q, out, tables, items, part_acc, part_ml, total, scale, k_bufs, v_bufs, v_low, bars,
                    HEADS, KV_HEADS, DIM, BLOCK_N, SEGMENT, STAGES, 0)),
        (_consume, (q, out, tables, items, part_acc, part_ml, total, scale, k_bufs, v_bufs, v_high, bars,
                    HEADS, KV_HEADS, DIM, BLOCK_N, SEGMENT, STAGES, 1)),
        (_produce, (k_desc, v_desc, tables, items, total, k_bufs, v_bufs, bars,
                    KV_HEADS, DIM, BLOCK_N, SEGMENT, PAGE, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip
