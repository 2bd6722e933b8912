"""The choices of one HTTP request as streams: each is a request of its own, but a prompt is scored once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from llm42.protocol import Delta, Request, RequestStats

Deltas = AsyncGenerator[Delta, None]
Generate = Callable[[Request], Deltas]


def streams_of(generate: Generate, requests: Sequence[Request], prompts: int) -> list[Deltas]:
    """Of each choice its deltas. requests: of `prompts` prompts, as many choices of each, in order.

    Where the prompt's log-probabilities are asked for, a prompt's first choice computes them (as a long
    prefill, which leaves out every cache) and the others begin when they are there, which is when they would
    have them themselves. They find the prompt in the caches then.
    """
    streams: list[Deltas] = []
    each = len(requests) // prompts
    for begin in range(0, len(requests), each):
        first, *others = requests[begin : begin + each]
        if first.prompt_logprobs is None or not others:
            streams += map(generate, (first, *others))
            continue
        scored = _Scored(generate, first)
        streams += [scored.first(), *map(scored.other, others)]
    return streams


class _Scored:
    """The choices of one prompt."""

    def __init__(self, generate: Generate, request: Request) -> None:
        self._generate, self._request = generate, request
        self._known = asyncio.Event()
        self._delta: Delta | None = None
        """The delta of the first choice that brought the prompt's log-probabilities."""

    async def first(self) -> Deltas:
        """The choice that scores the prompt."""
        async with aclosing(self._generate(self._request)) as deltas:
            async for delta in deltas:
                if self._delta is None and delta.prompt_logprobs is not None:
                    self._delta = delta
                    self._known.set()
                yield delta
        self._known.set()

    async def other(self, request: Request) -> Deltas:
        """Another choice. When the first one fails, all of them are closed: this one waits for that."""
        await self._known.wait()
        known = self._delta
        if known is not None and not request.max_tokens:  # there is nothing else to know
            yield replace(known, stats=known.stats and RequestStats(), cached_tokens=None)
            return
        asked = request if known is None else replace(request, prompt_logprobs=None)
        async with aclosing(self._generate(asked)) as deltas:
            async for delta in deltas:
                yield delta if known is None else replace(delta, prompt_logprobs=known.prompt_logprobs)
                known = None
