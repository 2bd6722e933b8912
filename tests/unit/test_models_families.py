"""Every family and rope variant against transformers in float32, with controls that each feature matters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llm42.checkpoint.load import load_model
from llm42.models import families
from llm42.models.rope import RopeSettings
from llm42.models.weights import LoadedModel
from llm42_kernels.rotary import cos_sin_table
from tests.unit.model_oracle import our_logits, report, save_tiny, their_logits, tiny_config, tokens_of

TOLERANCE = 1e-4
"""Largest difference of a logit; the logits' standard deviation is about 1."""
POSITIONS = 200

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_FULL = YARN | {
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "truncate": False,
}
ROPES = {"llama3": LLAMA3, "linear": LINEAR, "yarn": YARN, "yarn-full": YARN_FULL}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 20}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 6}),
    **{f"llama-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "llama-yarn-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 0.8}}),
    "mistral": ("mistral", {}),
    "mistral-head-dim": ("mistral", {"head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn-tied": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-bias-yarn": ("qwen3", {"attention_bias": True, "rope_parameters": YARN}),
}


def difference(model: LoadedModel, expected: Tensor) -> float:
    return float((our_logits(model, tokens_of(POSITIONS)) - expected).abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    expected = their_logits(save_tiny(tmp_path, family, **changes), tokens_of(POSITIONS))
    model = load_model(tmp_path, "float32", "cpu", POSITIONS)
    found = difference(model, expected)
    report(f"{variant}: largest difference {found:.1e}, logits' deviation {float(expected.std()):.2f}")
    assert expected.std() > 0.5  # else a small difference says nothing
    assert found < TOLERANCE
    assert (model.weights.lm_head is model.weights.embed) == bool(changes.get("tie_word_embeddings"))


@pytest.mark.parametrize("rope", ROPES)
def test_control_the_oracle_notices_a_wrong_rope(rope: str, tmp_path: Path) -> None:
    expected = their_logits(save_tiny(tmp_path, "llama", rope_parameters=ROPES[rope]), tokens_of(POSITIONS))
    model = load_model(tmp_path, "float32", "cpu", POSITIONS)
    plain = RopeSettings(model.config.rope.theta)
    model.weights.cos_sin = cos_sin_table(plain.inv_freq(model.config.head_dim), POSITIONS)
    assert difference(model, expected) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("llama", "qkv_bias"),
        ("llama", "o_bias"),
        ("llama", "gate_up_bias"),
        ("llama", "down_bias"),
        ("qwen2", "qkv_bias"),
        ("qwen3", "q_norm"),
        ("qwen3", "k_norm"),
    ],
)
def test_control_the_oracle_notices_a_dropped_part(family: str, part: str, tmp_path: Path) -> None:
    changes = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    expected = their_logits(save_tiny(tmp_path, family, **changes), tokens_of(POSITIONS))
    model = load_model(tmp_path, "float32", "cpu", POSITIONS)
    weight = getattr(model.weights.layers[1], part)
    weight.fill_(1.0 if part.endswith("norm") else 0.0)
    assert difference(model, expected) > 50 * TOLERANCE


def test_the_old_spelling_of_rope_scaling_means_the_same() -> None:
    base = tiny_config("llama").to_dict()
    base.pop("rope_parameters")
    old = base | {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    older = old | {"rope_scaling": {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()}}
    configs = [families.read_config(data, "x") for data in (old, older, base | {"rope_parameters": LLAMA3})]
    assert configs[0].rope.kind == "llama3"
    assert configs[0] == configs[1] == configs[2]


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR, YARN, YARN_FULL], ids=list(ROPES))
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_equal_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    scale = 128  # realistic contexts and bases
    rope = rope | {"rope_theta": 500000.0}
    if "original_max_position_embeddings" in rope:
        rope = rope | {"original_max_position_embeddings": 64 * scale}
    theirs = tiny_config("llama", head_dim=head_dim, rope_parameters=dict(rope))
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
    ours = families.read_config(theirs.to_dict() | {"rope_parameters": rope}, "x")
    torch.testing.assert_close(ours.rope.inv_freq(ours.head_dim).float(), inv_freq, rtol=2e-6, atol=0)
    assert ours.rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_all_weights_are_rounded_to_the_activation_dtype(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", attention_bias=True)
    exact = load_model(tmp_path, "float32", "cpu", 8).weights
    rounded = load_model(tmp_path, "bfloat16", "cpu", 8).weights
    assert rounded.cos_sin.dtype == torch.float32
    pairs = [
        (exact.embed, rounded.embed),
        (exact.lm_head, rounded.lm_head),
        (exact.final_norm, rounded.final_norm),
    ]
    for before, after in zip(exact.layers, rounded.layers, strict=True):
        pairs += zip(dataclasses.astuple(before), dataclasses.astuple(after), strict=True)
    for before, after in pairs:
        if before is not None:
            assert after.dtype == torch.float32
            assert torch.equal(after, before.bfloat16().float())
            assert not torch.equal(after, before)
