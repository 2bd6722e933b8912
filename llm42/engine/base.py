"""The fast path's interface: an engine proposes candidates; only the session decides what stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llm42.errors import RequestRejected
from llm42.protocol import FinishReason, Request, TokenLogprob
from llm42.step_times import StepTimes


@dataclass(slots=True)  # not frozen: one is made per token, and a frozen one costs three times as much
class EngineOutput:
    """Tokens a request produced: `tokens[i]` is its output token number `start + i`.

    `epoch` is the request's rollback count when they were decoded; older epochs are stale. `finish` and
    `error` are final. A deterministic request never finishes by itself: it parks after an end token or at
    its limit.
    """

    request_id: str
    epoch: int
    start: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """With a best-effort request's first output, if asked for: from the prompt's second token on."""
    cached_tokens: int | None = None
    """With a first output: how many of the prompt's tokens were found in the engine's cache."""
    param: str | None = None
    """With an error: the field of the request that is to blame, if one is."""


SAME_ID = "two requests with this id are under way: each needs an id of its own"
"""How both of them end: either's owner would abort the other by its id, and leave it waiting for ever."""

Sink = Callable[[EngineOutput], None]
"""Called from the engine's thread; must not block."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine is busy with: requests, and KV in tokens."""

    running: int
    waiting: int
    kv_used: int
    kv_total: int
    preemptions: int = 0
    steps: int = 0


class Engine(Protocol):
    """A fast-path engine. Every method may be called from any thread and returns at once."""

    def check(self, request: Request) -> None:
        """Raises what `submit` would, and starts nothing: RequestRejected for what can never run here,
        Overloaded where the engine is gone."""
        ...

    def submit(self, request: Request, sink: Sink, limit: int) -> None:
        """Starts a request that may produce output tokens up to number `limit` (lookahead bound).

        It goes on after `request.output`: the first token it reports is number len(request.output). Raises
        RequestRejected for what can never fit or cannot be computed, Overloaded when the engine has ended.
        """
        ...

    def extend(self, request_id: str, limit: int) -> None:
        """Renews the lookahead bound, in output tokens: a held request goes on. Unknown ids are ignored."""
        ...

    def rollback(self, request_id: str, output: Sequence[int], epoch: int, limit: int) -> None:
        """Makes the request's output exactly `output` and goes on from there, up to output token number
        `limit`; later outputs carry `epoch`. Unknown ids are ignored."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request and frees what it holds; unknown ids are ignored."""
        ...

    def load(self) -> EngineLoad:
        """The present load."""
        ...

    def close(self) -> None:
        """Ends the engine; requests still running get an error output. Waits for it."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the engine's loop runs."""
        ...

    @property
    def times(self) -> StepTimes:
        """How long its steps take, in seconds, by the requests that they decode. May be read from any
        thread."""
        ...


def require_room(request: Request, positions: int, kv_tokens: int | None = None) -> None:
    """Raises RequestRejected for more than the context (prompt plus output) or the engine's KV cache."""
    needed = len(request.prompt) + request.max_tokens
    if needed > positions:
        text = f"need {needed} positions; this server has {positions} (model.max_model_len)"
    elif kv_tokens is not None and needed > kv_tokens:
        text = f"need {needed} tokens of KV cache; this server has {kv_tokens} (engine.kv_tokens)"
    else:
        return
    advice = "shorten the prompt or lower max_tokens"
    raise RequestRejected(f"prompt and max_tokens {text}: {advice}", "max_tokens", "context_length_exceeded")


def require_known_ids(request: Request, vocab_size: int) -> None:
    """Raises RequestRejected for an id that the model has no row for.

    The HTTP side checks them too; whoever forgets to must not bring an engine down, and others' requests
    with it.
    """
    if not all(0 <= token < vocab_size for token in (*request.prompt, *request.output)):
        text = f"prompt: a token id is outside the model's vocabulary (0 to {vocab_size - 1})"
        raise RequestRejected(text, "prompt")
    if not request.sampling.fits(vocab_size):
        text = f"logit_bias: an id is outside the model's vocabulary (0 to {vocab_size - 1})"
        raise RequestRejected(text, "logit_bias")
