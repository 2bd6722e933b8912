"""Row invariance over a whole model on one GPU: random steps against a reference, bits of every logit
compared.

Reference: each sequence alone, one chunk, largest bucket. Trials: random buckets, random pieces of several
sequences in random order, each over a prefix that is warm (the reference's own blocks) or was computed in
other chunks, beside a companion whose cached prefix is NaN; unwritten blocks are NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llm42.cache import KVCache
from llm42.protocol import SamplingParams
from llm42.verifier.cuda.runner import CudaRunner
from llm42.verifier.runner import SequenceRows


@dataclass(slots=True)
class Count:
    """Rows compared and rows whose logits differ in any bit; trials by kind."""

    rows: int = 0
    differing: int = 0
    steps: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Known:
    """A sequence, its blocks, how far they are written, and the reference logits of its rows."""

    tokens: list[int]
    table: list[int]
    written: int
    want: Tensor


def random_steps(
    runner: CudaRunner, kv: KVCache, vocab: int, length: int, sequences: int, steps: int, seed: int = 0
) -> Count:
    """Runs `steps` random steps. Needs (2 x sequences + 1) x ceil(length / block) blocks."""
    rng, count = random.Random(seed), Count()
    need = -(-length // kv.block_size)
    tables = [list(range(i * need, (i + 1) * need)) for i in range(2 * sequences + 1)]
    for table in tables:
        rng.shuffle(table)
    kv.fill(range((2 * sequences + 1) * need), float("nan"))
    bad = tables.pop()
    warm, cold = [], []
    for i in range(sequences):
        tokens = [rng.randrange(vocab) for _ in range(length)]
        want = runner.logits(runner.buckets[-1], [_rows(tokens, tables[i], 0, length)])
        warm.append(Known(tokens, tables[i], length, want))
        cold.append(Known(tokens, tables[sequences + i], 0, want))
    for _ in range(steps):
        _one(runner, rng, warm + cold, bad, count)
        for known in cold:
            if known.written == length:
                known.written = 0
                kv.fill(known.table, float("nan"))
    return count


def _rows(tokens: list[int], table: list[int], start: int, count: int) -> SequenceRows:
    return SequenceRows(tokens, start, count, table, 0, len(tokens), SamplingParams())


def _one(runner: CudaRunner, rng: random.Random, known: list[Known], bad: list[int], count: Count) -> None:
    bucket = rng.choice(runner.buckets)
    room, picked = bucket, []
    if bucket > 8 and rng.random() < 0.5:
        first = known[0]
        picked.append((None, _rows(first.tokens, bad, len(first.tokens) // 2, 1)))
        room -= 1
    for k in rng.sample(known, len(known)):
        length = len(k.tokens)
        start = k.written if k.written < length else rng.randrange(length)
        most = min(room, length - start)
        if most <= 0:
            continue
        n = rng.choice([1, min(most, 33), rng.randint(1, most), most])
        picked.append((k, _rows(k.tokens, k.table, start, n)))
        k.written = max(k.written, start + n)
        room -= n
    rng.shuffle(picked)
    got = runner.logits(bucket, [rows for _, rows in picked])
    at = 0
    for k, rows in picked:
        if k is not None:
            part, want = got[at : at + rows.count], k.want[rows.start : rows.start + rows.count]
            wrong = int((part.view(torch.int32) != want.view(torch.int32)).any(1).sum())
            count.rows += rows.count
            count.differing += wrong
            if wrong and len(count.examples) < 5:
                count.examples.append(
                    f"{wrong} of rows {rows.start}+{rows.count} in a step of {bucket}, {len(picked)} parts"
                )
        at += rows.count
    count.steps += 1
