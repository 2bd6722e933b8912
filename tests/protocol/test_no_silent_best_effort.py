"""A verifier that fails for good ends its requests with an error. What was sent before is the oracle's, and
no candidate follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from llm42.errors import StepFailed, VerifierUnavailable
from llm42.protocol import Commit, Failure, TokenLogprob, Window
from llm42.session import verify as verify_way
from llm42.session.verify_call import verify
from tests.support import Lab, Wrapped, both_engines, request_of

GOOD = 2
"""Windows that are answered before the verifier fails."""


class FailsForGood(Wrapped):
    """Answers some windows, then none."""

    answered = 0

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        if self.answered == GOOD:
            raise StepFailed("planted")
        self.answered += 1
        return await super().verify(windows)


async def accepts_instead(client: Any, window: Window, *rest: Any) -> Any:
    """A call that takes the candidates for the answer when the verifier gives none."""
    answer = await verify(client, window, *rest)
    if isinstance(answer, Commit):
        return answer
    logprobs = tuple(TokenLogprob(token, -1.0) for token in window.candidates)
    base, accepted = len(window.tokens), len(window.candidates) - 1
    return Commit(window.request_id, base, accepted, window.candidates[-1], logprobs, "tiny")


def broken_promises(lab: Lab) -> list[str]:
    """What is wrong with a stream whose verifier fails after two windows."""
    request = request_of("fails", 3)
    client = FailsForGood(lab.verifier().start())
    generator = lab.generator(
        lab.engine(corrupt_share=0.3), client, max_window=7, start_window=7, verify_attempts=2
    )
    sent: list[int] = []

    async def read() -> str:
        try:
            async for delta in generator.generate(request):
                sent.extend(delta.token_ids)
        except VerifierUnavailable:
            return ""
        return "it ended without an error"

    found = [asyncio.run(read())]
    right = list(lab.oracle(request).tokens)
    assert len(sent) >= GOOD
    if sent != right[: len(sent)]:
        found.append("tokens that are not the verifier's were sent")
    if len(sent) > GOOD * 8:
        found.append("more was sent than was verified")
    return [text for text in found if text]


@both_engines
def test_no_candidate_leaves_when_the_verifier_fails(lab: Lab) -> None:
    assert broken_promises(lab) == []


@both_engines
def test_control_a_fall_back_to_the_candidates_is_noticed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_way, "verify", accepts_instead)
    found = broken_promises(lab)
    assert "it ended without an error" in found
    assert "more was sent than was verified" in found
