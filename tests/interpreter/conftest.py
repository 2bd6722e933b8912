"""Runs only in a process started with TRITON_INTERPRET=1 (tests/tiers.py starts it)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("set TRITON_INTERPRET=1 before Triton is imported")

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 turns one-element arrays into int() directly, which numpy 2.4 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index


def _widen(handle: Any) -> Any:
    if str(handle.dtype) == "bf16":  # held as raw uint16, which Triton 3.6 would multiply as integers
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def _ordered_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """K in ascending order for every output element, as the matrix unit does: numpy's own product goes
    through a BLAS whose order depends on the number of rows."""
    wide_a, wide_b, total = _widen(a), _widen(b), d.data.copy()
    for k in range(wide_a.shape[1]):
        total += wide_a[:, k : k + 1] * wide_b[k : k + 1]
    return interpreter.TensorHandle(total, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _ordered_dot


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
