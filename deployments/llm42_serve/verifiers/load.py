"""How much work verifiers have, and how much is too much: places in their steps, KV, the time of a step.

A window takes part in a few steps, and how long windows wait is measured (verifier.target_queue_s). A request
that is decoded directly waits once, at its beginning, and then takes a row of every step until it ends: of
these the work itself is counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llm42.config import VerifierSettings
from llm42.step_times import Costs

FEW = 0.25
"""With less of its places and of its KV in use, the time of a verifier's steps is its device's, not too much
work."""
REST = 0.7
"""When one is given up, the work may be this part of what the others should have at most: so that a little
more does not call for it again."""


class Work(Protocol):
    """What a verifier says of itself (actor.py's VerifierStatus). One of a release that does not say how much
    it can do (places and kv_tokens are 0) never has too much."""

    @property
    def direct(self) -> int:
        """Requests that it decodes by itself, those too that wait for KV or for their prompt's rows."""

    @property
    def places(self) -> int:
        """Rows of its largest step."""

    @property
    def kv_used(self) -> int:
        """KV that cannot be evicted, in tokens."""

    @property
    def kv_tokens(self) -> int:
        """All of its KV, in tokens."""

    @property
    def step_s(self) -> float:
        """Mean seconds of the last steps in which requests were decoded; 0.0 where none were."""

    @property
    def yielding(self) -> int:
        """Of `direct`, those that give way to others: no reason to turn anybody away."""

    @property
    def yielding_kv(self) -> int:
        """What these hold of `kv_used`."""

    @property
    def decode_steps(self) -> Costs:
        """How long such steps take, by how many requests."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the work: verifier.target_load, target_step_s and target_queue_s."""

    share: float
    step_s: float
    queue_s: float

    @classmethod
    def of(cls, settings: VerifierSettings) -> Limits:
        """Those of the settings."""
        return cls(settings.target_load, settings.target_step_s, settings.target_queue_s)

    def excess(self, work: Work) -> tuple[str, ...]:
        """Of what one verifier has too much, in words for a log. Neither a full step is too much, nor a slow
        one of a single request, which has it for itself."""
        found, (direct, kv) = [], _own(work)
        if work.places and direct > math.ceil(self.share * work.places):
            found.append("places")
        if work.kv_tokens and kv > self.share * work.kv_tokens:
            found.append("KV")
        few = direct < FEW * work.places and kv < FEW * work.kv_tokens
        if _own_step_s(work, direct) > self.step_s and direct > 1 and work.places and not few:
            found.append("step time")
        return tuple(found)

    def crowded(self, verifiers: Sequence[Work]) -> bool:
        """Whether each of them has too much to do, so that there is nowhere to go with more."""
        return bool(verifiers) and all(self.excess(v) for v in verifiers)

    def fit(self, verifiers: Sequence[Work], others: Sequence[Work], queue_s: float) -> bool:
        """Whether `others`, some of the verifiers, could do the work of all, and more. queue_s: seconds that
        windows have waited lately."""
        if not others:
            return False
        direct, kv = (sum(each) for each in zip(*map(_own, verifiers), strict=True))
        places, kv_tokens = sum(v.places for v in others), sum(v.kv_tokens for v in others)
        most = REST * self.share
        if queue_s > self.queue_s / 4 or direct > most * places or kv > most * kv_tokens:
            return False
        if direct < 2 or (direct < REST * FEW * places and kv < REST * FEW * kv_tokens):
            return True
        # a step of two steps' rows takes as long as both, at most
        return sum(v.step_s for v in verifiers) <= REST * self.step_s * len(others)


def _own(work: Work) -> tuple[int, int]:
    """Places and KV without what is given up as soon as others want it."""
    return max(0, work.direct - work.yielding), max(0, work.kv_used - work.yielding_kv)


def _own_step_s(work: Work, direct: int) -> float:
    """The time of a step with so many requests, where others ride along that give way; as far as that is
    known."""
    if not work.yielding:
        return work.step_s
    return min(work.step_s, work.decode_steps.at(direct)) if work.decode_steps.times else 0.0


class StepTime:
    """The mean time of the steps that have ended since it was asked for last. Where none has, as the present
    one lasts longer than between two such questions: of those before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._steps, self._seconds = clock, 0, 0.0
        self._mean_s, self._ended_at = 0.0, -math.inf

    def mean_s(self, steps: int, seconds: float, present_s: float) -> float:
        """steps, seconds: all so far. present_s: how long the present step has been running, 0.0 where none
        is."""
        ended, took, now = steps - self._steps, seconds - self._seconds, self._clock()
        self._steps, self._seconds = steps, seconds
        if ended > 0:
            self._mean_s, self._ended_at = took / ended, now
            return self._mean_s
        # by now another one would have ended, were steps still as long
        old = not present_s or now - self._ended_at > self._mean_s
        return present_s if old else max(present_s, self._mean_s)
