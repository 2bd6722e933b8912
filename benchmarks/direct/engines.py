"""The engines that side.py measures, behind one client loop (`Engine.run`, `Engine.arrive`)."""

from __future__ import annotations

import json
import queue
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.direct.alone import BLOCK, CREDIT, VOCAB, Waiting, runner_8b
from llm42.cache import BlockPool
from llm42.protocol import Commit, SamplingParams, Window
from llm42.verifier.scheduler import Verifier

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 257, 32), *range(320, 513, 64), 1024)
QUIET_S = 60.0
"""A verifier that says nothing for so long has failed."""
KV_TOKEN_BYTES = 32 * 2 * 8 * 128 * 2
STUB_STEP_S = 0.004
POLL_S = 0.0002
Sampling = dict[str, Any]
"""Fields that SamplingParams of either side has."""


@dataclass(frozen=True)
class Options:
    """How a side is built, and what it does once before it is ready, so that nothing is compiled later."""

    small: str = "hopper"
    max_len: int = 8192
    kv_tokens: int = 352_256
    max_requests: int = 320
    prefix_caching: bool = True
    cpu: bool = False
    warm: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Asked:
    """One request, that ends after exactly so many tokens."""

    prompt: list[int]
    tokens: int
    at: float = 0.0
    """When it comes, in seconds after the first one; where that is asked for."""
    first: float = 0.0
    """When its client saw the first token (time.perf_counter)."""


class Engine(ABC):
    """What is measured, as its client sees it."""

    vocab = 128_000
    """Prompts have ids below it."""

    @abstractmethod
    def add(self, asked: Asked, sampling: Sampling, seed: int, watched: bool) -> None:
        """One more request. watched: its first token is to be seen when it comes."""

    @abstractmethod
    def ended(self, limit_s: float | None = None) -> int:
        """Waits until something has happened, or for so long; how many requests have ended by that."""

    @abstractmethod
    def costs(self) -> dict[str, float]:
        """Counters since the start."""

    def run(self, asked: Iterable[Asked], in_flight: int, sampling: Sampling) -> float:
        """Seconds until all have ended, with at most `in_flight` at a time."""
        began, running, left = time.perf_counter(), 0, enumerate(asked)
        while True:
            while running < in_flight and (entering := next(left, None)) is not None:
                self.add(entering[1], sampling, entering[0] + 1, False)
                running += 1
            if not running:
                return time.perf_counter() - began
            running -= self.ended()

    def arrive(self, asked: Iterable[Asked], sampling: Sampling) -> list[float]:
        """Lets each in at its time, whatever runs. Seconds from that time to its first token."""
        requests = list(asked)
        began, running, left = time.perf_counter(), 0, deque(requests)
        while left or running:
            now = time.perf_counter() - began
            while left and left[0].at <= now:
                self.add(left.popleft(), sampling, len(left) + 1, True)
                running += 1
            wait_s = max(0.0, left[0].at - now) if left else None
            if running:
                running -= self.ended(wait_s)
            elif wait_s is not None:
                time.sleep(wait_s)
        return [a.first - began - a.at for a in requests]


