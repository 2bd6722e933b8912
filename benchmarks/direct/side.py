"""One engine of beside_vllm.py in a process of its own.

    python -m benchmarks.direct.side vllm|ours OPTIONS REPLY_FD      (OPTIONS: JSON of `Options`)

Both are driven by the same client loop (`Engine.run`), which adds a request when another one has ended.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.direct.alone import BLOCK, CREDIT, VOCAB, Waiting, runner_8b
from benchmarks.lib.sides import serve
from llm42.cache import BlockPool
from llm42.protocol import Commit, SamplingParams, Window
from llm42.verifier.scheduler import Verifier

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 257, 32), *range(320, 513, 64), 1024)
FEW = 8
"""Tokens of the shorter one of two generations whose difference is a step's time."""
QUIET_S = 60.0
"""A verifier that says nothing for so long has failed."""
KV_TOKEN_BYTES = 32 * 2 * 8 * 128 * 2
STUB_STEP_S = 0.004


@dataclass(frozen=True)
class Options:
    """How a side is built, and what it does once before it is ready, so that nothing is compiled later."""

    small: str = "tma"
    max_len: int = 8192
    kv_tokens: int = 352_256
    max_requests: int = 320
    prefix_caching: bool = True
    cpu: bool = False
    warm: list[dict[str, Any]] = field(default_factory=list)


class Engine(ABC):
    """What is measured, as its client sees it."""

    @abstractmethod
    def add(self, prompt: list[int], tokens: int, temperature: float, seed: int) -> None:
        """One more request, that ends after exactly so many tokens."""

    @abstractmethod
    def ended(self) -> int:
        """Waits until something has happened; how many requests have ended by that."""

    @abstractmethod
    def costs(self) -> dict[str, float]:
        """Counters since the start."""

    def run(self, prompts: list[list[int]], tokens: int, in_flight: int, temperature: float) -> float:
        """Seconds until all have ended, with at most `in_flight` at a time."""
        began, running, left = time.perf_counter(), 0, enumerate(prompts)
        while True:
            while running < in_flight and (entering := next(left, None)) is not None:
                self.add(entering[1], tokens, temperature, entering[0] + 1)
                running += 1
            if not running:
                return time.perf_counter() - began
            running -= self.ended()


