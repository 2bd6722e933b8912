"""The decoder forward of Llama-type models over flat rows: one code for the fast path and the verifier.

Rounding points (A = activation dtype): every operator of kernels/ computes in float32 inside and rounds
once to A at its end: embedding, norm (+ residual), qkv product, q/k norm, rotary, attention, output
product, norm, gate-up product, SiLU-multiply, down product. Logits stay in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llm42.models.weights import LoadedModel
from llm42_kernels.operators import Operators

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [T, Hq, D], k [T, Hk, D], v [T, Hk, D]) -> [T, Hq * D]; writes k, v into the KV cache."""


def forward(model: LoadedModel, ops: Operators, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """tokens [T] int64, positions [T] int64 -> final normed hidden states [T, H] in the activation dtype."""
    config, weights = model.config, model.weights
    rows, eps = tokens.shape[0], config.rms_norm_eps
    q_heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    x, residual = weights.embed[tokens].to(model.dtype), None
    for index, layer in enumerate(weights.layers):
        x, residual = ops.rms_norm(x, residual, layer.input_norm, eps)
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        q, k, v = torch.split(qkv.view(rows, -1, head_dim), [q_heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, _ = ops.rms_norm(q.contiguous(), None, layer.q_norm, eps)
            k, _ = ops.rms_norm(k.contiguous(), None, layer.k_norm, eps)
        q, k = ops.rotary(q, k, positions, weights.cos_sin)
        x = ops.linear(attend(index, q, k, v), layer.o, layer.o_bias)
        x, residual = ops.rms_norm(x, residual, layer.post_norm, eps)
        x = ops.linear(
            ops.silu_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias
        )
    normed, _ = ops.rms_norm(x, residual, weights.final_norm, eps)
    return normed


def logits(model: LoadedModel, ops: Operators, hidden: Tensor) -> Tensor:
    """hidden [R, H] -> [R, V] float32."""
    return ops.lm_head(hidden, model.weights.lm_head, None)


def activation_dtype(name: str) -> torch.dtype:
    """The torch dtype of a settings string."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
