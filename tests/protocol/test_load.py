"""Many requests at once: arrivals, windows, steps and caches are drawn at random, clients leave, memory and
queues are short, verifiers wait. Whoever gets an answer gets the oracle's."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from llm42 import cache
from llm42.cache import KVCache
from llm42.engine.base import Engine, EngineOutput
from llm42.engine.torch.engine import Running, TorchEngine
from llm42.errors import Overloaded
from llm42.host.threads import torch_threads
from llm42.protocol import Commit, Failure, Request, Window
from llm42.sampling import Sampled
from llm42.session import drive
from llm42.session.driver import Generator
from llm42.session.machine import Session
from llm42.verifier.cpu.runner import CPURunner
from llm42.verifier.runner import SequenceRows
from llm42.verifier.scheduler import Verifier
from tests.support import (
    GREEDY,
    PATIENCE_S,
    PENALISED,
    SAMPLED,
    Answer,
    Lab,
    Wrapped,
    all_ways,
    check_blocks,
    check_pool,
    collect,
    differences,
    pinned_ways,
    prompt_of,
    request_of,
    sweep,
    switching_ways,
    window_of,
)

KINDS = (GREEDY, SAMPLED, PENALISED)


async def after(seconds: float, generator: Generator, request: Request) -> Answer:
    """One request that arrives later."""
    await asyncio.sleep(seconds)
    return await collect(generator, request)


def serve(generator: Generator, requests: Sequence[Request], spread: float = 0.0) -> list[Answer]:
    """All requests, arriving within `spread` seconds."""
    rng = random.Random(len(requests))

    async def together() -> list[Answer]:
        return list(await asyncio.gather(*(after(spread * rng.random(), generator, r) for r in requests)))

    return asyncio.run(together())


def all_free(engine: Engine, verifier: Verifier) -> bool:
    """Whether nothing is held, now."""
    load, stats = engine.load(), verifier.stats()
    busy = load.running, load.waiting, load.kv_used, stats.kv_held_blocks, stats.active, stats.waiting
    return not any((*busy, stats.idle_sequences))


async def freed(engine: Engine, verifier: Verifier, seconds: float = PATIENCE_S) -> bool:
    """Whether nothing is held, within `seconds`."""
    end = time.monotonic() + seconds
    while not all_free(engine, verifier):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.01)
    return True


class RandomWindows(Session):
    """Asks for a window of a random length each time."""

    def due(self, now: float) -> Window | None:
        rng = random.Random(f"{self.request.request_id}/{len(self.committed)}")
        self.target = rng.choice([1, 2, 5, 16, 33, 128])
        window = super().due(now)
        if window is not None and window.candidates and rng.random() < 0.5:  # fewer than there are
            kept = window.candidates[: rng.randrange(1, len(window.candidates) + 1)]
            self.in_flight = window = replace(window, candidates=kept)
        return window


def draw_request(rng: random.Random, index: int) -> Request:
    """Few distinct ones, so that caches are hit and the oracle need not decode each."""
    seed, sampling = rng.randrange(4), KINDS[rng.randrange(3)]
    length, tokens = (3, 16, 33, 100)[seed], (1, 20, 50)[rng.randrange(3)]
    request = request_of(f"a{index}", seed, length=length, max_tokens=tokens, sampling=sampling)
    return replace(request, priority=rng.randrange(2))


@pinned_ways
@pytest.mark.parametrize("seed", sweep(range(6), quick=(3,)))
def test_random_load_equals_the_oracle(lab: Lab, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    play_random_load(lab, monkeypatch, seed)


@switching_ways
@pytest.mark.parametrize("seed", sweep((1, 3), quick=(3,)))
def test_random_load_of_changing_ways(lab: Lab, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    play_random_load(lab, monkeypatch, seed)


def play_random_load(lab: Lab, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Random windows, credit, prompt chunks, step sizes, corruption and arrivals; best-effort companions; a
    third of the clients leave early."""
    monkeypatch.setattr(drive, "Session", RandomWindows)
    rng = random.Random(seed)
    engine = lab.engine(
        prefill_chunk=rng.choice([1, 9, 64]),
        corrupt_share=rng.choice([0.0, 0.05, 0.3]),
        kv_tokens=rng.choice([256, 4096]),
        max_batch=rng.choice([3, 32]),
    )
    buckets = rng.choice([(8,), (16, 48), (8, 16, 32, 64, 128)])
    verifier = lab.verifier(rng.choice([256, 4096]), buckets=buckets).start()
    lengths = {"min_window": 1, "max_window": 128, "lookahead": 128, "credit": rng.choice([1, 5, 64])}
    generator = lab.generator(engine, verifier, **lengths)
    requests = [draw_request(rng, i) for i in range(14)]
    leavers = [replace(draw_request(rng, 100 + i), max_tokens=90) for i in range(5)]
    others = [replace(draw_request(rng, 200 + i), deterministic=False) for i in range(4)]

    async def everyone() -> tuple[list[Answer], bool]:
        leaving = [asyncio.create_task(after(rng.random() / 2, generator, r)) for r in leavers]
        for task in leaving:
            asyncio.get_running_loop().call_later(0.1 + rng.random(), task.cancel)
        wanted = (*requests, *others)
        results = await asyncio.gather(*(after(rng.random() / 2, generator, r) for r in wanted))
        await asyncio.gather(*leaving, return_exceptions=True)
        return results, await freed(engine, verifier)

    answers, free = asyncio.run(everyone())
    assert lab.wrong(answers[: len(requests)], requests) == []
    assert free
    check_pool(verifier._pool)
    check_blocks(engine)


