"""Where a canonical step's device time goes: kernels by name, and the gaps before them."""

from __future__ import annotations

import sys
import time
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.lib.random_model import LLAMA_8B, random_model
from benchmarks.verifier.steps import MIXES, host_ms, kv_ms, pipelined_ms, sequences_of, step_and_products_ms
from llm42.cache import KVCache
from llm42.verifier.cuda.runner import CudaRunner
from llm42_kernels.cuda import cuda_operators

BLOCK = 128


def main() -> None:
    """Arguments: names of mixes to profile."""
    model = random_model(LLAMA_8B)
    c = model.config
    kv = KVCache(c.num_layers, 200_000 // BLOCK, BLOCK, c.num_kv_heads, c.head_dim, model.dtype, "cuda")
    runner = CudaRunner(model, cuda_operators(), kv, (64, 256, 512, 1024), 32768)
    for mix in MIXES:
        sequences = sequences_of(mix, BLOCK, c.vocab_size)
        step, products = step_and_products_ms(runner, mix, sequences)
        begin, finish = host_ms(runner, mix, sequences)
        wall = pipelined_ms(runner, mix.total, sequences)
        both = step / (products + kv_ms(mix, model))
        print(
            f"{mix.name:20} step {step:.3f} products {products:.3f} ratio {step / products:.3f} "
            f"with kv {both:.3f} begin {begin:.3f} finish {finish:.3f} wall {wall:.3f}",
            flush=True,
        )
        if mix.name in sys.argv[1:]:
            _profile(runner, mix.total, sequences)
    _host(runner, sequences_of(MIXES[4], BLOCK, c.vocab_size))


def _host(runner: CudaRunner, sequences: list) -> None:  # type: ignore[type-arg]
    """Host microseconds of the parts of `begin`."""
    runner.finish(runner.begin(64, sequences))
    small, large = (torch.zeros(n, dtype=torch.int32, pin_memory=True) for n in (2000, 50000))
    target = torch.zeros(50000, dtype=torch.int32, device="cuda")
    body, head = runner._bodies[64, "Sc"], runner._heads[64, 64]
    _, host = runner._host.take(64)
    parts = {
        "pack": lambda: runner._packers[64].pack(host, 64, sequences),
        "copy 8 KB": lambda: target[:2000].copy_(small, non_blocking=True),
        "copy 200 KB": lambda: target.copy_(large, non_blocking=True),
        "copy back": lambda: small.copy_(target[:2000], non_blocking=True),
        "pinned": lambda: torch.empty(192, dtype=torch.int32, pin_memory=True),
        "event": lambda: torch.cuda.Event().record(runner.stream),
        "body": body.replay,
        "head": head.replay,
    }
    for name, call in parts.items():
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            with torch.cuda.stream(runner.stream), torch.inference_mode():
                t = time.perf_counter()
                call()
                times.append((time.perf_counter() - t) * 1e6)
        print("host", name, round(sorted(times)[15], 1), "us", flush=True)


def _profile(runner: CudaRunner, bucket: int, sequences: list) -> None:  # type: ignore[type-arg]
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(12):
            runner.finish(runner.begin(bucket, sequences))
        torch.cuda.synchronize()
    events = sorted((e for e in prof.events() if e.device_time > 0), key=lambda e: e.time_range.start)
    events = events[-(len(events) // 12) :]
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    end = None
    for e in events:
        row = spent[e.name[:70]]
        row[0] += 1
        row[1] += e.time_range.end - e.time_range.start
        row[2] += 0.0 if end is None else e.time_range.start - end
        end = e.time_range.end
    for name, (n, busy, gap) in sorted(spent.items(), key=lambda x: -x[1][1]):
        print(
            f"   {n:5.0f} x {busy / n:8.2f} us = {busy / 1000:7.3f} ms, "
            f"gaps before {gap / n:6.2f} us = {gap / 1000:.3f} ms  {name}"
        )


main()
