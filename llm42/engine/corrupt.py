"""The test plant `engine.corrupt_share`: an engine that is often wrong, so that every run has rollbacks to
survive."""

from __future__ import annotations

import random
from dataclasses import replace

from llm42.engine.base import Engine, EngineOutput, Sink
from llm42.protocol import Request
from llm42.step_times import StepTimes


class CorruptingEngine:
    """Implements llm42.engine.base.Engine over another one, whose candidates it makes wrong on their way to
    the sink: of deterministic requests only, and no end tokens, after which the engine waits.

    Whether output token number n of a request is made wrong depends on the request's id and on n alone, so it
    is wrong again after a rollback to before it. The engine itself goes on from the right token; a rollback
    gives it the whole output, so it never has to know.
    """

    def __init__(self, engine: Engine, share: float) -> None:
        """share: of the candidates, between 0 and 1."""
        self.engine, self._share = engine, share
        self.extend, self.rollback, self.abort = engine.extend, engine.rollback, engine.abort
        self.load, self.close = engine.load, engine.close

    @property
    def alive(self) -> bool:
        """Whether the engine's loop runs."""
        return self.engine.alive

    @property
    def times(self) -> StepTimes:
        """The engine's own."""
        return self.engine.times

    def check(self, request: Request) -> None:
        """As the engine does."""
        self.engine.check(request)

    def submit(self, request: Request, sink: Sink, limit: int) -> None:
        """Starts a request; the sink hears wrong candidates."""

        def spoil(number: int, token: int) -> int:
            draw = random.Random(f"{request.request_id} {number}").random()
            right = draw >= self._share or token in request.stop_token_ids
            return token if right else token - 1 if token else 1

        def spoiled(output: EngineOutput) -> None:
            tokens = (spoil(number, token) for number, token in enumerate(output.tokens, output.start))
            sink(replace(output, tokens=tuple(tokens)))

        self.engine.submit(request, spoiled if request.deterministic else sink, limit)
