"""FlashAttention 3: whether windows of several rows give the bits of single rows, and what either costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import graph_ms
from llm42_kernels.attention import AttentionShape, Tile, TritonAttention

SHAPES = ((9, 3, 64), (32, 8, 128), (14, 2, 64), (32, 8, 64))
LONGEST = (1, 2, 4, 8, 16, 21, 22, 32, 64, 128, 1024)
"""Values of max_seqlen_q: the library picks its tile by it."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, counts: list[int], ends: list[int], longest: int
) -> Tensor:
    """Sequences of counts[i] rows whose last key is ends[i] - 1, each with a row of `table`."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int().cuda()
    return flash_attn_varlen_func(
        q, k, v, max_seqlen_q=longest, cu_seqlens_q=starts, max_seqlen_k=4096, causal=True, fa_version=3,
        seqused_k=torch.tensor(ends, dtype=torch.int32).cuda(), block_table=table, num_splits=1,
    )  # fmt: skip


def flash_rows() -> dict[str, Any]:
    """Per shape and page size: windows against single rows, and our kernels against single rows."""
    out: dict[str, Any] = {}
    for heads, kv_heads, dim in SHAPES:
        for page in (16, 64, 128):
            out[f"{heads}/{kv_heads}/{dim} page {page}"] = _shape(heads, kv_heads, dim, page)
    for shape in SHAPES[:2]:
        out[f"us {shape}"] = _times(*shape)
    return out


def _case(heads: int, kv_heads: int, dim: int, page: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    gen = torch.Generator("cuda").manual_seed(keys)
    k, v = (
        torch.randn(keys // page, page, kv_heads, dim, generator=gen, device="cuda").bfloat16()
        for _ in range(2)
    )
    q = torch.randn(rows, heads, dim, generator=gen, device="cuda").bfloat16()
    table = torch.randperm(keys // page, generator=gen, device="cuda").int()[None]
    return q, k, v, table


def _shape(heads: int, kv_heads: int, dim: int, page: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for end in (48, 130, 600, 2000):
        rows = min(32, end)
        q, k, v, table = _case(heads, kv_heads, dim, page, rows, 2048)
        ends = list(range(end - rows + 1, end + 1))
        want = attend(q, k, v, table.expand(rows, -1).contiguous(), [1] * rows, ends, 1)
        found: dict[str, Any] = {}
        for longest in LONGEST:
            one = attend(q, k, v, table.expand(rows, -1).contiguous(), [1] * rows, ends, longest)
            found[f"rows max {longest}"] = _share(one, want)
            if longest >= 16:
                count = min(rows, longest)
                got = attend(q[-count:], k, v, table, [count], [end], longest)
                found[f"window of {count} max {longest}"] = _share(got, want[-count:])
        for longest in (8, 16):
            counts = [longest] * (rows // longest)
            tables = table.expand(len(counts), -1).contiguous()
            got = attend(q, k, v, tables, counts, ends[longest - 1 :: longest], longest)
            found[f"windows of {longest}"] = _share(got, want)
        found |= _ours(q, k, v, table, end, want)
        out[f"end {end}"] = {key: value for key, value in found.items() if value != 1.0} | {
            "equal": [key for key, value in found.items() if value == 1.0]
        }
    return out


def _ours(q: Tensor, k: Tensor, v: Tensor, table: Tensor, end: int, want: Tensor) -> dict[str, float]:
    heads, dim = q.shape[1:]
    kv_heads, page, out = k.shape[2], k.shape[1], {}
    for block_n, segment in ((64, 512), (64, 1 << 20), (128, 1 << 20)):
        tile = Tile(64, 4, 2, 1)
        shape = AttentionShape(heads, kv_heads, dim, page, block_n, tile, tile, segment)
        engine = TritonAttention(shape, q.device)
        flat = (x.flatten(0, 1) for x in (k, v))
        got = engine.run(q, *flat, [end - len(q)], [len(q)], [table[0].tolist()])
        out[f"triton {block_n} {segment}"] = _share(got, want)
    return out


def _share(a: Tensor, b: Tensor) -> float:
    return float((a.view(torch.int16) == b.view(torch.int16)).float().mean())


def _times(heads: int, kv_heads: int, dim: int) -> dict[str, float]:
    """Microseconds of one layer: 16 windows of 32 rows after 2,048 keys, as rows and as windows of 16."""
    page, keys, out = 16, 2048 + 32, {}
    q, k, v, _ = _case(heads, kv_heads, dim, page, 512, 16 * keys)
    tables = torch.arange(16 * keys // page, dtype=torch.int32, device="cuda").view(16, -1)
    for name, count in (("rows", 1), ("windows of 8", 8), ("windows of 16", 16), ("windows of 32", 32)):
        parts = 32 // count
        ends = [keys - 32 + (i + 1) * count for _ in range(16) for i in range(parts)]
        each = tables.repeat_interleave(parts, 0).contiguous()
        starts = torch.arange(0, 513, count, dtype=torch.int32, device="cuda")
        used = torch.tensor(ends, dtype=torch.int32, device="cuda")
        out[name] = _graph_us(q, k, v, starts, used, each, count)
    return out


def _graph_us(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, used: Tensor, tables: Tensor, longest: int
) -> float:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def call() -> None:
        flash_attn_varlen_func(
            q, k, v, max_seqlen_q=longest, cu_seqlens_q=starts, max_seqlen_k=4096, causal=True, fa_version=3,
            seqused_k=used, block_table=tables, num_splits=1,
        )  # fmt: skip

    return graph_ms(call) * 1000
