"""The promise on a real model: SmolLM2's tokens and log-probability bits equal the verifier decoding
alone, one token at a time, at every load, greedy and seeded, and whatever the fast path proposes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from llm42.config.engine import EngineSettings
from llm42.engine.base import Engine
from llm42.engine.corrupt import CorruptingEngine
from llm42.engine.torch.engine import TorchEngine
from llm42.protocol import Commit, Request, SamplingParams
from llm42.session import drive
from llm42.session.actions import Action, Emit
from llm42.session.driver import Generator
from llm42.session.interfaces import VerifierClient
from llm42.session.machine import Session
from llm42.verifier.build import build_verifier
from llm42.verifier.scheduler import Verifier
from tests.support import (
    ENGINES,
    GREEDY,
    AcceptsEverything,
    Answer,
    Lab,
    VllmPool,
    collect,
)

TOKENS = 20
PROMPTS = ("Why is the sky blue?", "Explain recursion to a ten-year-old.", "Write a haiku about winter.")
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
slow = pytest.mark.slow
QUICK = (("seeded", 5),)
MakeEngine = Callable[[float], Engine]


@pytest.fixture(scope="module")
def verifier(smollm2: Lab) -> Iterator[Verifier]:
    """As the service builds it; the oracle's are others, with caches that no session has written to."""
    lab = smollm2
    made = build_verifier(lab.settings, lab.model, lab.tokenizer, lab.certificate).start()
    yield made
    made.close()


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest, smollm2: Lab) -> Iterator[MakeEngine]:
    """Fast paths by the share of their candidates that is made wrong."""
    started: list[TorchEngine] = []
    pool: VllmPool | None = None if request.param == "torch" else request.getfixturevalue("vllm_pool")

    def make(corrupt: float) -> Engine:
        if pool is not None:  # in float32: vLLM's bfloat16 products on CPU are several times slower
            engine = pool.get(smollm2.settings, dtype="float32", max_num_batched_tokens=256)
            return CorruptingEngine(engine, corrupt)
        started.append(TorchEngine(smollm2.model, EngineSettings(threads=1)).start())
        return CorruptingEngine(started[-1], corrupt)

    yield make
    for engine in started:
        engine.close()


def requests_of(lab: Lab, sampling: SamplingParams) -> list[Request]:
    """A question each."""
    made = []
    for number, prompt in enumerate(PROMPTS):
        text = lab.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        ids, stop = tuple(lab.tokenizer.encode(text)), lab.tokenizer.eos_token_ids
        made.append(Request(f"{number}", ids, TOKENS, sampling, True, stop_token_ids=stop, num_logprobs=0))
    return made


def answers(
    lab: Lab, engine: Engine, client: VerifierClient, sampling: SamplingParams, load: int
) -> list[Answer]:
    """To every prompt at once among `load` best-effort streams."""
    generator = Generator(engine, lab.tokenizer, lab.settings, client)
    rng = random.Random(load)

    async def noise(n: int) -> None:
        prompt = tuple(rng.randrange(100, 10000) for _ in range(rng.randrange(5, 60)))
        await collect(
            generator, Request(f"noise-{n}", prompt, 2 * TOKENS, SamplingParams(temperature=1.0, seed=n))
        )

    async def run() -> list[Answer]:
        others = [asyncio.create_task(noise(n)) for n in range(load)]
        done = await asyncio.gather(*(collect(generator, r) for r in requests_of(lab, sampling)))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return list(done)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("sampling", "load"),
    [
        pytest.param(sampling, load, id=f"{name}-{load}", marks=[] if (name, load) in QUICK else slow)
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED))
        for load in (0, 5, 16)
    ],
)
def test_equals_the_oracle_at_every_load(
    smollm2: Lab, verifier: Verifier, make_engine: MakeEngine, sampling: SamplingParams, load: int
) -> None:
    got = answers(smollm2, make_engine(0.0), verifier, sampling, load)
    assert smollm2.wrong(got, requests_of(smollm2, sampling)) == []
    assert all(a.stats.windows >= 1 and a.stats.verified_tokens >= len(a.tokens) for a in got)


@slow
@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_corrupt_fast_path_changes_nothing(
    smollm2: Lab, verifier: Verifier, make_engine: MakeEngine, sampling: SamplingParams, share: float
) -> None:
    got = answers(smollm2, make_engine(share), verifier, sampling, 2)
    assert smollm2.wrong(got, requests_of(smollm2, sampling)) == []
    assert sum(a.stats.rollbacks for a in got) > 0
    if share == 1:  # every window but one that ends the output: end tokens are never made wrong
        ends = [a.tokens[-1] in smollm2.tokenizer.eos_token_ids for a in got]
        assert all(a.stats.windows - a.stats.rollbacks in (0, end) for a, end in zip(got, ends, strict=True))


@slow
def test_control_a_verifier_that_accepts_everything_is_noticed(
    smollm2: Lab, verifier: Verifier, make_engine: MakeEngine
) -> None:
    got = answers(smollm2, make_engine(0.3), AcceptsEverything(verifier), GREEDY, 2)
    assert smollm2.wrong(got, requests_of(smollm2, GREEDY))


class ReleasesBeforeCommit(Session):
    """A session that hands candidates to the client as they come."""

    def candidates(self, epoch: int, start: int, tokens: Sequence[int]) -> list[Action]:
        actions = super().candidates(epoch, start, tokens)
        return [*actions, Emit(tuple(tokens), ())] if epoch == self.epoch else actions

    def commit(self, commit: Commit, now: float) -> list[Action]:
        actions = super().commit(commit, now)
        return [Emit((), ()), *actions[1:]]


@slow
def test_control_a_session_that_releases_before_commit_is_noticed(
    smollm2: Lab, verifier: Verifier, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "Session", ReleasesBeforeCommit)
    got = answers(smollm2, make_engine(0.3), verifier, GREEDY, 2)
    want = [smollm2.oracle(r) for r in requests_of(smollm2, GREEDY)]
    assert [a.tokens for a in got] != [w.tokens for w in want]
