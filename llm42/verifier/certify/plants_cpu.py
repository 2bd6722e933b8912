"""Planted violations on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llm42.sampling import Draw, Sampled, StepSampler
from llm42.verifier.certify.plants import Plant, broken
from llm42.verifier.cpu.operators import CanonicalSet
from llm42_kernels.attention_cpu import QueryRows, StepAttention
from llm42_kernels.operators import Linear, RMSNorm


def _split_k(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product summed in two halves of K, as a split-K kernel does."""
    half = x.shape[1] // 2
    y = x[:, :half].float() @ weight[:, :half].T.float() + x[:, half:].float() @ weight[:, half:].T.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _row_position(linear: Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rows in the second half of a step sum K in two halves."""
    y, half = linear(x, weight, bias), x.shape[0] // 2
    y[half:] = _split_k(x[half:], weight, bias)
    return y


def _row_count(linear: Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """K is summed in two halves when at most half of the rows are in use."""
    in_use = int((x != 0).any(-1).sum())
    return _split_k(x, weight, bias) if 2 * in_use <= x.shape[0] else linear(x, weight, bias)


def _row_residue(linear: Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A register block of four rows whose third row gets another last bit."""
    y = linear(x, weight, bias)
    y[2::4, 0] = torch.nextafter(y[2::4, 0], torch.tensor(float("inf"), dtype=y.dtype))
    return y


def _one_ulp(
    norm: RMSNorm, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """One element of the last row is off by one unit in the last place."""
    y, r = norm(x, residual, weight, eps)
    y[-1, ..., 0] = torch.nextafter(y[-1, ..., 0], torch.tensor(float("inf"), dtype=y.dtype))
    return y, r


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


def _attention_split(
    attention: StepAttention, q: Tensor, k: Tensor, v: Tensor, groups: Sequence[QueryRows], scale: float
) -> Tensor:
    """The order over keys changes when there are companions."""
    return (_reversed_keys if len(groups) > 1 else attention)(q, k, v, groups, scale)


def _attention_tile(
    attention: StepAttention, q: Tensor, k: Tensor, v: Tensor, groups: Sequence[QueryRows], scale: float
) -> Tensor:
    """The order over keys changes when a companion has more than 9 query rows."""
    wide = len(groups) > 1 and max(g.count for g in groups) > 9
    return (_reversed_keys if wide else attention)(q, k, v, groups, scale)


def _dirty_tail(
    attention: StepAttention, q: Tensor, k: Tensor, v: Tensor, groups: Sequence[QueryRows], scale: float
) -> Tensor:
    """A slot behind the last written one is read with weight zero."""
    out, row = attention(q, k, v, groups, scale), 0
    for g in groups:
        tail = v[g.table].flatten(0, 1)[g.start + g.count :]  # slots nobody has written
        row += g.count
        if len(tail):
            out[row - 1] += 0.0 * tail[0, 0, 0]
    return out


def _topp_scan(sampler: StepSampler, logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """More than 4 rows get a batched scan in float32, where few rows get one in float64."""
    if len(draws) > 4:
        single = [float(torch.tensor(d.params.top_p, dtype=torch.float32)) for d in draws]
        draws = [replace(d, params=replace(d.params, top_p=p)) for d, p in zip(draws, single, strict=True)]
    return sampler(logits, draws)


PLANTS: dict[str, Plant] = {
    "row-position": Plant("linear", _row_position),
    "row-count": Plant("linear", _row_count),
    "row-residue": Plant("linear", _row_residue),
    "one-ulp": Plant("rms_norm", _one_ulp),
    "attention-split": Plant("attention", _attention_split),
    "attention-tile": Plant("attention", _attention_tile),
    "dirty-tail": Plant("attention", _dirty_tail),
    "topp-scan": Plant("sampling", _topp_scan),
}


def with_plants(parts: CanonicalSet, names: Sequence[str]) -> CanonicalSet:
    """The operators, of which the named plants break some."""
    ops, row_wise = parts.ops, {PLANTS[name].operator for name in names} - {"attention", "sampling"}
    planted = {op: broken(PLANTS, names, op, getattr(ops, op)) for op in row_wise}
    attention = broken(PLANTS, names, "attention", parts.attention)
    return CanonicalSet(replace(ops, **planted), attention, broken(PLANTS, names, "sampling", parts.sampler))
