"""A tiny random model on disk, the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

VOCAB = 512
END = 0
"""The tiny model's end-of-text id."""
SPECIAL = ("<|end|>", "<|begin|>")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": END,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_model(
    directory: Path, head_dim: int = CONFIG["head_dim"], chat: bool = False, positions: int = 1024
) -> Path:
    """A random Llama and a byte-level BPE tokenizer as a Hugging Face directory; the same bytes every
    time. `chat`: with a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    changes = {"head_dim": head_dim, "max_position_embeddings": positions}
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(_tensors(head_dim), directory / "model.safetensors")
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    names = {"eos_token": SPECIAL[0], "bos_token": SPECIAL[1]}
    names |= {"chat_template": CHAT_TEMPLATE} if chat else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory


def _tensors(head_dim: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(42)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    q_rows, kv_rows = 4 * head_dim, 2 * head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=gen) * gain / columns**0.5

    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=gen)}
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes = {
            # sharp attention: what a token attends to must matter, or a wrong cache would go unnoticed
            "self_attn.q_proj": (q_rows, hidden, 2.5),
            "self_attn.k_proj": (kv_rows, hidden, 2.5),
            "self_attn.v_proj": (kv_rows, hidden, 1.5),
            "self_attn.o_proj": (hidden, q_rows, 2.0),
            "mlp.gate_proj": (inner, hidden, 1.5),
            "mlp.up_proj": (inner, hidden, 1.5),
            "mlp.down_proj": (hidden, inner, 1.5),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=gen)
    tensors["model.norm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=gen)
    tensors["lm_head.weight"] = matrix(VOCAB, hidden, 2.0)
    return tensors


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """512 tokens: two special ones, 256 bytes, and 254 pairs of letters, so that text is often readable."""
    letters = "etaoinshrdlucmfwypvb"
    pairs = [(a, b) for a in letters for b in letters][: VOCAB - 258]
    vocab = {token: i for i, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    vocab |= {a + b: 258 + i for i, (a, b) in enumerate(pairs)}
    backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return backend
