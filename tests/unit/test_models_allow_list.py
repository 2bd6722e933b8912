"""The allow-list of config.json, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from llm42.errors import ModelFileError, UnsupportedModel
from llm42.models.families import FAMILIES, read_config
from tests.unit.model_oracle import CONFIGS, tiny_config

WHERE = "some/config.json"
REFUSED: list[tuple[str, Any]] = [
    ("hidden_act", "gelu"),
    ("sliding_window", 4096),
    ("use_sliding_window", True),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("num_experts", 8),
    ("num_local_experts", 8),
    ("num_experts_per_tok", 2),
    ("n_routed_experts", 64),
    ("use_mrope", True),
    ("partial_rotary_factor", 0.5),
    ("rope_interleaved", True),
    ("quantization_config", {"quant_method": "fp8"}),
    ("alibi", True),
    ("pretraining_tp", 2),
    ("auto_map", {"AutoModel": "modeling.Model"}),
    ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ("layer_types", ["full_attention", "linear_attention", "full_attention"]),
    ("architectures", ["LlamaForSequenceClassification"]),
    ("clip_qkv", 8.0),
    ("embedding_multiplier", 12.0),
    ("residual_multiplier", 0.22),
    ("logits_scaling", 8.0),
    ("attention_multiplier", 0.01),
    ("query_pre_attn_scalar", 256),
    ("vision_config", {}),
    ("no_rope_layers", [1, 0]),
    ("a_field_of_tomorrow", 1),
    ("is_encoder_decoder", True),
]
REFUSED_ROPES: list[tuple[str, dict[str, Any]]] = [
    ("rope_type", {"rope_type": "dynamic", "factor": 2.0}),
    ("rope_type", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
    ("rope_type", {"rope_type": "mrope", "mrope_section": [2, 3, 3]}),
    ("mrope_section", {"rope_type": "default", "mrope_section": [2, 3, 3]}),
    ("partial_rotary_factor", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ("high_freq_factor", {"rope_type": "linear", "factor": 2.0, "high_freq_factor": 4.0}),
]


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = tiny_config(family).to_dict() | {"architectures": [FAMILIES[family].class_name]}
    return data | changes


@pytest.mark.parametrize("family", CONFIGS)
def test_everything_that_transformers_writes_by_default_is_known(family: str) -> None:
    config = read_config(config_of(family), WHERE)
    assert config.architecture == family
    assert (config.num_heads, config.num_kv_heads, config.eos_token_ids) == (6, 2, (2,))


# Qwen's window counts only with use_sliding_window: test_qwen_window
CASES = [
    (family, field, value)
    for family in CONFIGS
    for field, value in REFUSED
    if not (field == "sliding_window" and family.startswith("qwen"))
]


@pytest.mark.parametrize(("family", "field", "value"), CASES, ids=lambda value: str(value)[:40])
def test_a_field_outside_the_list_is_refused_by_name(family: str, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"{WHERE}: {field} ") as caught:
        read_config(config_of(family, **{field: value}), WHERE)
    assert caught.value.field == field


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("field", "rope"), REFUSED_ROPES, ids=lambda value: str(value)[:40])
def test_a_rope_outside_the_list_is_refused_by_name(spelling: str, field: str, rope: dict[str, Any]) -> None:
    data = config_of("llama")
    data.pop("rope_parameters")
    with pytest.raises(UnsupportedModel) as caught:
        read_config(data | {spelling: rope}, WHERE)
    assert caught.value.field == f"{spelling}.{field}"


def test_qwen_window() -> None:
    read_config(config_of("qwen2", sliding_window=64, use_sliding_window=False), WHERE)
    for family in ("qwen2", "qwen3"):
        with pytest.raises(UnsupportedModel) as caught:
            read_config(config_of(family, sliding_window=64, use_sliding_window=True), WHERE)
        assert "sliding_window" in caught.value.field


def test_mistral_without_the_field_has_a_window() -> None:
    data = config_of("mistral")
    del data["sliding_window"]
    with pytest.raises(UnsupportedModel) as caught:
        read_config(data, WHERE)
    assert caught.value.field == "sliding_window"


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_a_bias_that_the_family_has_not_is_refused(family: str, field: str) -> None:
    read_config(config_of(family, **{field: False}), WHERE)
    with pytest.raises(UnsupportedModel) as caught:
        read_config(config_of(family, **{field: True}), WHERE)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "gpt2", None])
def test_unknown_architecture(name: str | None) -> None:
    with pytest.raises(UnsupportedModel, match="supported: llama, mistral, qwen2, qwen3") as caught:
        read_config(config_of("llama", model_type=name), WHERE)
    assert caught.value.field == "model_type"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", None),
        ("hidden_size", "48"),
        ("num_hidden_layers", 0),
        ("num_attention_heads", -1),
        ("num_key_value_heads", 4),
        ("head_dim", 7),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("max_position_embeddings", True),
    ],
)
def test_broken_values_are_named(field: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=f"{WHERE}: {field} "):
        read_config(config_of("llama", **{field: value}), WHERE)


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_an_incomplete_rope_is_named(missing: str) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    del rope[missing]
    with pytest.raises(ModelFileError, match=missing):
        read_config(config_of("llama", rope_parameters=rope), WHERE)


def test_contradicting_ropes() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ModelFileError, match="contradicts"):
        read_config(config_of("llama", rope_parameters=linear, rope_scaling=linear | {"factor": 3.0}), WHERE)


@pytest.mark.parametrize(("value", "expected"), [(None, ()), (5, (5,)), ([9, 5, 9], (5, 9))])
def test_end_of_text_ids(value: Any, expected: tuple[int, ...]) -> None:
    assert read_config(config_of("llama", eos_token_id=value), WHERE).eos_token_ids == expected
