"""What certification runs on a CPU: each row-wise operator in every form in which the decoder calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llm42.models.weights import LoadedModel
from llm42.verifier.certify.rows import RowSubject
from llm42_kernels.operators import Operators

Make = Callable[[int, torch.Generator], Tensor]


def subjects(model: LoadedModel, ops: Operators, operator: str) -> list[RowSubject]:
    """The operator at each of the model's real shapes, with the first layer's weights, in the activation
    dtype and in float32 (where no final rounding hides a difference)."""
    return [
        subject
        for dtype in dict.fromkeys((model.dtype, torch.float32))
        for subject in _subjects_in(dtype, model, ops, operator)
    ]


def _subjects_in(dtype: torch.dtype, model: LoadedModel, ops: Operators, operator: str) -> list[RowSubject]:
    c, w, layer = model.config, model.weights, model.weights.layers[0]
    eps, q_shape, k_shape = c.rms_norm_eps, (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)

    def rand(*shape: int) -> Make:
        return lambda rows, gen: torch.randn(rows, *shape, generator=gen).to(dtype)

    if operator == "linear":
        weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
        biases = (layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias)
        return [
            _product(operator, ops.linear, weight, bias, rand(weight.shape[1]))
            for weight, bias in zip(weights, biases, strict=True)
        ]
    if operator == "lm_head":
        return [_product(operator, ops.lm_head, w.lm_head, None, rand(c.hidden_size))]
    if operator == "rms_norm":
        hidden, norms = rand(c.hidden_size), [(layer.q_norm, q_shape), (layer.k_norm, k_shape)]
        heads = [_norm(ops, weight, eps, rand(*shape)) for weight, shape in norms if weight is not None]
        return [
            _norm_add(ops, layer.input_norm, eps, hidden),
            _norm(ops, layer.input_norm, eps, hidden),
            *heads,
        ]
    if operator == "rotary":
        joined = rand(c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        return [_rotary(ops, w.cos_sin, rand(*q_shape), rand(*k_shape)), _rotary_views(ops, model, joined)]
    return [_silu_mul(ops, c.intermediate_size, rand(2 * c.intermediate_size))]


def _product(operator: str, run: Any, weight: Tensor, bias: Tensor | None, make: Make) -> RowSubject:
    shape = f"N={weight.shape[0]}, K={weight.shape[1]}"
    return RowSubject(operator, shape, lambda n, g: (make(n, g),), lambda x: (run(x, weight, bias),))


def _silu_mul(ops: Operators, width: int, make: Make) -> RowSubject:
    return RowSubject("silu_mul", f"I={width}", lambda n, g: (make(n, g),), lambda x: (ops.silu_mul(x),))


def _norm_add(ops: Operators, weight: Tensor, eps: float, make: Make) -> RowSubject:
    return RowSubject(
        "rms_norm",
        f"H={weight.shape[0]} with residual",
        lambda n, g: (make(n, g), make(n, g)),
        lambda x, r: ops.rms_norm(x, r, weight, eps),
    )


def _norm(ops: Operators, weight: Tensor, eps: float, make: Make) -> RowSubject:
    """Without residual: the first norm, and those of the heads (x [T, heads, D])."""
    shape = f"{list(make(1, torch.Generator()).shape[1:])}"
    return RowSubject(
        "rms_norm", shape, lambda n, g: (make(n, g),), lambda x: ops.rms_norm(x, None, weight, eps)[:1]
    )


def _rotary(ops: Operators, cos_sin: Tensor, make_q: Make, make_k: Make) -> RowSubject:
    def make(rows: int, gen: torch.Generator) -> tuple[Tensor, ...]:
        positions = torch.randint(0, cos_sin.shape[0], (rows,), generator=gen)
        return make_q(rows, gen), make_k(rows, gen), positions

    return RowSubject("rotary", f"D={cos_sin.shape[1]}", make, lambda q, k, p: ops.rotary(q, k, p, cos_sin))


def _rotary_views(ops: Operators, model: LoadedModel, make_qkv: Make) -> RowSubject:
    """As the decoder calls it without q/k norm: q and k are strided views of one product."""
    c, cos_sin = model.config, model.weights.cos_sin
    heads = [c.num_heads, c.num_kv_heads, c.num_kv_heads]

    def make(rows: int, gen: torch.Generator) -> tuple[Tensor, ...]:
        return make_qkv(rows, gen), torch.randint(0, cos_sin.shape[0], (rows,), generator=gen)

    def run(qkv: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        q, k, _ = torch.split(qkv, heads, dim=1)
        return ops.rotary(q, k, positions, cos_sin)

    return RowSubject("rotary", f"D={cos_sin.shape[1]}, views of qkv", make, run)
