"""Launch options shared by all Triton kernels."""

from __future__ import annotations

import os

import torch

STRICT = {"enable_fp_fusion": False}
"""No silent a * b + c contraction: the compiler may fuse it in one variant of a kernel and not in another,
and all variants of an operator must give the same bits. Where a fused multiply-add is wanted it is written
as tl.fma."""


def interpreted() -> bool:
    """True where Triton runs its interpreter (CPU tensors, tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def multiprocessors(device: torch.device) -> int:
    """Number of SMs of a CUDA device; a small number under the interpreter."""
    return 3 if interpreted() else torch.cuda.get_device_properties(device).multi_processor_count
