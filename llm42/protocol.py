"""The messages of the decode-verify-rollback protocol: plain dataclasses, all frozen but the counters of
RequestStats, which every release can unpickle. Nothing is done here but checks of their own values."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeVar

from llm42.errors import VersionSkew

T = TypeVar("T")


def across_releases(kind: type[T]) -> type[T]:
    """A slotted dataclass that is read as an older or a newer release pickled it, with fields added at the
    end: missing ones have their defaults, unknown ones are left out. What is deterministic is not answered by
    two releases at all (VersionSkew)."""

    def restore(message: Any, state: Any) -> None:
        known: Any = fields(message)
        if not isinstance(state, tuple):  # a frozen one is a list of values
            state = None, dict(zip((f.name for f in known), state, strict=False))
        for f in known:
            value = state[1].get(f.name, f.default)
            if value is MISSING:
                raise VersionSkew(
                    f"a {kind.__name__} of another release came without {f.name}: deploy one release"
                )
            object.__setattr__(message, f.name, value)

    # set afterwards: the dataclass decorator would put its own in the place of an inherited one
    kind.__setstate__ = restore  # type: ignore[attr-defined]
    return kind


class FinishReason(StrEnum):
    """Why a request ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@across_releases
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the logits (docs/sampling.md).

    Neutral values switch a stage off: temperature 0 (greedy), top_k 0, top_p 1, min_p 0,
    repetition_penalty 1, presence and frequency penalty 0, empty logit_bias, min_tokens 0.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    min_tokens_banned: tuple[int, ...] = ()
    """Token ids that may not be drawn before `min_tokens` output tokens (end-of-text and stop ids)."""

    def fits(self, vocab_size: int) -> bool:
        """Whether every id that it names is one of the vocabulary's: others would address other memory."""
        named = (*(i for i, _ in self.logit_bias), *self.min_tokens_banned)
        return all(0 <= i < vocab_size for i in named)


@across_releases
@dataclass(frozen=True, slots=True)
class Request:
    """One generation request, tokenised and validated."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    deterministic: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the output; the model's end-of-text ids are included unless the client said ignore_eos."""
    include_stop: bool = False
    priority: int = 0
    """Smaller goes first when requests wait, and is preempted last."""
    num_logprobs: int | None = None
    """None: no log-probabilities; 0: the chosen token's only; n: also the n most likely ones."""
    seeded: bool = True
    """False: the client named no seed, so a best-effort engine need not keep the noise of `sampling.seed`."""
    output: tuple[int, ...] = ()
    """What the client has already: the request goes on after it (failover). Counts towards max_tokens."""
    fingerprint: str | None = None
    """The verifier's fingerprint that `output` was committed under; no other may go on with it."""
    prompt_logprobs: int | None = None
    """As num_logprobs, but for the prompt's tokens from the second on: they come with the first delta."""
    json_schema: str | None = None
    """The output is constrained to JSON of this schema (best effort only; the engine must be able to)."""
    stream: bool = True
    """False: the client gets the output when it is whole, so parts of it may wait for each other."""
    trace: str = ""
    """W3C traceparent of the span that the request belongs to; empty: it is not traced."""
    cache_salt: str = ""
    """Caches of prompts are shared among requests with the same salt only. It cannot change a token."""


@across_releases
@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of `token` under the raw logits, and the most likely alternatives, best
    first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@across_releases
@dataclass(frozen=True, slots=True)
class Window:
    """Candidates of one request to be verified: `candidates[i]` was proposed for position `len(tokens) +
    i`."""

    request_id: str
    tokens: tuple[int, ...]
    prompt_len: int
    candidates: tuple[int, ...]
    sampling: SamplingParams
    num_logprobs: int = 0
    score: bool = False
    """The candidates are not to be checked but scored: all stand, each with its own log-probability."""
    cache_salt: str = ""
    """As the request's."""
    credit: int = 0
    """How many tokens the verifier may decode by itself after its own next token."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the output; said where there is credit."""
    max_len: int = 0
    """Length of prompt and output together at which the output ends; said where there is credit."""
    yields: bool = False
    """Its request gives way to others in the verifier: an engine goes on with it at any time."""


@across_releases
@dataclass(frozen=True, slots=True)
class VerifyTimings:
    """Where a window's time went (seconds), and how many rows were computed and how many came from the
    cache."""

    queue_s: float = 0.0
    compute_s: float = 0.0
    rows: int = 0
    cached_rows: int = 0


@across_releases
@dataclass(frozen=True, slots=True)
class Commit:
    """The verifier's answer: `accepted` candidates stand, then comes `next_token` (correction or bonus), then
    `decoded`, what the verifier decoded by itself.

    logprobs has an entry for each of these tokens. `base` is how many tokens, of prompt and output, stand
    before them: `len(window.tokens)` in a window's first commit. Where a window had credit, more follow.
    """

    request_id: str
    base: int
    accepted: int
    next_token: int
    logprobs: tuple[TokenLogprob, ...]
    fingerprint: str
    timings: VerifyTimings = VerifyTimings()
    decoded: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """How many tokens stand after it."""
        return self.base + len(self.logprobs)


@across_releases
@dataclass(frozen=True, slots=True)
class Failure:
    """The verifier cannot answer this window, ever (too long, NaN logits): the request ends with this
    error."""

    request_id: str
    code: str
    message: str


@across_releases
@dataclass(slots=True)
class RequestStats:
    """What a request cost; returned as the `llm42` object of a reply."""

    windows: int = 0
    rollbacks: int = 0
    rolled_back_tokens: int = 0
    verified_tokens: int = 0
    candidate_tokens: int = 0
    verify_retries: int = 0
    cached_prompt_tokens: int = 0
    """Prompt tokens whose KV the verifier had in its cache when the first window came."""
    failovers: int = 0
    """How often another replica went on with the request."""
    direct_tokens: int = 0
    """Of the verified tokens, those that the verifier decoded by itself."""


@across_releases
@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of output ready for the client: committed tokens only when the request is deterministic."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    token_texts: tuple[str, ...] = ()
    finish_reason: FinishReason | None = None
    fingerprint: str | None = None
    stats: RequestStats | None = field(default=None)
    """Set on the last delta."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """On the first delta, if asked for: of the prompt's tokens from the second on."""
    cached_tokens: int | None = None
    """On one of the first deltas: prompt tokens that the fast path had in its cache."""
    replica: str = ""
    verifier: str = ""
    """Who has computed it, where that is known: on the first and the last delta. No part of the promise."""
