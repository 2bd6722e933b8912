"""GGUF: each weight type against a scalar decoder and transformers, row order of q and k, broken files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from llm42.checkpoint.load import load_model
from llm42.errors import LLM42Error, ModelFileError, UnsupportedModel
from llm42.models.gguf.source import unpermute
from llm42.models.rope import RopeSettings
from llm42.models.weights import LoadedModel
from tests.unit.gguf_oracle import DECODERS, dequantise, interleaved, quantise, write_gguf
from tests.unit.model_oracle import our_logits, report, their_logits, tiny_model, tokens_of

TOLERANCE = 1e-4
WIDE = {  # K-quants come in blocks of 256
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}
NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
KINDS = [*DECODERS, Kind.F16, Kind.BF16, Kind.F32]


def load(path: Path) -> LoadedModel:
    return load_model(path, "float32", "cpu", 128)


def difference(path: Path, model: Any) -> float:
    tokens = tokens_of(100)
    expected = their_logits(model, tokens)
    assert expected.std() > 0.05
    return float(((our_logits(load(path), tokens) - expected) / expected.std()).abs().max())


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_the_librarys_dequantiser_equals_the_scalar_one(kind: Kind) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    values = np.random.default_rng(1).normal(size=(8, 2 * block)).astype(np.float32)
    data = quantise(values, kind)
    assert data.shape == (8, 2 * size)
    found, expected = gguf.quants.dequantize(data, kind), dequantise(data, kind)
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    assert len(np.unique(found)) > 100


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_logits_of_every_weight_type(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("llama", **(WIDE if "K" in kind.name else NARROW))
    write_gguf(path, model, "llama", kind)
    found = difference(path, model)
    report(f"{kind.name}: largest difference {found:.1e} of the logits' deviation")
    assert found < TOLERANCE
    quantised = kind in DECODERS
    assert load(path).dequantiser.startswith("gguf " if quantised else "none")


@pytest.mark.parametrize(
    ("family", "architecture", "changes"),
    [
        ("llama", "llama", {"tie_word_embeddings": True}),
        ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", "llama", {"head_dim": 24}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
    ],
)
def test_logits_of_every_family(
    family: str, architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model(family, **NARROW, **changes)
    write_gguf(path, model, architecture)
    assert difference(path, model) < TOLERANCE


def test_control_the_row_order_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("llama", **NARROW)
    write_gguf(path, model, "llama")
    monkeypatch.setattr("llm42.models.gguf.source.unpermute", lambda rows, heads: rows)
    assert difference(path, model) > 100 * TOLERANCE


@pytest.mark.parametrize("heads", [1, 3])
def test_unpermute_is_the_inverse_of_the_converters_order(heads: int) -> None:
    rows = np.arange(heads * 8 * 5).reshape(heads * 8, 5)
    assert np.array_equal(unpermute(torch.from_numpy(interleaved(rows, heads)), heads).numpy(), rows)
    assert not np.array_equal(interleaved(rows, heads), rows)


YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}


@pytest.mark.parametrize("rope", [YARN, LINEAR], ids=["yarn", "linear"])
def test_rope_scaling_keys(rope: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("qwen2", **NARROW, rope_parameters=rope)
    keys = {"qwen2.rope.scaling.type": rope["rope_type"], "qwen2.rope.scaling.factor": rope["factor"]}
    if rope is YARN:
        keys["qwen2.rope.scaling.original_context_length"] = 64
    write_gguf(path, model, "qwen2", metadata=keys)
    assert difference(path, model) < TOLERANCE
    if rope is LINEAR:  # llama.cpp's reading of a factor without a type
        del keys["qwen2.rope.scaling.type"]
        write_gguf(path, model, "qwen2", metadata=keys)
        assert difference(path, model) < TOLERANCE
    write_gguf(path, model, "qwen2")
    assert difference(path, model) > 100 * TOLERANCE


def test_llama3_scaling_comes_as_a_tensor(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny_model("llama", **NARROW, rope_parameters=rope)
    plain = RopeSettings(500.0).inv_freq(16)
    divisors = (plain / model.model.rotary_emb.inv_freq.double()).numpy().astype(np.float32)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama", extra={"rope_freqs.weight": divisors})
    assert difference(path, model) < TOLERANCE
    write_gguf(tmp_path / "without.gguf", model, "llama")
    assert difference(tmp_path / "without.gguf", model) > 100 * TOLERANCE


def written(path: Path, **changes: Any) -> Path:
    write_gguf(path, tiny_model("llama", **NARROW), changes.pop("architecture", "llama"), **changes)
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.sliding_window", 64),
        ("llama.expert_count", 8),
        ("llama.expert_used_count", 2),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 8),
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.logit_scale", 2.0),
        ("llama.a_key_of_tomorrow", 1),
    ],
)
def test_a_key_outside_the_list_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", metadata={key: value})
    with pytest.raises(UnsupportedModel, match=re.escape(key)) as caught:
        load(path)
    assert caught.value.field == key
    assert str(path) in str(caught.value)


def test_neutral_keys_are_accepted(tmp_path: Path) -> None:
    load(written(tmp_path / "m.gguf", metadata={"llama.expert_count": 0, "llama.rope.dimension_count": 16}))


@pytest.mark.parametrize("architecture", ["gemma2", "phi3", "qwen2moe"])
def test_unknown_architecture(architecture: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", architecture=architecture)
    with pytest.raises(UnsupportedModel, match=f"{architecture}.*supported: llama, qwen2, qwen3") as caught:
        load(path)
    assert caught.value.field == "general.architecture"


@pytest.mark.parametrize(
    ("tensor", "ours"),
    [
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("token_embd.weight", "token_embd.weight"),
    ],
)
def test_missing_tensor(tensor: str, ours: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", drop=(tensor,))
    with pytest.raises(ModelFileError, match=f"{path}: tensor {ours} is missing"):
        load(path)


def test_unexpected_tensor(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", extra={"blk.0.ffn_gate_exps.weight": np.zeros(4, np.float32)})
    with pytest.raises(ModelFileError, match=f"{path}: unexpected tensor blk.0.ffn_gate_exps.weight"):
        load(path)


def test_wrong_shape(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", metadata={"llama.feed_forward_length": 95})
    with pytest.raises(ModelFileError, match=r"mlp.gate_proj.weight has shape \(96, 64\).*\(95, 64\)"):
        load(path)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("llama.attention.head_count", [4, 8], UnsupportedModel),
        ("llama.attention.head_count_kv", 3, ModelFileError),
        ("llama.attention.key_length", 15, ModelFileError),
        ("llama.block_count", 0, ModelFileError),
        ("llama.context_length", "long", ModelFileError),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, ModelFileError),
        ("llama.rope.freq_base", float("nan"), ModelFileError),
    ],
)
def test_broken_values(key: str, value: Any, error: type[Exception], tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", metadata={key: value})
    with pytest.raises(error, match=str(path)):
        load(path)


def test_rope_divisors_of_the_wrong_length(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(7, np.float32)})
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight has 7 values, not 8"):
        load(path)


def refusal(path: Path) -> str | None:
    """The message of a typed error; None: the file loads. Any other exception fails the test."""
    try:
        load(path)
    except LLM42Error as error:
        return str(error)
    return None


def test_damaged_headers_give_typed_errors(tmp_path: Path) -> None:
    """Any byte of the header may be wrong: the file loads, or the error is ours."""
    path = written(tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": ["word"] * 9})
    good, generator, refused = path.read_bytes(), np.random.default_rng(5), 0
    for _ in range(200):
        data = bytearray(good)
        data[generator.integers(0, 1900)] = generator.choice([0, 255, generator.integers(256)])
        path.write_bytes(data)
        message = refusal(path)
        assert message is None or str(path) in message
        refused += message is not None
    assert refused > 50


def test_missing_key(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", metadata={"llama.attention.head_count": None})
    with pytest.raises(ModelFileError, match=f"{path}.*llama.attention.head_count is missing"):
        load(path)


def test_a_weight_type_without_dequantiser_test_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 256)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((32, 84), np.uint8), raw_dtype=Kind.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"token_embd.weight has type Q2_K"):
        load(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.005, 0.02, 0.3, 0.6, 0.95, 0.9999])
def test_truncated_file(share: float, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": ["word"] * 40})
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelFileError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "truncated" in str(caught.value)
    if share >= 0.3:
        assert re.search(r"tensor \S+\.weight ends at byte", str(caught.value))


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\3\4" + bytes(1000))
    with pytest.raises(ModelFileError, match="not a readable GGUF file"):
        load(path)
