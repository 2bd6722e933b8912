"""What the driver of one request waits for: outputs of the engine's thread, answers of its own event loop.

Waking an event loop from another thread for every token costs more than anything else a replica does with
the token (at 256 requests a replica's Python was the limit of the whole GPU). So the driver says from which
output token on it wants to be woken, and what came before that is taken along.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from llm42.engine.base import EngineOutput
from llm42.errors import LLM42Error
from llm42.protocol import Commit

ANY = 0
"""`wake_at` of a driver that wants every output."""
NONE = float("inf")
"""`wake_at` of a driver that wants no output, unless it ends something."""


class Inbox:
    """Made and read in an event loop; `sink` may be called from any one thread.

    stops: ids that always wake (after an end token no more candidates come).
    """

    __slots__ = ("_answers", "_loop", "_outputs", "_ready", "_stops", "_wake_at", "_woken")

    def __init__(self, stops: Iterable[int] = ()) -> None:
        self._loop = asyncio.get_running_loop()
        self._outputs: deque[EngineOutput] = deque()
        self._answers: deque[Commit | LLM42Error] = deque()
        self._ready = asyncio.Event()
        self._stops = frozenset(stops)
        self._wake_at: float = NONE
        self._woken = False

    def sink(self, output: EngineOutput) -> None:
        """llm42.engine.base.Sink."""
        self._outputs.append(output)  # before `_wake_at` is read: `wait` sets that and then looks here
        if not self._woken and self._wakes(output):
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._ready.set)

    def put(self, answer: Commit | LLM42Error) -> None:
        """An answer; called in the event loop."""
        self._answers.append(answer)
        self._ready.set()

    async def wait(self, wake_at: float, timeout_s: float | None = None) -> None:
        """Until an output reaches output token number `wake_at`, or ends something, or an answer is there, or
        the time is over. What was to wake an earlier wait does not end this one."""
        self._wake_at = wake_at
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # wait_for may lose a cancellation when an event comes
                while True:
                    self._ready.clear()
                    self._woken = False  # before the look: what comes later wakes again
                    if self._answers or any(self._wakes(output) for output in list(self._outputs)):
                        return
                    await self._ready.wait()

    def take(self) -> tuple[list[EngineOutput], list[Commit | LLM42Error]]:
        """Everything that is there."""
        self._ready.clear()
        self._woken = False  # before the outputs are looked at: what comes later wakes again
        outputs, answers = [], []
        while self._outputs:
            outputs.append(self._outputs.popleft())
        while self._answers:
            answers.append(self._answers.popleft())
        return outputs, answers

    def _wakes(self, output: EngineOutput) -> bool:
        return (
            output.start + len(output.tokens) >= self._wake_at
            or output.finish is not None
            or output.error is not None
            or not self._stops.isdisjoint(output.tokens)
        )
