"""No engine: what a replica has where verifiers decode all requests (engine.kind canonical)."""

from __future__ import annotations

from collections.abc import Sequence

from llm42.engine.base import EngineLoad, Sink
from llm42.protocol import Request
from llm42.step_times import StepTimes


class NoEngine:
    """Is never busy, lives until it is closed, and is asked for nothing: no request may reach it."""

    def __init__(self) -> None:
        self._closed = False

    def check(self, request: Request) -> None:
        """Raises RuntimeError."""
        self.submit(request, lambda _: None, 0)

    def submit(self, request: Request, sink: Sink, limit: int) -> None:
        """Raises RuntimeError."""
        raise RuntimeError(f"{request.request_id}: this replica has no engine (engine.kind canonical)")

    def extend(self, request_id: str, limit: int) -> None:
        """Nothing is under way."""

    def rollback(self, request_id: str, output: Sequence[int], epoch: int, limit: int) -> None:
        """Nothing is under way."""

    def abort(self, request_id: str) -> None:
        """Nothing is under way."""

    def load(self) -> EngineLoad:
        """Zeros."""
        return EngineLoad(0, 0, 0, 0)

    @property
    def times(self) -> StepTimes:
        """None were measured."""
        return StepTimes()

    def close(self) -> None:
        """There is nothing to end."""
        self._closed = True

    @property
    def alive(self) -> bool:
        """Until it is closed."""
        return not self._closed
