"""Clients that ask for one stream after another while something is done to the cluster, and what they saw."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from typing import Any, Self

from llm42.protocol import Request
from tests.chaos.support import App, Outcome, best_effort, deterministic
from tests.support import Lab

AGAIN_S = 0.5
"""A client whose request was refused asks again after this time."""


class Traffic:
    """Deterministic and best-effort clients of one application. Use as a context manager: they end their last
    streams at its end."""

    def __init__(self, app: App, lab: Lab, clients: int = 6, others: int = 3, tokens: int = 96) -> None:
        """clients: deterministic ones; others: best effort. tokens: of each answer."""
        self._app, self._lab, self._tokens = app, lab, tokens
        self._kinds = (clients, others)
        self.found: list[tuple[Request, Outcome]] = []
        self._numbers = itertools.count()
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for count, make in zip(self._kinds, (deterministic, best_effort), strict=True):
            self._tasks += [asyncio.create_task(self._client(make)) for _ in range(count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def answered(self, more: int = 1) -> None:
        """Returns when each client has had so many more streams, on average."""
        want = len(self.found) + more * len(self._tasks)
        while len(self.found) < want:
            await asyncio.sleep(0.05)

    async def _client(self, make: Any) -> None:
        while not self._over.is_set():
            request = make(next(self._numbers) % 12, self._tokens)
            got = await self._app.stream(request)
            self.found.append((request, got))
            if not got.finish:
                await asyncio.sleep(AGAIN_S)

    def seen(self) -> dict[str, dict[str, int]]:
        """What clients saw, by class: streams that ended, those of them that were continued elsewhere,
        refused ones by status, and those that an error or a cut ended. `wrong`: a deterministic client has a
        token or a logprob that is not the oracle's."""
        found: dict[str, Counter[str]] = {"deterministic": Counter(), "best effort": Counter()}
        for request, got in self.found:
            count = found["deterministic" if request.deterministic else "best effort"]
            if request.deterministic:
                count["wrong"] += not self._right(request, got)
            elif got.finish and len(got.tokens) != self._tokens:
                count["wrong"] += 1
            count[_end(got)] += 1
            count["resumed"] += got.failovers > 0
        return {name: {k: n for k, n in sorted(count.items()) if n} for name, count in found.items()}

    def _right(self, request: Request, got: Outcome) -> bool:
        tokens, logprobs = self._lab.oracle(request).sent
        if got.finish:
            return (got.tokens, got.logprobs, got.finish) == (tokens, logprobs, "length")
        return got.tokens == tokens[: len(got.tokens)] and got.logprobs == logprobs[: len(got.logprobs)]


def _end(got: Outcome) -> str:
    if got.finish:
        return "ended"
    if got.status != 200:
        return f"refused: {got.status} {_kind(got.error)}".rstrip()
    return "error event" if got.error else "cut"


def _kind(text: str) -> str:
    """What an error object says of itself, in a word."""
    try:
        return str(json.loads(text)["error"]["type"])
    except (ValueError, KeyError, TypeError):
        return ""
