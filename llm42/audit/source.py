"""What stored answers are held against: the interface of a verifier, here or behind a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from llm42.errors import Overloaded, VerifierUnavailable
from llm42.protocol import Commit, Delta, Failure, Request, Window

log = logging.getLogger(__name__)
ATTEMPTS = 6
T = TypeVar("T")
Planner = Callable[[Mapping[str, Any]], Sequence[Request]]
"""From the body of a stored request to what the service makes of it, one request a choice. Raises
LLM42Error."""


class Canon(Protocol):
    """What answers are held against: a verifier, here or behind a server."""

    async def identity(self) -> tuple[str, Mapping[str, Any]]:
        """Fingerprint and manifest. Raises VerifierUnavailable."""
        ...

    async def replay(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """Answers in order, computed without the cache. VerifierUnavailable and Overloaded may be retried."""
        ...

    def regenerate(self, request: Request) -> AsyncIterator[Delta]:
        """The deterministic output of a request. Raises LLM42Error."""
        ...


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats what the verifiers were too busy for, or what died with one of them: all of it is pure."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return await call()
        except (VerifierUnavailable, Overloaded) as error:
            log.info("tried again: %s", error)
            await asyncio.sleep(min(5.0, 0.1 * 3**attempt))
    return await call()
