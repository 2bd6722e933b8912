"""What stored answers are held against in a service: its verifiers, within what audits may take of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from llm42.api.keys import KeyPolicy
from llm42.audit.replayer import REGENERATIONS
from llm42.errors import LLM42Error, Overloaded
from llm42.protocol import Commit, Delta, Failure, Request, Window

if TYPE_CHECKING:
    from llm42.api.backend import Backend

KEY_PAUSE_S, KEY_TRIES = 0.1, 600
"""How an audit waits for its key's other requests: a look after each pause, a minute in all."""


class Bounds:
    """What all audits of an ingress share."""

    def __init__(self, concurrency: int) -> None:
        """concurrency: of `audit.concurrency`."""
        self.calls = asyncio.Semaphore(concurrency)
        self.outputs = asyncio.Semaphore(concurrency * REGENERATIONS)
        """Outputs that are generated again at a time."""


class BackendCanon:
    """llm42.audit.source.Canon over the service's verifiers, for one audit of one key."""

    def __init__(self, backend: Backend, bounds: Bounds, policy: KeyPolicy) -> None:
        self._backend, self._bounds, self._policy = backend, bounds, policy
        self._turn = asyncio.Lock()

    async def identity(self) -> tuple[str, Mapping[str, Any]]:
        """The pool's. Raises VersionSkew where stored questions would not be read as the pool's are."""
        return await self._backend.fingerprint(agreed=True)

    async def replay(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """By some verifier, without its cache."""
        async with self._bounds.calls:
            return await self._backend.replay(windows)

    async def regenerate(self, request: Request) -> AsyncGenerator[Delta, None]:
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
        async with self._bounds.outputs, aclosing(self._backend.generate(asked)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield delta
