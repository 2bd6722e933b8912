"""How tests wait: until something has happened, not for as long as it should take. A machine that is busy may
give a process no CPU for seconds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""How long a test waits for what must come: so late that the machine is not to blame."""


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
    """Polls; whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


async def until(condition: Callable[[], bool], otherwise: str = "it did not happen in time") -> None:
    """Polls beside other tasks; fails with `otherwise` when it does not come true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, otherwise
        await asyncio.sleep(0.002)


class Clock:
    """Stands for `time` in a module under test: it stands still until a test moves it on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Awake:
    """Stands for `time.monotonic` in the whole process: seconds in which the machine gives it no CPU do not
    pass. For tests of limits in seconds, which speak of what else the program has done meanwhile."""

    TICK_S, MOST_S = 0.02, 0.1
    """How often a thread looks at the clock, and what a look adds at most."""

    def __init__(self) -> None:
        self._real, self._ended = time.monotonic, threading.Event()
        self._mark = self._real(), self._real()
        """When the thread has looked last, and what the time was then."""
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def monotonic(self) -> float:
        """The time."""
        seen, then = self._mark
        return then + min(self._real() - seen, self.MOST_S)

    def close(self) -> None:
        """Ends the thread; time stands still from then on."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(self.TICK_S):
            real, (seen, then) = self._real(), self._mark
            self._mark = real, then + min(real - seen, self.MOST_S)
