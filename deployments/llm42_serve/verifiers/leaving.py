"""What is done about nodes that Ray drains: the supervisor's look at them, and the end of a verifier there.
While an actor is on it, such a node waits for its whole time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray

from llm42_serve.verifiers.names import draining_nodes

log = logging.getLogger(__name__)
NEWS_S = 2.0
"""By then replicas have heard that it is no longer there, and send nothing more."""
LEAVE_S = 10.0
"""It may go on for so long with what it has; the rest goes on elsewhere, with the same tokens."""
LOOK_S = 0.5
STATUS_TIMEOUT_S = 5.0
RETRY_S = 10.0


class DrainWatch:
    """The nodes that are being drained. Belongs to the supervisor's event loop."""

    def __init__(self, check_s: float) -> None:
        """check_s: seconds between two looks; 0: none."""
        self.nodes: Mapping[str, float] = {}
        """Seconds left at the last look, by node."""
        self._check_s = check_s

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while self._check_s > 0:
            pause_s = self._check_s
            try:
                self.nodes = await asyncio.to_thread(draining_nodes)
            except (ImportError, AttributeError):
                log.exception("this Ray does not say which nodes it drains: verifiers end with their node")
                return
            except Exception as error:  # its control store may be away
                log.warning("it is not known which nodes are drained: %r", error)
                pause_s = max(pause_s, RETRY_S)
            await asyncio.sleep(pause_s)


async def end_softly(handle: Any) -> None:
    """Ends a verifier that replicas are no longer told of: when it has answered what it has, or soon."""
    until = time.monotonic() + LEAVE_S
    await asyncio.sleep(NEWS_S)
    while time.monotonic() < until and await _busy(handle):
        await asyncio.sleep(LOOK_S)
    await asyncio.to_thread(ray.kill, handle, no_restart=True)


async def _busy(handle: Any) -> bool:
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            status = await handle.status.remote()
    except Exception:  # whatever it is, it is no reason to stay
        return False
    return bool(status.direct or status.active or status.waiting)
