"""A reply is made under one fingerprint and never starts anew once tokens have left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from llm42.config import ServerSettings
from llm42.errors import Overloaded, VerifierUnavailable
from llm42.protocol import Commit, Delta, Failure, FinishReason, Request, Window
from llm42.telemetry.metrics import Metrics
from llm42_serve.ingress.ingress import RayBackend
from tests.support import Lab, Wrapped, both_engines, collect, differences, request_of


class Replaced(Wrapped):
    """After two windows another verifier, with another fingerprint, answers."""

    calls = 0
    names = ("first", "first", "second")

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        name = self.names[min(self.calls, len(self.names) - 1)]
        self.calls += 1
        return [
            replace(c, fingerprint=name) if isinstance(c, Commit) else c
            for c in await super().verify(windows)
        ]


class Same(Replaced):
    names = ("first",)


@both_engines
def test_a_reply_never_mixes_two_fingerprints(lab: Lab) -> None:
    generator = lab.generator(lab.engine(), Replaced(lab.verifier().start()), max_window=7, start_window=7)
    with pytest.raises(VerifierUnavailable, match="fingerprint"):
        asyncio.run(collect(generator, request_of("mixed", 1)))


@both_engines
def test_control_one_fingerprint_goes_through(lab: Lab) -> None:
    generator = lab.generator(lab.engine(), Same(lab.verifier().start()), max_window=7, start_window=7)
    request = request_of("one", 1)
    assert differences(asyncio.run(collect(generator, request)), lab.oracle(request)) == []


class Busy(Wrapped):
    """Overloaded from the second window on."""

    calls = 0

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        self.calls += 1
        if self.calls > 1:
            raise Overloaded("planted")
        return await super().verify(windows)


@both_engines
def test_overload_in_mid_stream_is_not_a_refusal(lab: Lab) -> None:
    client = Busy(lab.verifier().start())
    generator = lab.generator(
        lab.engine(), client, max_window=7, start_window=7, verify_timeout_s=1.0, verify_attempts=2
    )
    with pytest.raises(VerifierUnavailable, match="planted"):
        asyncio.run(collect(generator, request_of("busy", 2)))


class Handle:
    """A deployment handle whose stream sends tokens and then says it is overloaded, or says so at once."""

    def __init__(self, before: int) -> None:
        self.before, self.calls = before, 0

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, _request: Request, *_: Any) -> AsyncIterator[Delta | Overloaded]:
        self.calls += 1
        return self._stream(self.calls)

    async def _stream(self, call: int) -> AsyncIterator[Delta | Overloaded]:
        for token in range(self.before):
            yield Delta((token,), "x")
        if call == 1:
            yield Overloaded("full")
        else:
            yield Delta((9,), "y", finish_reason=FinishReason.LENGTH)


def shown(handle: Handle) -> tuple[list[int], bool]:
    async def run() -> tuple[list[int], bool]:
        tokens: list[int] = []
        try:
            backend = RayBackend(handle, {}, ServerSettings(), Metrics())  # type: ignore[arg-type]
            async for delta in backend.generate(request_of("h", 1)):
                tokens += delta.token_ids
        except Overloaded:
            return tokens, True
        return tokens, False

    return asyncio.run(run())


def test_a_stream_never_starts_anew() -> None:
    assert shown(Handle(before=2)) == ([0, 1], True)


def test_a_refusal_before_any_token_is_offered_again() -> None:
    assert shown(Handle(before=0)) == ([9], False)
