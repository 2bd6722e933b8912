"""How much work verifiers have: places in their steps, KV, the time of a step, how long what is new waits.

A window takes part in a few steps, a request that is decoded directly in one after the other until it ends.
So neither the number of windows nor their waiting says how much is being done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from llm42.config import VerifierSettings


class Work(Protocol):
    """What a verifier says of itself (actor.py's VerifierStatus)."""

    @property
    def waiting(self) -> int:
        """Windows that wait to be admitted."""

    @property
    def active(self) -> int:
        """Windows that are being computed."""

    @property
    def direct(self) -> int:
        """Requests that it decodes by itself."""

    @property
    def places(self) -> int:
        """Rows of its largest step; 0: it does not say."""

    @property
    def kv_used(self) -> int:
        """KV of live requests, in tokens."""

    @property
    def kv_tokens(self) -> int:
        """All of its KV, in tokens; 0: it does not say."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step lately."""


@dataclass(frozen=True, slots=True)
class Load:
    """Of verifiers together. Shares may exceed 1: what waits counts as what is computed."""

    places: float = 0.0
    """Requests that are decoded and windows, waiting ones too, against the rows of the largest steps."""
    kv: float = 0.0
    """KV of live requests against the KV that there is."""
    step_s: float = 0.0
    """Mean seconds of a step, of the verifiers that have anything to do."""
    queue_s: float = 0.0
    """Mean seconds that windows waited; 0.0 where that is observed otherwise."""
    busy: bool = False
    """Whether anything is computed, or waits for it."""

    @classmethod
    def of(cls, verifiers: Iterable[Work], queue_s: float = 0.0) -> Load:
        """The load of verifiers that are ready. One that does not say how much it can do counts as idle."""
        told = [(v.waiting + v.active + v.direct, v) for v in verifiers]
        places = [(work, v.places) for work, v in told if v.places]
        kv = [(v.kv_used, v.kv_tokens) for _, v in told if v.kv_tokens]
        steps = [v.step_s for work, v in told if work]
        return cls(
            _share(places),
            _share(kv),
            sum(steps) / len(steps) if steps else 0.0,
            queue_s,
            any(work for work, _ in told),
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the load: verifier.target_load, target_step_s and target_queue_s."""

    share: float
    step_s: float
    queue_s: float

    @classmethod
    def of(cls, settings: VerifierSettings) -> Limits:
        """Those of the settings."""
        return cls(settings.target_load, settings.target_step_s, settings.target_queue_s)

    def exceeded(self, load: Load) -> bool:
        """Whether the verifiers should not have more to do than this."""
        return self.crowded(load) or load.queue_s > self.queue_s

    def crowded(self, load: Load) -> bool:
        """The same of the work alone."""
        return load.places > self.share or load.kv > self.share or load.step_s > self.step_s

    def fit_fewer(self, load: Load, verifiers: int) -> bool:
        """Whether the work of so many verifiers would leave one fewer of them with room."""
        if not load.busy:
            return True
        if verifiers < 2 or load.queue_s > self.queue_s / 4 or load.step_s > self.step_s / 2:
            return False
        return max(load.places, load.kv) * verifiers / (verifiers - 1) <= self.share


class StepTime:
    """The mean time of the steps since it was asked for last; of the last ones where there was none."""

    def __init__(self) -> None:
        self._steps, self._seconds, self._mean = 0, 0.0, 0.0

    def mean_s(self, steps: int, seconds: float) -> float:
        """steps, seconds: all so far."""
        if steps > self._steps:
            self._mean = (seconds - self._seconds) / (steps - self._steps)
            self._steps, self._seconds = steps, seconds
        return self._mean


def _share(used: list[tuple[int, int]]) -> float:
    total = sum(of for _, of in used)
    return sum(part for part, _ in used) / total if total else 0.0
