"""The vLLM adapter under random commands, and under the real session: what it reports continues what it was
told to continue from, stays within its bound, and goes on until it is reached."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from llm42.config import Settings
from llm42.engine.vllm.engine import VllmEngine
from llm42.protocol import Commit, Failure, Request, RequestStats, TokenLogprob, Window
from llm42.session.driver import Generator
from tests.unit.fake_vllm import VOCAB, FakeLLM, Make, Scene, continuation, next_token, request_of

ENDS = tuple(range(0, VOCAB, 40))


@dataclass
class Expected:
    """One stream as it should be: `base` is what it was told to continue from."""

    request: Request
    limit: int
    base: tuple[int, ...] = ()

    def output(self) -> list[int]:
        """All it may report in this epoch: up to its bound or an end token after `base`."""
        tokens = [*self.base, *continuation([*self.request.prompt, *self.base], self.limit - len(self.base))]
        for i, token in enumerate(tokens[len(self.base) :], len(self.base)):
            if token in self.request.stop_token_ids:
                return tokens[: i + 1]
        return tokens


def play(scene: Scene, seed: int) -> list[str]:
    """Random commands; returns what went wrong."""
    rng, known, wrong = random.Random(seed), dict[str, Expected](), list[str]()

    def check(complete: bool = False) -> None:
        for name, expected in known.items():
            got, want = scene.clients[name].tokens, expected.output()
            if got != want[: len(got)] or (complete and got != want):
                wrong.append(f"{name}: {len(got)} tokens of {len(want)}")

    for number in range(60):
        name = rng.choice([*known, "new"])
        kind = rng.choice(["steps", "steps", "extend", "rollback", "abort"])
        if name == "new":
            request = request_of(f"s{number}", stop_token_ids=ENDS)
            known[request.request_id] = Expected(request, limit := rng.randrange(1, 20))
            scene.submit(request, limit)
        elif kind == "steps":
            scene.steps(rng.randrange(1, 9))
        elif kind == "abort":
            scene.abort(name)
            del known[name]
        elif kind == "extend":
            known[name].limit += rng.randrange(1, 16)
            scene.extend(name, known[name].limit)
        else:
            kept = scene.clients[name].tokens
            base = (*kept[: rng.randrange(len(kept) + 1)], rng.randrange(VOCAB))
            known[name].base, known[name].limit = base, len(base) + rng.randrange(1, 20)
            scene.roll_back(name, base, known[name].limit)
        check()
    for _ in range(40):
        scene.steps(10)
    check(complete=True)
    for name in known:
        scene.abort(name)
    return wrong if scene.idle else [*wrong, "not everything was freed"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("lag", [0, 2])
def test_random_commands(make: Make, seed: int, lag: int) -> None:
    try:
        assert play(make(FakeLLM(max_num_seqs=3, lag=lag)), seed) == []
    except AssertionError as error:
        raise AssertionError(f"seed {seed}") from error


class NeverRenews(VllmEngine):
    """Leaves a held stream alone when its bound moves."""

    def _extend(self, request_id: str, limit: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and stream.attempt is not None:
            super()._extend(request_id, limit)


class ContinuesFromItsOwn(VllmEngine):
    """Cuts to the committed length but keeps its own last token."""

    def _roll_back(self, request_id: str, output: Sequence[int], epoch: int, limit: int) -> None:
        own = self._streams[request_id].output
        super()._roll_back(request_id, [*output[:-1], *own[len(output) - 1 :][:1]], epoch, limit)


class ForgetsTheEpoch(VllmEngine):
    """Reports under the old epoch after a rollback."""

    def _roll_back(self, request_id: str, output: Sequence[int], epoch: int, limit: int) -> None:
        super()._roll_back(request_id, output, epoch - 1, limit)


@pytest.mark.parametrize("engine", [NeverRenews, ContinuesFromItsOwn, ForgetsTheEpoch])
def test_control_a_broken_adapter_is_noticed(make: Make, engine: type[VllmEngine]) -> None:
    def noticed(seed: int) -> bool:
        try:
            return play(make(FakeLLM(max_num_seqs=3), engine), seed) != []
        except (AssertionError, IndexError):
            return True

    assert any(noticed(seed) for seed in range(4))


# ---- the real session and driver over it


def canonical(tokens: Sequence[int], every: int) -> int:
    """What the verifier says: now and then not what the fast path says."""
    token = next_token(tokens)
    return (token + 1) % VOCAB if sum(tokens) % every == 0 else token


class PlainVerifier:
    """Verifies by the rule above."""

    kv_tokens = None

    def __init__(self, every: int) -> None:
        self.every = every

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        await asyncio.sleep(0.002)
        return [self._commit(w) for w in windows]

    def _commit(self, window: Window) -> Commit:
        known = list(window.tokens)
        for accepted, candidate in enumerate((*window.candidates, -1)):
            token = canonical(known, self.every)
            known.append(token)
            if token != candidate:
                lps = tuple(TokenLogprob(t, 0.0) for t in known[len(window.tokens) :])
                return Commit(window.request_id, len(window.tokens), accepted, token, lps, "f")
        raise AssertionError

    def release(self, request_id: str) -> None:
        pass


class Text:
    """A tokenizer whose every token is one letter."""

    def token_text(self, token: int) -> str:
        return "x"


def serve(scene: Scene, count: int, every: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """`count` deterministic requests among best-effort ones. Returns (wrong outputs, rollbacks, rollbacks
    that could not be avoided)."""
    from llm42.session import driver

    class Output:
        stopped = False

        @classmethod
        def of(cls, *_: Any) -> Output:
            return cls()

        def push(self, tokens: Sequence[int]) -> tuple[str, int]:
            return "x" * len(tokens), len(tokens)

        def flush(self) -> str:
            return ""

    monkeypatch.setattr(driver, "OutputText", Output)
    settings = Settings.load(
        {"session": {"lookahead": 24, "max_window": 15, "start_window": 7, "commit_deadline_s": 0.02}}
    )
    generator = Generator(scene.engine, Text(), settings, PlainVerifier(every))  # type: ignore[arg-type]
    requests = [request_of(f"d{i}", max_tokens=80, stop_token_ids=(3,)) for i in range(count)]
    others = [request_of(f"b{i}", deterministic=False, max_tokens=60) for i in range(count)]

    async def one(request: Request) -> tuple[list[int], RequestStats | None]:
        tokens: list[int] = []
        stats = None
        async for delta in generator.generate(request):
            tokens += delta.token_ids
            stats = delta.stats or stats
        return tokens, stats

    async def steps() -> None:
        while True:
            scene.engine._loop.call_soon_threadsafe(scene.llm.step)
            await asyncio.sleep(0.0005)

    async def everyone() -> list[tuple[list[int], RequestStats | None]]:
        stepping = asyncio.create_task(steps())
        done = await asyncio.gather(*(one(r) for r in (*requests, *others)))
        stepping.cancel()
        return done[:count]

    wrong = rollbacks = needed = 0
    for request, (tokens, stats) in zip(requests, asyncio.run(everyone()), strict=True):
        known = list(request.prompt)
        while len(known) < len(request.prompt) + 80 and (known[-1] != 3 or len(known) == len(request.prompt)):
            known.append(canonical(known, every))
        wrong += tokens != known[len(request.prompt) :]
        needed += sum(canonical(known[:i], every) != next_token(known[:i]) for i in range(10, len(known)))
        assert stats is not None
        rollbacks += stats.rollbacks
    return wrong, rollbacks, needed


@pytest.mark.parametrize("every", [5, 25, 10**9])
def test_each_rollback_is_one_that_the_verifier_asked_for(
    make: Make, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(FakeLLM(max_num_seqs=4, lag=1))
    wrong, rollbacks, needed = serve(scene, 6, every, monkeypatch)
    assert wrong == 0
    assert rollbacks == needed
    scene.do()
    assert scene.idle
    assert needed >= {5: 20, 25: 1}.get(every, 0)


def test_control_an_adapter_that_continues_from_its_own_tokens_rolls_back_more(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, rollbacks, needed = serve(make(FakeLLM(), ContinuesFromItsOwn), 4, 5, monkeypatch)
    assert wrong == 0, "whatever the fast path does, the verifier decides"
    assert rollbacks > needed
