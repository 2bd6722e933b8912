"""The canonical decoder forward on CUDA: llm42/models/decoder.py with fused kernels at the same rounding
points.

Fused: residual add + RMSNorm (in place on the residual stream), q/k norm + rotary + KV write. Where the
residual is rounded is the choice of the RMSNorm provider (rmsnorm.py there). Everything is launched on the
current stream and may be captured into a CUDA graph; work lists are read from device memory."""

from __future__ import annotations

import torch
from torch import Tensor

from llm42.cache import KVCache
from llm42.models.weights import LayerWeights, LoadedModel
from llm42_kernels.attention import Sources, TritonAttention
from llm42_kernels.kv_write import launch_qkv
from llm42_kernels.operators import Operators
from llm42_kernels.rmsnorm import launch_rms_norm, launch_sum_norm
from llm42_kernels.silu_mul import launch_silu_mul


class CudaForward:
    """Model, cache and attention bound together; `views` are bucket -> the device parts of its step
    layout."""

    def __init__(
        self,
        model: LoadedModel,
        ops: Operators,
        kv: KVCache,
        attention: TritonAttention,
        views: dict[int, dict[str, Tensor]],
        sampled: Tensor,
    ) -> None:
        """sampled: [R] int32, where the head leaves the tokens of a step's logit rows."""
        self.sampled = sampled
        self.model, self.ops, self.attention, self.views = model, ops, attention, views
        chosen = dict(ops.providers)
        self.carried = chosen.get("rms_norm") == "carried"
        self.library_exp = chosen.get("silu_mul") == "library-exp"
        self._flat = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(kv.keys, kv.values, strict=True)]
        self._sources = [attention.sources(k, v) for k, v in self._flat]

    def body(self, rows: int, variant: str, hidden: Tensor) -> None:
        """Rows [0, rows) of the step -> final normed hidden states in hidden [rows, H]."""
        views = self.views[rows]
        weights, eps = self.model.weights, self.model.config.rms_norm_eps
        # before the head of this step overwrites them: those of the step before, in stream order
        residual = weights.embed[fed(views["tokens"], views["feed"], self.sampled)]
        x = torch.empty_like(residual)
        if self.carried:
            launch_sum_norm((residual,), weights.layers[0].input_norm, x, None, eps)
        else:
            launch_rms_norm(residual, None, weights.layers[0].input_norm, x, residual, eps)
        for index, layer in enumerate(weights.layers):
            last = index + 1 == len(weights.layers)
            norm = weights.final_norm if last else weights.layers[index + 1].input_norm
            out = hidden if last else x
            attended = self._attend(index, layer, x, views, variant)
            if self.carried:
                launch_sum_norm((attended, residual), layer.post_norm, x, None, eps)
                launch_sum_norm((self._mlp(layer, x), attended, residual), norm, out, residual, eps)
            else:
                launch_rms_norm(attended, residual, layer.post_norm, x, residual, eps)
                launch_rms_norm(self._mlp(layer, x), residual, norm, out, residual, eps)

    def _attend(
        self, index: int, layer: LayerWeights, x: Tensor, views: dict[str, Tensor], variant: str
    ) -> Tensor:
        config, rows = self.model.config, x.shape[0]
        qkv = self.ops.linear(x, layer.qkv, layer.qkv_bias)
        q = torch.empty(rows, config.num_heads, config.head_dim, dtype=x.dtype, device=x.device)
        positions, slots = views["positions"], views["slots"]
        launch_qkv(
            qkv, q, *self._flat[index], positions, slots, self.model.weights.cos_sin,
            layer.q_norm, layer.k_norm, config.rms_norm_eps,
        )  # fmt: skip
        mixed = torch.empty_like(q)
        self._tiles(q, mixed, self._sources[index], views, variant)
        return self.ops.linear(mixed.view(rows, -1), layer.o, layer.o_bias)

    def _tiles(
        self, q: Tensor, out: Tensor, sources: Sources, views: dict[str, Tensor], variant: str
    ) -> None:
        shape, counts = self.attention.shape, views["counts"]
        heights = [("L", "large", shape.large, 0), ("S", "small", shape.small, 1)]
        for letter, name, tile, field in heights:
            if letter not in variant:
                continue
            self.attention.attend(tile, q, out, sources, views["tables"], views[name], counts[field:])
            if "c" in variant:
                self.attention.combine(tile, out, views["combine_" + name], counts[field + 2 :])

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate_up = self.ops.linear(x, layer.gate_up, layer.gate_up_bias)
        inner = torch.empty(x.shape[0], gate_up.shape[1] // 2, dtype=x.dtype, device=x.device)
        launch_silu_mul(gate_up, inner, self.library_exp)
        return self.ops.linear(inner, layer.down, layer.down_bias)


def fed(tokens: Tensor, feed: Tensor, sampled: Tensor) -> Tensor:
    """Where feed [T] names a logit row of the step before: what that row sampled; else tokens [T]. All
    int32."""
    return torch.where(feed >= 0, sampled[feed], tokens)  # a -1 reads the last one, which is not taken
