"""Sampling as a pure function of one row's logits, the request's parameters and the tokens before it.

Stages, in order (docs/sampling.md), all in float32 unless said:
1. repetition penalty over prompt and output (l > 0 ? l / r : l * r), then frequency * count and presence
   over the output are subtracted;
2. logit_bias is added, ids banned by min_tokens become -inf;
3. division by temperature;
4. top-k;
5. top-p over the softmax of what is left (float64 cumulative sum, the id that crosses p is kept);
6. min-p: an id stays if value >= largest value + ln(min_p), in float64;
7. argmax of (value + Gumbel noise) in float64.
A temperature below GREEDY_BELOW stops after stage 2 with a plain argmax (so small a divisor only overflows).
Every tie, at a border too, goes to the lowest id.
Log-probabilities are of the raw logits: float32 exponentials, float64 sum.

One row at a time: every tensor has the row's fixed shape [V], so no other row can change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm42.noise import gumbel_row
from llm42.protocol import SamplingParams, TokenLogprob

NEG_INF = float("-inf")
TOP_P_HEAD = 1024
GREEDY_BELOW = 1e-5


@dataclass(slots=True)
class Sampled:
    """The canonical next token after one row, its log-probability, and the alternatives asked for."""

    token: int
    logprob: TokenLogprob
    finite: bool = True
    """False: the row's logits hold NaN or +inf, or a stage overflowed, or no finite value is left to draw
    from; the request must end with an error."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row's draw depends on besides its logits: see `sample_row`."""

    params: SamplingParams
    history: Sequence[int]
    """Its ids are read where `reads_history`; else only its length, and it may be a range."""
    prompt_len: int
    num_logprobs: int = 0
    given: int | None = None
    """The token that follows anyway (scoring): nothing is drawn, its log-probability is what is asked for."""
    tally: int = -1
    """Not negative: the row of a device's table that counts its ids (llm42/verifier/cuda/tallies.py); of
    `history` only the length is read then."""


StepSampler = Callable[[Tensor, Sequence[Draw]], list[Sampled]]


