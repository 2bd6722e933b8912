"""What every device's checks of a whole step share, and the check of sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llm42.protocol import SamplingParams
from llm42.sampling import Draw, StepSampler
from llm42.verifier.certify.rows import Tally, Violation, same_bits
from llm42.verifier.runner import SequenceRows

NAN = float("nan")
RAGGED = tuple(2**n - 1 for n in range(1, 11))
"""Sizes of a prompt's chunks: 1, 3, 7, ... rows."""
StepLogits = Callable[[int, list[SequenceRows]], Tensor]
"""step(bucket, sequences) -> logits [R, V] float32 of their rows, in order."""


def compare_attention(
    got: Tensor, want: Tensor, start: int, count: int, arrangement: str, dirt: float, tally: Tally
) -> Violation | None:
    """A probe's `count` rows from position `start`, as computed in some arrangement, against the same rows of
    the whole probe alone. got [count, Hq, D], want [length, Hq, D]."""
    tally.rows += count
    if same_bits(got, want[start : start + count]):
        return None
    what = f"rows {start}..{start + count - 1} of {len(want)}, {arrangement}, unwritten slots {dirt}"
    check = "dirty memory" if got.isnan().any() else "window borders or companions"
    return Violation("attention", check, what)


def check_chunks(
    step: StepLogits,
    rows: Callable[[int, int], SequenceRows],
    sizes: Iterable[int],
    buckets: Sequence[int],
    length: int,
    want: Tensor,
    tally: Tally,
) -> Violation | None:
    """A prompt of `length` rows in chunks of `sizes` rows, each in the smallest of `buckets` that holds it,
    against its logits in one chunk. rows(start, count): the prompt's. want [length, V]."""
    start = 0
    for size in sizes:
        count = min(size, length - start)
        if count == 0:
            break
        bucket = next(b for b in buckets if b >= count)
        got = step(bucket, [rows(start, count)])
        tally.rows += count
        if not same_bits(got, want[start : start + count]):
            what = f"{count} rows at {start} in a step of {bucket}"
            return Violation("model", "chunking or step size", what)
        start += count
    return None


def check_sampling(sampler: StepSampler, vocab_size: int, tally: Tally) -> Violation | None:
    """A row's draw does not depend on the rows beside it: every row is drawn alone and in steps of 2 to 33
    rows; borders of top-p are hit exactly."""
    draws = _sampling_draws(vocab_size)
    gen = torch.Generator().manual_seed(1)
    logits = torch.randn(len(draws), vocab_size, generator=gen) * 3
    # three equal leaders beside which the rest weighs exactly nothing: with top_p = 2/3 the third is the
    # border
    logits[:, :3] = logits.max() + 200
    want = [sampler(row[None].clone(), [d])[0] for row, d in zip(logits, draws, strict=True)]
    for rows in (2, 5, 8, 33):
        for begin in range(0, len(draws), rows):
            pick = [(begin + i) % len(draws) for i in range(rows)]
            got = sampler(logits[pick], [draws[i] for i in pick])
            tally.rows += rows
            bad = [i for i, g in zip(pick, got, strict=True) if g != want[i]]
            if bad:
                return Violation("sampling", "companions", f"row drawn among {rows}: {draws[bad[0]].params}")
    return None


def _sampling_draws(vocab_size: int) -> list[Draw]:
    history = [i % vocab_size for i in range(40)]
    bias = ((min(7, vocab_size - 1), 2.5),)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_p=2 / 3),
        SamplingParams(temperature=0.9, top_k=2, min_p=0.05),
        SamplingParams(temperature=1.1, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=bias),
    ]
    return [
        Draw(replace(kind, seed=seed), history[: 20 + seed], 10, 2) for seed in range(12) for kind in kinds
    ]
