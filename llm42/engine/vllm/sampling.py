"""Between our requests and vLLM's: sampling parameters in, log-probabilities and finish reasons out.

Deterministic requests. What vLLM proposes only has to be a good guess at the canonical token:
- Penalties, logit_bias, min_tokens, top-k, top-p and min-p stay off: after a resubmission vLLM would take
  committed output for prompt and apply them wrongly, and the first three cost vLLM time per step.
- At temperature 0 the guess is vLLM's argmax: right, but for rounding.
- At a higher temperature the canonical token depends on noise that vLLM's sampler does not know. The best
  guess without it is again the argmax: it is right with the probability of the most likely token, p_max,
  which no sample of vLLM's own can beat (that would be right with the sum of all p squared). So about
  1 / (1 - p_max) tokens pass before a rollback. With `engine.vllm.sampled_agreement` draw.py applies
  the canonical sampler.

Best-effort requests get vLLM's own sampler with exactly what the client asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from llm42.protocol import FinishReason, Request, SamplingParams, TokenLogprob
from llm42.sampling import is_greedy, is_plain

EXTRA_ARG = "llm42_draw"
"""Key in vLLM's SamplingParams.extra_args: which canonical draw a request asks for."""
_SEED_MASK = 2**63 - 1
_LARGEST = 2**31 - 1
"""More than any vocabulary or output has: a larger top_k or min_tokens, which vLLM could not carry, means
the same."""


def arguments_of(
    request: Request, done: int, sampled_agreement: bool = False, seeds: bool = True
) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams for what is left after `done` output tokens.

    sampled_agreement: draw.py is loaded. seeds: vLLM can take a request's seed.
    """
    arguments: dict[str, Any] = {
        "max_tokens": request.max_tokens - done,
        # which ids end the output is said in full by stop_token_ids, so vLLM's own end token must not
        "ignore_eos": True,
        "stop_token_ids": list(request.stop_token_ids),
    }
    if request.deterministic:
        arguments["temperature"] = 0.0
        if sampled_agreement and not is_plain(request.sampling):
            p = request.sampling
            p = dataclasses.replace(p, top_k=min(p.top_k, _LARGEST), min_tokens=min(p.min_tokens, _LARGEST))
            draw = dataclasses.asdict(p)
            arguments["extra_args"] = {EXTRA_ARG: {"prompt_len": len(request.prompt), "sampling": draw}}
        return arguments
    return arguments | _own_sampler(request, done, seeds)


def _own_sampler(request: Request, done: int, seeds: bool) -> dict[str, Any]:
    p = request.sampling
    least = min(p.min_tokens, request.max_tokens)  # vLLM refuses more
    arguments: dict[str, Any] = {
        "temperature": 0.0 if is_greedy(p) else p.temperature,
        "top_k": min(p.top_k, _LARGEST),
        "top_p": p.top_p,
        "min_p": p.min_p,
        "repetition_penalty": p.repetition_penalty,
        "presence_penalty": p.presence_penalty,
        "frequency_penalty": p.frequency_penalty,
        "min_tokens": max(0, least - done),
        "logprobs": request.num_logprobs,
    }
    if request.prompt_logprobs is not None and not request.output:
        arguments["prompt_logprobs"] = request.prompt_logprobs
    if request.json_schema is not None:
        arguments["json_schema"] = request.json_schema
    if p.logit_bias:
        arguments["logit_bias"] = dict(p.logit_bias)
    if seeds and request.seeded and not is_greedy(p):
        arguments["seed"] = p.seed & _SEED_MASK  # vLLM keeps seeds as signed 64-bit integers
    return arguments


def draw_of(extra_args: Mapping[str, Any] | None) -> tuple[SamplingParams, int] | None:
    """(sampling, prompt length) of a request that asks for the canonical draw, else None."""
    asked = (extra_args or {}).get(EXTRA_ARG)
    if asked is None:
        return None
    # lists come back where tuples went in
    values = dict(asked["sampling"])
    values["logit_bias"] = tuple((int(i), float(b)) for i, b in values["logit_bias"])
    values["min_tokens_banned"] = tuple(values["min_tokens_banned"])
    return SamplingParams(**values), int(asked["prompt_len"])


def token_logprobs(
    tokens: Sequence[int], positions: Sequence[Mapping[int, Any]] | None, count: int | None
) -> tuple[TokenLogprob, ...]:
    """vLLM's log-probabilities in our form: per token, its own and the `count` most likely ones."""
    if count is None or not positions:
        return ()
    found = []
    for token, entries in zip(tokens, positions, strict=True):
        ranked = sorted(entries.items(), key=lambda item: item[1].rank)
        top = tuple((i, entry.logprob) for i, entry in ranked if entry.rank <= count)[:count]
        found.append(TokenLogprob(token, entries[token].logprob, top))
    return tuple(found)


def reason_of(error: Exception) -> tuple[str, bool]:
    """What vLLM's error says, and whether it is about the request; vLLM wraps a refusal in an error of the
    engine that says nothing, so the first that speaks is taken, from the outside in."""
    found = error
    while not str(found) and found.__cause__ is not None and isinstance(found.__cause__, Exception):
        found = found.__cause__
    mine = isinstance(found, ValueError) or "VLLMClientError" in {c.__name__ for c in type(found).__mro__}
    return f"{type(found).__name__}: {found}", mine


def finish_of(reason: str | None) -> FinishReason | None:
    """vLLM's finish reason in our form. Raises RuntimeError for one that is an error."""
    try:
        return None if reason is None else FinishReason(reason)
    except ValueError as error:
        raise RuntimeError(f"vLLM ended the request: {reason}") from error
