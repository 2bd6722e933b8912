"""What the driver of one request waits for: outputs of the engine's thread, a verifier's answers.

Waking an event loop from another thread for every token costs more than anything else a replica does with
the token (at 256 requests a replica's Python was the limit of the whole GPU). So the driver says from which
output token on it wants to be woken, and what came before that is taken along.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Generic, TypeVar

from llm42.engine.base import EngineOutput

A = TypeVar("A")

ANY = 0
"""`wake_at` of a driver that wants every output."""
NONE = float("inf")
"""`wake_at` of a driver that wants no output, unless it ends something."""


class Inbox(Generic[A]):
    """Made and read in an event loop; `sink` and `post` may be called from any thread. A: what answers are.

    stops: ids that always wake (after an end token no more candidates come).
    """

    __slots__ = ("_answers", "_loop", "_outputs", "_ready", "_stops", "_wake_at", "_woken")

    def __init__(self, stops: Iterable[int] = ()) -> None:
        self._loop = asyncio.get_running_loop()
        self._outputs: deque[EngineOutput] = deque()
        self._answers: deque[A] = deque()
        self._ready = asyncio.Event()
        self._stops = frozenset(stops)
        self._wake_at: float = NONE
        self._woken = False

    def sink(self, output: EngineOutput) -> None:
        """llm42.engine.base.Sink."""
        self._outputs.append(output)  # before `_wake_at` is read: `wait` sets that and then looks here
        if self._wakes(output):
            self._wake()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there."""
        return not (self._outputs or self._answers)

    def put(self, answer: A) -> None:
        """An answer; called in the event loop."""
        self._answers.append(answer)
        self._ready.set()

    def post(self, answer: A) -> None:
        """An answer, from any thread."""
        self._answers.append(answer)  # before `_woken` is read, as above
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._ready.set)

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

    def take(self) -> tuple[list[EngineOutput], list[A]]:
        """Everything that is there."""
        self._ready.clear()
        self._woken = False  # before the outputs are looked at: what comes later wakes again
        outputs, answers = list[EngineOutput](), list[A]()
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
