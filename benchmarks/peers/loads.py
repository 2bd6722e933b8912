"""The loads of h200.py: shapes, lengths as in published traces, and few requests at a time. Pure.

Two loads have lengths as in traces that others published: the median and the 90th percentile of prompts and
outputs are those given in the paper on Sarathi-Serve (OSDI 2024, the table of its datasets) for
openchat_sharegpt4 (conversations) and arxiv_summarization (long documents). Between and beyond these two a
logarithm of the length is normally distributed, cut off where a request would be longer than its model takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from benchmarks.verify_mode.loads import Load

QUANTILES = 20
SHARES = (0, 2, 10, 50, 100)


@dataclass(frozen=True)
class Lengths:
    """How long something is, in tokens."""

    median: float
    p90: float
    longest: int

    def quantiles(self, count: int = QUANTILES) -> tuple[int, ...]:
        """So many lengths that are as likely as each other: the middles of equal parts."""
        normal = NormalDist()
        spread = math.log(self.p90 / self.median) / normal.inv_cdf(0.9)
        places = (normal.inv_cdf((n + 0.5) / count) for n in range(count))
        return tuple(min(self.longest, round(self.median * math.exp(spread * z))) for z in places)


CHAT = Lengths(1730, 5696, 7168), Lengths(415, 834, 1024)
DOCUMENTS = Lengths(7059, 12_985, 14_336), Lengths(208, 371, 1024)
"""Prompts and outputs."""


def _traced(lengths: tuple[Lengths, Lengths], in_flight: int, ramp_s: float, window_s: float) -> Load:
    prompts, outputs = (each.quantiles() for each in lengths)
    return Load(in_flight, prompts, outputs, ramp_s=ramp_s, window_s=window_s)


SHAPES = {
    "256_256": Load(256, (256,), (256,), ramp_s=4.5, window_s=5.0),
    "1024_256": Load(112, (1024,), (256,), ramp_s=6.5, window_s=5.0),
    "512_512": Load(128, (512,), (512,), ramp_s=5.0, window_s=6.0),
    "4096_1024": Load(28, (4096,), (1024,), ramp_s=6.0, window_s=10.0),
    "chat": _traced(CHAT, 40, 6.0, 10.0),
    "documents": _traced(DOCUMENTS, 14, 7.0, 12.0),
}
"""As many at a time as have room in the KV of a vLLM that shares the GPU with two more copies of the weights
(cells.py): the same number in every command, so that one command's figures can be read beside another's."""
LOW = {f"low_{count}": Load(count, (256,), (256,), ramp_s=1.0, window_s=4.5) for count in (1, 4, 16)}
LOADS = SHAPES | LOW


def longest(loads: list[Load]) -> int:
    """Tokens of the longest request of all."""
    return max(load.longest for load in loads)


def mean_tokens(load: Load) -> float:
    """Of an output, of requests that come while others end."""
    return sum(load.outputs) / len(load.outputs)


def shortened(load: Load) -> Load:
    """To try the script on two cores."""
    few = min(load.in_flight, 2 + load.in_flight.bit_length() // 3)
    return replace(
        load, in_flight=few, prompts=tuple(min(96, max(8, n // 32)) for n in load.prompts),
        outputs=tuple(min(48, max(8, n // 32)) for n in load.outputs), ramp_s=1.0, window_s=2.5,
    )  # fmt: skip
