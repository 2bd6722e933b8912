"""Sets of CPU operators by provider name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm42_kernels import linear_cpu, rmsnorm, rotary, silu_mul
from llm42_kernels.operators import Operators, choose

PROVIDERS: dict[str, dict[str, Any]] = {
    "linear": linear_cpu.CPU_PROVIDERS,
    "rms_norm": rmsnorm.CPU_PROVIDERS,
    "rotary": rotary.CPU_PROVIDERS,
    "silu_mul": silu_mul.CPU_PROVIDERS,
    "lm_head": linear_cpu.CPU_LM_HEAD_PROVIDERS,
}
"""Operator -> provider name -> function, fastest first."""


def cpu_operators(chosen: Mapping[str, str] | None = None) -> Operators:
    """The named provider of each operator; an operator that is not named gets its fastest one."""
    return choose(PROVIDERS, chosen)
