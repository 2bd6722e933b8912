"""Models with random weights in the shape of real ones, made on the device: for bits and speed, not for
text."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from llm42.engine.vllm.export import config_json
from llm42.models.config import ModelConfig
from llm42.models.rope import RopeSettings
from llm42.models.safetensors import INDEX
from llm42.models.weights import LayerWeights, LoadedModel, ModelWeights, expected_shapes
from llm42.text.tokenizer import Tokenizer
from llm42_kernels.rotary import cos_sin_table

ROPE = RopeSettings(theta=500000.0)
LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, ROPE, 131072)
SMALL_64 = ModelConfig("llama", 49152, 576, 1536, 6, 9, 3, 64, 1e-5, ROPE, 8192, tie_word_embeddings=True)
SMALL_96 = ModelConfig("llama", 32064, 768, 2048, 4, 8, 8, 96, 1e-5, ROPE, 8192)
SMALL_QK = ModelConfig("qwen3", 32000, 1024, 3072, 4, 16, 8, 128, 1e-6, ROPE, 8192, qk_norm=True)


def write_random(config: ModelConfig, tokenizer: Tokenizer, directory: Path, seed: int = 0) -> Path:
    """The same kind of weights as files that any engine reads, in bfloat16: a Hugging Face directory.

    tokenizer: its vocabulary may be smaller than the model's. Shards are of one layer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json(config, "bfloat16")))
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    shards: dict[str, dict[str, Tensor]] = {}
    for name, shape in expected_shapes(config).items():
        norm, embedding = len(shape) == 1, name == "model.embed_tokens.weight"
        mean, scale = (1.0, 0.1) if norm else (0.0, 1.0 if embedding else shape[-1] ** -0.5)
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        layer = name.split(".")[2] if ".layers." in name else "other"
        held = shards.setdefault(layer, {})
        held[name] = tensor.normal_(mean, scale, generator=generator).cpu()
    placed: dict[str, str] = {}
    for layer, tensors in shards.items():
        save_file(tensors, directory / f"model-{layer}.safetensors", metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, f"model-{layer}.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    if device == "cuda":
        torch.cuda.empty_cache()
    return directory


def random_model(
    config: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    max_len: int = 32768,
    seed: int = 0,
) -> LoadedModel:
    """Normal weights scaled by 1 / sqrt(fan-in), so that activations stay of order one."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        out = torch.empty(rows, columns, dtype=dtype, device=device)
        return out.normal_(0.0, scale * columns**-0.5, generator=generator)

    def norm(width: int) -> Tensor:
        return torch.empty(width, dtype=dtype, device=device).normal_(1.0, 0.1, generator=generator)

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    rows = (config.num_heads + 2 * config.num_kv_heads) * dim

    def layer() -> LayerWeights:
        q_norm, k_norm = (norm(dim), norm(dim)) if config.qk_norm else (None, None)
        return LayerWeights(
            norm(hidden), matrix(rows, hidden), None, q_norm, k_norm,
            matrix(hidden, config.num_heads * dim), None,
            norm(hidden), matrix(2 * inner, hidden), None, matrix(hidden, inner), None,
        )  # fmt: skip

    embed = matrix(config.vocab_size, hidden, hidden**0.5)
    layers = [layer() for _ in range(config.num_layers)]
    head = embed if config.tie_word_embeddings else matrix(config.vocab_size, hidden)
    table = cos_sin_table(config.rope.inv_freq(config.head_dim), min(max_len, config.max_position)).to(device)
    weights = ModelWeights(embed, layers, norm(hidden), head, table)
    return LoadedModel(config, weights, dtype, device, f"random-{seed}", "none")
