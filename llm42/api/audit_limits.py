"""What audits may take of a service: some of its verifiers' time and places, and of a key's share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from llm42.api.keys import KeyPolicy
from llm42.errors import LLM42Error, Overloaded
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.session.interfaces import Answers

KEY_PAUSE_S, KEY_TRIES = 0.1, 600
"""How an audit waits for its key's other requests: a look after each pause, a minute in all."""


class LimitedAnswers:
    """The service's `Answers`, for one audit of one key."""

    def __init__(
        self, answers: Answers, policy: KeyPolicy, calls: asyncio.Semaphore, outputs: asyncio.Semaphore
    ) -> None:
        """calls, outputs: `verify_cold`s and outputs under way; all audits of an ingress share them."""
        self._answers, self._policy, self._calls, self._outputs = answers, policy, calls, outputs
        self._turn = asyncio.Lock()

    async def fingerprint(self, agreed: bool = False) -> tuple[str, Mapping[str, Any]]:
        """The pool's."""
        return await self._answers.fingerprint(agreed)

    async def verify_cold(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """By some verifier."""
        async with self._calls:
            return await self._answers.verify_cold(windows)

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Like any other deterministic request of the key: it counts towards its `deterministic_share`, and
        waits for a place in it. Raises LLM42Error, at last also when there comes none."""
        async with aclosing(await self._held(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def _held(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The output, once the key may have one more."""
        async with self._turn:
            for _ in range(KEY_TRIES):
                pieces = self._policy.hold(1, self._output(request))
                try:
                    await anext(pieces)
                    return pieces
                except Overloaded:
                    await asyncio.sleep(KEY_PAUSE_S)
        raise LLM42Error(f"the key '{self._policy.name}' had no place left to generate the answer again")

    async def _output(self, request: Request) -> AsyncGenerator[Delta | None, None]:
        """None first, when the key's place is taken; then the output."""
        yield None
        asked = self._policy.salted(request)
        async with self._outputs, aclosing(self._answers.generate(asked)) as deltas:
            async for delta in deltas:
                yield delta
