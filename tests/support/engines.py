"""Fast paths for tests: what takes their outputs, and vLLM's, which tests share."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from llm42.cache import BlockPool
from llm42.config import Settings
from llm42.engine.base import Engine, EngineOutput
from llm42.engine.corrupt import CorruptingEngine
from llm42.engine.torch.engine import TorchEngine
from llm42.engine.vllm.engine import VllmEngine
from llm42.protocol import FinishReason
from llm42.session.load import Load, Progress, Way
from tests.support.patience import wait_until

ENGINES = ("torch", pytest.param("vllm", marks=pytest.mark.vllm))
both_engines = pytest.mark.parametrize("lab", ENGINES, indirect=True)
"""For tests that hold whatever proposes the candidates: the torch engine, and vLLM where it is installed."""
both_ways = pytest.mark.parametrize("lab", ["torch", "direct", "switching"], indirect=True)
"""For tests that hold whichever way a token is committed: verified, or decoded by the verifier itself, or the
one and the other within a request, drawn at each commit."""
all_ways = pytest.mark.parametrize("lab", [*ENGINES, "direct", "switching"], indirect=True)
"""For tests that hold for both."""
pinned_ways = pytest.mark.parametrize("lab", [*ENGINES, "direct"], indirect=True)
"""The same without requests that change their way."""
switching_ways = pytest.mark.parametrize("lab", ["switching"], indirect=True)
"""These alone."""


class RandomWays:
    """Draws the way whenever it is asked; counts how often it was another one than before."""

    def __init__(self, seed: int, share: float = 0.5) -> None:
        """share: of the decisions, those for direct."""
        self._random, self._share = random.Random(seed), share
        self.changes = 0

    def __call__(self, request: Progress, load: Load) -> Way:
        way: Way = "direct" if self._random.random() < self._share else "verify"
        self.changes += request.way is not None and way != request.way
        return way


@dataclass
class Client:
    """What one request's sink heard: the output of its present epoch."""

    outputs: list[EngineOutput] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    epoch: int = 0
    finish: FinishReason | None = None
    error: str | None = None

    def __call__(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        self.finish, self.error = output.finish, output.error
        if output.epoch == self.epoch and output.error is None:
            assert output.start == len(self.tokens), "output tokens are missing or came twice"
            self.tokens += output.tokens


def vllm_missing() -> str | None:
    """Why tests with vLLM cannot run here, or None."""
    if importlib.util.find_spec("vllm") is not None:
        return None
    return "vLLM is not installed here; `make test-vllm` runs this where it is"


def vllm_settings(**more: Any) -> dict[str, Any]:
    """engine.vllm for a test on a CPU: a small cache, small blocks, prompts in chunks."""
    arguments = {"kv_cache_memory_bytes": 256 << 20, "block_size": 32} | more.pop("extra_args", {})
    common = {"enforce_eager": True, "max_num_seqs": 32, "max_num_batched_tokens": 64}
    # vLLM checks this share of the memory before it looks at kv_cache_memory_bytes
    return common | {"gpu_memory_utilization": 0.05, "extra_args": arguments} | more


class VllmPool:
    """vLLM engines that tests share, since one takes half a minute to start."""

    def __init__(self) -> None:
        self._engines: dict[str, VllmEngine] = {}

    def get(self, settings: Settings, **vllm: Any) -> VllmEngine:
        """An engine with these vLLM settings that nobody uses; started when there is none yet."""
        engine = {"kind": "vllm", "vllm": vllm_settings(**vllm)}
        wanted = Settings.load(settings.model_dump(mode="json") | {"engine": engine})
        key = wanted.model_dump_json()
        if key in self._engines and not self._engines[key].alive:
            self._engines.pop(key).close()
        if key not in self._engines:
            self._engines[key] = VllmEngine(wanted).start()
        found = self._engines[key]
        wait_until(lambda: not found._streams and found.load().kv_used == 0)
        assert not found._streams, "an earlier test has left a request behind"
        return found

    def close(self) -> None:
        """Ends them all."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()


def bare(engine: Any) -> Any:
    """The engine itself, without the test plant around it."""
    return engine.engine if isinstance(engine, CorruptingEngine) else engine


def check_blocks(engine: Engine) -> None:
    """The torch engine's own accounting of its cache; vLLM's is its own affair."""
    if isinstance(bare(engine), TorchEngine):
        check_pool(bare(engine)._pool)


def check_pool(pool: BlockPool) -> None:
    """Every block is in exactly one state, and the index agrees."""
    free, idle = set(pool._free), set(pool._idle)
    assert len(free) == len(pool._free), "a block is free twice"
    assert not free & idle, "a block is free and cached"
    for block in range(pool.num_blocks):
        assert (pool._refs[block] == 0) == (block in free or block in idle), f"block {block} lost"
        assert (block in free) <= (pool._keys[block] is None), f"free block {block} is published"
    assert all(pool._keys[block] == key for key, block in pool._index.items()), "index and keys disagree"
