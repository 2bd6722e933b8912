"""The verifier decoding by itself, in process: tokens a second, and where the time goes.

    python3 -m benchmarks.direct.alone --out DIR          one H200, an 8B shape with random weights
    python3 -m benchmarks.direct.alone --cpu --out DIR    a runner that only waits: the host's part alone

Each cell: so many followers with random prompts of 256 tokens. When all have their first token they get
credit for 64 more, renewed when half is used, and decode 128 in lockstep; what is timed begins there.
`host_ms` is CPU time of the step thread a step, without what it spends waiting for the device. `idle_share`
is the share of the wall time in which no step was on the device, by CUDA events around what each step queues.
DIR/h200-direct-cells.json (DIR/cpu-direct-cells.json) is written after each cell.
Needs CUBLASLT_WORKSPACE_SIZE=0 CUBLAS_WORKSPACE_CONFIG=:0:0 on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from llm42.cache import BlockPool
from llm42.config.verifier import GPU_DEFAULTS
from llm42.protocol import Commit, SamplingParams, TokenLogprob, Window
from llm42.sampling import Sampled
from llm42.verifier.runner import SequenceRows
from llm42.verifier.scheduler import Verifier

PROMPT, DECODED, CREDIT = 256, 128, 64
VOCAB, BLOCK, BUCKETS = 128256, GPU_DEFAULTS["block_size"], GPU_DEFAULTS["buckets"]
FOLLOWERS = (1, 8, 64, 256)
SAMPLINGS = {"greedy": SamplingParams(), "temperature_1": SamplingParams(temperature=1.0, seed=1)}
KV_TOKENS = 163840


@dataclass
class Cell:
    """Who takes part, and what was seen on the step thread."""

    verifier: Verifier
    left: int
    ready: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    errors: list[Any] = field(default_factory=list)

    def one_less(self, event: threading.Event) -> None:
        """One more follower has come so far; the last one sets the event."""
        self.left -= 1
        if not self.left:
            event.set()


class Stream:
    """One follower's reader: renews its credit when half is used."""

    __slots__ = ("cell", "last", "name", "renew_at")

    def __init__(self, cell: Cell, name: str, last: int) -> None:
        self.cell, self.name, self.last = cell, name, last
        self.renew_at = 0

    def __call__(self, answer: Any) -> None:
        if not isinstance(answer, Commit):
            self.cell.errors.append(answer)
            self.cell.ready.set()
            self.cell.done.set()
        elif not self.renew_at:
            self.renew_at = answer.end
            self.cell.one_less(self.cell.ready)
        elif answer.end >= self.last:
            self.cell.one_less(self.cell.done)
        elif answer.end >= self.renew_at:
            self.renew(answer.end)

    def renew(self, length: int) -> None:
        """Credit for CREDIT tokens after `length`; asked for again after half of them."""
        self.renew_at = length + CREDIT // 2
        self.cell.verifier.renew(self.name, length + CREDIT)


class Timed:
    """A CUDA runner with an event before and after what each step queues, and the CPU time of its waits."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.copy_block = runner, runner.copy_block
        self.spans: list[tuple[Any, Any]] = []
        self.waited = 0.0
        self._copy, runner._host.copy = runner._host.copy, self._started

    def _started(self, *args: Any) -> None:
        import torch

        begun = torch.cuda.Event(enable_timing=True)
        begun.record(self.runner.stream)
        self.spans.append((begun, torch.cuda.Event(enable_timing=True)))
        self._copy(*args)

    def begin(self, bucket: int, sequences: list[SequenceRows]) -> Any:
        """As the runner's."""
        pending = self.runner.begin(bucket, sequences)
        self.spans[-1][1].record(self.runner.stream)
        return pending

    def finish(self, pending: Any) -> Any:
        """As the runner's; what it spins is not the loop's own time."""
        began = time.thread_time()
        pending.done.synchronize()
        self.waited += time.thread_time() - began
        return self.runner.finish(pending)

    def step(self, bucket: int, sequences: list[SequenceRows]) -> Any:
        """Both at once."""
        return self.finish(self.begin(bucket, sequences))

    def idle_share(self) -> float:
        """Of the time from the first step's begin to the last one's end."""
        busy = sum(a.elapsed_time(b) for a, b in self.spans)
        return float(1 - busy / self.spans[0][0].elapsed_time(self.spans[-1][1]))


