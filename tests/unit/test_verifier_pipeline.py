"""Two steps in flight: answers are those of one step at a time, and a failing step ends its own windows
only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.lib.random_model import random_model
from llm42.cache import BlockPool, KVCache
from llm42.errors import VerifierUnavailable
from llm42.models.config import ModelConfig
from llm42.models.rope import RopeSettings
from llm42.protocol import Commit, SamplingParams, Window
from llm42.verifier.cpu.runner import CPURunner
from llm42.verifier.jobs import Answer
from llm42.verifier.runner import PipelinedRunner, SequenceRows
from llm42.verifier.scheduler import Verifier
from llm42_kernels.cpu import cpu_operators
from tests.support import check_pool

CONFIG = ModelConfig("llama", 101, 64, 96, 2, 4, 2, 16, 1e-5, RopeSettings(), 256)
BUCKETS = (4, 16)


class Delayed:
    """A pipelined runner made of the CPU runner: a queued step is computed when it is waited for, in
    order."""

    def __init__(self, runner: CPURunner, fail_at: int | None = None) -> None:
        self._runner, self._fail_at = runner, fail_at
        self.queued: list[tuple[int, int, list[SequenceRows]]] = []
        self.begun = self.most_in_flight = 0

    def begin(self, bucket: int, sequences: list[SequenceRows]) -> int:
        self.queued.append((self.begun, bucket, sequences))
        self.begun += 1
        self.most_in_flight = max(self.most_in_flight, len(self.queued))
        return self.begun - 1

    def finish(self, pending: int) -> list[list[Any]]:
        number, bucket, sequences = self.queued.pop(0)
        assert number == pending, "steps must be finished in the order they were begun"
        if number == self._fail_at:
            raise RuntimeError("planted failure")
        return self._runner.step(bucket, sequences)

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Any]]:
        return self.finish(self.begin(bucket, sequences))

    def copy_block(self, source: int, target: int) -> None:
        self._runner.copy_block(source, target)


def _runner() -> CPURunner:
    model = random_model(CONFIG, torch.float32, "cpu", 256)
    kv = KVCache(CONFIG.num_layers, 64, 16, CONFIG.num_kv_heads, CONFIG.head_dim, torch.float32)
    return CPURunner(model, cpu_operators({"linear": "row", "lm_head": "row"}), kv, BUCKETS)


def _verifier(runner: Any) -> Verifier:
    pool = BlockPool(64, 16)
    return Verifier(runner, pool, buckets=BUCKETS, max_len=256, vocab_size=101, fingerprint="f")


def _windows() -> list[Window]:
    gen = torch.Generator().manual_seed(0)
    out = []
    for i, (prompt, candidates) in enumerate(((40, 3), (5, 7), (33, 0), (2, 2), (70, 5), (9, 9))):
        ids = torch.randint(0, 101, (prompt + candidates,), generator=gen).tolist()
        params = SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i)
        out.append(Window(f"r{i}", tuple(ids[:prompt]), prompt, tuple(ids[prompt:]), params, 2))
    return out


def _answers(verifier: Verifier, windows: list[Window]) -> list[Answer | Exception]:
    futures = [verifier.submit(w) for w in windows]
    while verifier.step():
        pass
    assert not verifier._active
    return [f.exception() or f.result() for f in futures]  # type: ignore[misc]


def _essence(answer: Any) -> tuple[Any, ...]:
    assert isinstance(answer, Commit), answer
    return answer.accepted, answer.next_token, answer.logprobs


def test_answers_are_those_of_one_step_at_a_time() -> None:
    plain, delayed = _runner(), Delayed(_runner())
    assert isinstance(delayed, PipelinedRunner)
    assert not isinstance(plain, PipelinedRunner)
    want = [_essence(a) for a in _answers(_verifier(plain), _windows())]
    got = [_essence(a) for a in _answers(_verifier(delayed), _windows())]
    assert got == want
    assert delayed.most_in_flight == 2, "full steps must really overlap"


def test_a_single_window_is_not_kept_waiting() -> None:
    delayed = Delayed(_runner())
    assert len(_answers(_verifier(delayed), _windows()[1:2])) == 1
    assert delayed.most_in_flight == 1


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_a_failed_step_ends_its_windows_and_no_others(fail_at: int) -> None:
    want = [_essence(a) for a in _answers(_verifier(_runner()), _windows())]
    verifier = _verifier(Delayed(_runner(), fail_at))
    answers = _answers(verifier, _windows())
    failed = [i for i, a in enumerate(answers) if isinstance(a, VerifierUnavailable)]
    assert 0 < len(failed) < len(answers)
    assert all(_essence(a) == want[i] for i, a in enumerate(answers) if i not in failed)
    again = _answers(verifier, [_windows()[i] for i in failed])
    assert [_essence(a) for a in again] == [want[i] for i in failed], "a retry is answered from a sound cache"
    check_pool(verifier._pool)


def test_closing_settles_what_is_in_flight() -> None:
    delayed = Delayed(_runner())
    verifier = _verifier(delayed).start()
    futures = [verifier.submit(w) for w in _windows()]
    verifier.close()
    assert not delayed.queued
    assert all(f.done() for f in futures)
