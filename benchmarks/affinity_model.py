"""A checkpoint and prompts for vLLM, from the GGUF file that the service reads: the same rounded weights.

python -m benchmarks.affinity_model GGUF DIRECTORY"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from llm42.checkpoint.load import load_model
from llm42.models.weights import LoadedModel

PROMPT_COUNT = 64
ENDINGS = ("", " Answer in detail.", " Keep it short and simple.", " Give an example.")


def state(model: LoadedModel) -> dict[str, Tensor]:
    """Weights under their Hugging Face names, in the activation dtype."""
    c, w = model.config, model.weights
    q, k = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    out = {"model.embed_tokens.weight": w.embed, "model.norm.weight": w.final_norm}
    if not c.tie_word_embeddings:
        out["lm_head.weight"] = w.lm_head
    for i, layer in enumerate(w.layers):
        prefix = f"model.layers.{i}."
        out |= {
            f"{prefix}self_attn.{name}_proj.weight": value
            for name, value in zip("qkv", layer.qkv.split((q, k, k)), strict=True)
        }
        gate, up = layer.gate_up.chunk(2)
        out |= {
            prefix + "self_attn.o_proj.weight": layer.o,
            prefix + "mlp.gate_proj.weight": gate,
            prefix + "mlp.up_proj.weight": up,
            prefix + "mlp.down_proj.weight": layer.down,
            prefix + "input_layernorm.weight": layer.input_norm,
            prefix + "post_attention_layernorm.weight": layer.post_norm,
        }
    return {name: value.to(model.dtype).contiguous().clone() for name, value in out.items()}


def hf_config(model: LoadedModel) -> dict[str, object]:
    """config.json of a plain Llama model."""
    c = model.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "max_position_embeddings": c.max_position,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": c.tie_word_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def prompts(gguf: str) -> list[list[int]]:
    """Chat prompts as token ids."""
    from llm42.local.demo import PROMPTS
    from llm42.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(gguf)
    texts = [p + ending for ending in ENDINGS for p in PROMPTS][:PROMPT_COUNT]
    return [tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": t}])) for t in texts]


def write(gguf: str, directory: Path) -> None:
    """model.safetensors, config.json and prompts.json."""
    from safetensors.torch import save_file

    model = load_model(gguf, "bfloat16", "cpu", 2048)
    directory.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        save_file(state(model), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(hf_config(model), indent=1))
    (directory / "prompts.json").write_text(json.dumps(prompts(gguf)))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
