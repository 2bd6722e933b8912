"""Planted violations: broken versions of operators that prove that certification can fail.

Each plant wraps the working operator of a step and breaks one property that a real kernel might break.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llm42.sampling import Draw, Sampled, StepSampler
from llm42_kernels.attention_cpu import QueryRows, StepAttention
from llm42_kernels.operators import Linear, RMSNorm


@dataclass(frozen=True, slots=True)
class Plant:
    """Which operator is broken, and how."""

    operator: str
    summary: str
    wrap: Callable[[Any], Any]


def _split_k(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product summed in two halves of K, as a split-K kernel does."""
    half = x.shape[1] // 2
    y = x[:, :half].float() @ weight[:, :half].T.float() + x[:, half:].float() @ weight[:, half:].T.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _row_position(linear: Linear) -> Linear:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y, half = linear(x, weight, bias), x.shape[0] // 2
        y[half:] = _split_k(x[half:], weight, bias)
        return y

    return run


def _row_count(linear: Linear) -> Linear:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        in_use = int((x != 0).any(-1).sum())
        return _split_k(x, weight, bias) if 2 * in_use <= x.shape[0] else linear(x, weight, bias)

    return run


def _row_residue(linear: Linear) -> Linear:
    """A register block of four rows whose third row gets another last bit."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = linear(x, weight, bias)
        y[2::4, 0] = torch.nextafter(y[2::4, 0], torch.tensor(float("inf"), dtype=y.dtype))
        return y

    return run


def _one_ulp(rms_norm: RMSNorm) -> RMSNorm:
    def run(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, r = rms_norm(x, residual, weight, eps)
        y[-1, ..., 0] = torch.nextafter(y[-1, ..., 0], torch.tensor(float("inf"), dtype=y.dtype))
        return y, r

    return run


def _reversed_keys(
    q: Tensor, keys: Tensor, values: Tensor, groups: Sequence[QueryRows], scale: float
) -> Tensor:
    """Correct attention that sums over the keys backwards: another reduction order, as another tile would
    give."""
    out, row = [], 0
    for g in groups:
        part, end = q[row : row + g.count], g.start + g.count
        k, v = (x[g.table].flatten(0, 1)[:end].flip(0).float() for x in (keys, values))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", part.float() * scale, k)
        positions = torch.arange(g.start, end)
        scores.masked_fill_(torch.arange(end).flip(0)[None, :] > positions[:, None], float("-inf"))
        out.append(torch.einsum("hts,shd->thd", scores.softmax(-1), v).to(q.dtype))
        row += g.count
    return torch.cat(out)


def _attention_split(attention: StepAttention) -> StepAttention:
    def run(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[QueryRows], scale: float) -> Tensor:
        return (_reversed_keys if len(groups) > 1 else attention)(q, k, v, groups, scale)

    return run


def _attention_tile(attention: StepAttention) -> StepAttention:
    def run(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[QueryRows], scale: float) -> Tensor:
        wide = len(groups) > 1 and max(g.count for g in groups) > 9
        return (_reversed_keys if wide else attention)(q, k, v, groups, scale)

    return run


def _dirty_tail(attention: StepAttention) -> StepAttention:
    def run(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[QueryRows], scale: float) -> Tensor:
        out, row = attention(q, k, v, groups, scale), 0
        for g in groups:
            tail = v[g.table].flatten(0, 1)[g.start + g.count :]  # slots nobody has written
            row += g.count
            if len(tail):
                out[row - 1] += 0.0 * tail[0, 0, 0]
        return out

    return run


def _topp_scan(sampler: StepSampler) -> StepSampler:
    def run(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
        if len(draws) > 4:  # a batched scan in float32, where few rows get one in float64
            single = [float(torch.tensor(d.params.top_p, dtype=torch.float32)) for d in draws]
            draws = [
                replace(d, params=replace(d.params, top_p=p)) for d, p in zip(draws, single, strict=True)
            ]
        return sampler(logits, draws)

    return run


PLANTS: dict[str, Plant] = {
    "row-position": Plant("linear", "rows in the second half of a step sum K in two halves", _row_position),
    "row-count": Plant(
        "linear", "K is summed in two halves when at most half of the rows are in use", _row_count
    ),
    "row-residue": Plant("linear", "one element of every fourth row is off by one unit", _row_residue),
    "one-ulp": Plant(
        "rms_norm", "one element of the last row is off by one unit in the last place", _one_ulp
    ),
    "attention-split": Plant(
        "attention", "the order over keys changes when there are companions", _attention_split
    ),
    "attention-tile": Plant(
        "attention",
        "the order over keys changes when a companion has more than 9 query rows",
        _attention_tile,
    ),
    "dirty-tail": Plant(
        "attention", "a slot behind the last written one is read with weight zero", _dirty_tail
    ),
    "topp-scan": Plant("sampling", "more than 4 rows use a less exact top-p border", _topp_scan),
}
