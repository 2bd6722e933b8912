"""How long an event loop was kept from its work, whatever else the machine is doing."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
TICK_S = 0.001


async def longest_gap(work: Awaitable[T]) -> tuple[float, T]:
    """Seconds of the longest gap between two turns of the loop while `work` is awaited, and its result.

    Of each gap the time, or the CPU time of this process where that is less: who keeps the loop waiting, on
    its thread or by holding the interpreter in another one, computes meanwhile; other processes, which only
    make it late, do not count.
    """
    worst, ended = 0.0, False

    async def tick() -> None:
        nonlocal worst
        last = time.perf_counter(), time.process_time()
        while not ended:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter(), time.process_time()
            worst = max(worst, min(b - a for a, b in zip(last, now, strict=True)))
            last = now

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(2 * TICK_S)
    try:
        found = await work
    finally:
        ended = True
        await ticker
    return worst, found


def settle_heap() -> None:
    """As an ingress does once it has started: what is there will stay, and need not be looked through."""
    gc.collect()
    gc.freeze()
