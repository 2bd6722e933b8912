"""The promise on a real model: SmolLM2's tokens and log-probability bits equal the verifier decoding
alone, one token at a time, at every load, greedy and seeded, and whatever the fast path proposes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest

from llm42.checkpoint.fetch import fetch_smollm2
from llm42.checkpoint.load import load_for
from llm42.config import EngineSettings, Settings
from llm42.engine.base import Engine
from llm42.engine.corrupt import CorruptingEngine
from llm42.engine.torch.engine import TorchEngine
from llm42.models.weights import LoadedModel
from llm42.protocol import Commit, Failure, Request, RequestStats, SamplingParams, Window
from llm42.session import driver
from llm42.session.driver import Generator
from llm42.session.machine import Action, Emit, Session
from llm42.text.tokenizer import Tokenizer
from llm42.verifier.build import build_verifier
from llm42.verifier.scheduler import Verifier
from tests.support import ENGINES, VllmPool, Wrapped, verified

TOKENS = 28
PROMPTS = ("Why is the sky blue?", "Explain recursion to a ten-year-old.", "Write a haiku about winter.")
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
slow = pytest.mark.slow
QUICK = (("greedy", 0), ("seeded", 5))
Answer = tuple[tuple[int, ...], tuple[float, ...]]
MakeEngine = Callable[[float], Engine]


@dataclass
class Lab:
    """The model, a certified verifier, and engines made on demand."""

    settings: Settings
    model: LoadedModel
    tokenizer: Tokenizer
    verifier: Verifier
    judge: Verifier
    """Another verifier, for the oracle alone: with a cache that no session has written to."""

    def request(self, name: str, prompt: str, sampling: SamplingParams) -> Request:
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        ids, stop = tuple(self.tokenizer.encode(text)), self.tokenizer.eos_token_ids
        return Request(name, ids, TOKENS, sampling, True, stop_token_ids=stop, num_logprobs=0)

    def oracle(self, prompt: str, sampling: SamplingParams) -> Answer:
        """The verifier decoding alone, one token at a time."""
        request = self.request("oracle", prompt, sampling)
        tokens, logprobs = list(request.prompt), []
        while len(tokens) < len(request.prompt) + TOKENS:
            window = Window("oracle", tuple(tokens), len(request.prompt), (), sampling)
            (commit,) = verified(self.judge, window)
            assert isinstance(commit, Commit)
            tokens.append(commit.next_token)
            logprobs.append(commit.logprobs[0].logprob)
            if commit.next_token in request.stop_token_ids:
                break
        return tuple(tokens[len(request.prompt) :]), tuple(logprobs)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    path = fetch_smollm2(".models/smollm2")
    settings = Settings.load(
        {
            "model": {"path": str(path)},
            "verifier": {"certificate_dir": str(tmp_path_factory.mktemp("certificates")), "kv_tokens": 8192},
        }
    )
    model, tokenizer = load_for(settings)
    verifier, judge = (build_verifier(settings, model, tokenizer).start() for _ in range(2))
    made = Lab(settings, model, tokenizer, verifier, judge)
    made.oracle = cache(made.oracle)  # type: ignore[method-assign]
    yield made
    verifier.close()
    judge.close()


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest, lab: Lab) -> Iterator[MakeEngine]:
    """Fast paths by the share of their candidates that is made wrong."""
    started: list[TorchEngine] = []
    pool: VllmPool | None = None if request.param == "torch" else request.getfixturevalue("vllm_pool")

    def make(corrupt: float) -> Engine:
        if pool is not None:  # in float32: vLLM's bfloat16 products on CPU are several times slower
            return CorruptingEngine(
                pool.get(lab.settings, dtype="float32", max_num_batched_tokens=256), corrupt
            )
        started.append(TorchEngine(lab.model, EngineSettings(threads=1)).start())
        return CorruptingEngine(started[-1], corrupt)

    yield make
    for engine in started:
        engine.close()


def answers(
    lab: Lab, engine: Engine, sampling: SamplingParams, load: int, client: Wrapped | None = None
) -> tuple[list[Answer], list[RequestStats]]:
    """Every prompt at once among `load` best-effort streams."""
    generator = Generator(engine, lab.tokenizer, lab.settings, client or lab.verifier)
    rng = random.Random(load)

    async def noise(n: int) -> None:
        prompt = tuple(rng.randrange(100, 10000) for _ in range(rng.randrange(5, 60)))
        request = Request(f"noise-{n}", prompt, 2 * TOKENS, SamplingParams(temperature=1.0, seed=n))
        async for _ in generator.generate(request):
            pass

    async def one(index: int) -> tuple[Answer, RequestStats]:
        tokens: list[int] = []
        logprobs: list[float] = []
        stats = None
        async for delta in generator.generate(lab.request(f"{load}-{index}", PROMPTS[index], sampling)):
            tokens += delta.token_ids
            logprobs += [x.logprob for x in delta.logprobs]
            stats = delta.stats or stats
        assert stats is not None
        return (tuple(tokens), tuple(logprobs)), stats

    async def run() -> list[tuple[Answer, RequestStats]]:
        others = [asyncio.create_task(noise(n)) for n in range(load)]
        done = await asyncio.gather(*(one(i) for i in range(len(PROMPTS))))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return done

    results = asyncio.run(run())
    return [a for a, _ in results], [s for _, s in results]


def differing(lab: Lab, got: Sequence[Answer], sampling: SamplingParams) -> int:
    """How many answers are not, bit for bit, the oracle's."""
    return sum(a != lab.oracle(p, sampling) for a, p in zip(got, PROMPTS, strict=True))


