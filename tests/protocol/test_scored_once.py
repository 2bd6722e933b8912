"""A prompt is scored once for all choices, in pieces whose bits are those of the whole; a retry repeats one
piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest

from llm42.api.deltas import choices
from llm42.errors import VerifierUnavailable
from llm42.protocol import Commit, Delta, Failure, FinishReason, Request, TokenLogprob, Window
from llm42.session import prompt_scores
from llm42.session.prompt_scores import scoring_windows
from tests.support import PATIENCE_S, Lab, Wrapped, request_of

CHUNK = 32


class Unsteady(Wrapped):
    """Loses the answer to some windows, after they have been computed."""

    def __init__(self, verifier: object, lose: Sequence[int] = ()) -> None:
        super().__init__(verifier)  # type: ignore[arg-type]
        self.windows: list[Window] = []
        self._lose = set(lose)

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        found = await super().verify(windows)
        self.windows += windows
        if len(self.windows) in self._lose:
            raise VerifierUnavailable("lost")
        return found


async def scores(lab: Lab, request: Request, client: Wrapped) -> tuple[TokenLogprob, ...]:
    generator = lab.generator(lab.engine(), client)
    (only,) = [d async for d in generator.generate(replace(request, max_tokens=0))]
    assert only.fingerprint == "tiny"
    assert only.finish_reason is FinishReason.LENGTH
    return only.prompt_logprobs or ()


@pytest.mark.parametrize("length", [1, 2, 32, 33, 34, 97, 200])
def test_pieces_have_the_bits_of_the_whole(lab: Lab, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """With log-probabilities of two alternatives, to the bit; each piece costs its own rows and one more."""
    request = request_of("r", 31, length, prompt_logprobs=2)
    whole, pieces = lab.verifier().start(), lab.verifier().start()
    want = asyncio.run(scores(lab, request, Unsteady(whole)))
    monkeypatch.setattr(prompt_scores.scoring_windows, "__defaults__", (CHUNK,))
    client = Unsteady(pieces)
    assert asyncio.run(scores(lab, request, client)) == want
    assert len(want) == length - 1
    count = max(1, -(-(length - 1) // CHUNK))
    assert len(client.windows) == count
    assert all(len(w.candidates) <= CHUNK for w in client.windows)
    assert whole.stats().rows == length
    assert pieces.stats().rows == length + count - 1


def test_a_retry_repeats_one_piece(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost answers to the second and the fifth window: their pieces are asked again, and the verifier has
    almost all of their rows."""
    request = request_of("r", 32, 129, prompt_logprobs=1)
    want = asyncio.run(scores(lab, request, Unsteady(lab.verifier().start())))
    monkeypatch.setattr(prompt_scores.scoring_windows, "__defaults__", (CHUNK,))
    verifier = lab.verifier().start()
    client = Unsteady(verifier, lose=(2, 5))
    assert asyncio.run(scores(lab, request, client)) == want
    begins = [len(w.tokens) for w in client.windows]
    assert begins == [1, 33, 33, 65, 97, 97]
    assert verifier.stats().rows == 129 + 3 + 2 * (CHUNK + 1)


def test_windows_cover_the_prompt(lab: Lab) -> None:
    for length in (1, 2, 511, 512, 513, 514, 1025, 1026):
        request = request_of("r", 33, length)
        windows = list(scoring_windows(request))
        assert sum((w.candidates for w in windows), request.prompt[:1]) == request.prompt
        assert all(
            w.tokens + w.candidates == request.prompt[: len(w.tokens) + len(w.candidates)] for w in windows
        )
        assert all(w.score for w in windows)


def choices_of(prompts: int, each: int, **more: object) -> list[Request]:
    return [
        request_of(f"p{p}c{c}", 40 + p, 50, 6, seeded=True, prompt_logprobs=1, **more)  # type: ignore[arg-type]
        for p in range(prompts)
        for c in range(each)
    ]


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_a_prompt_is_scored_once_for_all_choices(lab: Lab, max_tokens: int) -> None:
    """Two prompts of four choices: every choice has the log-probabilities in its first piece, and the
    verifier computes each prompt once."""
    verifier = lab.verifier().start()
    client = Unsteady(verifier)
    generator = lab.generator(lab.engine(), client)
    requests = [replace(r, max_tokens=max_tokens) for r in choices_of(2, 4)]

    async def together() -> list[list[Delta]]:
        found: list[list[Delta]] = [[] for _ in requests]
        async for index, delta in choices(generator.generate, requests, 2):
            found[index].append(delta)
        return found

    found = asyncio.run(asyncio.wait_for(together(), PATIENCE_S))
    assert sum(w.score for w in client.windows) == 2, "one scoring window for each prompt"
    for index, request in enumerate(requests):
        alone = lab.verifier().start()
        want = asyncio.run(scores(lab, request, Unsteady(alone)))
        assert found[index][0].prompt_logprobs == want
        assert all(d.prompt_logprobs is None for d in found[index][1:])
        assert found[index][-1].finish_reason is not None
        if max_tokens:
            got = tuple(t for d in found[index] for t in d.token_ids)
            assert got == lab.oracle(replace(request, prompt_logprobs=None)).tokens
    if not max_tokens:
        assert verifier.stats().rows == 2 * 50


def test_an_error_of_the_scoring_choice_ends_all(lab: Lab) -> None:
    async def failing(request: Request) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(0)
        if request.prompt_logprobs is not None:
            raise VerifierUnavailable("no verifier")
        yield Delta((), "")

    async def together() -> None:
        async for _ in choices(failing, choices_of(1, 3), 1):
            pass

    with pytest.raises(VerifierUnavailable):
        asyncio.run(asyncio.wait_for(together(), PATIENCE_S))


def test_a_backend_without_scores_keeps_nobody_waiting() -> None:
    async def silent(request: Request) -> AsyncGenerator[Delta, None]:
        yield Delta((1,), "a", finish_reason=FinishReason.STOP)

    async def together() -> int:
        return len([d async for d in choices(silent, choices_of(1, 3), 1)])

    assert asyncio.run(asyncio.wait_for(together(), PATIENCE_S)) == 3