def split_head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Logits summed in two halves of K; float32, so that no rounding hides it."""
    half = x.shape[1] // 2
    return x[:, :half].float() @ weight[:, :half].T + x[:, half:].float() @ weight[:, half:].T


class SplitsWhenHalfFull:
    """A runner that sums the logits in another order when at most half of a step's rows are in use.

    The row-count plant of one operator seldom changes a bit of this model: only the padding of attention's
    output is zero, and the tiny product after it rounds to the same values.
    """

    def __init__(self, inner: CPURunner) -> None:
        self.inner, self.whole = inner, inner.ops
        self.split = replace(inner.ops, lm_head=split_head)

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        half_full = 2 * sum(s.count for s in sequences) <= bucket
        self.inner.ops = self.split if half_full else self.whole
        return self.inner.step(bucket, sequences)

    def copy_block(self, source: int, target: int) -> None:
        self.inner.copy_block(source, target)


@pytest.fixture(scope="module")
def unrounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Activations in float32: rounding to bfloat16 would hide most of what another order of a sum changes,
    and which part it hides is the machine's affair."""
    lab = Lab.make(tmp_path_factory.mktemp("unrounded"), dtype="float32")
    yield lab
    lab.close()


def answers_of(verifier: Verifier, windows: Sequence[Window]) -> list[Commit | Failure]:
    """Steps a verifier that has no thread until all windows are answered: they share its steps, on every
    machine."""
    futures = [verifier.submit(window) for window in windows]
    while not all(future.done() for future in futures):
        verifier.step()
    return [future.result() for future in futures]


@pytest.mark.parametrize("plant", [None, "row-count", "attention-split", "attention-tile"])
def test_control_a_verifier_whose_rows_depend_on_the_load_is_noticed(
    unrounded: Lab, plant: str | None
) -> None:
    """Each window alone, then all at once."""
    lab = unrounded
    requests = [request_of(f"l{i}", i % 4, length=(3, 16, 33, 100)[i % 4]) for i in range(12)]
    # one step size: how many of its rows are in use depends on the load
    if plant == "row-count":
        verifier = lab.verifier(buckets=(128,), wrap=SplitsWhenHalfFull)
    else:
        verifier = lab.verifier(buckets=(128,), plants=() if plant is None else (plant,))
    windows = [window_of(r, [], lab.oracle(r).tokens[: 5 + 5 * (i % 3)]) for i, r in enumerate(requests)]
    alone = [replace(window, request_id=f"{window.request_id}-alone") for window in windows[:4]]
    with torch_threads(lab.settings.verifier.threads):
        got = [answers_of(verifier, [window])[0] for window in alone] + answers_of(verifier, windows)

    def is_the_oracles(answer: Commit | Failure, request: Request) -> bool:
        assert isinstance(answer, Commit), answer
        count, right = answer.accepted + 1, lab.oracle(request)
        return (answer.next_token, answer.logprobs) == (right.tokens[count - 1], right.logprobs[:count])

    right = [is_the_oracles(a, r) for a, r in zip(got, [*requests[:4], *requests], strict=True)]
    assert all(right) == (plant is None)


def test_requests_with_a_common_prompt_share_its_blocks(lab: Lab) -> None:
    common = prompt_of(50, 96)
    requests = [replace(request_of(f"s{i}", 1), prompt=(*common, 100 + i, 7)) for i in range(6)]
    verifier, engine = lab.verifier().start(), lab.engine()
    generator = lab.generator(engine, verifier)
    first = serve(generator, requests[:1])
    before = verifier.stats().cached_rows, engine._pool.hits
    answers = first + serve(generator, requests[1:])
    assert lab.wrong(answers, requests) == []
    assert verifier.stats().cached_rows - before[0] >= 5 * 96
    assert engine._pool.hits - before[1] >= 5 * 96 // 16


