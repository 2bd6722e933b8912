"""One engine of beside_vllm.py in a process of its own.

    python -m benchmarks.direct.side vllm|invariant|ours OPTIONS REPLY_FD      (OPTIONS: JSON of `Options`)

All are driven by the same client loop (engines.py), which adds a request when another one has ended, or at
its time. `invariant` is vLLM in a process that was started with VLLM_BATCH_INVARIANT=1.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.direct.engines import Asked, Engine, Options, Ours, Sampling, Stub, Vllm
from benchmarks.lib.sides import serve

FEW = 8
"""Tokens of the shorter one of two generations whose difference is a step's time."""
MIXED_PROMPTS, MIXED_TOKENS = (128, 256, 1024, 2048), (64, 128, 256, 512)
"""Lengths of a mixed load, each as likely as the others: 864 and 240 on average."""


class Side:
    """Takes the orders."""

    def __init__(self, make: Callable[[], Engine], warm: Sequence[dict[str, Any]] = ()) -> None:
        """warm: orders."""
        began = time.monotonic()
        self.engine = make()
        self._vocab = self.engine.vocab
        self._kept: dict[int, list[list[int]]] = {}
        booted = time.monotonic()
        for order in warm:
            getattr(self, order["do"])(**{key: value for key, value in order.items() if key != "do"})
        self.ready = {"boot_s": booted - began, "warm_s": time.monotonic() - booted}
        print(self.ready, flush=True)

    def brief(self, count: int, context: int) -> dict[str, float]:
        """The shorter generation alone: afterwards the prompts are in the cache, and kernels are compiled."""
        return {"seconds": self.engine.run(_same(self._prompts(count, context), FEW), count, {})}

    def steps(self, count: int, context: int, tokens: int) -> dict[str, float]:
        """Milliseconds between tokens, as the difference of two generations after prompts in the cache."""
        prompts = self._prompts(count, context)
        short = self.engine.run(_same(prompts, FEW), count, {})
        found = self._measured(_same(prompts, FEW + tokens), count, {})
        return {"ms": 1e3 * (found["seconds"] - short) / tokens, "short_s": short, **found}

    def load(
        self, count: int, length: int, tokens: int, in_flight: int, sampling: Sampling, seed: int
    ) -> dict[str, float]:
        """Output tokens per second, the prompts' time included."""
        prompts = list(prompts_of(str(seed), count, length, self._vocab))
        found = self._measured(_same(prompts, tokens), in_flight, sampling)
        return {"tok_s": count * tokens / found["seconds"], **found}

    def prefill(self, count: int, length: int, in_flight: int, seed: int) -> dict[str, float]:
        """Prompt tokens per second: outputs are of one token."""
        prompts = list(prompts_of(f"p{seed}", count, length, self._vocab))
        found = self._measured(_same(prompts, 1), in_flight, {})
        return {"tok_s": count * length / found["seconds"], **found}

    def mixed(self, count: int, in_flight: int, seed: int) -> dict[str, float]:
        """Requests per second of the mixed load when some always wait: what saturation is."""
        asked = list(_mixed(seed, count))
        found = self._measured(asked, in_flight, {})
        tokens = sum(a.tokens for a in asked)
        return {"req_s": count / found["seconds"], "tok_s": tokens / found["seconds"], **found}

    def arrivals(self, rate: float, seconds: float, seed: int) -> dict[str, float]:
        """Time to first token, in milliseconds, of the mixed load at so many requests per second, which come
        at random."""
        asked = list(_mixed(seed, max(2, round(rate * seconds)), rate))
        began, before = time.perf_counter(), self.engine.costs()
        waits = sorted(self.engine.arrive(asked, {}))
        spent = {key: value - before[key] for key, value in self.engine.costs().items()}
        return {
            "p50_ms": 1e3 * statistics.median(waits), "p99_ms": 1e3 * waits[len(waits) * 99 // 100],
            "max_ms": 1e3 * waits[-1], "requests": len(asked), "seconds": time.perf_counter() - began,
            **spent,
        }  # fmt: skip

    def _measured(self, asked: list[Asked], in_flight: int, sampling: Sampling) -> dict[str, float]:
        before = self.engine.costs()
        seconds = self.engine.run(asked, in_flight, sampling)
        spent = {key: value - before[key] for key, value in self.engine.costs().items()}
        return {"seconds": seconds, **spent}

    def _prompts(self, count: int, context: int) -> list[list[int]]:
        """The same ones each time, and one token longer than `context`: of a prompt of whole blocks an engine
        computes the last block anew, of these a single row."""
        kept = self._kept.setdefault(context, [])
        kept += prompts_of(str(context), count, context + 1, self._vocab, len(kept))
        return kept[:count]


def _same(prompts: list[list[int]], tokens: int) -> list[Asked]:
    return [Asked(prompt, tokens) for prompt in prompts]


def prompts_of(
    seed: str, count: int, length: int, vocab: int = 128_000, begin: int = 0
) -> Iterator[list[int]]:
    """Prompts number `begin` to `count` of a seed."""
    for number in range(begin, count):
        yield random.Random(f"{seed} {number}").choices(range(3, vocab), k=length)


def _mixed(seed: int, count: int, rate: float = 0.0) -> Iterator[Asked]:
    """rate: requests per second, at random times; 0: all at once."""
    rng, at = random.Random(f"mixed {seed}"), 0.0
    for _ in range(count):
        prompt = rng.choices(range(3, 128_000), k=rng.choice(MIXED_PROMPTS))
        yield Asked(prompt, rng.choice(MIXED_TOKENS), at)
        at += rng.expovariate(rate) if rate else 0.0


def main() -> None:
    """Answers until stdin ends."""
    kind, options, pipe = sys.argv[1], Options(**json.loads(sys.argv[2])), int(sys.argv[3])
    engine = Ours if kind == "ours" else Stub if options.cpu else Vllm
    serve(lambda: Side(lambda: engine(options), options.warm), pipe)


if __name__ == "__main__":
    main()
