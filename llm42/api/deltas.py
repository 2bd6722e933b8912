"""Streams of deltas: joining neighbours, sending at most every so often; the choices of an HTTP request, each
a request of its own, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

from llm42.protocol import Delta, Request, RequestStats

Deltas = AsyncGenerator[Delta, None]
Generate = Callable[[Request], Deltas]


def merge(deltas: Sequence[Delta]) -> Delta:
    """Neighbouring pieces of one output as one; finish reason and statistics are the last one's."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return Delta(
        token_ids=tuple(t for d in deltas for t in d.token_ids),
        text="".join(d.text for d in deltas),
        logprobs=tuple(p for d in deltas for p in d.logprobs),
        token_texts=tuple(t for d in deltas for t in d.token_texts),
        finish_reason=last.finish_reason,
        fingerprint=next((d.fingerprint for d in reversed(deltas) if d.fingerprint), None),
        stats=last.stats,
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        cached_tokens=next((d.cached_tokens for d in deltas if d.cached_tokens is not None), None),
    )


async def coalesce(source: Deltas, interval_s: float) -> Deltas:
    """Passes deltas on at most once per interval, joined; the first and the last are never held back.

    The source is read ahead (its memory is bounded by max_tokens) and closed when this generator is closed.
    """
    buffer: list[Delta] = []
    arrived, done = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        try:
            async for delta in source:
                buffer.append(delta)
                arrived.set()
        finally:
            done.set()
            arrived.set()

    reader = asyncio.create_task(read())
    try:
        while True:
            await arrived.wait()
            arrived.clear()
            if buffer:
                ready, buffer[:] = merge(buffer), []
                yield ready
            elif done.is_set():
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), interval_s)
            if done.is_set():
                arrived.set()
        await reader  # raises what the source raised
    finally:
        await _end(reader)
        await source.aclose()  # aborts the request behind it


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


async def interleave(sources: Sequence[Deltas]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(index, delta) of several streams as they come; the first error ends all of them."""
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(maxsize=len(sources))

    async def pump(index: int, source: Deltas) -> None:
        try:
            async for delta in source:
                await queue.put((index, delta))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(i, s)) for i, s in enumerate(sources)]
    open_streams = len(sources)
    try:
        while open_streams:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield index, item
    finally:
        for task, source in zip(tasks, sources, strict=True):
            await _end(task)
            await source.aclose()  # aborts the request behind it


async def _end(task: asyncio.Task[None]) -> None:
    """Cancels a task if it still runs and waits for it, whatever it ends with."""
    task.cancel()
    await asyncio.wait([task])
