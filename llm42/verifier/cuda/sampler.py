"""Rows that need more than a plain argmax: penalties, temperature, restriction, noise, alternatives
(llm42/sampling.py).

Works on device logits without waiting for the device: what the host must say (ids, counts, parameters) is
copied in from pinned memory, results are copied out beside the greedy ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from llm42.protocol import SamplingParams, TokenLogprob
from llm42.sampling import Draw, Sampled, is_greedy, is_plain
from llm42.verifier.cuda.tallies import counted, penalised
from llm42_kernels.sampling import (
    RowStats,
    gumbel_argmax,
    logprobs_of,
    noise_keys,
    restrict,
    restrict_few,
    row_stats,
    top_tokens,
)

ROWS_AT_ONCE = 64
"""Rows sorted together: bounds the memory of a sort over the vocabulary."""
FEW = 1024
"""A top_k up to this is found without a sort of the whole vocabulary."""


Restrict = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def sample_step_device(logits: Tensor, draws: Sequence[Draw], narrowed: Restrict = restrict) -> list[Sampled]:
    """llm42.sampling.sample_step on the device: logits [R, V] float32 (certification, tests; a runner
    queues the same calls and waits later). Ids are counted on the host in a step of one row, else on the
    device."""
    stats, table = row_stats(logits), None
    if len(draws) > 1:
        draws, table = counted(draws, logits.shape[1], logits.device)
    rows = [i for i, d in enumerate(draws) if d.given is not None or not is_plain(d.params)]
    draw_rows(logits, stats, rows, [draws[i] for i in rows], narrowed, table)
    tops: dict[int, tuple[tuple[int, float], ...]] = {}
    for count in {d.num_logprobs for d in draws if d.num_logprobs > 0}:
        wanted = [i for i, d in enumerate(draws) if d.num_logprobs == count]
        ids, values = alternatives(logits, stats, wanted, count)
        for row, i, v in zip(wanted, ids.tolist(), values.tolist(), strict=True):
            tops[row] = tuple(zip(i, v, strict=True))
    found = zip(stats.token.tolist(), stats.logprob.tolist(), stats.bad.tolist(), strict=True)
    return [sampled(t, p, b, tops.get(i, ())) for i, (t, p, b) in enumerate(found)]


def sampled(token: int, logprob: float, bad: int, top: tuple[tuple[int, float], ...]) -> Sampled:
    """One row's result as the scheduler sees it."""
    if bad:
        return Sampled(-1, TokenLogprob(-1, float("nan")), finite=False)
    return Sampled(token, TokenLogprob(token, logprob, top))


def draw_rows(
    logits: Tensor,
    stats: RowStats,
    rows: list[int],
    asked: Sequence[Draw],
    narrowed: Restrict = restrict,
    tallies: Tensor | None = None,
) -> None:
    """Overwrites token, logprob and bad of `rows` in `stats`. logits [R, V] float32; asked[i] describes
    rows[i]. tallies: the table that draws name rows of."""
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        part, wanted = rows[begin : begin + ROWS_AT_ONCE], asked[begin : begin + ROWS_AT_ONCE]
        index = _device(part, torch.int64, logits)
        raw = logits[index]
        token, bad = _draw(raw, wanted, narrowed, tallies)
        stats.token[index] = token
        stats.bad[index] |= bad  # NaN or infinity of the raw logits stays an error
        stats.logprob[index] = logprobs_of(raw, stats.log_sum[index], token[:, None])[:, 0]


def device_tensor(ids: Sequence[int], like: Tensor) -> Tensor:
    """Ids as an int64 tensor [len(ids)] beside `like`, copied without waiting."""
    return _device(list(ids), torch.int64, like)


def draw_tokens(raw: Tensor, asked: Sequence[Draw]) -> Tensor:
    """The canonical token of every row, [R] int32. raw [R, V] float32, of few rows: they are sorted together;
    asked[i] describes row i."""
    return _draw(raw, asked, restrict)[0]


def alternatives(logits: Tensor, stats: RowStats, rows: list[int], count: int) -> tuple[Tensor, Tensor]:
    """The `count` most likely ids of `rows` and their log-probabilities: two [len(rows), count] device
    tensors."""
    ids, values = [], []
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        index = _device(rows[begin : begin + ROWS_AT_ONCE], torch.int64, logits)
        raw = logits[index]
        top, _ = top_tokens(raw, min(count, raw.shape[1]))
        ids.append(top)
        values.append(logprobs_of(raw, stats.log_sum[index], top))
    return torch.cat(ids), torch.cat(values)