def sample_step(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Every row of a step, each by itself. logits [R, V] float32, R = len(draws)."""
    # clone: a row of its own, aligned the same way wherever it stood in the step
    return [
        sample_row(row.clone(), d.params, d.history, d.prompt_len, d.num_logprobs, d.given)
        for row, d in zip(logits, draws, strict=True)
    ]


def sample_row(
    logits: Tensor,
    params: SamplingParams,
    history: Sequence[int],
    prompt_len: int,
    num_logprobs: int = 0,
    given: int | None = None,
) -> Sampled:
    """The canonical token for position len(history), or the given one. logits [V] float32; history = prompt +
    output so far."""
    if given is None:
        token = draw(logits, params, history, prompt_len)
    else:
        token = given if math.isfinite(logits.max()) else None
    if token is None:
        return Sampled(-1, TokenLogprob(-1, float("nan")), finite=False)
    return Sampled(token, token_logprob(logits, token, num_logprobs))


def draw(logits: Tensor, params: SamplingParams, history: Sequence[int], prompt_len: int) -> int | None:
    """The drawn token id, or None where `Sampled.finite` is False. logits [V] float32."""
    # the raw maximum too: a ban may hide a NaN or +inf from the draw, but not from the log-probabilities
    if not math.isfinite(logits.max()):
        return None
    values = adjust(logits, params, history, prompt_len)
    if not is_greedy(params):
        values = values / params.temperature
    best = int(values.argmax())  # lowest id on ties; NaN counts as the largest value
    if not math.isfinite(values[best]):
        return None
    if is_greedy(params):
        return best
    keep = _restrict(values, params)
    if keep is not None:
        values = torch.where(keep, values, NEG_INF)
    noise = gumbel_row(params.seed, len(history), logits.shape[0], logits.device)
    return int((values.double() + noise).argmax())


def is_greedy(params: SamplingParams) -> bool:
    """True where the draw is the plain argmax after stage 2."""
    return params.temperature < GREEDY_BELOW


def is_plain(params: SamplingParams) -> bool:
    """True where the canonical token is the argmax of the raw logits: stages 1 and 2 change nothing."""
    adjusted = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    banned = params.min_tokens and params.min_tokens_banned
    return is_greedy(params) and not (adjusted or params.logit_bias or banned)


def reads_history(params: SamplingParams) -> bool:
    """True where the draw depends on which tokens came before, not only on how many."""
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def adjust(logits: Tensor, params: SamplingParams, history: Sequence[int], prompt_len: int) -> Tensor:
    """Stages 1 and 2: penalties, logit_bias, min_tokens. [V] float32 -> [V] float32 (the input is not
    changed)."""
    values = logits
    if params.repetition_penalty != 1.0 and history:
        seen = torch.tensor(sorted(set(history)), device=logits.device)
        picked = values[seen]
        r = params.repetition_penalty
        values = values.index_copy(0, seen, torch.where(picked > 0, picked / r, picked * r))
    output = history[prompt_len:]
    if (params.presence_penalty or params.frequency_penalty) and output:
        counts = torch.bincount(torch.tensor(output, device=logits.device), minlength=logits.shape[0]).float()
        values = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0).float()
    if params.logit_bias:
        ids = torch.tensor([i for i, _ in params.logit_bias], device=logits.device)
        bias = torch.tensor([b for _, b in params.logit_bias], dtype=torch.float32, device=logits.device)
        values = values.index_copy(0, ids, values[ids] + bias)
    if params.min_tokens_banned and len(output) < params.min_tokens:
        values = values.index_fill(0, torch.tensor(params.min_tokens_banned, device=logits.device), NEG_INF)
    return values


def _restrict(values: Tensor, params: SamplingParams) -> Tensor | None:
    """Stages 4 to 6: which ids may be drawn, [V] bool, or None for all."""
    keep: Tensor | None = None
    if 0 < params.top_k < values.shape[0]:
        keep = _top_k(values, params.top_k)
    if params.top_p < 1.0:
        keep = _top_p(values, params.top_p, keep)
    if params.min_p > 0.0:
        # the most likely id always survives the stages before, so the maximum is that of all values
        likely = values.double() >= values.max().double() + math.log(params.min_p)
        keep = likely if keep is None else keep & likely
    return keep


def _top_k(values: Tensor, k: int) -> Tensor:
    border = values.topk(k).values[-1]
    keep = values > border
    ties = (values == border).nonzero().flatten()
    keep[ties[: k - int(keep.sum())]] = True
    return keep


def _top_p(values: Tensor, p: float, keep: Tensor | None) -> Tensor:
    if keep is not None:
        values = torch.where(keep, values, NEG_INF)
    mass = p * (values - values.max()).exp().sum(dtype=torch.float64)
    chosen = None
    if values.shape[0] > TOP_P_HEAD:
        # the head alone decides when the border falls inside it: sorting 1,000 values instead of 100,000
        head = (values > values.topk(TOP_P_HEAD).values[-1]).nonzero().flatten()
        chosen = _nucleus(values, head, mass)
    if chosen is None:
        chosen = _nucleus(values, torch.arange(values.shape[0], device=values.device), mass)
    assert chosen is not None
    result = torch.zeros(values.shape[0], dtype=torch.bool, device=values.device)
    result[chosen] = True
    return result


def _nucleus(values: Tensor, ids: Tensor, mass: Tensor) -> Tensor | None:
    """The fewest ids, most likely first, whose weight reaches `mass`; None if `ids` (not all of them) hold
    less."""
    order = values[ids].sort(descending=True, stable=True)
    weight = (order.values - values.max()).exp().double()
    before = weight.cumsum(0) - weight
    inside = before < mass
    if len(ids) < len(values) and bool(inside.all()):
        return None
    return ids[order.indices[inside & (order.values > NEG_INF)]]


def token_logprob(logits: Tensor, token: int, num_logprobs: int = 0) -> TokenLogprob:
    """ln softmax(logits)[token] and the num_logprobs (at most V) most likely ids (ties: lowest id first).
    logits [V] float32."""
    top_value = logits.max()
    log_sum = (logits - top_value).exp().sum(dtype=torch.float64).log() + top_value.double()
    top: tuple[tuple[int, float], ...] = ()
    if num_logprobs > 0:
        ids = _top_k(logits, min(num_logprobs, logits.shape[0])).nonzero().flatten()
        order = logits[ids].sort(descending=True, stable=True)
        values = (order.values.double() - log_sum).float()
        top = tuple(zip(ids[order.indices].tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float((logits[token].double() - log_sum).float()), top)
