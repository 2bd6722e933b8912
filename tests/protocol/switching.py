"""What the tests of requests that change their ways share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from llm42.protocol import Window
from llm42.session.driver import Generator
from llm42.session.machine import Session
from llm42.session.policy import Way
from llm42.telemetry import metrics as m
from tests.support import GREEDY, PENALISED, SAMPLED, Lab, RandomWays, Wrapped

KINDS = (GREEDY, SAMPLED, PENALISED)


class Counts(m.Metrics):
    """Counters, summed over their labels."""

    def __init__(self) -> None:
        self.found: Counter[Any] = Counter()

    def inc(self, metric: Any, value: float = 1.0, **labels: Any) -> None:
        self.found[metric] += value


def nothing_left(generator: Generator) -> bool:
    """Of what is counted and promised for requests in progress."""
    ways = generator.ways
    counts = ways.best_effort, ways.movable, len(ways.deterministic), len(ways._ids), ways.promises.total
    return not any(counts) and not ways.promises._of and not ways.moved


def switching(lab: Lab, seed: int, share: float = 0.5) -> tuple[Lab, RandomWays]:
    ways = RandomWays(seed, share)
    return replace(lab, mode="auto", decide=ways, parts=lab.parts), ways


class OneLate(Session):
    """Goes direct behind a candidate that nobody has verified."""

    def turn(self, way: Way) -> None:
        if way == "direct" and self.proposed:
            self.committed.append(self.proposed.pop(0))
        super().turn(way)


class Starves(Wrapped):
    """A verifier with KV for windows alone: it never comes to who is to be decoded there."""

    followed = 0

    def follow(self, window: Window, sink: Any) -> None:
        self.followed += 1

    def renew(self, *_: Any) -> None:
        """Nobody is decoded."""

    def progressed_s(self, request_id: str) -> float:
        """It works on others."""
        return 0.0
