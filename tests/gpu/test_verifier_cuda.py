"""The verifier over the CUDA runner: two steps in flight give the answers of one at a time, and of one
alone."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.lib.random_model import SMALL_64, random_model
from llm42.cache import BlockPool, KVCache
from llm42.protocol import Commit, SamplingParams, Window
from llm42.verifier.cuda.runner import CudaRunner
from llm42.verifier.runner import PipelinedRunner
from llm42.verifier.scheduler import Verifier
from llm42_kernels.cuda import cuda_operators

BUCKETS = (1, 8, 64, 256)


class OneAtATime:
    """The same runner without `begin` and `finish`."""

    def __init__(self, runner: CudaRunner) -> None:
        self.step, self.copy_block = runner.step, runner.copy_block


def _verifier(alone: bool) -> Verifier:
    c = SMALL_64
    kv = KVCache(c.num_layers, 200, 64, c.num_kv_heads, c.head_dim, torch.bfloat16, "cuda")
    runner = CudaRunner(random_model(c), cuda_operators(), kv, BUCKETS, 1024)
    assert isinstance(runner, PipelinedRunner)
    pool = BlockPool(200, 64)
    return Verifier(
        OneAtATime(runner) if alone else runner,
        pool, buckets=BUCKETS, max_len=1024, vocab_size=c.vocab_size, fingerprint="f",
    )  # fmt: skip


def _windows() -> list[Window]:
    gen = torch.Generator().manual_seed(0)
    out = []
    for i in range(24):
        prompt, candidates = 30 + 37 * i % 600, i % 32
        ids = torch.randint(0, SMALL_64.vocab_size, (prompt + candidates,), generator=gen).tolist()
        params = SamplingParams(temperature=0.9 if i % 3 else 0.0, top_p=0.9 if i % 2 else 1.0, seed=i)
        out.append(Window(f"r{i}", tuple(ids[:prompt]), prompt, tuple(ids[prompt:]), params, i % 3))
    return out


def _essence(answer: Any) -> tuple[Any, ...]:
    assert isinstance(answer, Commit), answer
    return answer.accepted, answer.next_token, answer.logprobs


def test_pipelined_and_single_steps_answer_alike() -> None:
    got, flights = _verifier(False), []
    collect = got._collect
    got._collect = lambda flight: (flights.append(flight), collect(flight))[1]  # type: ignore[method-assign]
    windows = _windows()
    with_two = [_essence(a) for a in _run(got, windows)]
    with_one = [_essence(a) for a in _run(_verifier(True), windows)]
    each_alone = [_essence(_run(_verifier(True), [w])[0]) for w in windows[::6]]
    assert with_two == with_one
    assert with_two[::6] == each_alone
    assert len(flights) > 5


def _run(verifier: Verifier, windows: list[Window]) -> list[Any]:
    futures = [verifier.submit(w) for w in windows]
    while verifier.step():
        pass
    return [f.result() for f in futures]
