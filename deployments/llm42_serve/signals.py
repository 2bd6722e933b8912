"""Signals that come in the middle of a start."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals_later() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the block's end: half a Ray cluster cannot be shut down.

    Nobody else sets handlers meanwhile: `ray.init` would make SIGTERM an exit there and then. Its C++ part
    sets one beneath Python's that prints a stack and goes on; that one is gone after the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda number, _: came.append(number)) for kind in kinds}
    register = signal.signal

    def register_others(kind: int, handler: Any) -> Any:
        return signal.getsignal(kind) if kind in kinds else register(kind, handler)

    signal.signal = register_others  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = register
        for kind, handler in before.items():
            signal.signal(kind, handler)
        if came:
            signal.raise_signal(came[0])
