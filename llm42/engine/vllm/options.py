"""From settings to the arguments of vLLM's AsyncEngineArgs, and what may not be among them."""

from __future__ import annotations

import copy
import importlib.util
import logging
from pathlib import Path
from typing import Any

from llm42.checkpoint.description import read_config
from llm42.config import Settings
from llm42.engine.vllm.export import export_model
from llm42.errors import LLM42Error
from llm42.models.config import ModelConfig
from llm42_kernels.rmsnorm import TIMED_BEYOND

log = logging.getLogger(__name__)

FIXED_COMPILATION = {
    "inductor_compile_config": {
        "deterministic": True, "combo_kernels": False, "benchmark_combo_kernel": False,
    }
}  # fmt: skip
"""vLLM's compilation_config under which the compiler times no kernels whose order of summation would follow
from it (combining kernels is decided by time as well, and refused in that mode). It is the compiler's choice
of kernels only: no slower step was seen with it (docs/measurements/auto.md)."""
MAX_LOGPROBS = 20
_DRAW = "llm42.engine.vllm.draw:CanonicalDraw"
_AMX = "llm42.engine.vllm.amx.AllowsAMX"

_OURS = "the engine depends on it"
_SPECULATION = (
    "vLLM drops min_p, logit_bias and logits processors with speculative decoding, which best-effort requests"
    " and engine.vllm.sampled_agreement need"
)
_GENERATES = "the engine generates text"
REFUSED = {
    "model": "model.path says it",
    "max_model_len": "model.max_model_len says it",
    "tensor_parallel_size": "engine.vllm.tensor_parallel_size says it",
    "pipeline_parallel_size": "a replica runs on one node (engine.vllm.tensor_parallel_size)",
    "scheduling_policy": _OURS,
    "skip_tokenizer_init": _OURS,
    "enable_prefix_caching": _OURS,
    "max_logprobs": f"the service offers {MAX_LOGPROBS} alternatives",
    "logprobs_mode": "log-probabilities are those of the raw logits, on every path",
    "runner": _GENERATES,
    "convert": _GENERATES,
    "pooler_config": _GENERATES,
    "diffusion_config": _GENERATES,
    "speculative_config": _SPECULATION,
    "spec_": _SPECULATION,
    "data_parallel_": "set server.fastpath_replicas: each replica is an engine of its own",
}
"""Arguments of vLLM that `engine.vllm.extra_args` must not set, and why; a name that ends in _ stands for all
that begin with it."""


class EngineUnavailable(LLM42Error):
    """The configured engine cannot be started here; the message says what to do."""

    code = "engine_unavailable"


def require_vllm() -> None:
    """Raises EngineUnavailable where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineUnavailable(
            "engine.kind is vllm, but vLLM is not installed in this environment: pip install"
            " 'vllm>=0.26,<0.33', or set engine.kind to torch"
        )


def model_directory(settings: Settings) -> str:
    """The Hugging Face directory that vLLM loads: the model's own, or an export of a GGUF file."""
    place = Path(settings.model.path)
    if place.is_dir():
        return str(place)
    return str(export_model(place, settings.model.dtype, settings.engine.vllm.export_dir))


def engine_arguments(settings: Settings, model: str) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs. Raises EngineUnavailable for `extra_args` that must stay as they are."""
    v = settings.engine.vllm
    _check(v.extra_args)
    arguments: dict[str, Any] = {
        "model": model,
        # token ids go in and come out; only a grammar has to know what they stand for
        "skip_tokenizer_init": not v.structured_outputs,
        "dtype": v.dtype or settings.model.dtype,
        "max_model_len": settings.model.max_model_len,
        "gpu_memory_utilization": v.gpu_memory_utilization,
        "max_num_seqs": v.max_num_seqs,
        "tensor_parallel_size": v.tensor_parallel_size,
        "enforce_eager": v.enforce_eager,
        "scheduling_policy": "priority",  # else a resubmission queues behind everyone
        "enable_prefix_caching": True,  # what makes a resubmission cheap
        "max_logprobs": MAX_LOGPROBS,
        "disable_log_stats": True,  # of vLLM's own log; the figures still come through our stat logger
    }
    if v.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = v.max_num_batched_tokens
    if settings.model.device == "cpu":
        arguments["worker_extension_cls"] = _AMX
    near: dict[str, Any] = _affinity_arguments(model) if settings.verifier.affinity == "vllm" else {}
    custom = {"compilation_config": {"custom_ops": list(v.custom_ops)}} if v.custom_ops else {}
    merged = _merged(_merged(_merged(arguments, custom), near), v.extra_args)
    if _merged(merged, near) != merged:
        log.warning(
            "engine.vllm.extra_args changes what verifier.affinity needs (%s): expect rollbacks", near
        )
    if v.sampled_agreement:  # last: what it leaves is what is proposed
        merged["logits_processors"] = [*(merged.get("logits_processors") or ()), _DRAW]
    return merged


def _affinity_arguments(model: str) -> dict[str, Any]:
    """Under which vLLM's sums have the order that the verifier mirrors, as far as best effort pays nothing
    for it: vLLM may split the contexts of a small batch, and what differs there is rolled back."""
    config = config_of(model)
    wide = config is not None and config.hidden_size > TIMED_BEYOND
    return copy.deepcopy({"compilation_config": FIXED_COMPILATION}) if wide else {}


def config_of(model: str) -> ModelConfig | None:
    """The model as the verifier reads it; None for a family that only vLLM knows."""
    try:
        return read_config(Path(model))
    except LLM42Error:
        return None


def _check(extra: dict[str, Any]) -> None:
    for name in extra:
        for refused, reason in REFUSED.items():
            if name == refused or (refused.endswith("_") and name.startswith(refused)):
                raise EngineUnavailable(f"engine.vllm.extra_args must not set {name}: {reason}")


def _merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """`theirs` over `ours`, entry by entry."""
    out = dict(ours)
    for key, value in theirs.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else value
    return out
