"""One verifier of the pool, as a replica sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llm42_serve.replica.window_batches import WindowBatches
from llm42_serve.verifiers.actor import VerifierStatus


@dataclass(slots=True)
class Member:
    """One verifier of the pool."""

    name: str
    actor_id: str = ""
    handle: Any = None
    status: VerifierStatus | None = None
    in_flight: int = 0
    avoid_until: float = 0.0
    """A verify call failed a moment ago: others are chosen first."""
    failed_at: float = -math.inf
    """When a call found its actor dead or out of reach; a status from before is out of date."""
    _batches: tuple[Any, WindowBatches] | None = None
    """With the handle that they are for: calls to a dead actor must not hold up its successor's."""

    @property
    def ready(self) -> bool:
        """Whether it can be asked: certified, with the pool's fingerprint, and its handle is known."""
        return self.status is not None and self.status.state == "ready" and self.handle is not None

    @property
    def batches(self) -> WindowBatches:
        """Joins windows into calls of the present actor."""
        handle = self.handle
        if self._batches is None or self._batches[0] is not handle:
            self._batches = handle, WindowBatches(lambda windows: handle.verify.remote(windows, False))
        return self._batches[1]
