"""What a verifier's own Python costs a window when the device costs nothing: 256 requests at a time.

    python -m benchmarks.verifier.host

A stand-in runner accepts every candidate at once, so what is left is the queue, the scheduler and the
accounting of the cache; in CPU seconds of one thread, so that other processes do not count. `windows_s` is
the whole: windows of 31 candidates after about 1,024 tokens, a step of at most 1,024 rows, pipelined as on a
GPU. `front_us` is what `submit` takes of the actor's event loop for a window, `step_ms` what a step takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.report import RESULTS, Figure, arguments, report
from llm42.cache import BlockPool
from llm42.protocol import SamplingParams, TokenLogprob, Window
from llm42.sampling import Sampled
from llm42.verifier.runner import SequenceRows
from llm42.verifier.scheduler import Verifier

VOCAB, BLOCK, BUCKETS = 128256, 64, (64, 128, 256, 512, 1024)


class Agreeing:
    """Draws what was proposed, and 7 where nothing was. No device: a step takes no time of its own."""

    def begin(self, _bucket: int, sequences: list[SequenceRows]) -> list[SequenceRows]:
        """As a pipelined runner's."""
        return sequences

    def finish(self, pending: list[SequenceRows]) -> list[list[Sampled]]:
        """As a pipelined runner's."""
        return [[self._sampled(s, p) for p in s.logit_positions] for s in pending]

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        """Both at once."""
        return self.finish(self.begin(bucket, sequences))

    def copy_block(self, _source: int, _target: int) -> None:
        """Nothing to copy."""

    @staticmethod
    def _sampled(rows: SequenceRows, position: int) -> Sampled:
        token = rows.tokens[position + 1] if position + 1 < len(rows.tokens) else 7
        return Sampled(token, TokenLogprob(token, -1.0), True)


def run(requests: int, context: int, candidates: int, rounds: int) -> dict[str, float]:
    """One verifier, all requests in lockstep; medians over the rounds after the prefill."""
    blocks = requests * (-(-(context + rounds * (candidates + 1)) // BLOCK) + 2)
    verifier = Verifier(
        Agreeing(), BlockPool(blocks, BLOCK), buckets=BUCKETS, max_len=1 << 20, vocab_size=VOCAB,
        fingerprint="f", max_waiting=1 << 20,
    )  # fmt: skip
    prompts = [tuple((7919 * i + 104729 * j) % VOCAB for j in range(context)) for i in range(requests)]
    tokens = [list(p) for p in prompts]
    took: list[dict[str, float]] = []
    for number in range(rounds):
        windows = [
            Window(f"r{i}", tuple(t), context, tuple(range(300, 300 + candidates)), SamplingParams())
            for i, t in enumerate(tokens)
        ]
        steps, began = verifier.stats().steps, time.process_time()
        futures = [verifier.submit(w) for w in windows]
        entered = time.process_time()
        while not all(f.done() for f in futures):
            verifier.step()
        done = time.process_time()
        for window, kept in zip(windows, tokens, strict=True):
            kept += [*window.candidates, 7]
        if number:
            took.append(
                {
                    "windows_s": requests / (done - began),
                    "front_us": 1e6 * (entered - began) / requests,
                    "step_ms": 1e3 * (done - entered) / (verifier.stats().steps - steps),
                }
            )
    return {name: statistics.median(t[name] for t in took) for name in took[0]}


def main() -> None:
    """Writes results/verifier-host.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--candidates", type=int, default=31)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = run(args.requests, args.context, args.candidates, args.rounds)
    raw: dict[str, Any] = {"options": arguments(args), "found": found, "load_average": os.getloadavg()}
    figures = {
        f"windows_s_{args.requests}": Figure(round(found["windows_s"]), "windows/s", better="higher"),
        f"front_us_{args.requests}": Figure(round(found["front_us"], 1), "us per window"),
        f"step_ms_{args.requests}": Figure(round(found["step_ms"], 2), "ms per step"),
    }
    print(report("verifier-host", figures, raw, args.out))
    print(found)


if __name__ == "__main__":
    main()
