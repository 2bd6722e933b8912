"""Streams of deltas: joining neighbours, sending at most every so often; the choices of an HTTP request, each
a request of its own, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import replace

from llm42.protocol import Delta, Request, RequestStats

Deltas = AsyncGenerator[Delta, None]
Generate = Callable[[Request], Deltas]
Pieces = AsyncGenerator[tuple[int, Delta], None]


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


def choices(
    generate: Generate,
    requests: Sequence[Request],
    prompts: int,
    held: AbstractContextManager[None] | None = None,
) -> Pieces:
    """(index, delta) of all choices, as they come. requests: of `prompts` prompts, as many choices of each,
    in order. held: as `interleave` has it.

    Where the prompt's log-probabilities are asked for, a prompt's first choice computes them (as a long
    prefill, which leaves out every cache) and the others begin when they are there, which is when they would
    have them themselves. They find the prompt in the caches then.
    """
    streams: list[Deltas] = []
    firsts: dict[int, _Scored] = {}
    each = len(requests) // prompts
    for begin in range(0, len(requests), each):
        first, *others = requests[begin : begin + each]
        if first.prompt_logprobs is None or not others:
            streams += map(generate, (first, *others))
            continue
        firsts[begin] = scored = _Scored(generate)
        streams += [generate(first), *map(scored.other, others)]

    def heard(index: int, delta: Delta | None) -> None:
        if (scored := firsts.get(index)) is not None:
            scored.heard(delta)

    return interleave(streams, held, heard)


class _Scored:
    """The choices of one prompt."""

    def __init__(self, generate: Generate) -> None:
        self._generate, self._known = generate, asyncio.Event()
        self._delta: Delta | None = None
        """The delta of the first choice that brought the prompt's log-probabilities."""

    def heard(self, delta: Delta | None) -> None:
        """From the choice that scores the prompt; None: it has ended."""
        if self._delta is None and delta is not None and delta.prompt_logprobs is not None:
            self._delta = delta
        if self._delta is not None or delta is None:
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


async def interleave(
    sources: Sequence[Deltas],
    held: AbstractContextManager[None] | None = None,
    heard: Callable[[int, Delta | None], None] = lambda *_: None,
) -> Pieces:
    """(index, delta) of several streams as they come; the first error ends all of them.

    held: entered before the first begins, left when all are closed; may refuse. heard: told of each delta,
    and with None of each stream's end, before what comes of it. Both are here instead of in generators of
    their own, which would be resumed for every delta."""
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(maxsize=len(sources))

    async def pump(index: int, source: Deltas) -> None:
        try:
            async for delta in source:
                heard(index, delta)
                await queue.put((index, delta))
            heard(index, None)
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    with held or nullcontext():
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
