"""One piece of work at a time, and of those who wait the keys take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A lock that goes from key to key: who sends much waits for himself."""

    def __init__(self) -> None:
        self._busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By key; the next one's first."""

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Holds the lock; among the same key's, first come, first served."""
        await self._enter(key)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, key: str) -> None:
        if not self._busy:
            self._busy = True
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it had been given to us
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            key = next(iter(self._waiting))
            queue = self._waiting.pop(key)
            first = queue.popleft()
            if queue:
                self._waiting[key] = queue  # behind the others
            if not first.done():
                first.set_result(None)
                return
        self._busy = False
