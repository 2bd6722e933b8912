"""Launch options shared by all Triton kernels."""

from __future__ import annotations

import os
from typing import Any

import torch

_EARLY = True


def early_launch(on: bool) -> None:
    """Switches programmatic dependent launch (benchmarks compare both; results are the same)."""
    global _EARLY
    _EARLY = on


def options() -> dict[str, Any]:
    """Arguments of every kernel that starts with `started(PDL)`.

    enable_fp_fusion=False: no silent a * b + c contraction. The compiler may fuse it in one variant of a kernel and not
    in another, and all variants of an operator must give the same bits. Where a fused multiply-add is wanted it is
    written as tl.fma.
    launch_pdl: the kernel may be set up while the one before it still runs; it waits before it touches memory.
    """
    early = _EARLY and not interpreted() and torch.cuda.get_device_capability() >= (9, 0)
    return {"enable_fp_fusion": False, "launch_pdl": early, "PDL": early}


def interpreted() -> bool:
    """True where Triton runs its interpreter (CPU tensors, tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def multiprocessors(device: torch.device) -> int:
    """Number of SMs of a CUDA device; a small number under the interpreter."""
    return 3 if interpreted() else torch.cuda.get_device_properties(device).multi_processor_count
