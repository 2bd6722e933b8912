"""A thread's number of torch threads, and whether its device still answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_threads(count: int) -> None:
    """Sets how many threads the calling thread's operators use, for good.

    torch gives a thread the process's latest setting at the thread's first parallel operator, whatever the
    thread has set before; asking for the number makes that happen now.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """The same for the length of a block."""
    before = torch.get_num_threads()
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


def device_lost(device: str) -> bool:
    """Whether the device answers no more: after a fault in a kernel every later call of the process fails."""
    if not device.startswith("cuda"):
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:  # torch.AcceleratorError is one
        return True
    return False
