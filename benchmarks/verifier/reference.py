"""Teacher-forced log-probabilities of the canonical runner against transformers, on one GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llm42.models.weights import LoadedModel
from llm42.protocol import SamplingParams
from llm42.verifier.cuda.runner import CudaRunner
from llm42.verifier.runner import SequenceRows

LENGTH = 8000


def compare(model: LoadedModel, runner: CudaRunner) -> dict[str, Any]:
    """Log-probabilities of the next token at positions 0..LENGTH - 2: mean and largest distance from float32
    transformers, of ours and of transformers' own bfloat16, per quarter of the positions."""
    tokens = torch.randint(0, model.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(7))
    exact = _transformers(model, tokens, torch.float32)
    theirs = _transformers(model, tokens, torch.bfloat16)
    ours = _canonical(model, runner, tokens)
    out: dict[str, Any] = {"positions": LENGTH}
    for name, values in (("ours", ours), ("transformers_bf16", theirs)):
        distance = (values - exact).abs()
        out[name] = {
            "mean": float(distance.mean()),
            "max": float(distance.max()),
            "mean_by_quarter": [float(d.mean()) for d in distance.chunk(4)],
        }
    return out


def _chosen(logits: Tensor, following: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(1, following[:, None])[:, 0]


def _canonical(model: LoadedModel, runner: CudaRunner, tokens: Tensor) -> Tensor:
    size, out, ids = runner.kv.block_size, [], tokens.tolist()
    table = list(range(-(-LENGTH // size)))
    for start in range(0, LENGTH - 1, 1024):
        count = min(1024, LENGTH - 1 - start)
        rows = SequenceRows(ids, start, count, table, 0, LENGTH, SamplingParams())
        logits = runner.logits(1024, [rows])
        out.append(_chosen(logits, tokens[start + 1 : start + 1 + count].cuda()))
    return torch.cat(out)


@torch.inference_mode()
def _transformers(model: LoadedModel, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, max_position_embeddings=c.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta}, tie_word_embeddings=True,
    )  # fmt: skip
    net = LlamaForCausalLM(config).to("cuda", dtype).eval()
    missing = net.load_state_dict(_state(model), strict=False)
    assert not missing.unexpected_keys, missing
    assert set(missing.missing_keys) <= {"lm_head.weight"}, missing
    ids = tokens[None].cuda()
    hidden = net.model(ids).last_hidden_state[0, :-1]
    pieces = [
        _chosen(net.lm_head(h), t) for h, t in zip(hidden.split(1024), ids[0, 1:].split(1024), strict=True)
    ]
    return torch.cat(pieces)


def _state(model: LoadedModel) -> dict[str, Tensor]:
    c, w = model.config, model.weights
    q, k = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    state = {
        "model.embed_tokens.weight": w.embed,
        "model.norm.weight": w.final_norm,
        "lm_head.weight": w.lm_head,
    }
    for i, layer in enumerate(w.layers):
        prefix = f"model.layers.{i}."
        parts = zip("qkv", layer.qkv.split((q, k, k)), strict=True)
        state |= {f"{prefix}self_attn.{name}_proj.weight": value for name, value in parts}
        gate, up = layer.gate_up.chunk(2)
        state |= {
            prefix + "self_attn.o_proj.weight": layer.o,
            prefix + "mlp.gate_proj.weight": gate,
            prefix + "mlp.up_proj.weight": up,
            prefix + "mlp.down_proj.weight": layer.down,
            prefix + "input_layernorm.weight": layer.input_norm,
            prefix + "post_attention_layernorm.weight": layer.post_norm,
        }
    return state
