"""What the log says when two verifiers differ: who, where and in what, but nothing that a user was told."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from llm42.protocol import Commit, Failure, SamplingParams, TokenLogprob, Window
from llm42.telemetry.metrics import Metrics
from llm42_serve.replica.spot_check import Auditor, kind_of

WINDOW = Window("cmpl-7-0", (40, 41, 42), 2, (50,), SamplingParams())


def commit(token: int = 31337, logprob: float = -0.15625, top: tuple[tuple[int, float], ...] = ()) -> Commit:
    entries = (TokenLogprob(50, -0.5), TokenLogprob(token, logprob, top))
    return Commit("cmpl-7-0", 3, 1, token, entries, "a")


class Member:
    """A verifier that gives one answer, and is its own handle, method and call."""

    def __init__(self, name: str, answer: Commit) -> None:
        self.name = self.actor_id = name
        self.handle: Any = self
        self.verify_cold = self.self_test = self
        self.answer = answer

    async def remote(self, *asked: Any, **how: Any) -> Any:
        return [self.answer] if asked else True


class Pool:
    """Two members; nobody is condemned."""

    def __init__(self, *ready: Member) -> None:
        self.ready = list(ready)

    async def condemn(self, member: Member, reason: str) -> None: ...


async def logged(caplog: pytest.LogCaptureFixture, log_values: bool) -> str:
    first, second = Member("v1", commit()), Member("v2", commit(logprob=-0.171875))
    auditor = Auditor(Pool(first, second), 1.0, Metrics(), log_values)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        await auditor.audit(first, [WINDOW], [commit()])  # type: ignore[arg-type]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    return record.getMessage()


async def test_tokens_and_log_probabilities_stay_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    text = await logged(caplog, log_values=False)
    assert text == "audit: v1 and v2 differ on a window of request cmpl-7-0: logprob at position 4"
    assert not any(secret in text for secret in ("31337", "0.15625", "0.171875"))


async def test_they_are_there_where_prompts_are_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    text = await logged(caplog, log_values=True)
    assert "31337" in text
    assert "-0.171875" in text


def test_what_differs_is_said_in_kind() -> None:
    assert kind_of(WINDOW, commit(), commit(token=31338)) == "token at position 4"
    assert kind_of(WINDOW, commit(), commit(top=((1, -2.0),))) == "top at position 4"
    shorter = Commit("cmpl-7-0", 3, 0, 50, (TokenLogprob(50, -0.5),), "a")
    assert kind_of(WINDOW, commit(), shorter) == "how many candidates stand"
    assert kind_of(WINDOW, commit(), Failure("cmpl-7-0", "x", "token 31337")) == "one of them refused it"
