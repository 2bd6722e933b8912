"""The environment variables as far as bits may depend on them."""

from __future__ import annotations

import os

ENVIRONMENT = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NVIDIA_TF32_OVERRIDE",
)
"""Variables that can change which kernel a library picks."""


def steering_variables() -> dict[str, str]:
    """Those that are set."""
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
