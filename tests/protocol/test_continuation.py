"""What the verifier decodes by itself is what it says one token at a time, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from llm42.errors import LLM42Error
from llm42.protocol import Commit, Failure, Request, SamplingParams, TokenLogprob, Window
from llm42.verifier.scheduler import Verifier
from tests.support import GREEDY, PENALISED, SAMPLED, Lab, check_pool, request_of, window_of
from tests.support.late_runner import LateRunner


@dataclass
class Reader:
    """What a replica would know of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    answers: int = 0

    def window(self, credit: int, candidates: tuple[int, ...] = ()) -> Window:
        """Its window, from what it has."""
        plain, most = window_of(self.request, self.tokens, candidates), self.request.max_tokens
        return replace(
            plain,
            credit=credit,
            stop_token_ids=self.request.stop_token_ids,
            max_len=len(self.request.prompt) + most,
        )

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    def __call__(self, answer: Commit | Failure | LLM42Error) -> None:
        self.answers += 1
        if not isinstance(answer, Commit):
            self.errors.append(answer)
            return
        assert answer.base == self.length, "a gap or a repeat"
        self.tokens += [*self.candidates[: answer.accepted], answer.next_token, *answer.decoded]
        self.logprobs += answer.logprobs
        assert answer.end == self.length

    candidates: tuple[int, ...] = ()

    def follow(self, verifier: Verifier, credit: int, candidates: tuple[int, ...] = ()) -> None:
        self.candidates = candidates
        verifier.follow(self.window(credit, candidates), self)


def run(verifier: Verifier, steps: int = 100_000) -> None:
    while steps and verifier.step():
        steps -= 1


def check(lab: Lab, reader: Reader, length: int | None = None) -> None:
    want = lab.oracle(reader.request)
    length = len(want.tokens) if length is None else min(length, len(want.tokens))
    assert not reader.errors
    assert tuple(reader.tokens) == want.tokens[:length]
    assert tuple(reader.logprobs) == want.logprobs[:length]


@pytest.mark.parametrize("credit", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED])
def test_credit(lab: Lab, credit: int, sampling: SamplingParams) -> None:
    late = None

    def wrap(runner: Any) -> Any:
        nonlocal late
        late = LateRunner(runner)
        return late

    verifier = lab.verifier(wrap=wrap)
    reader = Reader(request_of("r", 1, max_tokens=100, sampling=sampling))
    reader.follow(verifier, credit)
    run(verifier)
    check(lab, reader, 1 + credit)
    assert reader.answers == 1 + credit
    check_pool(verifier._pool)
