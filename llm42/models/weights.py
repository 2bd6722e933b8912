"""Weights of a Llama-type decoder, and how they are assembled from a file's tensors.

Rounding: every tensor is rounded once to the activation dtype (so that a value does not depend on where it is
stored); weights are then kept in `operators.storage_dtype`: on CPU float32, for float32 products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llm42.errors import ModelFileError
from llm42.models.config import ModelConfig
from llm42_kernels.operators import storage_dtype
from llm42_kernels.rotary import cos_sin_table


@dataclass(slots=True)
class LayerWeights:
    """One decoder block. H hidden, D head size, I intermediate; matrices are [out, in]."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(Hq + 2 Hk) D, H]
    qkv_bias: Tensor | None  # [(Hq + 2 Hk) D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Tensor  # [H, Hq D]
    o_bias: Tensor | None  # [H]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H], gate first
    gate_up_bias: Tensor | None  # [2 I]
    down: Tensor  # [H, I]
    down_bias: Tensor | None  # [H]


@dataclass(slots=True)
class ModelWeights:
    """All weights; `lm_head` is the very tensor `embed` when the embeddings are tied."""

    embed: Tensor  # [V, H]
    layers: list[LayerWeights]
    final_norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]
    cos_sin: Tensor  # [P, D] float32, llm42_kernels.rotary


@dataclass(slots=True)
class LoadedModel:
    """A model ready for `llm42.models.decoder.forward`."""

    config: ModelConfig
    weights: ModelWeights
    dtype: torch.dtype
    """Activation dtype."""
    device: str
    identity: str
    """sha256 over the configuration and the content of the weight files."""
    dequantiser: str
    """Name and version of the code that expanded quantised weights; "none" where nothing was quantised."""


class TensorSource(Protocol):
    """The tensors of one checkpoint under their Hugging Face names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of every tensor in the checkpoint."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor's values, exact, on the CPU, in any floating dtype."""
        ...

    def where(self, name: str) -> str:
        """The file that holds (or should hold) a tensor, for error messages."""
        ...


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this configuration must hold, in file order."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    matrices = {
        "self_attn.q_proj": (q_rows, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_rows, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_rows, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_rows, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, bias) in matrices.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (head,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: ModelConfig, source: TensorSource) -> None:
    """Raises ModelFileError, naming file and tensor, unless the source holds just what the config needs."""
    expected, found = expected_shapes(config), source.shapes()
    for name, shape in expected.items():
        if name not in found:
            raise ModelFileError(f"{source.where(name)}: tensor {name} is missing")
        if tuple(found[name]) != shape:
            raise ModelFileError(
                f"{source.where(name)}: tensor {name} has shape {tuple(found[name])},"
                f" the configuration says {shape}"
            )
    for name in found:
        if name not in expected and not _is_redundant(name, config, source):
            raise ModelFileError(
                f"{source.where(name)}: unexpected tensor {name}: not part of {config.architecture}"
            )


def _is_redundant(name: str, config: ModelConfig, source: TensorSource) -> bool:
    """True for tensors without information: old rotary buffers, a tied head that equals the embedding."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True  # recomputed from the configuration; written by old versions of transformers
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return torch.equal(source.read(name), source.read("model.embed_tokens.weight"))
    return False


def assemble(
    config: ModelConfig, source: TensorSource, dtype: torch.dtype, device: str, max_model_len: int
) -> ModelWeights:
    """Reads, rounds and fuses all tensors. ModelFileError: one is missing, unexpected or misshapen."""
    check_tensors(config, source)
    storage = storage_dtype(dtype, device)

    def read(*names: str) -> Tensor:
        parts = [source.read(name).to(dtype) for name in names]
        return (
            (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device=device, dtype=storage).contiguous()
        )

    embed = read("model.embed_tokens.weight")
    layers = [_layer(config, f"model.layers.{index}.", read) for index in range(config.num_layers)]
    frequencies = config.rope.inv_freq(config.head_dim)
    return ModelWeights(
        embed=embed,
        layers=layers,
        final_norm=read("model.norm.weight"),
        lm_head=embed if config.tie_word_embeddings else read("lm_head.weight"),
        cos_sin=cos_sin_table(frequencies, max_model_len, config.rope.attention_factor).to(device),
    )


def _layer(config: ModelConfig, prefix: str, read: Callable[..., Tensor]) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = [f"{attention}{part}_proj" for part in "qkv"]
    gate_up = [f"{mlp}gate_proj", f"{mlp}up_proj"]
    return LayerWeights(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=read(*(name + ".weight" for name in qkv)),
        qkv_bias=read(*(name + ".bias" for name in qkv)) if config.qkv_bias else None,
        q_norm=read(attention + "q_norm.weight") if config.qk_norm else None,
        k_norm=read(attention + "k_norm.weight") if config.qk_norm else None,
        o=read(attention + "o_proj.weight"),
        o_bias=read(attention + "o_proj.bias") if config.o_bias else None,
        post_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=read(*(name + ".weight" for name in gate_up)),
        gate_up_bias=read(*(name + ".bias" for name in gate_up)) if config.mlp_bias else None,
        down=read(mlp + "down_proj.weight"),
        down_bias=read(mlp + "down_proj.bias") if config.mlp_bias else None,
    )
