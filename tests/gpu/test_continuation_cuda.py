"""What the verifier decodes by itself on a GPU, two steps in flight, is what it says one row at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.lib.random_model import SMALL_64, random_model
from llm42.cache import BlockPool, KVCache
from llm42.protocol import Commit, SamplingParams, TokenLogprob, Window
from llm42.verifier.cuda.forward import fed
from llm42.verifier.cuda.runner import CudaRunner
from llm42.verifier.cuda.tallies import Tallies
from llm42.verifier.scheduler import Verifier
from llm42_kernels.cuda import cuda_operators
from tests.support import check_pool

SMALL = replace(SMALL_64, tie_word_embeddings=False)
"""A random model whose head is its embedding says the same id for ever, whatever is biased or penalised."""
BUCKETS = (1, 8, 24, 64, 96, 256)
OUTPUT = 40

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.1, top_p=0.8, top_k=50, seed=4),
    SamplingParams(temperature=0.7, min_p=0.02, repetition_penalty=1.3, seed=2**40),
    SamplingParams(frequency_penalty=0.5, presence_penalty=0.2, logit_bias=((11, 40.0),)),
    SamplingParams(temperature=0.9, seed=9, min_tokens=12, min_tokens_banned=tuple(range(0, 49152, 2))),
]


class Alone:
    """The same runner without `begin` and `finish`: no token is ever fed on the device."""

    def __init__(self, runner: CudaRunner) -> None:
        self.step, self.copy_block = runner.step, runner.copy_block


@pytest.fixture(scope="module")
def runner() -> CudaRunner:
    c = SMALL
    with torch.inference_mode():
        kv = KVCache(c.num_layers, 300, 64, c.num_kv_heads, c.head_dim, torch.bfloat16, "cuda")
        return CudaRunner(random_model(c), cuda_operators(), kv, BUCKETS, 1024)


def _verifier(runner: Any, blocks: int = 300) -> Verifier:
    pool = BlockPool(blocks, 64)
    vocab = SMALL.vocab_size
    return Verifier(runner, pool, buckets=BUCKETS, max_len=1024, vocab_size=vocab, fingerprint="f")


def _prompt(i: int) -> tuple[int, ...]:
    gen = torch.Generator().manual_seed(i)
    return tuple(torch.randint(0, SMALL.vocab_size, (20 + 41 * i % 300,), generator=gen).tolist())


Output = tuple[list[int], list[TokenLogprob]]


def _one_row_at_a_time(runner: CudaRunner, i: int, params: SamplingParams) -> Output:
    """Windows without candidates, by a verifier that nobody else uses, not pipelined."""
    verifier, prompt = _verifier(Alone(runner)), _prompt(i)
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for _ in range(OUTPUT):
        future = verifier.submit(Window("r", (*prompt, *tokens), len(prompt), (), params, i % 3))
        while not future.done():
            verifier.step()
        commit = future.result()
        assert isinstance(commit, Commit), commit
        tokens.append(commit.next_token)
        logprobs += commit.logprobs
    return tokens, logprobs


class Reader:
    def __init__(self, verifier: Verifier, i: int, params: SamplingParams, credit: int = OUTPUT) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt = _prompt(i)
        last = len(self.prompt) + OUTPUT
        window = Window(
            f"r{i}", self.prompt, len(self.prompt), (), params, i % 3, credit=credit, max_len=last
        )
        verifier.follow(window, self)

    def __call__(self, answer: Any) -> None:
        assert isinstance(answer, Commit), answer
        assert answer.base == len(self.prompt) + len(self.tokens)
        self.tokens += [answer.next_token, *answer.decoded]
        self.logprobs += answer.logprobs


def _run(verifier: Verifier) -> None:
    while verifier.step():
        pass


@pytest.mark.parametrize("params", PARAMS)
def test_alone(runner: CudaRunner, params: SamplingParams) -> None:
    verifier = _verifier(runner)
    reader = Reader(verifier, 1, params)
    _run(verifier)
    assert (reader.tokens, reader.logprobs) == _one_row_at_a_time(runner, 1, params)


KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8),
    "restricted": SamplingParams(temperature=0.8, top_p=0.95, top_k=50, presence_penalty=0.5),
    "repeated": SamplingParams(temperature=0.5, repetition_penalty=1.2, frequency_penalty=0.3),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_64_beside_windows(runner: CudaRunner, kind: str) -> None:
    """They come one after the other, with prompts of other requests and windows in between."""
    verifier, readers = _verifier(runner), []
    params = [replace(KINDS[kind], seed=i) for i in range(64)]
    futures = []
    for i in range(64):
        readers.append(Reader(verifier, i, params[i]))
        if i % 3 == 0:
            other = _prompt(100 + i)
            futures.append(verifier.submit(Window(f"w{i}", other[:-7], 5, other[-7:], params[i])))
        verifier.step()
    _run(verifier)
    assert all(isinstance(f.result(), Commit) for f in futures)
    for i in range(0, 64, 7):
        assert (readers[i].tokens, readers[i].logprobs) == _one_row_at_a_time(runner, i, params[i]), i
    check_pool(verifier._pool)


def test_preempted_ones_go_on_as_if_nothing_had_happened(runner: CudaRunner) -> None:
    verifier = _verifier(runner, blocks=12)
    params = [replace(KINDS["repeated" if i % 2 else "greedy"], seed=i) for i in range(12)]
    readers = [Reader(verifier, i, params[i]) for i in range(12)]
    _run(verifier)
    assert verifier.stats().preemptions > 0
    for i in range(0, 12, 3):
        assert (readers[i].tokens, readers[i].logprobs) == _one_row_at_a_time(runner, i, params[i]), i


def test_control_a_wrong_row_is_fed(runner: CudaRunner) -> None:
    """Negative control: every follower gets its neighbour's token."""
    pack = {b: p.pack for b, p in runner._packers.items()}
    try:
        for bucket, packer in runner._packers.items():

            def shifted(host: Any, size: int, sequences: Any, bucket: int = bucket) -> Any:
                late = [s for s in sequences if s.feed >= 0]
                for s in late:
                    s.feed = (s.feed + 1) % len(late)
                return pack[bucket](host, size, sequences)

            packer.pack = shifted  # type: ignore[method-assign]
        verifier, params = _verifier(runner), SamplingParams()
        readers = [Reader(verifier, i, params) for i in range(4)]
        _run(verifier)
    finally:
        for bucket, packer in runner._packers.items():
            packer.pack = pack[bucket]  # type: ignore[method-assign]
    assert any(r.tokens != _one_row_at_a_time(runner, i, params)[0] for i, r in enumerate(readers))


