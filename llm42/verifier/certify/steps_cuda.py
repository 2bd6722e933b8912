"""Device versions of the checks that see a whole step: paged attention, and the model through a CUDA
runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llm42.cache import KVCache
from llm42.protocol import SamplingParams
from llm42.verifier.certify.rows import Tally, Violation, same_bits
from llm42.verifier.runner import SequenceRows
from llm42_kernels.attention import SEGMENT, AttentionShape, Tile
from llm42_kernels.attention_flash import make_attention

NAN = float("nan")
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


def split_with_companions(shape: AttentionShape, device: torch.device) -> Attention:
    """Plant: the segments over keys are shorter when the step holds companions."""
    split = replace(shape, order="segments", block_n=64, segment=SEGMENT // 2)
    alone, other = (device_attention(s, device) for s in (shape, split))
    return lambda q, k, v, spans, n: (other if len(spans) > 1 else alone)(q, k, v, spans, n)


def tile_by_neighbour(shape: AttentionShape, device: torch.device) -> Attention:
    """Plant: the key tile follows the largest number of query rows in the step."""
    tile = Tile(64, 4, 2, 1)
    block_n = 320 - shape.block_n if shape.order == "flash" else 32  # flash: 128 for 192 and 192 for 128
    narrow = replace(shape, block_n=block_n, large=tile, small=tile)
    alone, other = device_attention(shape, device), device_attention(narrow, device)
    return lambda q, k, v, spans, n: (other if max(c for _, c, _ in spans) > 9 else alone)(q, k, v, spans, n)


def reads_dirty_tail(shape: AttentionShape, device: torch.device) -> Attention:
    """Plant: the value slot behind the last written one is read with weight zero."""
    attention = device_attention(shape, device)

    def run(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], programs: int | None) -> Tensor:
        out, row = attention(q, k, v, spans, programs), 0
        for start, count, table in spans:
            row += count
            slot = (start + count) % shape.block_size
            if slot:
                out[row - 1] += (
                    0.0 * v[table[(start + count) // shape.block_size] * shape.block_size + slot, 0, 0]
                )
        return out

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


def check_attention_device(
    attention: Attention, shape: AttentionShape, dtype: torch.dtype, device: torch.device, tally: Tally
) -> Violation | None:
    """Checks (d) and (e) on unrounded outputs: window borders, single rows, fused and split segments,
    companions of many shapes and NaN, dirty slots. Probes of 40 and of two and a half segments."""
    segment = min(shape.segment, SEGMENT)
    for length in (40, 5 * segment // 2):
        probe = _Probe.make(length, shape, dtype, device)
        whole: list[Span] = [(0, length, probe.table)]
        want = attention(probe.queries, *probe.dirty(length, 0.0), whole, None)
        for start, count in _pieces(length, segment):
            for dirt, programs in ((0.0, None), (NAN, 1), (3.0, 10**6)):
                cache = probe.dirty(start + count, dirt)
                if dirt != 0.0:
                    cache = probe.nan_companion(*cache)
                part = probe.queries[start : start + count]
                for label, before, after in _arrangements(probe, length):
                    spans = [*before, (start, count, probe.table), *after]
                    rows = (
                        [probe.queries[:n] for _, n, _ in before]
                        + [part]
                        + [probe.queries[:n] for _, n, _ in after]
                    )
                    at = sum(n for _, n, _ in before)
                    got = attention(torch.cat(rows), *cache, spans, programs)[at : at + count]
                    tally.rows += count
                    if not same_bits(got, want[start : start + count]):
                        where = (
                            f"rows {start}..{start + count - 1} of {length}, {label}, unwritten slots {dirt}"
                        )
                        check = "dirty memory" if got.isnan().any() else "window borders or companions"
                        return Violation("attention", check, where)
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


StepLogits = Callable[[int, list[SequenceRows]], Tensor]


def check_model_device(
    step: StepLogits, kv: KVCache, buckets: Sequence[int], vocab_size: int, length: int, tally: Tally
) -> Violation | None:
    """Check (f): logits of one prompt in one chunk, in ragged chunks, in steps of every bucket, beside
    companions (one whose cached prefix is NaN), and over a warm prefix. The cache starts full of NaN."""
    gen = torch.Generator().manual_seed(2)
    length = min(length, buckets[-1])
    tokens, other = (torch.randint(0, vocab_size, (length,), generator=gen).tolist() for _ in range(2))
    need = -(-length // kv.block_size)
    probe, second, third = (list(range(i * need, (i + 1) * need)) for i in range(3))

    def rows(ids: list[int], table: list[int], start: int, count: int) -> SequenceRows:
        return SequenceRows(ids, start, count, table, 0, length, SamplingParams())

    def chunked(table: list[int], sizes: Sequence[int], bucket: int) -> Violation | None:
        start = 0
        for size in sizes:
            count = min(size, length - start)
            if not count:
                break
            got = step(bucket, [rows(tokens, table, start, count)])
            tally.rows += count
            if not same_bits(got, want[start : start + count]):
                return Violation(
                    "model", "chunking or step size", f"{count} rows at {start} in a step of {bucket}"
                )
            start += count
        return None

    kv.fill(range(3 * need), NAN)
    want = step(buckets[-1], [rows(tokens, probe, 0, length)])
    if want.isnan().any():
        return Violation("model", "dirty memory", "unwritten slots reach a prompt's logits")
    for bucket in buckets:
        kv.fill(second, NAN)
        found = chunked(second, [bucket] * -(-length // bucket), bucket)
        if found:
            return found
    kv.fill(second, NAN)
    found = chunked(second, [1, 3, 7, 15, 31, 63, 127, 255, 511, length], buckets[-1])
    if found:
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