class Stream:
    """One follower's reader, on the step thread: tells the client when half of the credit is used, and at the
    end."""

    __slots__ = ("asks_at", "events", "last", "name")

    def __init__(
        self, name: str, first: int, last: int, events: queue.SimpleQueue[tuple[Stream, Any]]
    ) -> None:
        """first, last: how long prompt and output are after the first commit, and at the end."""
        self.name, self.last, self.events = name, last, events
        self.asks_at = min(first + CREDIT // 2, last)

    def __call__(self, answer: Any) -> None:
        if not isinstance(answer, Commit):
            self.events.put((self, answer))
        elif (end := answer.end) >= self.asks_at:
            self.asks_at = min(end + CREDIT // 2, self.last)
            self.events.put((self, end))


class Waits:
    """A CUDA runner. What the step thread spends waiting for the device is counted apart."""

    def __init__(self, runner: Any) -> None:
        self._finish, self.waited = runner.finish, 0.0
        self.begin, self.step, self.copy_block = runner.begin, runner.step, runner.copy_block

    def finish(self, pending: Any) -> Any:
        """As the runner's."""
        began = time.thread_time()
        pending.done.synchronize()
        self.waited += time.thread_time() - began
        return self._finish(pending)


class Ours(Engine):
    """The verifier decoding by itself; this thread renews credit and lets requests in, as a session does."""

    def __init__(self, options: Options) -> None:
        length, tokens = options.max_len, options.kv_tokens
        self.runner: Any = (
            Waiting(STUB_STEP_S) if options.cpu else Waits(runner_8b(SIZES, tokens, length, options.small))
        )
        self.verifier = Verifier(
            self.runner, BlockPool(tokens // BLOCK, BLOCK), buckets=SIZES, max_len=length, vocab_size=VOCAB,
            fingerprint="f", max_waiting=1 << 20,
        )  # fmt: skip
        self.events: queue.SimpleQueue[tuple[Stream, Any]] = queue.SimpleQueue()
        self.loop_s, self.count = 0.0, 0
        self.verifier.on_step = self._stepped
        self.verifier.start()

    def _stepped(self, _: float) -> None:
        self.loop_s = time.thread_time() - self.runner.waited

    def add(self, prompt: list[int], tokens: int, temperature: float, seed: int) -> None:
        """As Engine's; the seed is used."""
        self.count += 1
        length = len(prompt)
        stream = Stream(f"r{self.count}", length + 1, length + tokens, self.events)
        sampling = SamplingParams(temperature=temperature, seed=seed)
        window = Window(stream.name, tuple(prompt), length, (), sampling, credit=CREDIT, max_len=stream.last)
        self.verifier.follow(window, stream)

    def ended(self) -> int:
        """As Engine's."""
        stream, end = self.events.get(timeout=QUIET_S)
        if not isinstance(end, int):
            raise RuntimeError(f"a follower failed: {end}")
        if end >= stream.last:
            self.verifier.release(stream.name)
            return 1
        self.verifier.renew(stream.name, end + CREDIT)
        return 0

    def costs(self) -> dict[str, float]:
        """As Engine's."""
        s = self.verifier.stats()
        return {
            "process_s": time.process_time(), "loop_s": self.loop_s, "steps": s.steps, "rows": s.rows,
            "padding_rows": s.padding_rows, "decoded": s.decoded, "cached_rows": s.cached_rows,
            "preemptions": s.preemptions,
        }  # fmt: skip


class Vllm(Engine):
    """vLLM as it comes. Its engine is in another process yet; this one is its client."""

    def __init__(self, options: Options) -> None:
        from vllm import LLM

        from benchmarks.lib.random_model import LLAMA_8B
        from llm42.engine.vllm.export import config_json

        place = Path(tempfile.mkdtemp())
        (place / "config.json").write_text(json.dumps(config_json(LLAMA_8B, "bfloat16")))
        self.engine = LLM(
            model=str(place), load_format="dummy", skip_tokenizer_init=True, max_model_len=options.max_len,
            gpu_memory_utilization=0.3, kv_cache_memory_bytes=options.kv_tokens * KV_TOKEN_BYTES,
            max_num_seqs=options.max_requests, enable_prefix_caching=options.prefix_caching,
        ).llm_engine  # fmt: skip
        self.tokens: dict[str, int] = {}
        """Running requests, and how many tokens each is to have."""
        self.count = 0

    def add(self, prompt: list[int], tokens: int, temperature: float, seed: int) -> None:
        """As Engine's; the seed is not used."""
        from vllm import SamplingParams as Params
        from vllm.sampling_params import RequestOutputKind

        self.count += 1
        params = Params(
            temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        name = str(self.count)
        self.tokens[name] = tokens
        self.engine.add_request(name, {"type": "token", "prompt_token_ids": prompt}, params)

    def ended(self) -> int:
        """As Engine's."""
        done = [output for output in self.engine.step() if output.finished]
        for output in done:
            expected, found = self.tokens.pop(output.request_id), len(output.outputs[0].token_ids)
            if found != expected:
                raise RuntimeError(f"vLLM gave {found} tokens, not {expected}")
        return len(done)

    def costs(self) -> dict[str, float]:
        """As Engine's, of the client alone."""
        return {"process_s": time.process_time()}


class Stub(Engine):
    """In vLLM's place where there is no GPU: a step for all that run, which only waits."""

    def __init__(self, _: Options) -> None:
        self.left: list[int] = []

    def add(self, prompt: list[int], tokens: int, temperature: float, seed: int) -> None:
        """As Engine's."""
        self.left.append(tokens)

    def ended(self) -> int:
        """As Engine's."""
        time.sleep(STUB_STEP_S)
        before, self.left = len(self.left), [n - 1 for n in self.left if n > 1]
        return before - len(self.left)

    def costs(self) -> dict[str, float]:
        """As Engine's."""
        return {"process_s": time.process_time()}


class Side:
    """Takes the orders."""

    def __init__(self, kind: str, options: Options) -> None:
        began = time.monotonic()
        vllm = Stub if options.cpu else Vllm
        self.engine: Engine = Ours(options) if kind == "ours" else vllm(options)
        self._kept: dict[int, list[list[int]]] = {}
        booted = time.monotonic()
        for order in options.warm:
            getattr(self, order["do"])(**{key: value for key, value in order.items() if key != "do"})
        self.ready = {"boot_s": booted - began, "warm_s": time.monotonic() - booted}
        print(self.ready, flush=True)

    def brief(self, count: int, context: int) -> dict[str, float]:
        """The shorter generation alone: afterwards the prompts are in the cache, and kernels are compiled."""
        return {"seconds": self.engine.run(self._prompts(count, context), FEW, count, 0.0)}

    def steps(self, count: int, context: int, tokens: int) -> dict[str, float]:
        """Milliseconds between tokens, as the difference of two generations after prompts in the cache."""
        prompts = self._prompts(count, context)
        short = self.engine.run(prompts, FEW, count, 0.0)
        found = self._measured(prompts, FEW + tokens, count, 0.0)
        return {"ms": 1e3 * (found["seconds"] - short) / tokens, "short_s": short, **found}

    def load(
        self, count: int, length: int, tokens: int, in_flight: int, temperature: float, seed: int
    ) -> dict[str, float]:
        """Output tokens per second, the prompts' time included."""
        prompts = list(_prompts(seed, count, length))
        found = self._measured(prompts, tokens, in_flight, temperature)
        return {"tok_s": count * tokens / found["seconds"], **found}

    def _measured(
        self, prompts: list[list[int]], tokens: int, in_flight: int, temperature: float
    ) -> dict[str, float]:
        before = self.engine.costs()
        seconds = self.engine.run(prompts, tokens, in_flight, temperature)
        spent = {key: value - before[key] for key, value in self.engine.costs().items()}
        return {"seconds": seconds, **spent}

    def _prompts(self, count: int, context: int) -> list[list[int]]:
        """The same ones each time, and one token longer than `context`: of a prompt of whole blocks an engine
        computes the last block anew, of these a single row."""
        kept = self._kept.setdefault(context, [])
        kept += _prompts(context, count, context + 1, len(kept))
        return kept[:count]


def _prompts(seed: int, count: int, length: int, begin: int = 0) -> Iterator[list[int]]:
    for number in range(begin, count):
        yield random.Random(f"{seed} {number}").choices(range(3, 128_000), k=length)


def main() -> None:
    """Answers until stdin ends."""
    kind, options, pipe = sys.argv[1], Options(**json.loads(sys.argv[2])), int(sys.argv[3])
    serve(lambda: Side(kind, options), pipe)


if __name__ == "__main__":
    main()
