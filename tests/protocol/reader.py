"""Requests that follow a verifier without a thread, as their replicas would see them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from llm42.errors import LLM42Error
from llm42.protocol import Commit, Failure, Request, TokenLogprob, Window
from llm42.verifier.scheduler import Verifier
from tests.support import Lab, window_of
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
        """Of prompt and output."""
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
        """Sends it."""
        self.candidates = candidates
        verifier.follow(self.window(credit, candidates), self)


def run(verifier: Verifier, steps: int = 100_000) -> None:
    """Until it rests, or so many steps."""
    while steps and verifier.step():
        steps -= 1


def check(lab: Lab, reader: Reader, length: int | None = None) -> None:
    """What has come is what the oracle says; all of it, or the first `length` tokens."""
    want = lab.oracle(reader.request)
    length = len(want.tokens) if length is None else min(length, len(want.tokens))
    assert not reader.errors
    assert tuple(reader.tokens) == want.tokens[:length]
    assert tuple(reader.logprobs) == want.logprobs[:length]


class Lates:
    """Makes a lab's runner a late one, and keeps it."""

    def __init__(self, make: type[LateRunner] = LateRunner) -> None:
        self.make = make

    def __call__(self, runner: Any) -> Any:
        self.runner = self.make(runner)
        return self.runner
