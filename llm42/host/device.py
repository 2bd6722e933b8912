"""The device that a model is on: its kind, and whether it still answers."""

from __future__ import annotations

import torch


def device_kind(device: str) -> str:
    """`cpu` or `cuda`, of a torch device's name."""
    return "cuda" if device.startswith("cuda") else "cpu"


def device_lost(device: str) -> bool:
    """Whether the device answers no more: after a fault in a kernel every later call of the process fails."""
    if device_kind(device) == "cpu":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:  # torch.AcceleratorError is one
        return True
    return False
