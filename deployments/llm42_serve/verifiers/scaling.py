"""How many verifiers are wanted: more while each has too much to do, or they let windows wait too long, fewer
after a time in which one fewer would have been enough. No clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.load import Limits, Work
from llm42_serve.verifiers.watch import Watched

LOOKS_UP = 3
"""Too much work must be seen this many times in a row: one burst is no reason to load a model."""
SETTLE_S = 20.0
"""After a change the next one waits until the new verifier can have made a difference."""


@dataclass(slots=True)
class Scaler:
    """Between `least` and `most` verifiers. Times are seconds on the caller's clock."""

    least: int
    most: int
    limits: Limits
    scale_down_s: float
    wanted: int = 0
    _high: int = 0
    _quiet_since: float | None = None
    _changed: float = float("-inf")

    def __post_init__(self) -> None:
        self.most = max(self.least, self.most)
        self.wanted = self.least

    def adopt(self, count: int) -> None:
        """So many are there already, of a predecessor that wanted them."""
        self.wanted = min(max(self.wanted, count), self.most)

    def look(
        self, now: float, ready: Sequence[Work], left: Sequence[Work], queue_s: float = 0.0, coming: int = 0
    ) -> int:
        """One look. ready: the verifiers that can answer; left: those of them that would be left if one
        were given up; queue_s: mean time that windows waited since the last look; coming: wanted
        verifiers that are starting. Returns how many are wanted."""
        if coming:  # while one is missing, so is what it would be asked for, and others have its work
            self._changed, self._high, self._quiet_since = now, 0, None
            return self.wanted
        high = queue_s > self.limits.queue_s or self.limits.crowded(ready)
        self._high = self._high + 1 if high else 0
        if not self.limits.fit(ready, left, queue_s):
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        if now - self._changed < SETTLE_S:
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


@dataclass(slots=True)
class Look:
    """What one look at the verifiers has found, as `Scaler.look` takes it."""

    ready: list[VerifierStatus]
    left: list[VerifierStatus]
    queue_s: float
    coming: int


def look_at(
    staying: Sequence[Watched],
    published: Callable[[Watched], VerifierStatus | None],
    first_to_go: Watched,
) -> Look:
    """What has happened since the last look at these verifiers. published: the state that replicas are told.
    first_to_go: who is given up if one is."""
    windows = queue_s = 0.0
    found = Look([], [], 0.0, 0)
    for watched in staying:
        status = published(watched)
        if status is None or status.state != "ready":
            found.coming += status is None or status.state == "starting"  # others cannot be counted on
            continue
        before, watched.seen = watched.seen, {"windows": status.windows, "queue_s": status.queue_s}
        windows += status.windows - before.get("windows", status.windows)
        queue_s += status.queue_s - before.get("queue_s", status.queue_s)
        found.ready.append(status)
        if watched is not first_to_go:
            found.left.append(status)
    found.queue_s = queue_s / windows if windows > 0 else 0.0
    return found
