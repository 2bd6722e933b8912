"""What is said of rollbacks to expect: a figure for what was measured, and for nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.lib.random_model import LLAMA_8B
from llm42.config import Settings
from llm42.engine.vllm.expected import WHOLE, rollbacks_expected

H200 = "NVIDIA H200"


def said(
    version: str = "0.26.0", device: str = H200, shape: dict[str, Any] | None = None, **changed: Any
) -> str:
    """For the 8B shape with affinity; `changed` are sections of the settings, or settings of engine.vllm."""
    vllm = {k: v for k, v in changed.items() if k not in ("verifier", "model")}
    tree = {
        "model": {"device": "cuda", "dtype": "bfloat16"} | changed.get("model", {}),
        "engine": {"kind": "vllm", "vllm": vllm},
        "verifier": {"affinity": "vllm"} | changed.get("verifier", {}),
    }
    return rollbacks_expected(Settings.load(tree), replace(LLAMA_8B, **shape or {}), version, device)


def test_what_was_measured_is_said_with_its_conditions() -> None:
    text = said()
    assert "0 of 1,000 tokens at 64 and 256" in text and "22 at 8" in text
    assert "(measured: vLLM 0.26, NVIDIA H200, head size 128, 4 heads a KV head)" in text
    smollm2 = said(shape={"head_dim": 64, "num_heads": 9, "num_kv_heads": 3, "hidden_size": 576})
    assert "0.2 to 9.6 of 1,000" in smollm2
    assert said("0.26.1", max_num_seqs=64) == text


def test_contexts_kept_whole() -> None:
    text = said(extra_args={"attention_config": WHOLE, "kv_cache_memory_bytes": 1 << 30})
    assert "(measured:" in text and "kept whole here" in text


@pytest.mark.parametrize(
    "other",
    [
        {"version": "0.27.0"}, {"version": "dev"}, {"device": "NVIDIA H100"}, {"device": "cpu"},
        {"shape": {"head_dim": 64}}, {"shape": {"num_kv_heads": 4}}, {"shape": {"qk_norm": True}},
        {"shape": {"qkv_bias": True}}, {"tensor_parallel_size": 2}, {"enforce_eager": True},
        {"custom_ops": ["+rms_norm"]}, {"dtype": "float16"}, {"extra_args": {"quantization": "fp8"}},
        {"extra_args": {"attention_config": {"backend": "TRITON_ATTN"}}},
        {"verifier": {"logits_dtype": "float32"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_was_not_measured_has_no_figure(other: dict[str, Any]) -> None:
    text = said(**other)
    assert "not measured for this set-up" in text and "llm42 affinity" in text
    assert "of 1,000" not in text and "measured:" not in text


def test_a_family_that_only_vllm_knows_has_none() -> None:
    settings = Settings.load({"model": {"device": "cuda"}, "verifier": {"affinity": "vllm"}})
    assert "not measured for this set-up (NVIDIA H200)" in rollbacks_expected(settings, None, "0.26.0", H200)


def test_without_affinity_rollbacks_are_announced() -> None:
    text = said(verifier={"affinity": "none"})
    assert text.startswith("Expect rollbacks") and "(measured:" not in text
