"""Sets of CPU operators by provider name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm42_kernels import linear, rmsnorm, rotary, silu_mul
from llm42_kernels.operators import Operators

PROVIDERS: dict[str, dict[str, Any]] = {
    "linear": linear.CPU_PROVIDERS,
    "rms_norm": rmsnorm.CPU_PROVIDERS,
    "rotary": rotary.CPU_PROVIDERS,
    "silu_mul": silu_mul.CPU_PROVIDERS,
    "lm_head": linear.CPU_LM_HEAD_PROVIDERS,
}
"""Operator -> provider name -> function, fastest first."""


def cpu_operators(chosen: Mapping[str, str] | None = None) -> Operators:
    """The named provider of each operator; an operator that is not named gets its fastest one."""
    names = {op: (chosen or {}).get(op, next(iter(table))) for op, table in PROVIDERS.items()}
    return Operators(
        linear=linear.CPU_PROVIDERS[names["linear"]],
        rms_norm=rmsnorm.CPU_PROVIDERS[names["rms_norm"]],
        rotary=rotary.CPU_PROVIDERS[names["rotary"]],
        silu_mul=silu_mul.CPU_PROVIDERS[names["silu_mul"]],
        lm_head=linear.CPU_LM_HEAD_PROVIDERS[names["lm_head"]],
        providers=tuple(sorted(names.items())),
    )
