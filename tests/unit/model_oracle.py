"""Helpers of the model tests: transformers in float32 is the oracle; our decoder gets a plain attention."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from llm42.models.decoder import forward, logits
from llm42.models.weights import LoadedModel
from llm42_kernels import linear_cpu, rmsnorm, rotary, silu_mul
from llm42_kernels.operators import Operators

OPERATORS = Operators(
    linear_cpu.linear_mkl,
    rmsnorm.rms_norm_torch,
    rotary.rotary_torch,
    silu_mul.silu_mul_torch,
    linear_cpu.lm_head_mkl,
)
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PARTICULAR: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 16}}


def causal_attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain float32 causal attention over a whole sequence. q [T, Hq, D], k, v [T, Hk, D] -> [T, Hq D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q.float().transpose(0, 1), k, v, is_causal=True)
    return out.transpose(0, 1).reshape(q.shape[0], -1).to(q.dtype)


@torch.inference_mode()
def our_logits(model: LoadedModel, tokens: Tensor) -> Tensor:
    """tokens [T] -> [T, V] float32."""
    hidden = forward(model, OPERATORS, tokens, torch.arange(len(tokens)), causal_attend)
    return logits(model, OPERATORS, hidden)


@torch.inference_mode()
def their_logits(model: Any, tokens: Tensor) -> Tensor:
    """The same from a transformers model."""
    result: Tensor = model(tokens[None]).logits[0]
    return result


def tiny_config(family: str, **changes: Any) -> Any:
    """A tiny transformers configuration of one family."""
    return CONFIGS[family](**(TINY | PARTICULAR.get(family, {}) | changes))


def tiny_model(family: str, **changes: Any) -> Any:
    """A transformers model with every parameter random, biases and norms too (theirs start at 0 and 1)."""
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(20260)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.15 * noise)
    return model.eval()


def save_tiny(directory: Path, family: str, max_shard_size: str = "50GB", **changes: Any) -> Any:
    """Writes a tiny model as a Hugging Face directory and returns it."""
    model = tiny_model(family, **changes)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def tokens_of(count: int, vocab: int = TINY["vocab_size"]) -> Tensor:
    """Random token ids [count]."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(7))


def report(line: str) -> None:
    """A measured figure, shown with `pytest -s`."""
    print(line, file=sys.stderr)
