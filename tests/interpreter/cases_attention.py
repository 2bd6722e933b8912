"""Paged attention: against float64, and bit equality over companions, chunkings, splits, page sizes and
dirty memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llm42_kernels import attention
from llm42_kernels.attention import AttentionShape, Planner, Tile, TritonAttention, paged_reference

LARGE, SMALL = Tile(32, 4, 2, 1), Tile(16, 1, 2, 1)


class Sequences:
    """Random keys and values of whole sequences in a paged cache whose every other slot is NaN."""

    def __init__(self, shape: AttentionShape, lengths: list[int], seed: int = 1) -> None:
        self.shape, page = shape, shape.block_size
        generator = torch.Generator().manual_seed(seed)
        blocks = [-(-n // page) for n in lengths]
        order = torch.randperm(sum(blocks) + 2).tolist()
        self.tables, self.kv = [], []
        for n in blocks:
            self.tables.append([order.pop() for _ in range(n)])
        self.k = torch.full(((sum(blocks) + 2) * page, shape.kv_heads, shape.dim), float("nan")).half()
        self.v = self.k.clone()
        for table, n in zip(self.tables, lengths, strict=True):
            keys = torch.arange(n)
            slots = torch.tensor(table)[keys // page] * page + keys % page
            size = (n, shape.kv_heads, shape.dim)
            self.k[slots] = torch.randn(size, generator=generator).half()
            self.v[slots] = torch.randn(size, generator=generator).half()
        self.q = [torch.randn(n, shape.heads, shape.dim, generator=generator).half() for n in lengths]

    def rows(self, parts: list[tuple[int, int, int]], programs: int = 1, **options: object) -> torch.Tensor:
        """Attention for parts (sequence, start, count), as one step."""
        shape = replace(self.shape, **options)  # type: ignore[arg-type]
        engine = TritonAttention(shape, torch.device("cpu"), partials=64)
        engine.planner = Planner(shape, programs, 64)
        q = torch.cat([self.q[s][start : start + count] for s, start, count in parts])
        tables = [self.tables[s] for s, _, _ in parts]
        return engine.run(q, self.k, self.v, [p[1] for p in parts], [p[2] for p in parts], tables)

    def reference(self, parts: list[tuple[int, int, int]]) -> torch.Tensor:
        q = torch.cat([self.q[s][start : start + count] for s, start, count in parts])
        tables = [self.tables[s] for s, _, _ in parts]
        page = self.shape.block_size
        return paged_reference(q, self.k, self.v, [p[1] for p in parts], [p[2] for p in parts], tables, page)


def _shape(
    heads: int = 4, kv_heads: int = 2, dim: int = 64, page: int = 16, block_n: int = 64
) -> AttentionShape:
    return AttentionShape(heads, kv_heads, dim, page, block_n, LARGE, SMALL)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "block_n"),
    [(4, 2, 64, 16, 64), (9, 3, 64, 16, 32), (4, 1, 96, 64, 64), (2, 2, 128, 128, 64), (8, 1, 128, 64, 64)],
)
def test_against_float64(heads: int, kv_heads: int, dim: int, page: int, block_n: int) -> None:
    s = Sequences(_shape(heads, kv_heads, dim, page, block_n), [150, 40, 7])
    parts = [(0, 120, 30), (1, 0, 40), (2, 6, 1)]
    torch.testing.assert_close(s.rows(parts), s.reference(parts), rtol=4e-3, atol=2e-3)


def test_long_context_split_and_unsplit_have_equal_bits() -> None:
    length = 2 * attention.SEGMENT + 70
    s = Sequences(_shape(), [length, 90])
    parts = [(0, length - 40, 40), (1, 80, 10)]
    fused = s.rows(parts, programs=1)
    split, scarce = s.rows(parts, programs=15), s.rows(parts, programs=100)
    torch.testing.assert_close(fused, s.reference(parts), rtol=4e-3, atol=2e-3)
    arguments = _plan_arguments([40, 10], [length - 40, 80])
    plan = Planner(s.shape, 15, 64).plan(*arguments)
    assert len(plan.combine_large) == 2, "the second call must really have split"
    plan = Planner(s.shape, 100, 64).plan(*arguments)
    assert len(plan.combine_small) == 5, "with much room only short tiles are used"
    assert not len(plan.large)
    assert torch.equal(fused, split)
    assert torch.equal(fused, scarce)


def _plan_arguments(count: list[int], start: list[int]) -> tuple[object, ...]:
    import numpy as np

    counts = np.array(count)
    return np.cumsum(counts) - counts, counts, np.array(start), np.zeros(len(count), dtype=np.int64)


def test_rows_do_not_depend_on_chunks_companions_or_place() -> None:
    s = Sequences(_shape(), [100, 90, 33])
    whole = s.rows([(0, 0, 100)])
    ragged = torch.cat([s.rows([(1, 89, 1), (0, a, b - a), (2, 0, 33)])[1 : 1 + b - a] for a, b in
                        ((0, 1), (1, 8), (8, 60), (60, 99), (99, 100))])  # fmt: skip
    assert torch.equal(whole, ragged)


def test_pages_and_descriptors_change_nothing() -> None:
    a, b = (Sequences(_shape(page=page), [100]) for page in (16, 128))
    parts = [(0, 30, 70)]
    assert torch.equal(a.rows(parts), b.rows(parts))
    assert torch.equal(
        b.rows(parts), b.rows(parts, large=replace(LARGE, load="tma"), small=replace(SMALL, load="tma"))
    )


def test_nan_of_a_companion_and_of_later_tokens_stays_away() -> None:
    s = Sequences(_shape(), [60, 60])
    clean = s.rows([(0, 20, 40), (1, 20, 40)])
    page = torch.tensor(s.tables[1])
    slot = int(page[50 // 16]) * 16 + 50 % 16
    s.k[slot], s.v[slot] = (
        float("nan"),
        0.0,
    )  # as llm42_kernels/kv_write.py stores a token whose value is not finite
    dirty = s.rows([(0, 20, 40), (1, 20, 40)])
    assert torch.equal(clean[:70], dirty[:70]) and dirty[70:].isnan().all()


def test_a_key_tile_that_starts_at_the_window_would_be_caught() -> None:
    """Negative control: another key tile width gives other bits, so equality above says something."""
    s = Sequences(_shape(page=16), [200])
    parts = [(0, 100, 100)]
    assert not torch.equal(s.rows(parts), s.rows(parts, block_n=16))


def test_plan_covers_every_row_once() -> None:
    shape = _shape()
    plan = Planner(shape, 100, 8).plan(*_plan_arguments([1, 16, 17, 9, 40], [5000, 0, 3, 2000, 900]))
    seen: list[int] = []
    for items in (plan.large, plan.small):
        for row, tokens, _, _, first, _, part, _ in items.tolist():
            if part < 0 or first == 0:
                seen += range(row, row + tokens)
    assert sorted(seen) == list(range(83))
    assert len(plan.combine_small) + len(plan.combine_large) > 0
    pieces = [x[x[:, 6] >= 0] for x in (plan.large, plan.small)]
    assert all(len(x) <= 8 for x in pieces)
    for x in pieces:  # one slot per token, none of them twice
        used = [slot for item in x.tolist() for slot in range(item[6], item[6] + item[1])]
        assert len(set(used)) == len(used)
