"""What certification runs: each row-wise operator in every form in which the decoder calls it, at each of the
model's real shapes, with the first layer's weights and random activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llm42.models.weights import LoadedModel
from llm42.verifier.certify.rows import OperatorCase, Rows
from llm42_kernels.operators import Operators
from llm42_kernels.rmsnorm import launch_sum_norm


def operator_cases(
    model: LoadedModel, ops: Operators, operator: str, dtype: torch.dtype
) -> list[OperatorCase]:
    """The cases of `ops`' provider of `operator`, with activations in `dtype` on the model's device."""
    found: list[OperatorCase] = getattr(_Cases(model, ops, dtype), operator)()
    return found


@dataclass(frozen=True, slots=True)
class _Cases:
    """A method per operator, under its name."""

    model: LoadedModel
    ops: Operators
    dtype: torch.dtype

    def _random(self, rows: int, gen: torch.Generator, *shape: int) -> Tensor:
        """[rows, *shape], standard normal, made on the model's device."""
        device = self.model.weights.embed.device
        if device.type != "cpu":  # which has generators of its own
            seed = int(torch.randint(2**31, (1,), generator=gen))
            gen = torch.Generator(device).manual_seed(seed)
        return torch.randn(rows, *shape, generator=gen, device=device).to(self.dtype)

    def _inputs(self, *shape: int, count: int = 1) -> Callable[[int, torch.Generator], Rows]:
        return lambda rows, gen: tuple(self._random(rows, gen, *shape) for _ in range(count))

    def linear(self) -> list[OperatorCase]:
        layer = self.model.weights.layers[0]
        weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
        biases = (layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias)
        return [self._product("linear", w, b) for w, b in zip(weights, biases, strict=True)]

    def lm_head(self) -> list[OperatorCase]:
        return [self._product("lm_head", self.model.weights.lm_head, None)]

    def _product(self, operator: str, weight: Tensor, bias: Tensor | None) -> OperatorCase:
        (n, k), run = weight.shape, getattr(self.ops, operator)
        return OperatorCase(operator, f"N={n}, K={k}", self._inputs(k), lambda x: (run(x, weight, bias),))

    def silu_mul(self) -> list[OperatorCase]:
        width = self.model.config.intermediate_size
        run = self.ops.silu_mul
        return [OperatorCase("silu_mul", f"I={width}", self._inputs(2 * width), lambda x: (run(x),))]

    def rms_norm(self) -> list[OperatorCase]:
        layer, c = self.model.weights.layers[0], self.model.config
        heads = [(layer.q_norm, c.num_heads), (layer.k_norm, c.num_kv_heads)]
        return [
            self._norm(layer.input_norm, residual=True),
            self._norm(layer.input_norm),
            *([self._sum_norm()] if dict(self.ops.providers)["rms_norm"] == "carried" else []),
            *(self._norm(weight, count) for weight, count in heads if weight is not None),
        ]

    def _norm(self, weight: Tensor, *heads: int, residual: bool = False) -> OperatorCase:
        """Without residual: the first norm, and those of the heads (x [T, heads, D])."""
        run, eps, shape = self.ops.rms_norm, self.model.config.rms_norm_eps, (*heads, len(weight))
        if not residual:
            name, make = f"{list(shape)}", self._inputs(*shape)
            return OperatorCase("rms_norm", name, make, lambda x: run(x, None, weight, eps)[:1])
        name, make = f"H={len(weight)} with residual", self._inputs(*shape, count=2)
        return OperatorCase("rms_norm", name, make, lambda x, r: run(x, r, weight, eps))

    def _sum_norm(self) -> OperatorCase:
        """As a GPU's forward pass calls the provider `carried`: the sum comes as three terms."""
        weight, eps = self.model.weights.layers[0].input_norm, self.model.config.rms_norm_eps

        def run(*terms: Tensor) -> Rows:
            normed, summed = torch.empty_like(terms[0]), torch.empty_like(terms[0])
            launch_sum_norm(terms, weight, normed, summed, eps)
            return normed, summed

        return OperatorCase(
            "rms_norm", f"[{len(weight)}] of three terms", self._inputs(len(weight), count=3), run
        )

    def rotary(self) -> list[OperatorCase]:
        c, table, rotary = self.model.config, self.model.weights.cos_sin, self.ops.rotary
        heads = [c.num_heads, c.num_kv_heads, c.num_kv_heads]

        def positions(rows: int, gen: torch.Generator) -> Tensor:
            return torch.randint(0, len(table), (rows,), generator=gen).to(table.device)

        def make(rows: int, gen: torch.Generator) -> Rows:
            at = positions(rows, gen)
            return *(self._random(rows, gen, count, c.head_dim) for count in heads[:2]), at

        def make_joined(rows: int, gen: torch.Generator) -> Rows:
            return self._random(rows, gen, sum(heads), c.head_dim), positions(rows, gen)

        def views(qkv: Tensor, at: Tensor) -> Rows:
            q, k, _ = torch.split(qkv, heads, dim=1)
            return rotary(q, k, at, table)

        cases = [OperatorCase("rotary", f"D={c.head_dim}", make, lambda q, k, at: rotary(q, k, at, table))]
        if table.device.type == "cpu":  # without q/k norm the decoder passes strided views of one product
            cases.append(OperatorCase("rotary", f"D={c.head_dim}, views of qkv", make_joined, views))
        return cases
