"""The set of operators a decoder runs on: one callable per operator, each with the name of its provider.

A runner is given an `Operators` and calls nothing else for arithmetic. The verifier takes the set that
certification chose; the fast path takes the ordinary kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
RMSNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
Rotary = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
SiluMul = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Operators:
    """Row-wise operators of a Llama-type decoder. T rows, activation dtype A, weight dtype W.

    linear(x [T, K] A, weight [N, K] W, bias [N] or None)
        -> [T, N] A
    rms_norm(x [T, H] A, residual [T, H] A or None, weight [H] W, eps)
        -> normed [T, H] A, new residual [T, H] A
    rotary(q [T, Hq, D] A, k [T, Hk, D] A, positions [T] int64, cos_sin [P, D] float32)
        -> q and k, rotated
    silu_mul(x [T, 2 I] A)
        -> silu(x[:, :I]) * x[:, I:], [T, I] A
    lm_head(x [R, H] A, weight [V, H] W, bias None)
        -> logits [R, V] float32
    """

    linear: Linear
    rms_norm: RMSNorm
    rotary: Rotary
    silu_mul: SiluMul
    lm_head: Linear
    providers: tuple[tuple[str, str], ...] = ()
    """(operator, provider) pairs, for logs and the fingerprint."""


def choose(
    providers: Mapping[str, Mapping[str, Callable[..., Any]]], chosen: Mapping[str, str] | None = None
) -> Operators:
    """The named provider of each operator of `providers` (operator -> name -> function); an operator that is
    not named gets its first one. Raises KeyError for a provider that is not there."""
    names = {op: (chosen or {}).get(op, next(iter(table))) for op, table in providers.items()}
    functions = {op: table[names[op]] for op, table in providers.items()}
    return Operators(**functions, providers=tuple(sorted(names.items())))


def storage_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype weights of products are kept in: float32 on CPU (values rounded to `dtype`), `dtype` on
    CUDA."""
    return torch.float32 if device == "cpu" else dtype


def by_row(operator: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The provider of last resort for an elementwise operator of x [T, ...]: one call per row, so the call's
    shape never changes."""

    def run(x: Tensor) -> Tensor:
        return torch.cat([operator(row.clone()) for row in torch.split(x, 1)])

    return run


def rounded_head(ops: Operators, dtype: torch.dtype) -> Operators:
    """`ops` whose logits are rounded to `dtype` (and kept in float32)."""
    head = ops.lm_head
    return replace(ops, lm_head=lambda x, weight, bias: head(x, weight, bias).to(dtype).float())
