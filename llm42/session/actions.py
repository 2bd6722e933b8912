"""What a session wants done: it does nothing itself."""

from __future__ import annotations

from dataclasses import dataclass

from llm42.protocol import TokenLogprob


@dataclass(frozen=True, slots=True)
class Emit:
    """Committed tokens for the client, with their log-probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Rollback:
    """The fast path must continue from exactly these output tokens."""

    output: tuple[int, ...]
    epoch: int
    limit: int


@dataclass(frozen=True, slots=True)
class Extend:
    """The fast path may decode up to output token number `limit`."""

    limit: int


@dataclass(frozen=True, slots=True)
class Renew:
    """The verifier may go on until prompt and output together have this length."""

    until: int


@dataclass(frozen=True, slots=True)
class Resend:
    """A commit is missing, and what comes behind it is of no use: the verifier must have the window that
    `due` gives now, in full."""


Action = Emit | Rollback | Extend | Renew | Resend
