"""A GGUF file's export is the same model: configuration, every weight's bits, tokenizer and chat template."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

from llm42.checkpoint.load import load_model
from llm42.engine.vllm import export
from llm42.engine.vllm.export import config_json, export_model
from llm42.errors import LLM42Error
from llm42.models.families import read_config
from llm42.models.gguf import config as gguf_config
from llm42.models.gguf import source as gguf
from llm42.models.rope import RopeSettings
from llm42.models.weights import LoadedModel
from llm42.text.tokenizer import Tokenizer
from tests.unit.gguf_oracle import write_gguf
from tests.unit.model_oracle import tiny_model

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|none|>", "<s>", "</s>", *ALPHABET, "th", "the"],
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(ALPHABET) + 2)],
    "tokenizer.ggml.merges": ["t h", "th e"],
    "tokenizer.chat_template": "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}",
}


def write(path: Path, architecture: str = "llama", family: str = "llama", **more: Any) -> Path:
    """A tiny model with a tokenizer."""
    config, kind = more.pop("config", {}), more.pop("kind", Kind.Q8_0)
    metadata = TOKENIZER | more.pop("metadata", {})
    write_gguf(path, tiny_model(family, **SHAPE, **config), architecture, kind, metadata, **more)
    return path


def differing(a: LoadedModel, b: LoadedModel) -> list[str]:
    """Names of the tensors whose bits differ."""
    found = []
    for name in ("embed", "final_norm", "lm_head", "cos_sin"):
        if not torch.equal(getattr(a.weights, name), getattr(b.weights, name)):
            found.append(name)
    for i, (x, y) in enumerate(zip(a.weights.layers, b.weights.layers, strict=True)):
        for part in dataclasses.fields(x):
            left, right = getattr(x, part.name), getattr(y, part.name)
            if (left is None) != (right is None) or (left is not None and not torch.equal(left, right)):
                found.append(f"{i}.{part.name}")
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("family", "architecture", "config"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"tie_word_embeddings": True}),
        ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", "llama", {"head_dim": 24}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
    ],
)
def test_the_export_is_the_same_model(
    family: str, architecture: str, config: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "tiny.gguf", architecture, family, config=config)
    place = export_model(path, dtype, tmp_path / "exports")
    ours, again = load_model(path, dtype, "cpu", 128), load_model(place, dtype, "cpu", 128)
    assert again.config == ours.config
    assert differing(ours, again) == []
    assert Tokenizer.load(place).identity == Tokenizer.load(path).identity
    assert Tokenizer.load(place).encode("the moth") == Tokenizer.load(path).encode("the moth")


def test_control_another_row_order_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "tiny.gguf")
    with monkeypatch.context() as broken:
        broken.setattr(gguf, "unpermute", lambda rows, heads: rows)
        place = export_model(path, "float32", tmp_path / "exports")
    found = differing(load_model(path, "float32", "cpu", 128), load_model(place, "float32", "cpu", 128))
    assert found == ["0.qkv", "1.qkv"]


def test_a_large_model_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "tiny.gguf")
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    place = export_model(path, "float32", tmp_path / "exports")
    assert len(list(place.glob("model-*-of-*.safetensors"))) > 3
    assert differing(load_model(path, "float32", "cpu", 128), load_model(place, "float32", "cpu", 128)) == []


def test_an_export_is_made_once_per_content_and_dtype(tmp_path: Path) -> None:
    path, out = write(tmp_path / "tiny.gguf"), tmp_path / "exports"
    first = export_model(path, "float32", out)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert export_model(path, "float32", out) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert export_model(path, "bfloat16", out) != first
    write(path, config={"tie_word_embeddings": True})
    assert export_model(path, "float32", out) != first
    assert len(list(out.iterdir())) == 3


def test_a_broken_off_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = write(tmp_path / "tiny.gguf"), tmp_path / "exports"

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(export, "save_file", full)
        with pytest.raises(OSError, match="no space"):
            export_model(path, "float32", out)
    assert list(out.iterdir()) == []
    assert export_model(path, "float32", out).is_dir()


@pytest.mark.parametrize(
    "rope",
    [
        RopeSettings(5000.0),
        RopeSettings(5000.0, "linear", 4.0),
        RopeSettings(5000.0, "llama3", 8.0, 8192, 2.0, 5.0),
        RopeSettings(
            5000.0, "yarn", 4.0, 64, beta_fast=30.0, beta_slow=2.0, truncate=False, attention_factor=1.2
        ),
    ],
    ids=lambda rope: rope.kind,
)
def test_every_rope_scaling_survives(rope: RopeSettings, tmp_path: Path) -> None:
    config = dataclasses.replace(gguf_config.read_config(write(tmp_path / "tiny.gguf")), rope=rope)
    assert read_config(config_json(config, "float32"), "export") == config


def test_llama3_divisors_get_their_name_back(tmp_path: Path) -> None:
    plain = RopeSettings(10000.0).inv_freq(16)
    for factor in (8.0, 32.0):
        named = RopeSettings(10000.0, "llama3", factor, 8192)
        divisors = (plain / named.inv_freq(16)).numpy().astype(np.float32)
        path = write(tmp_path / f"{factor}.gguf", extra={"rope_freqs.weight": divisors})
        place = export_model(path, "float32", tmp_path / "exports")
        assert load_model(place, "float32", "cpu", 128).config.rope == named


def test_divisors_of_no_known_scaling_are_refused(tmp_path: Path) -> None:
    divisors = np.linspace(1.0, 3.0, 8, dtype=np.float32)
    path = write(tmp_path / "tiny.gguf", extra={"rope_freqs.weight": divisors})
    with pytest.raises(LLM42Error, match="Hugging Face directory"):
        export_model(path, "float32", tmp_path / "exports")
    assert list((tmp_path / "exports").iterdir()) == []
