"""What a claim asks: the request whose answer it is, from the stored body or from the ids beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from llm42.audit.claim import Claim
from llm42.errors import LLM42Error, RequestRejected
from llm42.protocol import Request, SamplingParams
from llm42.receipt import Receipt, token_hash

RequestMaker = Callable[[Mapping[str, Any]], Sequence[Request]]
"""From the body of a stored request to what the service makes of it, one request a choice. Raises
LLM42Error."""
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, math.inf),
    "top_p": (math.nextafter(0, 1), 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "min_tokens": (0, math.inf),
}
"""Smallest and largest value of each field that the API lets through (llm42/api/requests.py)."""
BIAS = (-100, 100)
MAX_BIASES = 1024


class Contradiction(LLM42Error):
    """The record says two things that exclude each other: whatever is canonical, its answer differs."""

    code = "contradiction"


class Questions:
    """Makes requests of claims. The body of a record is read once for all its choices, so claims of one
    record should come one after another. For one thread."""

    def __init__(self, make: RequestMaker, vocab_size: int) -> None:
        self._make, self._vocab_size = make, vocab_size
        self._line: int | None = None
        self._made: Sequence[Request] | LLM42Error = ()

    def of(self, claim: Claim, name: str) -> Request:
        """The request as it was sent, under another id. Without a stored body, nothing is known of its end:
        max_tokens and stops.

        Raises LLM42Error for one that the service would never have run, Contradiction for a reply with
        other choices than the stored body asks for.
        """
        if claim.body is not None:
            request = _chosen(claim, self._requests(claim))
        else:
            assert claim.prompt is not None
            assert claim.sampling is not None
            request = Request(name, claim.prompt, 1, claim.sampling)
        self._require_possible(request, claim.output or ())
        return replace(request, request_id=name, deterministic=True, num_logprobs=0, prompt_logprobs=None)

    def _requests(self, claim: Claim) -> Sequence[Request]:
        if claim.line != self._line:
            assert claim.body is not None
            self._line = claim.line
            try:
                self._made = self._make(claim.body)
            except LLM42Error as error:
                self._made = LLM42Error(f"the stored request: {error}")
        if isinstance(self._made, LLM42Error):
            raise self._made
        return self._made

    def _require_possible(self, request: Request, output: Iterable[int]) -> None:
        sampling = request.sampling
        self._require_known("prompt", request.prompt)
        self._require_known("output", output)
        self._require_known("logit_bias", [token for token, _ in sampling.logit_bias])
        self._require_known("min_tokens_banned", sampling.min_tokens_banned)
        require_ranges(sampling)

    def _require_known(self, what: str, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                last = self._vocab_size - 1
                raise RequestRejected(f"{what}: token id {token} is outside the vocabulary (0 to {last})")


def require_ranges(sampling: SamplingParams) -> None:
    """Raises RequestRejected for values that the API refuses."""
    values = asdict(sampling)
    bounded = [(name, values[name], *bounds) for name, bounds in RANGES.items()]
    bounded += [("logit_bias", value, *BIAS) for _, value in sampling.logit_bias]
    for name, value, least, most in bounded:
        if not least <= value <= most:
            raise RequestRejected(f"sampling.{name}: {value!r} is outside what a request may ask for", name)
    ids = [token for token, _ in sampling.logit_bias]
    if len(set(ids)) < len(ids) or len(ids) > MAX_BIASES:
        text = f"sampling.logit_bias names a token id twice, or more than {MAX_BIASES} of them"
        raise RequestRejected(text, "logit_bias")


def _chosen(claim: Claim, made: Sequence[Request]) -> Request:
    """Which of the body's requests it is: the one that the record names, else one that fits what stands
    beside the body, else the one whose number is behind the receipt's id.

    A body without a seed was run with the server's default of its day, which the receipt has kept.
    """
    if claim.choices is not None:
        if claim.choices != len(made):
            text = f"the stored reply has {claim.choices} choices; the request asks for {len(made)}"
            raise Contradiction(text)
        if claim.choice >= len(made):
            raise Contradiction(f"the stored request has no choice {claim.choice}")
        return _seeded(claim, made[claim.choice])
    number = _number(claim.receipt) if claim.receipt else 0
    first = number if number < len(made) else 0
    order = [made[first], *made[:first], *made[first + 1 :]]
    seeded = [_seeded(claim, request) for request in order]
    return next((request for request in seeded if _fits(claim, request)), seeded[0])


def _seeded(claim: Claim, request: Request) -> Request:
    assert claim.body is not None
    if claim.sampling is None or claim.body.get("seed") is not None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=claim.sampling.seed))


def _fits(claim: Claim, request: Request) -> bool:
    if claim.sampling is not None and claim.sampling != request.sampling:
        return False
    if claim.prompt is not None and claim.prompt != request.prompt:
        return False
    return claim.receipt is None or prompt_fits(claim.receipt, request.prompt)


def prompt_fits(receipt: Receipt, prompt: Sequence[int]) -> bool:
    """Whether the receipt is for this prompt."""
    return receipt.prompt_len == len(prompt) and receipt.prompt_sha256 == token_hash(prompt)


def _number(receipt: Receipt) -> int:
    """The choice's number behind a receipt's id; 0 where there is none."""
    digits = receipt.id.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 4 else 0
