"""How many rollbacks to expect beside vLLM, as far as it was measured. What is not in the table is not
guessed: `llm42 affinity` measures it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llm42.config import Settings
from llm42.models.config import ModelConfig

MEASURE = "`llm42 affinity` measures it"


@dataclass(frozen=True, slots=True)
class Setup:
    """What decides whether vLLM's attention has the verifier's bits."""

    version: str
    """vLLM's, major and minor."""
    device: str
    """As vLLM names it."""
    head_size: int
    group: int
    """Query heads of a KV head."""

    def __str__(self) -> str:
        return f"vLLM {self.version}, {self.device}, head size {self.head_size}, {self.group} heads a KV head"


MEASURED = {
    Setup("0.26", "NVIDIA H200", 128, 4): (
        "0 of 1,000 tokens at 64 and 256 requests at a time that come and go, 22 at 8 (random weights)"
    ),
    Setup("0.26", "NVIDIA H200", 64, 3): (
        "0.2 to 9.6 of 1,000 tokens at 64 requests at a time and more, some 5 at 8 and at 1"
    ),
}
"""With `verifier.affinity: vllm`, at temperature 0, every request deterministic (docs/vllm.md, and
docs/measurements/affinity.md)."""
PLAIN_ARGUMENTS = {"kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens", "attention_config"}
"""Of `engine.vllm.extra_args`: what leaves the measured bits as they were, if attention_config only keeps
contexts whole."""
WHOLE = {"flash_attn_max_num_splits_for_cuda_graph": 1}


def rollbacks_expected(settings: Settings, model: ModelConfig | None, version: str, device: str) -> str:
    """A sentence for the log and /health. model: None for a family that only vLLM knows."""
    if settings.verifier.affinity != "vllm":
        return (
            "Expect rollbacks: verifier.affinity is not vllm, so nothing makes the two sides add in one order"
            f" (SmolLM2 on an H200: 14 of 1,000 tokens); {MEASURE}."
        )
    setup = model and Setup(_minor(version), device, model.head_dim, model.num_heads // model.num_kv_heads)
    found = MEASURED.get(setup) if setup else None
    if model is None or found is None or not _as_measured(settings, model):
        return f"Rollbacks to expect: not measured for this set-up ({setup or device}); {MEASURE}."
    few = "; contexts are kept whole here, so a few at a time have fewer" if _whole(settings) else ""
    return f"Rollbacks to expect: {found}{few} (measured: {setup}); {MEASURE} for your model."


def _minor(version: str) -> str:
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version


def _whole(settings: Settings) -> bool:
    return settings.engine.vllm.extra_args.get("attention_config") == WHOLE


def _as_measured(settings: Settings, model: ModelConfig) -> bool:
    """The same kernels and roundings as in the measurement, but for the model's width and depth."""
    v = settings.engine.vllm
    plain = not (model.qk_norm or model.qkv_bias or model.o_bias or model.mlp_bias)
    arguments = set(v.extra_args) <= PLAIN_ARGUMENTS and (
        "attention_config" not in v.extra_args or _whole(settings)
    )
    dtypes = {settings.model.dtype, v.dtype or settings.model.dtype} == {"bfloat16"}
    one = v.tensor_parallel_size == 1 and not v.enforce_eager and not v.custom_ops
    return plain and arguments and dtypes and one and settings.verifier.rounds_logits
