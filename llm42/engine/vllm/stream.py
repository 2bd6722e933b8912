"""One request of the vLLM engine: what is known of it, what may be reported, whether it may run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llm42.engine.base import EngineOutput, Sink
from llm42.engine.vllm.sampling import token_logprobs
from llm42.protocol import FinishReason, Request, TokenLogprob


@dataclass(slots=True)
class Attempt:
    """One vLLM request, and what carries it."""

    id: str
    priority: int
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Stream:
    """A request in the engine, carried by one attempt after another."""

    request: Request
    sink: Sink
    limit: int
    epoch: int = 0
    count: int = 0
    """Output tokens reported in this epoch; of a deterministic request they are kept in `output`."""
    output: list[int] = field(default_factory=list)
    surplus: list[int] = field(default_factory=list)
    """Decoded beyond `limit`, not reported."""
    parked: bool = False
    """Waits for a rollback or an abort after an end-of-text candidate."""
    attempt: Attempt | None = None
    attempts: int = 0
    first_taken: bool = False
    """What comes with a first output was taken."""
    pending: dict[str, Any] = field(default_factory=dict)
    """Fields of the next EngineOutput that has tokens."""

    @property
    def full(self) -> bool:
        """Whether it has to wait: for its bound to move, or for a rollback."""
        return self.parked or self.count >= self.limit

    def restart(self, output: Sequence[int], epoch: int, limit: int) -> None:
        """Makes the output exactly `output`."""
        self.output, self.count, self.epoch, self.limit = [*output], len(output), epoch, limit
        self.surplus, self.parked = [], False

    def release(self) -> None:
        """Reports surplus tokens up to the bound, or to an end token, after which the stream parks."""
        if self.full or not self.surplus:
            return
        tokens = self.surplus[: self.limit - self.count]
        del self.surplus[: len(tokens)]
        end = next((i for i, t in enumerate(tokens) if t in self.request.stop_token_ids), None)
        if end is not None:
            del tokens[end + 1 :]
            self.surplus, self.parked = [], True
        self.output += tokens
        self.report(tokens)

    def take_first(self, output: Any) -> None:
        """Keeps what comes with a first output (a RequestOutput) and with no other."""
        self.first_taken, request = True, self.request
        self.pending["cached_tokens"] = getattr(output, "num_cached_tokens", None)
        if request.prompt_logprobs is not None and not request.deterministic and not request.output:
            found = (output.prompt_logprobs or [None])[1:]
            self.pending["prompt_logprobs"] = token_logprobs(
                request.prompt[1:], found, request.prompt_logprobs
            )

    def report(
        self,
        tokens: Sequence[int] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        finish: FinishReason | None = None,
        error: str | None = None,
        param: str | None = None,
    ) -> None:
        """Tells the sink. param: the request's field that the error is about."""
        start = self.count
        self.count += len(tokens)
        output = EngineOutput(
            self.request.request_id, self.epoch, start, tuple(tokens), logprobs, finish, error, param=param
        )
        if tokens and self.pending:
            output = replace(output, **self.pending)
            self.pending = {}
        self.sink(output)