def _draw(
    raw: Tensor, wanted: Sequence[Draw], narrowed: Restrict, tallies: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    params, vocab = [w.params for w in wanted], raw.shape[1]
    warm = [not is_greedy(p) for p in params]
    divisor = [p.temperature if on else 1.0 for p, on in zip(params, warm, strict=True)]
    values = _adjust(raw, wanted, tallies) / _device(divisor, torch.float32, raw)[:, None]
    bad = row_stats(values).bad
    tight = [i for i, p in enumerate(params) if warm[i] and _is_restricted(p, vocab)]
    few = [i for i in tight if 0 < params[i].top_k <= FEW]
    if few:
        most = max(params[i].top_k for i in few)
        _narrow(values, params, few, partial(restrict_few, most=most))
    if len(few) < len(tight):
        _narrow(values, params, [i for i in tight if not 0 < params[i].top_k <= FEW], narrowed)
    keys = noise_keys([p.seed for p in params], [len(w.history) for w in wanted], warm)
    token = gumbel_argmax(values, _device(keys, torch.int32, raw))
    if any(w.given is not None for w in wanted):
        given = _device([-1 if w.given is None else w.given for w in wanted], token.dtype, raw)
        token = torch.where(given >= 0, given, token)
    return token, bad


def _narrow(values: Tensor, params: Sequence[SamplingParams], rows: list[int], narrowed: Restrict) -> None:
    """Stages 4 to 6 of `rows`, in place."""
    vocab, index, chosen = values.shape[1], _device(rows, torch.int64, values), [params[i] for i in rows]
    values[index] = narrowed(
        values[index],
        _device([p.top_k if 0 < p.top_k < vocab else vocab for p in chosen], torch.int64, values),
        _device([p.top_p for p in chosen], torch.float64, values),
        _device([p.min_p for p in chosen], torch.float64, values),
    )


def _is_restricted(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab or params.top_p < 1.0 or params.min_p > 0.0


def _adjust(raw: Tensor, wanted: Sequence[Draw], tallies: Tensor | None) -> Tensor:
    """Stages 1 and 2 on a copy, as scattered updates of (row, id) pairs; pairs are unique, so no order
    exists. Rows whose ids are counted on the device are penalised as wholes."""
    values = raw.clone()
    counted_there = [row for row, w in enumerate(wanted) if w.tally >= 0]
    if counted_there and tallies is not None:
        _penalise(values, counted_there, [wanted[row] for row in counted_there], tallies)
    repeat: list[tuple[int, int, float]] = []
    counted: list[tuple[int, int, float, float, float]] = []
    bias: list[tuple[int, int, float]] = []
    banned: list[tuple[int, int, float]] = []
    for row, w in enumerate(wanted):
        p = w.params
        if p.repetition_penalty != 1.0 and w.tally < 0:
            repeat += [(row, i, p.repetition_penalty) for i in set(w.history)]
        if (p.presence_penalty or p.frequency_penalty) and w.tally < 0:
            f, b = p.frequency_penalty, p.presence_penalty
            counted += [(row, i, float(n), f, b) for i, n in Counter(w.history[w.prompt_len :]).items()]
        bias += [(row, i, b) for i, b in p.logit_bias]
        if len(w.history) - w.prompt_len < p.min_tokens:
            banned += [(row, i, 0.0) for i in p.min_tokens_banned]
    if repeat:
        at, (factor,) = _pairs(repeat, values)
        picked = values[at]
        values[at] = torch.where(picked > 0, picked / factor, picked * factor)
    if counted:
        at, (number, frequency, presence) = _pairs(counted, values)
        values[at] = values[at] - frequency * number - presence
    if bias:
        at, (added,) = _pairs(bias, values)
        values[at] = values[at] + added
    if banned:
        at, _ = _pairs(banned, values)
        values.index_put_(at, values.new_full((), float("-inf")))  # a number would come from the host: a wait
    return values


def _penalise(values: Tensor, rows: list[int], wanted: Sequence[Draw], tallies: Tensor) -> None:
    """Stage 1 of `rows`, in place."""
    index = _device(rows, torch.int64, values)
    counts = tallies[_device([w.tally for w in wanted], torch.int64, values)]
    factors = [
        _device([getattr(w.params, f"{name}_penalty") for w in wanted], torch.float32, values)[:, None]
        for name in ("repetition", "frequency", "presence")
    ]
    values[index] = penalised(values[index], counts, *factors)


def _pairs(entries: Sequence[tuple[float, ...]], like: Tensor) -> tuple[
    tuple[Tensor, Tensor], list[Tensor]
]:  # fmt: skip
    table = _device(entries, torch.float64, like)  # ids are exact in float64
    rows, ids, *numbers = table.unbind(1)
    return (rows.long(), ids.long()), [x.float() for x in numbers]


def _device(values: object, dtype: torch.dtype, like: Tensor) -> Tensor:
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else host
