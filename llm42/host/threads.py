"""How many threads the operators that a thread calls compute with: as set, and as observed."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from llm42.host.linked import find

log = logging.getLogger(__name__)


class ThreadsChanged(RuntimeError):
    """A thread's parallel regions are not of the size that was certified."""


def set_threads(count: int) -> None:
    """Sets how many threads the calling thread's operators use, for good.

    torch gives a thread the process's latest setting at the thread's first parallel operator, whatever the
    thread has set before; asking for the number makes that happen now. OMP_DYNAMIC, by which the machine's
    load would change the number, is switched off.
    """
    torch.get_num_threads()
    adjust = find(["omp_set_dynamic"], _torch_library())
    if adjust is not None:
        adjust(0)
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


def parallel_region_size() -> int:
    """How many threads a parallel region of the calling thread has: counted in one, since OMP_THREAD_LIMIT
    and its kin may leave fewer than were set. Where no region can be started from here: as set."""
    start, size = (find([name], _torch_library()) for name in ("GOMP_parallel", "omp_get_num_threads"))
    if start is None or size is None:
        return torch.get_num_threads()
    sizes: list[int] = []
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: sizes.append(size()))
    start.restype = None
    start(body, None, ctypes.c_uint(0), ctypes.c_uint(0))
    return len(sizes)


@lru_cache
def usable_threads(count: int) -> int:
    """How many of `count` threads run; says so when they are fewer."""
    with torch_threads(count):
        found = parallel_region_size()
    if found < count:
        log.warning(
            "verifier.threads is %d, but parallel regions have %d threads here (is OMP_THREAD_LIMIT set?):"
            " %d are used, and the fingerprint says %d", count, found, found, found
        )  # fmt: skip
    return min(found, count)


def hold_threads(count: int) -> None:
    """Sets the number for the calling thread. Raises ThreadsChanged unless a region has so many."""
    set_threads(count)
    found = parallel_region_size()
    if found != count:
        raise ThreadsChanged(f"a parallel region has {found} threads instead of {count}")


def _torch_library() -> str:
    return str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
