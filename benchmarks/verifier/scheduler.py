"""The whole verifier on one GPU: rows per second through its queue, scheduler and cache, not of steps
alone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

from llm42.cache import BlockPool
from llm42.models.weights import LoadedModel
from llm42.protocol import SamplingParams, Window
from llm42.verifier.cuda.runner import CudaRunner
from llm42.verifier.scheduler import Verifier

REQUESTS, CONTEXT, CANDIDATES, ROUNDS = 128, 2048, 31, 12


class OneAtATime:
    """The same runner without `begin` and `finish`: a step is settled before the next is planned."""

    def __init__(self, runner: CudaRunner) -> None:
        self.step, self.copy_block = runner.step, runner.copy_block


def rows_per_second(model: LoadedModel, runner: CudaRunner) -> dict[str, Any]:
    """REQUESTS requests of CONTEXT tokens: prefill, then ROUNDS windows of CANDIDATES each (32 rows a
    window)."""
    out: dict[str, Any] = {}
    for name, used in (("two in flight", runner), ("one at a time", OneAtATime(runner))):
        pool = BlockPool(runner.kv.keys.shape[1], runner.kv.block_size)
        verifier = Verifier(
            used, pool, buckets=runner.buckets, max_len=4096, vocab_size=model.config.vocab_size,
            fingerprint="f", max_waiting=1 << 20,
        )  # fmt: skip
        gen = torch.Generator().manual_seed(0)
        size = (REQUESTS, CONTEXT + CANDIDATES)
        ids = torch.randint(0, model.config.vocab_size, size, generator=gen).tolist()
        windows = [
            Window(f"r{i}", tuple(x[:CONTEXT]), CONTEXT, tuple(x[CONTEXT:]), SamplingParams())
            for i, x in enumerate(ids)
        ]
        verifier.start()
        began = time.perf_counter()
        asyncio.run(verifier.verify(windows))
        prefilled = time.perf_counter()
        for _ in range(ROUNDS):
            asyncio.run(verifier.verify(windows))
        done = time.perf_counter()
        verifier.close()
        out[name] = {
            "prefill_rows_s": REQUESTS * (CONTEXT + CANDIDATES) / (prefilled - began),
            "window_rows_s": ROUNDS * REQUESTS * (CANDIDATES + 1) / (done - prefilled),
            "steps": verifier.stats().steps,
        }
        print(name, out[name], flush=True)
    return out
