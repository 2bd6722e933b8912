"""Writes a GGUF file's model as a Hugging Face directory, for engines that read nothing else.

Weights are dequantised and rounded as llm42.models.weights does it, so both sides compute with the same
numbers. The directory is kept under a name that follows from the file's content, and appears only when it is
complete.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llm42.checkpoint.description import read_config
from llm42.checkpoint.load import identity_of
from llm42.errors import UnsupportedModel
from llm42.models.config import ModelConfig
from llm42.models.decoder import activation_dtype
from llm42.models.families import FAMILIES, ROPE_FIELDS
from llm42.models.gguf.source import GGUFSource
from llm42.models.rope import RopeSettings
from llm42.models.safetensors import INDEX, SINGLE
from llm42.models.weights import check_tensors, expected_shapes
from llm42.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
SHARD_BYTES = 2 << 30


def export_model(path: str | Path, dtype: str, directory: str | Path) -> Path:
    """Returns the exported model's directory below `directory`, made when it is not there yet.

    path: a GGUF file. dtype: the activation dtype, to which all weights are rounded. Raises ModelFileError
    (the file) or UnsupportedModel (a field that config.json cannot express).
    """
    place = Path(path)
    config = read_config(place)
    target = Path(directory) / f"{place.stem}-{dtype}-{identity_of(config, [place])[:16]}"
    if target.is_dir():
        return target
    log.info("writing %s as a Hugging Face directory for vLLM: %s", place, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as scratch:
        whole = Path(scratch) / "model"
        whole.mkdir()
        tokenizer = Tokenizer.load(place)
        _write_json(whole / "config.json", config_json(config, dtype))
        _write_json(whole / "generation_config.json", {"eos_token_id": list(tokenizer.eos_token_ids)})
        _write_tokenizer(whole, tokenizer)
        _write_weights(whole, config, GGUFSource(place, config), activation_dtype(dtype))
        try:
            os.rename(whole, target)
        except OSError:
            if not target.is_dir():  # another process was faster
                raise
    return target


def config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json; read back, it is the same ModelConfig. Raises UnsupportedModel."""
    family = FAMILIES[config.architecture]
    fields: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        **_rope_fields(config.rope),
    }
    biases = config.qkv_bias and not family.qkv_bias, config.o_bias
    if biases[0] != biases[1] or (config.o_bias and "attention_bias" not in family.used):
        raise UnsupportedModel(
            f"{config.architecture}: vLLM cannot load it: no config.json can describe these attention biases",
            "o_bias",
        )
    if config.mlp_bias and "mlp_bias" not in family.used:
        raise UnsupportedModel(
            f"{config.architecture}: vLLM cannot load it: no config.json can describe biases in the MLP",
            "mlp_bias",
        )
    if "attention_bias" in family.used:
        fields["attention_bias"] = config.o_bias
    if "mlp_bias" in family.used:
        fields["mlp_bias"] = config.mlp_bias
    if config.architecture == "mistral":
        fields["sliding_window"] = None
    return fields


def _rope_fields(rope: RopeSettings) -> dict[str, Any]:
    if rope.kind == "divisors":
        rope = _named_scaling(rope)
    values = asdict(rope) | {"original_max_position_embeddings": rope.original_max_position}
    used = {name: values[name] for name in sorted(ROPE_FIELDS[rope.kind] & values.keys())}
    scaling = None if rope.kind == "default" else {"rope_type": rope.kind, **used}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _named_scaling(rope: RopeSettings) -> RopeSettings:
    """GGUF gives Llama 3's scaling as one float32 divisor per frequency; config.json needs its parameters."""
    head_dim = 2 * len(rope.divisors)
    given = torch.tensor(rope.divisors, dtype=torch.float64)
    plain = RopeSettings(rope.theta).inv_freq(head_dim)
    for factor in (8.0, 32.0, 16.0, 4.0):  # Llama 3.1, Llama 3.2, and what derived models use
        named = RopeSettings(rope.theta, "llama3", factor, 8192)
        if torch.allclose(plain / named.inv_freq(head_dim), given, rtol=1e-5, atol=0.0):
            return named
    raise UnsupportedModel(
        "no config.json can describe the scaling in rope_freqs.weight: use the model's Hugging Face directory"
        " instead of the GGUF file",
        "rope_freqs.weight",
    )


def _write_weights(directory: Path, config: ModelConfig, source: GGUFSource, dtype: torch.dtype) -> None:
    """One file, or an index and shards of about SHARD_BYTES: a large model is never whole in memory."""
    check_tensors(config, source)
    shards, size = [list[str]()], 0
    for name, shape in expected_shapes(config).items():
        if size >= SHARD_BYTES:
            shards, size = [*shards, []], 0
        shards[-1].append(name)
        size += math.prod(shape) * dtype.itemsize
    placed: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(
            {name: source.read(name).to(dtype).contiguous() for name in names},
            directory / file,
            metadata={"format": "pt"},
        )
        placed |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(directory / INDEX, {"metadata": {}, "weight_map": placed})


def _write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special}
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template.source
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")
