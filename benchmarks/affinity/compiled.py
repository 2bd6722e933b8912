"""A decoder layer as torch.compile sees it: what vLLM's compiled graph holds between two attentions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llm42.engine.vllm.options import FIXED_COMPILATION
from llm42.models.weights import LoadedModel
from llm42_kernels.rmsnorm import TIMED_BEYOND

CHUNK = 512
"""Rows of a product at most: the row counts for which equality was measured."""
INDUCTOR = {"combo_kernels": True, "benchmark_combo_kernel": True}

EXAMPLE_ROWS = 8192
"""Rows of the call that a graph is compiled with: launch parameters follow from it."""


def inductor_options(width: int) -> dict[str, bool]:
    """The compiler's options in vLLM with `verifier.affinity: vllm`, for a model of that hidden size."""
    return FIXED_COMPILATION["inductor_compile_config"] if width > TIMED_BEYOND else INDUCTOR


class Compiled:
    """The row-wise work between two attentions as one graph, compiled once for any number of rows."""

    def __init__(self, model: LoadedModel, table: Tensor) -> None:
        c = model.config
        self.model, self.table, self.shape = model, table, (c.num_heads, c.num_kv_heads, c.head_dim)
        self._first, self._piece, self._last = (
            torch.compile(f, options=inductor_options(c.hidden_size))
            for f in (self.first_graph, self.piece_graph, self.last_graph)
        )
        example = torch.randn(EXAMPLE_ROWS, c.hidden_size, device="cuda").to(model.dtype)
        positions = torch.zeros(EXAMPLE_ROWS, dtype=torch.int64, device="cuda")
        mixed = torch.randn(EXAMPLE_ROWS, c.num_heads * c.head_dim, device="cuda").to(model.dtype)
        self.first(example, positions)
        self.piece(0, mixed, example, positions)
        self.piece(c.num_layers - 1, mixed, example, positions)

    def first(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        layer = self.model.weights.layers[0]
        return self._chunked(self._first, (x, positions), layer.input_norm, layer.qkv)

    def piece(self, index: int, mixed: Tensor, residual: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        w = self.model.weights
        layer = w.layers[index]
        own = (layer.o, layer.post_norm, layer.gate_up, layer.down)
        if index + 1 == len(w.layers):
            return self._chunked(self._last, (mixed, residual), *own, w.final_norm)
        after = w.layers[index + 1]
        rows = (mixed, residual, positions)
        return self._chunked(self._piece, rows, *own, after.input_norm, after.qkv)

    @staticmethod
    def _chunked(run: Any, rows: tuple[Tensor, ...], *weights: Tensor) -> tuple[Tensor, ...]:
        chunk = EXAMPLE_ROWS if len(rows[0]) == EXAMPLE_ROWS else CHUNK
        out = []
        for part in zip(*(x.split(chunk) for x in rows), strict=True):
            for x in part:
                torch._dynamo.mark_dynamic(x, 0)
            out.append([y.clone() for y in run(*part, *weights)])
        return tuple(torch.cat(parts) for parts in zip(*out, strict=True))

    def first_graph(self, x: Tensor, positions: Tensor, norm: Tensor, qkv: Tensor) -> tuple[Tensor, ...]:
        return self._project(self._rms(x.to(torch.float32), norm), qkv, positions)

    def piece_graph(
        self, mixed: Tensor, residual: Tensor, positions: Tensor, o: Tensor, post: Tensor, gate_up: Tensor,
        down: Tensor, norm: Tensor, qkv: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x, residual = self.last_graph(mixed, residual, o, post, gate_up, down, norm)
        return *self._project(x, qkv, positions), residual

    def last_graph(
        self, mixed: Tensor, residual: Tensor, o: Tensor, post: Tensor, gate_up: Tensor, down: Tensor,
        norm: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x, residual = self._add_rms(F.linear(mixed, o), residual, post)
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return self._add_rms(F.linear(F.silu(gate) * up, down), residual, norm)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.model.config.rms_norm_eps)
        return x.to(weight.dtype) * weight

    def _add_rms(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        s = x.to(torch.float32) + residual.to(torch.float32)
        return self._rms(s, weight), s.to(x.dtype)

    def _project(self, x: Tensor, weight: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        heads, kv_heads, dim = self.shape
        qkv = F.linear(x, weight).view(x.shape[0], -1, dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        cos, sin = self.table.index_select(0, positions).unsqueeze(-2).chunk(2, dim=-1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