class Stream:
    """One follower's reader, on the step thread: tells the client of the first token, when half of the credit
    is used, and of the end."""

    __slots__ = ("asked", "asks_at", "events", "last", "name")

    def __init__(self, name: str, asked: Asked, events: queue.SimpleQueue[tuple[Stream, Any]]) -> None:
        self.name, self.asked, self.events = name, asked, events
        self.asks_at, self.last = len(asked.prompt) + 1, len(asked.prompt) + asked.tokens

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
        runner: Any = (
            Waiting(STUB_STEP_S) if options.cpu else Waits(runner_8b(SIZES, tokens, length, options.small))
        )
        verifier = Verifier(
            runner, BlockPool(tokens // BLOCK, BLOCK), buckets=SIZES, max_len=length, vocab_size=VOCAB,
            fingerprint="f", max_waiting=1 << 20,
        )  # fmt: skip
        self._begin(verifier, lambda: float(runner.waited))

    def _begin(self, verifier: Verifier, waited: Callable[[], float]) -> None:
        """waited: CPU time of the step thread that is not the loop's own."""
        self.verifier, self._waited = verifier, waited
        self.events: queue.SimpleQueue[tuple[Stream, Any]] = queue.SimpleQueue()
        self.loop_s, self.count = 0.0, 0
        self.verifier.on_step = self._stepped
        self.verifier.start()

    def _stepped(self, _: float) -> None:
        self.loop_s = time.thread_time() - self._waited()

    def add(self, asked: Asked, sampling: Sampling, seed: int, watched: bool) -> None:
        """As Engine's; the seed is used."""
        self.count += 1
        stream = Stream(f"r{self.count}", asked, self.events)
        window = Window(
            stream.name, tuple(asked.prompt), len(asked.prompt), (), SamplingParams(**sampling, seed=seed),
            credit=CREDIT, max_len=stream.last,
        )  # fmt: skip
        self.verifier.follow(window, stream)

    def ended(self, limit_s: float | None = None) -> int:
        """As Engine's."""
        try:
            stream, end = self.events.get(timeout=QUIET_S if limit_s is None else limit_s)
        except queue.Empty:
            if limit_s is None:
                raise
            return 0
        if not isinstance(end, int):
            raise RuntimeError(f"a follower failed: {end}")
        stream.asked.first = stream.asked.first or time.perf_counter()
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
    """vLLM as it comes, or in its batch-invariant mode, by the environment. Its engine is in another process
    yet; this one is its client."""

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
        self.running: dict[str, Asked] = {}
        self.left: dict[str, int] = {}
        """How many tokens each is still to have."""
        self.count = 0

    def add(self, asked: Asked, sampling: Sampling, seed: int, watched: bool) -> None:
        """As Engine's; the seed is not used."""
        from vllm import SamplingParams as Params
        from vllm.sampling_params import RequestOutputKind

        self.count += 1
        kind = RequestOutputKind.DELTA if watched else RequestOutputKind.FINAL_ONLY
        params = Params(
            **{"temperature": 0.0} | sampling, max_tokens=asked.tokens, ignore_eos=True, detokenize=False,
            output_kind=kind,
        )  # fmt: skip
        name = str(self.count)
        self.running[name], self.left[name] = asked, asked.tokens
        self.engine.add_request(name, {"type": "token", "prompt_token_ids": asked.prompt}, params)

    def ended(self, limit_s: float | None = None) -> int:
        """As Engine's. With a limit it looks into the queue that vLLM's client reads, which would wait."""
        if limit_s is not None:
            end, waiting = time.perf_counter() + limit_s, self.engine.engine_core.outputs_queue
            while waiting.empty():
                if time.perf_counter() >= end:
                    return 0
                time.sleep(POLL_S)
        done, now = 0, time.perf_counter()
        for output in self.engine.step():
            name = output.request_id
            self.left[name] -= len(output.outputs[0].token_ids)
            self.running[name].first = self.running[name].first or now
            if output.finished:
                del self.running[name]
                if (missing := self.left.pop(name)) != 0:
                    raise RuntimeError(f"vLLM gave {missing} tokens less than asked for")
                done += 1
        return done

    def costs(self) -> dict[str, float]:
        """As Engine's, of the client alone."""
        return {"process_s": time.process_time()}


class Stub(Engine):
    """In vLLM's place where there is no GPU: a step for all that run, which only waits."""

    def __init__(self, _: Options) -> None:
        self.left: list[tuple[Asked, int]] = []

    def add(self, asked: Asked, sampling: Sampling, seed: int, watched: bool) -> None:
        """As Engine's."""
        self.left.append((asked, asked.tokens))

    def ended(self, limit_s: float | None = None) -> int:
        """As Engine's."""
        time.sleep(STUB_STEP_S)
        before, now = len(self.left), time.perf_counter()
        for asked, _ in self.left:
            asked.first = asked.first or now
        self.left = [(asked, n - 1) for asked, n in self.left if n > 1]
        return before - len(self.left)

    def costs(self) -> dict[str, float]:
        """As Engine's."""
        return {"process_s": time.process_time()}