class Waiting:
    """A runner that only waits: a step takes `seconds`, and the next one begins after it."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.spans, self.waited = seconds, list[Any](), 0.0
        self._free = 0.0

    def begin(self, _bucket: int, sequences: list[SequenceRows]) -> tuple[float, list[int]]:
        """Queues a step."""
        self._free = max(self._free, time.monotonic()) + self.seconds
        return self._free, [len(s.logit_positions) for s in sequences]

    def finish(self, pending: tuple[float, list[int]]) -> list[list[Sampled]]:
        """Its results: made as the CUDA runner makes them."""
        end, counts = pending
        time.sleep(max(0.0, end - time.monotonic()))
        return [[Sampled(7, TokenLogprob(7, -1.0, ())) for _ in range(count)] for count in counts]

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        """Both at once."""
        return self.finish(self.begin(bucket, sequences))

    def copy_block(self, _source: int, _target: int) -> None:
        """Nothing to copy."""

    def idle_share(self) -> float:
        """There is no device."""
        return 0.0


def cell(runner: Any, followers: int, sampling: SamplingParams, decoded: int = DECODED) -> dict[str, float]:
    """One verifier with an empty cache."""
    pool = BlockPool(KV_TOKENS // BLOCK, BLOCK)
    verifier = Verifier(
        runner, pool, buckets=BUCKETS, max_len=32768, vocab_size=VOCAB, fingerprint="f", max_waiting=1 << 20
    )
    marks: list[tuple[float, float]] = []
    verifier.on_step = lambda _: marks.append((time.monotonic(), time.thread_time()))
    now = Cell(verifier, followers)
    last = PROMPT + 1 + decoded
    streams = [Stream(now, f"r{i}", last) for i in range(followers)]
    verifier.start()
    began = time.monotonic()
    for i, stream in enumerate(streams):
        prompt = tuple((7919 * i + 104729 * j + 13) % VOCAB for j in range(PROMPT))
        verifier.follow(Window(stream.name, prompt, PROMPT, (), sampling, max_len=last), stream)
    now.ready.wait(120)
    prefilled = time.monotonic()
    time.sleep(0.05)  # nothing is in flight: the marks and events below are of decoding alone
    marks.clear()
    runner.spans.clear()
    now.left, runner.waited = followers, 0.0
    all_threads, started = time.process_time(), time.monotonic()
    for stream in streams:
        stream.renew(PROMPT + 1)
    now.done.wait(120)
    ended, all_threads = time.monotonic(), time.process_time() - all_threads
    time.sleep(0.05)
    verifier.close()
    if now.errors:
        raise RuntimeError(f"a follower failed: {now.errors[0]}")
    return figures(runner, marks, followers, decoded, prefilled - began, ended - started, all_threads)


def figures(
    runner: Any,
    marks: list[tuple[float, float]],
    followers: int,
    decoded: int,
    prefill_s: float,
    wall_s: float,
    process_s: float,
) -> dict[str, float]:
    """What a cell comes to. marks: (time, CPU time of the thread) at the end of each step."""
    gaps = [1e3 * (b[0] - a[0]) for a, b in pairwise(marks[2:])]
    cpu = marks[-1][1] - marks[0][1] - runner.waited
    return {
        "tok_s": followers * decoded / wall_s,
        "steps": len(marks),
        "step_ms": statistics.median(gaps),
        "step_ms_p90": sorted(gaps)[len(gaps) * 9 // 10],
        "host_ms": 1e3 * cpu / (len(marks) - 1),
        "process_ms": 1e3 * process_s / len(marks),
        "idle_share": runner.idle_share(),
        "prefill_tok_s": followers * PROMPT / prefill_s,
    }


def runner_8b(sizes: tuple[int, ...], kv_tokens: int, max_len: int, small: str = "hopper") -> Any:
    """The 8B shape in bfloat16, as a verifier on a GPU has it. small: how attention of few rows loads keys
    and values, "hopper" or "tma"."""
    import torch

    from benchmarks.lib.random_model import LLAMA_8B, random_model
    from llm42.cache import KVCache
    from llm42.verifier.cuda.runner import CudaRunner, attention_shape
    from llm42_kernels.attention import Tile
    from llm42_kernels.cuda import cuda_operators

    c, model = LLAMA_8B, random_model(LLAMA_8B, max_len=max_len)
    kv = KVCache(c.num_layers, kv_tokens // BLOCK, BLOCK, c.num_kv_heads, c.head_dim, torch.bfloat16, "cuda")
    tile = {"hopper": Tile(64, 4, 4, 1, "hopper"), "tma": Tile(64, 4, 3, 2, "tma")}[small]
    shape = replace(attention_shape(c.num_heads, c.num_kv_heads, c.head_dim, BLOCK), small=tile)
    return CudaRunner(model, cuda_operators(), kv, sizes, max_len, shape=shape)


def main() -> None:
    """Runs every cell, with a short one before each that compiles what it needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="the host's part alone: no GPU is used")
    parser.add_argument("--device-ms", type=float, default=13.0, help="with --cpu: what a step takes")
    parser.add_argument("--followers", type=int, nargs="+", default=None)
    args = parser.parse_args()
    began = time.monotonic()
    runner: Any = Waiting(args.device_ms / 1e3) if args.cpu else Timed(runner_8b(BUCKETS, KV_TOKENS, 32768))
    found: dict[str, Any] = {"start_s": time.monotonic() - began, "cells": {}}
    path = args.out / ("cpu-direct-cells.json" if args.cpu else "h200-direct-cells.json")
    args.out.mkdir(parents=True, exist_ok=True)
    for followers in args.followers or ((256,) if args.cpu else FOLLOWERS):
        for name, sampling in SAMPLINGS.items():
            if not args.cpu:
                cell(runner, followers, sampling, 8)
            got = cell(runner, followers, sampling)
            found["cells"][f"{name}_{followers}"] = got
            if args.cpu and name == "greedy":
                found[f"host_ms_{followers}"] = got["process_ms"]
            found["seconds"] = time.monotonic() - began
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(followers, name, {key: round(value, 3) for key, value in got.items()}, flush=True)


if __name__ == "__main__":
    main()
