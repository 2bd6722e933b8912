"""SmolLM2-135M-Instruct itself: logits of 2,000 positions against transformers (float32); bfloat16 bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from llm42.checkpoint.load import load_model
from llm42.models.decoder import forward, logits
from llm42.models.gguf.reader import open_gguf
from llm42.models.weights import LoadedModel
from tests.support import smollm2_file
from tests.unit.model_oracle import OPERATORS, causal_attend, report, tokens_of

POSITIONS = 2001
TYPICAL, LARGEST, SAME_TABLE = 1e-4, 2e-2, 1e-3
"""Difference of logits in float32 (their deviation is 3.1): median over positions of the largest, and the
largest of all. transformers computes rotary angles in float32 and is off by up to 1e-4 radians at position
2,000, which one ill-conditioned position among these tokens turns into 5e-3; with its rotary table the
largest is below SAME_TABLE."""


MEAN_BOUND, KL_BOUND, AGREE_BOUND = 0.2, 0.02, 0.9
"""bfloat16 against float32: mean difference of a logit, Kullback-Leibler divergence (nats), equal argmax."""


@pytest.fixture(scope="module")
def path() -> Path:
    return smollm2_file()


@pytest.fixture(scope="module")
def exact(path: Path) -> LoadedModel:
    return load_model(path, "float32", "cpu", 2048)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return tokens_of(POSITIONS, 49152)


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    """transformers' own reading of the file, with its own dequantiser."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def their_states(reference: Any, tokens: Tensor) -> Tensor:
    """Its hidden states [T, H]."""
    with torch.inference_mode():
        states: Tensor = reference.model(tokens[None]).last_hidden_state[0]
    return states


@torch.inference_mode()
def our_hidden(model: LoadedModel, tokens: Tensor) -> Tensor:
    return forward(model, OPERATORS, tokens, torch.arange(len(tokens)), causal_attend)


@torch.inference_mode()
@pytest.mark.slow
@pytest.mark.parametrize("table", ["ours", "theirs"])
def test_logits_of_two_thousand_positions(
    table: str,
    exact: LoadedModel,
    reference: Any,
    their_states: Tensor,
    tokens: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if table == "theirs":
        cos, sin = reference.model.rotary_emb(their_states, torch.arange(POSITIONS)[None])
        halves = cos[0, :, :32], sin[0, :, :32]  # theirs is [1, T, D], each half repeated
        monkeypatch.setattr(exact.weights, "cos_sin", torch.cat(halves, dim=-1))
    our_states = our_hidden(exact, tokens)
    worst, equal = torch.zeros(POSITIONS), torch.zeros(POSITIONS, dtype=torch.bool)
    for rows in torch.arange(POSITIONS).split(256):  # 49,152 logits a row
        theirs, ours = reference.lm_head(their_states[rows]), logits(exact, OPERATORS, our_states[rows])
        worst[rows] = (theirs - ours).abs().max(dim=-1).values
        equal[rows] = theirs.argmax(-1) == ours.argmax(-1)
        assert theirs.std() > 2
    shown = {position: f"{worst[position]:.1e}" for position in (1, 10, 100, 500, 1000, 2000)}
    report(f"float32, {table} table: {worst.median():.1e}, {worst.max():.1e}; {shown}; argmax {equal.sum()}")
    assert worst.median() < TYPICAL
    assert worst.max() < (LARGEST if table == "ours" else SAME_TABLE)
    assert equal.all()


@pytest.mark.slow
def test_weights_equal_those_that_transformers_reads(exact: LoadedModel, reference: Any) -> None:
    theirs = reference.state_dict()
    for index, layer in enumerate(exact.weights.layers):
        prefix = f"model.layers.{index}."
        qkv = [theirs[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
        gate_up = [theirs[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(layer.qkv, torch.cat(qkv))
        assert torch.equal(layer.gate_up, torch.cat(gate_up))
        assert torch.equal(layer.down, theirs[prefix + "mlp.down_proj.weight"])
        assert torch.equal(layer.o, theirs[prefix + "self_attn.o_proj.weight"])
    assert torch.equal(exact.weights.embed, theirs["model.embed_tokens.weight"])
    assert exact.weights.lm_head is exact.weights.embed


@pytest.mark.slow
def test_bfloat16_stays_close(exact: LoadedModel, path: Path) -> None:
    """The served default. Bounds twice what was measured on an AVX2 CPU."""
    rounded = load_model(path, "bfloat16", "cpu", 512)
    tokens = tokens_of(512, 49152)
    with torch.inference_mode():
        states = our_hidden(rounded, tokens)
        assert states.dtype == torch.bfloat16
        ours = logits(rounded, OPERATORS, states)
        theirs = logits(exact, OPERATORS, our_hidden(exact, tokens))
    off = (ours - theirs).abs()
    log_ours, log_theirs = ours.log_softmax(-1), theirs.log_softmax(-1)
    divergence = float((log_theirs.exp() * (log_theirs - log_ours)).sum(-1).mean())
    agree = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    report(f"bfloat16: {off.mean():.3f}, {off.max():.2f}, KL {divergence:.5f}, argmax {agree:.3f}")
    assert off.mean() < MEAN_BOUND
    assert divergence < KL_BOUND
    assert agree > AGREE_BOUND
    assert off.mean() > 0.001  # bfloat16 was really used


def test_the_fast_array_reader_reads_what_the_library_reads(path: Path) -> None:
    """open_gguf takes arrays apart itself, for speed; the library's own reader must agree on every key."""
    theirs, ours = gguf.GGUFReader(path), open_gguf(path)
    assert list(theirs.fields) == list(ours.fields)
    for key, field in theirs.fields.items():
        assert field.contents() == ours.fields[key].contents(), key
        assert field.types == ours.fields[key].types
    for left, right in zip(theirs.tensors, ours.tensors, strict=True):
        assert left.name == right.name
        assert np.array_equal(left.data[:2], right.data[:2])
