"""How many verifiers are wanted: more while windows wait too long, fewer after a quiet time. No clocks."""

from __future__ import annotations

from dataclasses import dataclass

LOOKS_UP = 3
"""A long queue must be seen this many times in a row: one burst is no reason to load a model."""
SETTLE_S = 20.0
"""After a change the next one waits until the new verifier can have made a difference."""


@dataclass(slots=True)
class Scaler:
    """Between `least` and `most` verifiers. Times are seconds on the caller's clock."""

    least: int
    most: int
    target_queue_s: float
    scale_down_s: float
    wanted: int = 0
    _high: int = 0
    _quiet_since: float | None = None
    _changed: float = float("-inf")

    def __post_init__(self) -> None:
        self.most = max(self.least, self.most)
        self.wanted = self.least

    def look(self, now: float, queue_s: float, busy: bool, ready: int) -> int:
        """One look. queue_s: mean time that windows waited since the last look; busy: whether any window was
        answered or waits; ready: verifiers that can answer. Returns how many are wanted."""
        self._high = self._high + 1 if queue_s > self.target_queue_s else 0
        if busy and queue_s > self.target_queue_s / 4:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        if now - self._changed < SETTLE_S or ready < self.wanted:
            return self.wanted
        if self._high >= LOOKS_UP and self.wanted < self.most:
            self._change(now, 1)
        elif (
            self._quiet_since is not None
            and now - self._quiet_since >= self.scale_down_s
            and self.wanted > self.least
        ):
            self._change(now, -1)
        return self.wanted

    def _change(self, now: float, by: int) -> None:
        self.wanted += by
        self._changed, self._high, self._quiet_since = now, 0, None
