"""What goes wrong beside a request: slow and failing verifiers, clients that leave, NaN, a second launch."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llm42.engine.base import Engine, EngineOutput
from llm42.errors import VerificationFailed, VerifierUnavailable
from llm42.host.threads import torch_threads
from llm42.models.weights import LoadedModel
from llm42.protocol import Commit, Failure, Request, SamplingParams, Window
from llm42.sampling import Sampled
from llm42.session.outputs import EngineFailed
from llm42.verifier.cpu.runner import CPURunner
from llm42.verifier.runner import SequenceRows
from llm42.verifier.scheduler import Verifier
from tests.support import (
    Lab,
    Wrapped,
    all_ways,
    answer_of,
    check_blocks,
    check_pool,
    collect,
    differences,
    request_of,
    wait_until,
    window_of,
)


class FailsAt:
    """A runner whose step number `at` writes KV and then raises."""

    def __init__(self, inner: CPURunner, at: set[int]) -> None:
        self.inner, self.at, self.steps = inner, at, 0

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        results = self.inner.step(bucket, sequences)
        self.steps += 1
        if self.steps in self.at:
            raise RuntimeError("planted")
        return results

    def copy_block(self, source: int, target: int) -> None:
        self.inner.copy_block(source, target)


def test_a_step_killed_midway_leaves_no_block_behind(lab: Lab) -> None:
    request = request_of("k", 1, length=40)
    verifier = lab.verifier(wrap=lambda r: FailsAt(r, {1}))
    with torch_threads(1):
        with pytest.raises(VerifierUnavailable, match="planted"):
            answer_of(verifier, window_of(request, []))
        assert verifier.stats().kv_held_blocks == 0
        check_pool(verifier._pool)
        want = lab.oracle(request)
        commit = answer_of(verifier, window_of(request, [], want.tokens[:9]))
    assert isinstance(commit, Commit)
    assert commit.accepted == 9
    assert commit.logprobs == want.logprobs[:10]


@all_ways
def test_failing_steps_are_retried_to_the_oracles_answer(lab: Lab) -> None:
    request = request_of("f", 2)
    verifier = lab.verifier(wrap=lambda r: FailsAt(r, {2, 3, 6})).start()
    answer = asyncio.run(collect(lab.generator(lab.engine(), verifier), request))
    assert differences(answer, lab.oracle(request)) == []
    assert answer.stats.verify_retries >= 2


def nothing_held(engine: Engine, verifier: Verifier) -> bool:
    load, stats = engine.load(), verifier.stats()
    engine_idle = load.running == load.waiting == load.kv_used == 0
    return engine_idle and stats.kv_held_blocks == stats.active == stats.waiting == stats.idle_sequences == 0


@all_ways
def test_a_verifier_that_never_answers_ends_the_request_and_frees_it(lab: Lab) -> None:
    verifier, engine = lab.verifier(wrap=lambda r: FailsAt(r, set(range(99)))).start(), lab.engine()
    with pytest.raises(VerifierUnavailable):
        asyncio.run(collect(lab.generator(engine, verifier, verify_attempts=2), request_of("n", 3)))
    assert wait_until(lambda: nothing_held(engine, verifier))


@all_ways
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_client_that_leaves_frees_everything_within_a_second(lab: Lab, after: int) -> None:
    verifier, engine = lab.verifier().start(), lab.engine()
    generator = lab.generator(engine, verifier)

    async def leave(index: int) -> None:
        stream = generator.generate(request_of(f"leave-{index}", index, length=50, max_tokens=400))
        for _ in range(after):
            await anext(stream)
        if after == 0:
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()

    async def several() -> bool:
        await asyncio.gather(*(leave(i) for i in range(4)))
        return await asyncio.to_thread(wait_until, lambda: nothing_held(engine, verifier))

    assert asyncio.run(several())
    check_pool(verifier._pool)
    check_blocks(engine)


@all_ways
def test_control_a_client_that_stays_holds_memory(lab: Lab) -> None:
    verifier, engine = lab.verifier().start(), lab.engine()

    async def hold() -> bool:
        stream = lab.generator(engine, verifier).generate(request_of("stay", 1, max_tokens=400))
        await anext(stream)
        held = await asyncio.to_thread(wait_until, lambda: nothing_held(engine, verifier), 0.3)
        await stream.aclose()
        return held

    assert not asyncio.run(hold())


class Slow(Wrapped):
    """Answers one call, and the others only when nobody waits any more."""

    calls = 0

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        self.calls += 1
        if self.calls > 1:
            await asyncio.Event().wait()
        return await super().verify(windows)


class Recorder:
    """An engine that notes how far ahead of the last commit it decodes."""

    def __init__(self, inner: Engine) -> None:
        self.inner, self.furthest, self.limit = inner, 0, 0
        self.settings = inner.settings

    def submit(self, request: Request, sink: Callable[[EngineOutput], None], limit: int) -> None:
        def watch(output: EngineOutput) -> None:
            if request.deterministic:
                self.furthest = max(self.furthest, output.start + len(output.tokens))
            sink(output)

        self.inner.submit(request, watch, limit)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@all_ways
def test_a_slow_verifier_holds_its_own_requests_only(lab: Lab) -> None:
    engine = Recorder(lab.engine())
    generator = lab.generator(engine, Slow(lab.verifier().start()), max_window=16, lookahead=24)  # type: ignore[arg-type]
    det = request_of("slow", 4, max_tokens=100)
    best = replace(request_of("fast", 5, max_tokens=200), deterministic=False)

    async def both() -> tuple[int, int]:
        committed = 0

        async def deterministic() -> None:
            nonlocal committed
            async for delta in generator.generate(det):
                committed += len(delta.token_ids)

        task = asyncio.create_task(deterministic())
        answer = await collect(generator, best)
        seen = committed
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return len(answer.tokens), seen

    done, committed = asyncio.run(both())
    assert done == 200  # the best-effort stream ended while the other one waited for its verifier
    assert committed < 100
    assert engine.furthest <= committed + 24 + 24  # at most one commit happened between the two readings


def nan_model(lab: Lab, token: int) -> LoadedModel:
    """The tiny model with a NaN embedding for one token."""
    embed = lab.model.weights.embed.clone()
    embed[token] = float("nan")
    return replace(lab.model, weights=replace(lab.model.weights, embed=embed))


def test_nan_ends_one_request_and_no_other(lab: Lab) -> None:
    poison = 501
    model = nan_model(lab, poison)
    greedy = SamplingParams()
    fine = [request_of(f"fine-{i}", i, sampling=greedy, max_tokens=24) for i in range(3)]
    assert all(poison not in (*r.prompt, *lab.oracle(r).tokens) for r in fine)
    bad = replace(request_of("bad", 9, sampling=greedy), prompt=(5, 6, poison, 7))
    bad_best = replace(bad, request_id="bad-best", deterministic=False)
    generator = lab.generator(lab.engine(model=model), lab.verifier(model=model).start())

    async def all_of_them() -> list[object]:
        runs = (collect(generator, r) for r in (*fine, bad, bad_best, *fine_again))
        return await asyncio.gather(*runs, return_exceptions=True)

    fine_again = [replace(r, request_id=f"{r.request_id}-again") for r in fine]
    results = asyncio.run(all_of_them())
    assert isinstance(results[3], VerificationFailed)
    assert results[3].code == "non_finite_logits"
    assert isinstance(results[4], EngineFailed)
    for request, answer in zip((*fine, *fine_again), (*results[:3], *results[5:]), strict=True):
        assert differences(answer, lab.oracle(request)) == []  # type: ignore[arg-type]


LAUNCH = """
import asyncio, sys
from pathlib import Path
from tests.support import *
lab = Lab.make(Path(sys.argv[1]))
generator = lab.generator(lab.engine(corrupt_share=0.2), lab.verifier().start())
async def main():
    return await asyncio.gather(*(collect(generator, request_of(str(i), i)) for i in range(4)))
for answer in asyncio.run(main()):
    print(answer.tokens, [x.logprob.hex() for x in answer.logprobs])
lab.close()
"""


@pytest.mark.slow
def test_two_launches_give_equal_bits(tmp_path: Path) -> None:
    outputs = []
    for seed in ("1", "2"):
        path = os.pathsep.join((str(Path(__file__).parents[2]), *filter(None, sys.path)))
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", LAUNCH, str(tmp_path / seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 4
