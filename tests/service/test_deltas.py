"""Joining, coalescing and interleaving of delta streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from llm42.api.deltas import coalesce, interleave, merge
from llm42.protocol import Delta, FinishReason


class Source:
    """Yields n one-token deltas, `pause_s` apart; then ends, or raises `error`."""

    def __init__(self, n: int, pause_s: float = 0.0, error: Exception | None = None) -> None:
        self.n, self.pause_s, self.error = n, pause_s, error
        self.closed = False

    async def stream(self) -> AsyncGenerator[Delta, None]:
        try:
            for i in range(self.n):
                await asyncio.sleep(self.pause_s)
                yield Delta((i,), f"{i},", finish_reason=FinishReason.LENGTH if i == self.n - 1 else None)
            if self.error:
                raise self.error
        finally:
            self.closed = True


async def _drain(stream: AsyncGenerator[Delta, None], tokens: list[int]) -> None:
    async for delta in stream:
        tokens += delta.token_ids


async def test_coalescing_keeps_everything_in_fewer_messages() -> None:
    source = Source(50, 0.002)
    began = time.monotonic()
    got = [d async for d in coalesce(source.stream(), 0.03)]
    elapsed = time.monotonic() - began
    assert merge(got) == merge([d async for d in Source(50).stream()])
    assert len(got) <= elapsed / 0.03 + 3
    assert len(got[0].token_ids) == 1, "the first token is not held back"
    assert source.closed


async def test_without_an_interval_nothing_waits() -> None:
    got = [d async for d in coalesce(Source(5, 0.01).stream(), 0.0)]
    assert [d.token_ids for d in got] == [(0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize("interval_s", [0.0, 0.05])
async def test_coalescing_passes_errors_on_after_the_tokens(interval_s: float) -> None:
    got: list[int] = []
    with pytest.raises(ValueError, match="boom"):
        await _drain(coalesce(Source(3, error=ValueError("boom")).stream(), interval_s), got)
    assert got == [0, 1, 2]


async def test_closing_closes_the_source() -> None:
    sources = [Source(10**6, 0.001), Source(10**6, 0.001)]
    streams = [coalesce(s.stream(), 0.01) for s in sources]
    joined = interleave(streams)
    async for _ in joined:
        break
    await joined.aclose()
    assert [s.closed for s in sources] == [True, True]


async def test_interleaving_keeps_each_order_and_ends_all_on_an_error() -> None:
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async for index, delta in interleave(
        [Source(20, 0.001).stream(), Source(5).stream(), Source(0).stream()]
    ):
        got[index] += delta.token_ids
    assert got == {0: list(range(20)), 1: list(range(5)), 2: []}
    endless = Source(10**6, 0.001)
    with pytest.raises(ValueError, match="boom"):
        await anext(interleave([endless.stream(), Source(0, error=ValueError("boom")).stream()]))
    assert endless.closed
