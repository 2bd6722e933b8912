"""Checks on a GPU of what sees a whole step: paged attention, and the model through a CUDA runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from llm42_kernels.attention import SEGMENT, AttentionShape
from llm42_kernels.attention_flash import make_attention

Span = tuple[int, int, list[int]]
"""First position, number of rows, block table."""
Attention = Callable[[Tensor, Tensor, Tensor, Sequence[Span], int | None], Tensor]
"""attention(q [T, Hq, D], k [slots, Hk, D], v, spans, programs) -> [T, Hq, D] float32. `programs` overrides
how much the planner thinks may run at once: few make it fuse segments, many make it split them."""


def device_attention(shape: AttentionShape, device: torch.device) -> Attention:
    """The kernels that a runner with this shape launches, unrounded."""
    engine = make_attention(shape, device)
    usual = engine.planner.programs

    def run(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], programs: int | None) -> Tensor:
        engine.planner.programs = programs or usual
        start, count, tables = [list(x) for x in zip(*spans, strict=True)]
        return engine.run(q, k, v, start, count, tables, torch.float32)

    return run


@dataclass(slots=True)
class _Probe:
    """One layer's cache: a probe sequence and a companion in shuffled blocks; every other slot is random."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    table: list[int]
    other: list[int]
    size: int

    @classmethod
    def make(cls, length: int, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> _Probe:
        gen = torch.Generator(device).manual_seed(length)
        size, blocks = shape.block_size, -(-length // shape.block_size) + 1
        order = torch.randperm(2 * blocks + 2, generator=torch.Generator().manual_seed(length)).tolist()
        slots = (len(order) * size, shape.kv_heads, shape.dim)
        keys, values = (torch.randn(slots, generator=gen, device=device).to(dtype) for _ in range(2))
        queries = torch.randn(length, shape.heads, shape.dim, generator=gen, device=device).to(dtype)
        return cls(keys, values, queries, order[:blocks], order[blocks : 2 * blocks], size)

    def dirty(self, written: int, value: float) -> tuple[Tensor, Tensor]:
        """Keys and values with every slot of the probe at positions >= written overwritten."""
        at = torch.arange(written, len(self.table) * self.size, device=self.keys.device)
        slots = torch.tensor(self.table, device=at.device)[at // self.size] * self.size + at % self.size
        keys, values = self.keys.clone(), self.values.clone()
        keys[slots], values[slots] = value, value
        return keys, values

    def nan_companion(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The companion's blocks full of NaN, as if its own activations were."""
        slots = torch.tensor(self.other, device=keys.device)[:, None] * self.size
        slots = (slots + torch.arange(self.size, device=keys.device)).flatten()
        keys[slots], values[slots] = NAN, NAN
        return keys, values


def check_attention(
    attention: Attention, shape: AttentionShape, dtype: torch.dtype, device: torch.device, tally: Tally
) -> Violation | None:
    """Checks (d) and (e) on unrounded outputs: a probe's rows have the bits of one step that holds it alone
    and whole, also in windows with other borders, in steps of one row, with segments fused and split, beside
    companions of many shapes and of NaN, over dirty slots. Probes of 40 and of two and a half segments."""
    segment = min(shape.segment, SEGMENT)
    for length in (40, 5 * segment // 2):
        probe = _Probe.make(length, shape, dtype, device)
        queries = probe.queries
        whole: list[Span] = [(0, length, probe.table)]
        want = attention(queries, *probe.dirty(length, 0.0), whole, None)
        for start, count in _pieces(length, segment):
            for dirt, programs in ((0.0, None), (NAN, 1), (3.0, 10**6)):
                cache = probe.dirty(start + count, dirt)
                if dirt != 0.0:
                    cache = probe.nan_companion(*cache)
                part = queries[start : start + count]
                for label, before, after in _arrangements(probe, length):
                    spans = [*before, (start, count, probe.table), *after]
                    rows = [*(queries[:n] for _, n, _ in before), part, *(queries[:n] for _, n, _ in after)]
                    at = sum(n for _, n, _ in before)
                    got = attention(torch.cat(rows), *cache, spans, programs)[at : at + count]
                    found = compare_attention(got, want, start, count, label, dirt, tally)
                    if found is not None:
                        return found
    return None


def _pieces(length: int, segment: int) -> list[tuple[int, int]]:
    singles = [(p, 1) for p in (0, 15, 16, 63, 64, segment - 1, segment, length - 1) if p < length]
    return [*singles, (0, 17), (5, 9), (length // 2, 13), (length - 20, 20), (length // 3, length // 2)]


def _arrangements(probe: _Probe, length: int) -> list[tuple[str, list[Span], list[Span]]]:
    short: Span = (3, 1, probe.other)
    long, wide = (length - 1, 1, probe.other), (0, length, probe.other)
    ten: Span = (0, 10, probe.other)
    return [
        ("alone", [], []),
        ("after a one-row companion", [short], []),
        ("among a long and a wide companion", [long, wide], [ten]),
        ("before a ten-row companion", [], [ten]),
    ]


def check_model(
    step: StepLogits, kv: KVCache, buckets: Sequence[int], vocab_size: int, length: int, tally: Tally
) -> Violation | None:
    """Check (f): a prompt has the logits of one chunk also in ragged chunks, in steps of every bucket, beside
    companions (one whose cached prefix is NaN), and over a warm prefix. The cache starts full of NaN."""
    gen = torch.Generator().manual_seed(2)
    length = min(length, buckets[-1])
    tokens, other = (torch.randint(0, vocab_size, (length,), generator=gen).tolist() for _ in range(2))
    need = -(-length // kv.block_size)
    probe, second, third = (list(range(i * need, (i + 1) * need)) for i in range(3))

    def rows(ids: list[int], table: list[int], start: int, count: int) -> SequenceRows:
        return SequenceRows(ids, start, count, table, 0, length, SamplingParams())

    kv.fill(range(3 * need), NAN)
    want = step(buckets[-1], [rows(tokens, probe, 0, length)])
    if want.isnan().any():
        return Violation("model", "dirty memory", "unwritten slots reach a prompt's logits")
    trials: list[tuple[Iterable[int], Sequence[int]]] = [(repeat(b), [b]) for b in buckets]
    for sizes, allowed in [*trials, (RAGGED, buckets[-1:])]:
        kv.fill(second, NAN)
        found = check_chunks(step, partial(rows, tokens, second), sizes, allowed, length, want, tally)
        if found is not None:
            return found
    half = length // 2 // kv.block_size * kv.block_size
    warm = [*probe[: half // kv.block_size], *third[half // kv.block_size :]]
    kv.fill(third, NAN)
    room = buckets[-1] - (length - half)
    companions = [rows(other, third, half // 2, 1), rows(other, second, 0, max(1, min(length, room - 1)))]
    if half and room > 2:
        got = step(buckets[-1], [*companions, rows(tokens, warm, half, length - half)])
        at = sum(c.count for c in companions)
        tally.rows += length - half
        if not same_bits(got[at:], want[half:]):
            return Violation("model", "companions or warm prefix", f"rows from position {half}")
    return None
