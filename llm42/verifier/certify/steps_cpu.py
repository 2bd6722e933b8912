"""Checks on a CPU of what sees a whole step: attention, and the model itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from llm42.cache import KVCache
from llm42.protocol import SamplingParams
from llm42.verifier.certify.rows import Tally, Violation, same_bits
from llm42.verifier.certify.steps import NAN, RAGGED, StepLogits, check_chunks, compare_attention
from llm42.verifier.runner import SequenceRows
from llm42_kernels.attention_cpu import QueryRows, StepAttention

PROBE_LENGTHS = (40, 150, 1100)
LONG = 1000
"""Probes from this length on are tried with NaN as the only dirt: their time grows with the square."""


@dataclass(slots=True)
class _Pages:
    """One layer's cache with a probe sequence in shuffled blocks, everything else dirty."""

    keys: Tensor
    values: Tensor
    table: list[int]
    queries: Tensor
    size: int

    @classmethod
    def make(cls, length: int, heads: int, kv_heads: int, dim: int, size: int, dtype: torch.dtype) -> _Pages:
        gen = torch.Generator().manual_seed(length)
        blocks = -(-length // 16) * (16 // size)
        total = 4 * blocks + 8
        keys, values = (torch.randn(total, size, kv_heads, dim, generator=gen).to(dtype) for _ in range(2))
        table = torch.randperm(total, generator=gen)[:blocks].tolist()
        return cls(keys, values, table, torch.randn(length, heads, dim, generator=gen), size)

    def dirty(self, written: int, value: float) -> tuple[Tensor, Tensor]:
        """The cache with every slot of the probe at positions >= written overwritten."""
        at = torch.arange(written, len(self.table) * self.size)
        slots = (torch.tensor(self.table)[at // self.size], at % self.size)
        keys, values = self.keys.clone(), self.values.clone()
        keys[slots], values[slots] = value, value
        return keys, values

    def group(self, start: int, count: int) -> QueryRows:
        """Query rows of the probe."""
        needed = -(-(start + count) // 16) * (16 // self.size)
        return QueryRows(start, count, torch.tensor(self.table[:needed]))

    def companion(self, start: int, count: int, seed: int) -> tuple[QueryRows, Tensor]:
        """Another sequence in blocks the probe does not use."""
        gen = torch.Generator().manual_seed(seed)
        free = sorted(set(range(self.keys.shape[0])) - set(self.table))
        needed = -(-(start + count) // 16) * (16 // self.size)
        table = torch.tensor([free[i % len(free)] for i in range(needed)])
        return QueryRows(start, count, table), torch.randn(count, *self.queries.shape[1:], generator=gen)


def check_attention(
    attention: StepAttention, heads: int, kv_heads: int, dim: int, size: int, dtype: torch.dtype, tally: Tally
) -> Violation | None:
    """Checks (d) and (e): a probe's rows have the bits of one step that holds it alone and whole, also in
    windows with other borders, in steps of one row, beside companions of many shapes, over dirty slots.
    Queries are in float32, so that a difference is not rounded away."""
    for length in PROBE_LENGTHS:
        pages = _Pages.make(length, heads, kv_heads, dim, size, dtype)
        scale = dim**-0.5
        want = attention(pages.queries, *pages.dirty(length, 0.0), [pages.group(0, length)], scale)
        for start, count in _pieces(length):
            for dirt in (0.0, NAN, 3.0) if length < LONG else (NAN,):
                cache = pages.dirty(start + count, dirt)
                part = pages.queries[start : start + count]
                for label, before, after in _arrangements(pages, length):
                    groups = [g for g, _ in before] + [pages.group(start, count)] + [g for g, _ in after]
                    rows = [q for _, q in before] + [part] + [q for _, q in after]
                    at = sum(g.count for g, _ in before)
                    got = attention(torch.cat(rows), *cache, groups, scale)[at : at + count]
                    found = compare_attention(got, want, start, count, label, dirt, tally)
                    if found is not None:
                        return found
    return None


def _pieces(length: int) -> list[tuple[int, int]]:
    singles = [(p, 1) for p in (0, 15, 16, length - 1)]
    return [*singles, (0, 17), (5, 9), (length // 2, 13), (length - 20, 20)]


def _arrangements(
    pages: _Pages, length: int
) -> list[tuple[str, list[tuple[QueryRows, Tensor]], list[tuple[QueryRows, Tensor]]]]:
    short, long = pages.companion(3, 1, 1), pages.companion(length, 1, 2)
    wide, tall = pages.companion(20, 33, 3), pages.companion(0, 10, 4)
    return [
        ("alone", [], []),
        ("after a one-row companion", [short], []),
        ("among a long and a wide companion", [long, wide], [tall]),
        ("before a ten-row companion", [], [tall]),
    ]


def check_model(
    step: StepLogits,
    kv: KVCache,
    blocks: int,
    buckets: Sequence[int],
    vocab_size: int,
    positions: int,
    tally: Tally,
) -> Violation | None:
    """Check (f): a prompt has the logits of one chunk also in ragged chunks, in steps of every bucket, beside
    companions, and over a warm prefix; the cache starts full of NaN. positions: how many the model has."""
    length = min(3 * buckets[-1] // 4, 96, blocks * kv.block_size // 3, positions)
    gen = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, vocab_size, (length,), generator=gen).tolist()
    other = torch.randint(0, vocab_size, (length,), generator=gen).tolist()
    need = -(-length // kv.block_size)
    probe, second, third = (list(range(i * need, (i + 1) * need)) for i in range(3))

    def rows(ids: list[int], table: list[int], start: int, count: int) -> SequenceRows:
        return SequenceRows(ids, start, count, table, 0, length, SamplingParams())

    kv.fill(range(blocks), NAN)
    want = step(buckets[-1], [rows(tokens, probe, 0, length)])
    trials: list[tuple[Iterable[int], Sequence[int]]] = [(RAGGED, buckets)]
    trials += [(repeat(bucket), [bucket]) for bucket in buckets[:-1]]
    for sizes, allowed in trials:
        kv.fill(second, NAN)
        found = check_chunks(step, partial(rows, tokens, second), sizes, allowed, length, want, tally)
        if found is not None:
            return found
    kv.fill(third, NAN)
    half = length // 2
    half -= half % kv.block_size
    warm = [*probe[: half // kv.block_size], *third[half // kv.block_size :]]
    count = min(length - half, buckets[-1] // 2)
    companions = rows(other, second, 0, min(length, buckets[-1] - count))
    got = step(buckets[-1], [companions, rows(tokens, warm, half, count)])[companions.count :]
    tally.rows += count
    if not same_bits(got, want[half : half + count]):
        return Violation("model", "companions or warm prefix", f"{count} rows from position {half}")
    return None
