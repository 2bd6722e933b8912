"""What the readers of a load waited for, by class: best effort and deterministic. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

CLASSES = {False: "best_effort", True: "deterministic"}


@dataclass(slots=True)
class _Running:
    deterministic: bool
    began: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class Latencies:
    """Within a window, in seconds from the beginning: what comes before is the ramp. All in milliseconds.

    ttft: from a request to its first tokens. itl: time per token of a request behind its first ones, of
    requests that end. gap: between two deliveries of a stream; a delivery may have several tokens.
    """

    since_s: float
    until_s: float
    clock: Callable[[], float] = time.perf_counter
    began: float = field(init=False)
    ttft: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    itl: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    gap: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    _running: dict[Hashable, _Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def started(self, key: Hashable, deterministic: bool, late_s: float = 0.0) -> None:
        """A request was sent. late_s: how long ago it should have been."""
        self._running[key] = _Running(deterministic, self.clock() - late_s)

    def came(self, key: Hashable, tokens: int) -> None:
        """Tokens are here. One that is not known, or no longer, is nothing."""
        one = self._running.get(key)
        if one is None or not tokens:
            return
        now = self.clock()
        if self._counts(now):
            kept, since = (self.ttft, one.began) if one.first is None else (self.gap, one.last)
            kept[one.deterministic].append(1e3 * (now - since))
        if one.first is None:
            one.first = now
        else:
            one.tokens += tokens
        one.last = now

    def ended(self, key: Hashable) -> None:
        """Its last tokens have come."""
        one = self._running.pop(key, None)
        if one is None or one.first is None or not one.tokens or not self._counts(one.last):
            return
        self.itl[one.deterministic].append(1e3 * (one.last - one.first) / one.tokens)

    def found(self) -> dict[str, Any]:
        """By class and kind of wait; `all` has both classes. JSON-ready."""
        kinds = {"ttft_ms": self.ttft, "itl_ms": self.itl, "gap_ms": self.gap}
        by_class = {
            name: {kind: spread(values[which]) for kind, values in kinds.items()}
            for which, name in CLASSES.items()
        }
        both = {kind: spread(values[False] + values[True]) for kind, values in kinds.items()}
        return {name: of for name, of in (by_class | {"all": both}).items() if of["ttft_ms"] or of["gap_ms"]}

    def _counts(self, now: float) -> bool:
        return self.since_s <= now - self.began < self.until_s


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile, and of how many; nothing of none."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 3) for p in (50, 99)}
    return at | {"count": len(ordered)}
