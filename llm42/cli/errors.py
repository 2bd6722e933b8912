"""Which errors of a command are the user's to act on, and are told in a line instead of a traceback."""

from __future__ import annotations

import sys
from typing import Any

import pydantic

from llm42.errors import LLM42Error
from llm42.validation import words

DEVICE_WORDS = ("CUDA", "NVIDIA", "cuBLAS", "CUBLAS")
"""PyTorch raises plain RuntimeErrors for a driver or a GPU that fails; they say one of these."""


def actionable(error: BaseException) -> str | None:
    """The line, or None for a fault of the program itself. PyTorch's classes are taken from where they are
    loaded: nothing is imported for them."""
    if isinstance(error, pydantic.ValidationError):
        return "\n".join(map(setting_error, error.errors()))
    if isinstance(error, LLM42Error):
        return str(error)
    if not isinstance(error, RuntimeError):
        return None
    if type(error).__module__.partition(".")[0] in ("llm42", "llm42_kernels"):
        return str(error)  # typed: the environment or the memory of the device
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, _torch("OutOfMemoryError")):
        return f"{first} Lower engine.kv_tokens or verifier.kv_tokens."
    if isinstance(error, _torch("AcceleratorError")) or any(word in first for word in DEVICE_WORDS):
        return f"the GPU failed: {first}"
    return None


def setting_error(found: Any) -> str:
    """One of pydantic's errors as a line: the field, where there is one, and what is wrong with it."""
    text = words(found)
    if found["type"] == "extra_forbidden":
        text = "unknown setting: correct or remove it (serve_config.yaml has all)"
    return ": ".join(filter(None, (".".join(map(str, found["loc"])), text)))


def _torch(name: str) -> Any:
    """One of PyTorch's exceptions; no class at all where it is not loaded or has none of the name."""
    return getattr(sys.modules.get("torch"), name, ())