def test_control_a_cache_that_ignores_what_came_before_a_block_is_noticed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts A C, B D, B C: with such keys, the third one finds the first one's C."""

    def shallow(parent: bytes, tokens: Sequence[int]) -> bytes:
        return hashlib.sha256(array("q", tokens).tobytes()).digest()

    def answers() -> list[str]:
        a, b, c, d = (prompt_of(60 + i, 16) for i in range(4))
        prompts = ((*a, *c, 9), (*b, *d, 9), (*b, *c, 9))
        requests = [replace(request_of(f"abc{i}", 1), prompt=p) for i, p in enumerate(prompts)]
        generator = lab.generator(lab.engine(), lab.verifier().start())
        return lab.wrong([serve(generator, [r])[0] for r in requests], requests)

    assert answers() == []
    monkeypatch.setattr(cache, "block_key", shallow)
    assert answers()


@all_ways
def test_three_turns_reuse_generated_text(lab: Lab) -> None:
    verifier = lab.verifier().start()
    generator = lab.generator(lab.engine(corrupt_share=0.1), verifier)
    prompt: tuple[int, ...] = prompt_of(3, 30)
    for turn in range(3):
        request = replace(request_of(f"turn{turn}", 1, max_tokens=40), prompt=prompt)
        cached = verifier.stats().cached_rows
        (answer,) = serve(generator, [request])
        assert differences(answer, lab.oracle(request)) == []
        first = verifier.stats().cached_rows - cached
        # what the turn before left: all of its full blocks, generated ones included
        assert first >= (len(prompt) - 4) // 16 * 16 if turn else True
        prompt = (*prompt, *answer.tokens, 20 + turn, 21, 22)


def test_control_another_first_token_finds_nothing(lab: Lab) -> None:
    verifier = lab.verifier().start()
    generator = lab.generator(lab.engine(), verifier)
    request = request_of("one", 3, length=70)
    serve(generator, [request])
    hits = verifier.stats().cache_hits
    other = replace(request, request_id="two", prompt=(request.prompt[0] ^ 1, *request.prompt[1:]))
    assert lab.wrong(serve(generator, [other]), [other]) == []
    assert verifier.stats().cache_hits == hits


@pytest.mark.parametrize(
    ("engine_short", "verifier_short"),
    sweep([(False, False), (False, True), (True, False), (True, True)], quick=[(False, False), (True, True)]),
)
def test_demand_of_three_times_the_memory(lab: Lab, engine_short: bool, verifier_short: bool) -> None:
    """The counters say who was short; with enough of it nothing is evicted and nobody preempted."""
    requests = [request_of(f"m{i}", i, length=60, max_tokens=60) for i in range(9)]
    short, ample = sum(len(r.prompt) + r.max_tokens for r in requests) // 3, 8192
    verifier = lab.verifier(short if verifier_short else ample).start()
    engine = lab.engine(kv_tokens=short if engine_short else ample)
    assert lab.wrong(serve(lab.generator(engine, verifier), requests), requests) == []
    assert (verifier.stats().evictions > 0) == verifier_short
    assert (engine.load().preemptions > 0) == engine_short


class Sleepy:
    """A runner whose steps take a given time longer."""

    def __init__(self, inner: CPURunner, seconds: float) -> None:
        self.inner, self.seconds = inner, seconds

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        time.sleep(self.seconds)
        return self.inner.step(bucket, sequences)

    def copy_block(self, source: int, target: int) -> None:
        self.inner.copy_block(source, target)


@all_ways
def test_an_overloaded_verifier_is_asked_again(lab: Lab) -> None:
    verifier = lab.verifier(wrap=lambda r: Sleepy(r, 0.02)).start()
    verifier._max_waiting = 1
    requests = [request_of(f"o{i}", i % 3, max_tokens=16) for i in range(5)]
    answers = serve(lab.generator(lab.engine(), verifier, verify_attempts=9), requests)
    assert lab.wrong(answers, requests) == []
    assert sum(a.stats.verify_retries for a in answers) > 0
    verifier._max_waiting = 0
    with pytest.raises(Overloaded):
        verifier.submit(window_of(requests[0], []))


@all_ways
def test_a_client_that_leaves_while_a_step_runs_frees_everything(lab: Lab) -> None:
    verifier = lab.verifier(wrap=lambda r: Sleepy(r, 0.2)).start()
    engine = lab.engine()
    generator = lab.generator(engine, verifier)
    stay = request_of("stay", 1, max_tokens=12)

    async def scene() -> tuple[Answer, bool]:
        staying = asyncio.create_task(collect(generator, stay))
        leaving = asyncio.create_task(collect(generator, request_of("go", 2, length=60, max_tokens=300)))
        while not verifier.stats().active:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # in the middle of a step
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        answer = await staying
        return answer, await freed(engine, verifier)

    answer, free = asyncio.run(scene())
    assert differences(answer, lab.oracle(stay)) == []
    assert free
    check_pool(verifier._pool)


