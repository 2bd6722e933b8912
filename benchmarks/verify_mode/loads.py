"""A load that both sides get in the same way, and what is counted of it: pure, without an engine.

Requests enter as others end, so many at a time. The first ones have the rest of an output still to come, as
if they had been running: so they do not end together, and the window that is measured begins in a steady
state.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Load:
    """What comes, and when it is counted."""

    in_flight: int
    prompts: tuple[int, ...]
    """Lengths, each as likely."""
    outputs: tuple[int, ...]
    """The same."""
    percent: int = 100
    """Of the requests, how many are deterministic where there is a choice."""
    ramp_s: float = 0.0
    """Not counted."""
    window_s: float = 1.0
    """Counted after that."""

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(self.prompts) + max(self.outputs)

    @property
    def seconds(self) -> float:
        """Of one run of one side."""
        return self.ramp_s + self.window_s


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request of a load."""

    number: int
    prompt: tuple[int, ...]
    tokens: int
    deterministic: bool


def load_of(order: dict[str, Any]) -> Load:
    """A load as it came through JSON."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in order.items()}
    return Load(**values)


def wanted(load: Load, seed: str, vocab: int) -> Iterator[Wanted]:
    """The load's requests, without end. Of a seed they are the same for every side."""
    number = 0
    while True:
        rng = random.Random(f"{seed} {number}")
        length, tokens = rng.choice(load.prompts), rng.choice(load.outputs)
        prompt = tuple(rng.choices(range(3, vocab), k=length))
        if number < load.in_flight:
            tokens = rng.randint(1, tokens)
        yield Wanted(number, prompt, tokens, is_deterministic(number, load.percent))
        number += 1


def is_deterministic(number: int, percent: int) -> bool:
    """Spread evenly."""
    return (number + 1) * percent // 100 > number * percent // 100


@dataclass(slots=True)
class Meter:
    """Counts tokens as their reader sees them, from the first that come after the ramp to the last within the
    window: tokens come some at a time, and with few requests the edges would count for much."""

    load: Load
    clock: Callable[[], float] = time.perf_counter
    began: float = field(init=False)
    first: float | None = None
    last: float = 0.0
    counts: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def over(self) -> bool:
        """Whether the window is."""
        return self.clock() - self.began >= self.load.seconds

    def add(self, tokens: int, deterministic: bool = False) -> None:
        """They are here."""
        now = self.clock()
        if not tokens or not self.load.ramp_s <= now - self.began < self.load.seconds:
            return
        if self.first is None:
            self.first = now  # what came with these was made before
        elif now > self.first:
            self.counts[deterministic] += tokens
            self.last = now

    def found(self) -> dict[str, float]:
        """Tokens per second, of all and of the deterministic requests."""
        seconds = self.last - self.first if self.first is not None and self.last else 0.0
        total = sum(self.counts.values())
        return {
            "tok_s": total / seconds if seconds else 0.0,
            "deterministic_tok_s": self.counts[True] / seconds if seconds else 0.0,
            "tokens": total, "seconds": seconds,
        }  # fmt: skip
