"""Sets of CUDA operators by provider name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llm42_kernels import linear_cuda, rmsnorm, rotary, silu_mul
from llm42_kernels.operators import Operators, choose

PROVIDERS: dict[str, dict[str, Callable[..., Any]]] = {
    "linear": linear_cuda.CUDA_PROVIDERS,
    "rms_norm": rmsnorm.CUDA_PROVIDERS,
    "rotary": rotary.CUDA_PROVIDERS,
    "silu_mul": silu_mul.CUDA_PROVIDERS,
    "lm_head": linear_cuda.CUDA_LM_HEAD_PROVIDERS,
}
"""Operator -> provider name -> function."""

_CANDIDATES = {
    "none": {
        "linear": ("cublas", "triton"),
        "rms_norm": ("triton", "torch"),
        "rotary": ("triton", "torch"),
        "silu_mul": ("triton", "torch"),
        "lm_head": ("cublas", "triton"),
        "attention": ("triton",),
    }
}
_CANDIDATES["vllm"] = _CANDIDATES["none"] | {
    "rms_norm": ("carried",),
    "silu_mul": ("library-exp",),
    "attention": ("flash-order",),
}


def candidates(affinity: str = "none") -> dict[str, tuple[str, ...]]:
    """Operator -> names of its providers, fastest first. affinity: "none", or the fast path ("vllm") whose
    bits the canonical ones shall be: then the providers with its arithmetic, and no others."""
    return dict(_CANDIDATES[affinity])


def cuda_operators(chosen: Mapping[str, str] | None = None) -> Operators:
    """The named provider of each operator; an operator that is not named gets its fastest one."""
    return choose(PROVIDERS, chosen)