class Gate(Wrapped):
    """Answers nothing until it is opened."""

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier)
        self.opened = asyncio.Event()

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        await self.opened.wait()
        return await super().verify(windows)


class Granted:
    """An engine that notes outputs beyond what the session has granted, and the furthest one."""

    def __init__(self, inner: TorchEngine) -> None:
        self.inner, self.settings = inner, inner.settings
        self.granted = self.furthest = 0
        self.beyond: list[EngineOutput] = []

    def submit(self, request: Request, sink: Callable[[EngineOutput], None], limit: int) -> None:
        def watch(output: EngineOutput) -> None:
            if request.deterministic:
                self.furthest = max(self.furthest, output.start + len(output.tokens))
                if self.furthest > self.granted:
                    self.beyond.append(output)
            sink(output)

        if request.deterministic:
            self.granted = limit
        self.inner.submit(request, watch, limit)

    def extend(self, request_id: str, limit: int) -> None:
        self.granted = max(self.granted, limit)
        self.inner.extend(request_id, limit)

    def rollback(self, request_id: str, output: Sequence[int], epoch: int, limit: int) -> None:
        """Grants as well: whether there is one depends on this machine's products."""
        self.granted = max(self.granted, limit)
        self.inner.rollback(request_id, output, epoch, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("lookahead", [24, 50])
def test_the_fast_path_waits_at_the_lookahead_bound_and_costs_others_no_step(
    lab: Lab, lookahead: int
) -> None:
    engine = Granted(lab.engine())
    request = request_of("gated", 4, max_tokens=80)
    best = replace(request_of("best", 5, max_tokens=60), deterministic=False)

    async def scene() -> tuple[Answer, int]:
        gate = Gate(lab.verifier().start())
        generator = lab.generator(engine, gate, max_window=16, lookahead=lookahead)  # type: ignore[arg-type]
        task = asyncio.create_task(collect(generator, request))
        while engine.furthest < lookahead:
            await asyncio.sleep(0.005)
        before = engine.load().steps
        await asyncio.sleep(0.1)
        assert engine.load().steps == before
        assert engine.furthest == lookahead
        await collect(generator, best)
        steps = engine.load().steps - before
        gate.opened.set()
        return await task, steps

    answer, steps = asyncio.run(scene())
    alone = lab.engine()
    asyncio.run(collect(lab.generator(alone, None), best))
    assert steps == alone.load().steps == best.max_tokens
    assert engine.beyond == []
    assert differences(answer, lab.oracle(request)) == []


class PoisonedOnce(TorchEngine):
    """Proposes a token whose embedding is NaN as output token 10."""

    poison = 501

    def _sample(self, running: Running, logits: torch.Tensor) -> None:
        if running.request.deterministic and running.output_len == 10 and running.epoch == 0:
            logits = torch.zeros_like(logits)
            logits[self.poison] = 1.0
        super()._sample(running, logits)


def rollbacks_after_poison(lab: Lab, verifier: Verifier, request: Request) -> int:
    engine = PoisonedOnce(verifier._runner.model, lab.settings.engine)  # type: ignore[attr-defined]
    lab.parts.append(engine)
    generator = lab.generator(engine.start(), verifier)
    (answer,) = serve(generator, [request])
    assert differences(answer, lab.oracle(request)) == []
    # the prompt and output are now a cached prefix of the fast path
    best = replace(request, request_id="best", deterministic=False, prompt=(*request.prompt, *answer.tokens))
    assert len(serve(generator, [best])[0].tokens) == best.max_tokens
    return answer.stats.rollbacks


def test_a_refused_candidate_with_nan_costs_one_rollback(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = lab.model.weights.embed.clone()
    embed[PoisonedOnce.poison] = float("nan")
    model = replace(lab.model, weights=replace(lab.model.weights, embed=embed))
    request = request_of("poisoned", 6, length=18, max_tokens=60, sampling=GREEDY)
    verifier = lab.verifier(model=model).start()
    healthy = rollbacks_after_poison(lab, verifier, request)
    assert 1 <= healthy <= 3
    monkeypatch.setattr(KVCache, "clear_tail", lambda *_: None)
    with pytest.raises(
        Exception, match="NaN"
    ):  # the control: the fast path stays poisoned, others hear of it
        rollbacks_after_poison(lab, verifier, replace(request, request_id="control"))
