"""Engines behind the client loop of benchmarks/direct/engines.py: ours through its adapter, and vLLM
untouched. Both say how many tokens have come, and can drop what still runs."""

from __future__ import annotations

import itertools
import queue
from abc import abstractmethod
from typing import Any

from benchmarks.direct import engines
from benchmarks.direct.engines import Asked, Sampling
from benchmarks.verify_mode.options import CPU_VLLM, SERVE_TOKENS, Options
from llm42.engine.base import Engine, EngineOutput
from llm42.protocol import Request, SamplingParams

QUIET_S = 60.0
"""An engine that says nothing for so long has failed."""


class Counted(engines.Engine):
    """Tells of tokens before their requests end."""

    @abstractmethod
    def new_tokens(self) -> int:
        """How many have come since the last call."""

    @abstractmethod
    def abandon(self) -> None:
        """Ends all that runs."""


class Adapted(Counted):
    """An engine of ours, best effort. A verifier decides on nothing of it."""

    def __init__(self, engine: Engine, vocab: int) -> None:
        self.engine, self.vocab = engine, vocab
        self._events: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self._running: set[str] = set()
        self._numbers, self._new = itertools.count(), 0

    def add(self, asked: Asked, sampling: Sampling, seed: int, watched: bool) -> None:
        """As Engine's; the seed is not used."""
        name = f"adapted-{next(self._numbers)}"
        params = SamplingParams(**sampling)
        request = Request(name, tuple(asked.prompt), asked.tokens, params, seeded=False)
        self._running.add(name)
        self.engine.submit(request, self._events.put, asked.tokens)

    def ended(self, limit_s: float | None = None) -> int:
        """As Engine's."""
        try:
            outputs = [self._events.get(timeout=QUIET_S if limit_s is None else limit_s)]
        except queue.Empty:
            if limit_s is None:
                raise
            return 0
        while not self._events.empty():
            outputs.append(self._events.get())
        return sum(map(self._taken, outputs))

    def _taken(self, output: EngineOutput) -> int:
        if output.request_id not in self._running:
            return 0  # it was abandoned
        if output.error is not None:
            raise RuntimeError(output.error)
        self._new += len(output.tokens)
        if output.finish is None:
            return 0
        self._running.discard(output.request_id)
        return 1

    def new_tokens(self) -> int:
        """As Counted's."""
        new, self._new = self._new, 0
        return new

    def abandon(self) -> None:
        """As Counted's."""
        for name in self._running:
            self.engine.abort(name)
        self._running.clear()

    def costs(self) -> dict[str, float]:
        """As Engine's; nothing is counted."""
        return {"steps": 0}


class Untouched(engines.Vllm, Counted):
    """vLLM as it comes, with the same files. Its step may hold as many tokens as that of `vllm serve`."""

    def __init__(self, options: Options) -> None:
        from vllm import LLM

        o, cpu = options, {"dtype": "float32", "enforce_eager": True, **CPU_VLLM} if options.cpu else {}
        self.engine = LLM(
            model=o.model, skip_tokenizer_init=True, max_model_len=o.max_len,
            gpu_memory_utilization=0.05 if o.cpu else 0.25, max_num_seqs=o.max_requests,
            max_num_batched_tokens=SERVE_TOKENS, enable_prefix_caching=True,
            **(cpu or {"kv_cache_memory_bytes": o.kv_bytes}),
        ).llm_engine  # fmt: skip
        self.vocab = self.engine.vllm_config.model_config.get_vocab_size()
        self.running: dict[str, Asked] = {}
        self.left: dict[str, int] = {}
        self.count = self._asked = self._told = 0

    def add(self, asked: Asked, sampling: Sampling, seed: int, watched: bool) -> None:
        """As Engine's."""
        self._asked += asked.tokens
        super().add(asked, sampling, seed, watched)

    def new_tokens(self) -> int:
        """As Counted's: of requests that are watched."""
        come = self._asked - sum(self.left.values())
        new, self._told = come - self._told, come
        return new

    def abandon(self) -> None:
        """As Counted's."""
        self.engine.abort_request(list(self.running))
        self._asked -= sum(self.left.values())
        self.running.clear()
        self.left.clear()

    def costs(self) -> dict[str, float]:
        """As Engine's; nothing is counted."""
        return {"steps": 0}


def facts_of(config: Any) -> dict[str, Any]:
    """What a vLLM really runs with (its VllmConfig)."""
    scheduler, cache = config.scheduler_config, config.cache_config
    return {
        "max_num_seqs": scheduler.max_num_seqs, "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": bool(scheduler.async_scheduling),
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
    }  # fmt: skip
