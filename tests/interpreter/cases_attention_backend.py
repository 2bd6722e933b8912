"""A fast path's step on our attention (benchmarks/attention_backend): host lengths in, rows out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from benchmarks.attention_backend import check, step
from benchmarks.attention_backend.check import Paged, attend
from benchmarks.attention_backend.step import StepAttention, shape_of
from llm42_kernels.attention import Tile

CPU = torch.device("cpu")
MIXED = [(0, 20), (520, 1), (70, 33), (62, 1)]
DECODE = [(1100, 1), (63, 1), (0, 1)]


def _runner(heads: int, kv_heads: int) -> StepAttention:
    tile = Tile(16, 1, 2, 1)
    shape = replace(shape_of(heads, kv_heads, 64, check.BLOCK, "pointer"), large=tile, small=tile)
    return StepAttention(shape, CPU, 128, 8)


def _paged(parts: list[tuple[int, int]], heads: int = 6, kv_heads: int = 2) -> Paged:
    return Paged(parts, heads, kv_heads, 64, device="cpu", dtype=torch.float16)


def test_prompts_chunks_and_decoding_rows_in_one_step() -> None:
    paged = _paged(MIXED)
    out = attend(paged, _runner(6, 2))
    torch.testing.assert_close(out, paged.reference(), rtol=4e-3, atol=2e-3)


def test_a_decoding_step_has_the_bits_of_any_other() -> None:
    """Split and unsplit contexts, beside prompts and alone; one runner, one step after another."""
    paged, runner = _paged(DECODE), _runner(6, 2)
    split = attend(paged, runner)
    torch.testing.assert_close(split, paged.reference(), rtol=4e-3, atol=2e-3)
    assert int(runner._flat[1]) > 0, "a context was split"
    runner._decode.programs = 1
    assert torch.equal(split, attend(paged, runner))
    assert int(runner._flat[1]) == 0
    runner._decode = runner._mixed
    assert torch.equal(split, attend(paged, runner))


def test_padding_has_no_items() -> None:
    paged, runner = _paged(DECODE), _runner(6, 2)
    want = attend(paged, runner)
    starts = np.array([0, 1, 2, 3, 3, 3], np.int32)
    ends = np.array([*paged.ends, 0, 0], np.int32)
    tables = torch.cat([paged.tables, torch.full((2, paged.tables.shape[1]), 1 << 20, dtype=torch.int32)])
    padded = torch.cat([paged.q, torch.full((2, 6, 64), float("nan")).half()])
    out = torch.full_like(padded, 7.0)
    sources = runner.attention.sources(*step.split_cache(paged.caches[0]))
    runner.run(runner.plan(starts, ends, tables, True), padded, out, sources)
    assert torch.equal(out[:3], want)
    assert (out[3:] == 7.0).all()
    out.fill_(7.0)
    nothing = runner.plan(starts, np.zeros(5, np.int32), tables, True)
    runner.run(nothing, padded, out, sources)  # as a graph is captured
    assert (out == 7.0).all()