@pytest.mark.parametrize("kind", list(KINDS))
def test_two_steps_are_in_flight(runner: CudaRunner, kind: str) -> None:
    """What makes it fast, and what the comparisons above are about."""
    begin, feeds = runner.begin, []

    def counting(bucket: int, sequences: Any) -> Any:
        feeds.append([s.feed for s in sequences])
        return begin(bucket, sequences)

    runner.begin = counting  # type: ignore[method-assign]
    try:
        verifier = _verifier(runner)
        readers = [Reader(verifier, i, KINDS[kind]) for i in range(3)]
        _run(verifier)
    finally:
        runner.begin = begin  # type: ignore[method-assign]
    assert all(len(r.tokens) == OUTPUT for r in readers)
    assert sum(f >= 0 for step in feeds for f in step) >= 3 * (OUTPUT - 4)


def test_control_a_token_is_not_counted(runner: CudaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of penalties: what is fed is counted as if it were always the same id."""
    add = Tallies._add
    monkeypatch.setattr(Tallies, "_add", lambda self, rows, ids: add(self, rows, ids * 0))
    # 5, 6, 5, ... if they are counted
    params = SamplingParams(frequency_penalty=2.0, logit_bias=((5, 90.0), (6, 89.0)))
    verifier = _verifier(runner)
    readers = [Reader(verifier, i, params) for i in range(4)]
    _run(verifier)
    monkeypatch.undo()
    assert any(r.tokens != _one_row_at_a_time(runner, i, params)[0] for i, r in enumerate(readers))


def test_a_step_with_penalties_does_not_wait(runner: CudaRunner) -> None:
    """Nothing between `begin` and its return may synchronise, the counting of a new sequence included."""
    verifier = _verifier(runner)
    readers = [Reader(verifier, i, KINDS["restricted"]) for i in range(3)]
    begin = runner.begin

    def strict(bucket: int, sequences: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return begin(bucket, sequences)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    _run(verifier)  # compiled, and memory is there
    runner.begin = strict  # type: ignore[method-assign]
    try:
        again = [Reader(verifier, i + 10, KINDS["restricted"]) for i in range(3)]
        _run(verifier)
    finally:
        runner.begin = begin  # type: ignore[method-assign]
    assert all(len(r.tokens) == OUTPUT for r in [*readers, *again])


def test_fed() -> None:
    tokens, sampled = torch.tensor([5, 6, 7]).int(), torch.tensor([1, 2, 3, 4]).int()
    feed = torch.tensor([-1, 3, 0]).int()
    assert fed(tokens.cuda(), feed.cuda(), sampled.cuda()).tolist() == [5, 4, 1]