@pytest.mark.parametrize(
    ("sampling", "load"),
    [
        pytest.param(sampling, load, id=f"{name}-{load}", marks=[] if (name, load) in QUICK else slow)
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED))
        for load in (0, 5, 16)
    ],
)
def test_equals_the_oracle_at_every_load(
    lab: Lab, make_engine: MakeEngine, sampling: SamplingParams, load: int
) -> None:
    got, stats = answers(lab, make_engine(0.0), sampling, load)
    assert differing(lab, got, sampling) == 0
    assert all(s.windows >= 1 and s.verified_tokens >= len(a[0]) for a, s in zip(got, stats, strict=True))


@slow
@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_corrupt_fast_path_changes_nothing(
    lab: Lab, make_engine: MakeEngine, sampling: SamplingParams, share: float
) -> None:
    got, stats = answers(lab, make_engine(share), sampling, 2)
    assert differing(lab, got, sampling) == 0
    assert sum(s.rollbacks for s in stats) > 0
    if share == 1:  # every window but one that ends the output: end tokens are never made wrong
        ends = [a[0][-1] in lab.tokenizer.eos_token_ids for a in got]
        assert all(s.windows - s.rollbacks in (0, end) for s, end in zip(stats, ends, strict=True))


class AcceptsEverything(Wrapped):
    """A verifier that lets every candidate through."""

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        commits = await super().verify(windows)
        return [
            replace(
                c,
                accepted=len(w.candidates),
                logprobs=(c.logprobs * (len(w.candidates) + 1))[: len(w.candidates) + 1],
            )
            if isinstance(c, Commit)
            else c
            for c, w in zip(commits, windows, strict=True)
        ]


@slow
def test_control_a_verifier_that_accepts_everything_is_noticed(lab: Lab, make_engine: MakeEngine) -> None:
    got, _ = answers(lab, make_engine(0.3), GREEDY, 2, AcceptsEverything(lab.verifier))
    assert differing(lab, got, GREEDY) > 0


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
    lab: Lab, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "Session", ReleasesBeforeCommit)
    got, _ = answers(lab, make_engine(0.3), GREEDY, 2)
    tokens = [a for a, _ in got]
    assert tokens != [lab.oracle(p, GREEDY)[0] for p in PROMPTS]
