"""Which systems run which loads in which command, how long that takes, and what is predicted. Pure.

One GPU does not hold all systems: a copy of an 8B's weights takes 15 GB, the KV of its requests 20 GB. So
there are groups, each with vLLM as it comes, and each ratio is taken within one command:

canonical   vllm, invariant (VLLM_BATCH_INVARIANT=1), canonical (the verifier alone): 3 copies, 60 GB of KV
auto        vllm, and ours with vLLM and a verifier, in session.mode auto or verify: 3 copies, 77 GB of KV
verify      the same over HTTP with verify pinned, since a service has one mode from its start
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.peers.loads import LOADS, LOW, SHAPES, SHARES, mean_tokens, shortened
from benchmarks.verify_mode.loads import Load

LEVELS = ("engine", "http")
GROUPS = {
    "canonical": ("vllm", "invariant", "canonical"),
    "auto": ("vllm", "auto", "verify"),
    "verify": ("vllm", "verify"),
}
KV_TOKENS, VERIFIER_KV_TOKENS = 152_064, 280_064
"""Of each system, and of the verifier beside vLLM: verify_mode/cells.py says why it has more."""
MAX_LEN = 16_384
BOOT_S = {"canonical": 150.0, "auto": 140.0, "verify": 140.0}
WARM_S, LANE_S, SETTLE_S, OPEN_S, SATURATION = 2.5, 1.0, 12.0, 15.0, 0.6
"""SATURATION: the share of vLLM's own rate at which requests come in an `open` row."""

DEFAULT = {
    ("engine", "canonical"): (
        "100_256_256", "100_chat", "100_1024_256", "100_low_1", "100_4096_1024", "100_512_512",
        "100_documents", "100_low_16", "100_low_4", "0_256_256", "50_256_256",
    ),
    ("engine", "auto"): (
        "10_256_256", "2_256_256", "50_256_256", "10_chat", "2_chat", "50_chat",
        "10_1024_256", "2_1024_256", "50_1024_256", "100_low_1", "100_low_4", "100_low_16",
    ),
    ("http", "canonical"): ("100_256_256", "100_open_256_256", "100_chat", "100_1024_256", "100_low_1"),
    ("http", "auto"): ("10_256_256", "2_256_256", "50_256_256", "10_chat", "50_chat", "10_low_16"),
    ("http", "verify"): ("10_256_256", "100_256_256", "10_chat"),
}  # fmt: skip
"""What a command runs unless --rows says otherwise, what says most for its time first."""
SECOND = (
    "10_512_512", "2_512_512", "50_512_512", "10_4096_1024", "2_4096_1024", "50_4096_1024",
    "10_documents", "2_documents", "50_documents", "0_256_256", "100_256_256",
)  # fmt: skip
"""Of the engine's group auto, which needs two commands: --rows second."""
VERIFY_AT = {"10_256_256", "10_chat", "100_256_256", "100_low_16"}
"""Rows of the group auto in which verify pinned runs too: it has no target."""

VLLM_TOK_S = {
    "256_256": 14_300.0, "1024_256": 5260.0, "512_512": 10_000.0, "4096_1024": 2380.0, "chat": 2940.0,
    "documents": 680.0, "low_1": 200.0, "low_4": 780.0, "low_16": 2800.0,
}  # fmt: skip
"""Predicted of vLLM as it comes: measured step times of such contexts, and 25 us for each prompt token."""
INVARIANT = {"256_256": 0.55, "low_1": 0.27, "low_4": 0.27, "low_16": 0.29, "documents": 0.65}
"""Predicted over vLLM: its steps took 18 ms where vLLM's took 4.9 to 7; more requests hide more of it."""
CANONICAL = {
    "256_256": 0.98, "512_512": 0.97, "1024_256": 0.93, "chat": 0.93, "4096_1024": 0.94, "documents": 0.89,
    "low_1": 1.0, "low_4": 1.0, "low_16": 1.0,
}  # fmt: skip
"""Measured before: 0.96 of vLLM over HTTP at 256/256; its prompts are computed at 0.9 of vLLM's rate."""
AUTO = {0: 0.99, 2: 0.96, 10: 0.97, 50: 0.78, 100: 0.95}
VERIFY = {0: 0.99, 2: 0.97, 10: 0.87, 50: 0.70, 100: 0.50}
"""Measured before at 256/256 and 1024/256, in turns of some seconds each; auto was noisy at 2 and 50 %."""
PREDICTED: dict[str, tuple[float, str]] = {
    "kept_2": (AUTO[2], "0.74 and 0.98 were measured; the first was a plan that a short turn did not settle"),
    "kept_10": (AUTO[10], "1.00 and 1.03 were measured at two shapes; long prompts are computed twice"),
    "kept_50": (AUTO[50], "0.63 and 0.79 were measured; mixed plans are not settled after 12 s"),
    "kept_100": (0.94, "the mean of what is predicted of six loads"),
    "worst_100": (0.89, "documents: nearly all is prompts, which run at 0.9"),
    "ttft_p99_ratio_100": (1.25, "prompts at 0.9 of the rate, first tokens one hop later"),
    "best_effort_p50_ratio_10": (1.04, "one in ten windows between vLLM's steps"),
    "distinct_outputs_10000": (1, "the promise"),
    "vllm_distinct_outputs_10000": (40, "a token of SmolLM2 in 250 differs by the batch beside it"),
}
"""Written before the first run."""
TARGETS: dict[str, tuple[float, str]] = {
    "kept_2": (0.98, "higher"), "kept_10": (0.93, "higher"), "kept_50": (0.80, "higher"),
    "kept_100": (0.95, "higher"), "worst_100": (0.88, "higher"), "ttft_p99_ratio_100": (1.3, "lower"),
    "best_effort_p50_ratio_10": (1.05, "lower"), "distinct_outputs_10000": (1, "lower"),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One load, run by some systems in turns."""

    name: str
    load: Load
    lanes: tuple[str, ...]
    open: bool = False
    """Requests come at random, at a share of the rate that vLLM takes, whatever runs."""

    @property
    def shape(self) -> str:
        """Its load's name."""
        return shape_of(self.name)

    @property
    def seconds(self) -> float:
        """Of all lanes, as expected."""
        settling = SETTLE_S * (("auto" in self.lanes) and self.load.ramp_s > 0)
        return len(self.lanes) * (self.load.seconds + LANE_S) + settling


def percent_of(name: str) -> int:
    """Of a row's requests, how many are deterministic."""
    return int(name.split("_", 1)[0])


def shape_of(name: str) -> str:
    """Of a row, whether open or not."""
    return name.split("_", 1)[1].removeprefix("open_")


def every_row(level: str) -> tuple[str, ...]:
    """All loads at all shares."""
    names = [f"{percent}_{shape}" for shape in LOADS for percent in SHARES]
    return tuple(names + (["100_open_256_256"] if level == "http" else []))


def row_of(name: str, level: str, group: str, short: bool = False) -> Row:
    """Raises KeyError for an unknown load."""
    load = replace(LOADS[shape_of(name)], percent=percent_of(name))
    is_open = "_open_" in name
    if is_open:
        load = replace(load, ramp_s=4.0, window_s=OPEN_S)
    lanes = GROUPS[group]
    if group == "auto" and (level == "http" or name not in VERIFY_AT):
        lanes = tuple(lane for lane in lanes if lane != "verify")
    if group == "canonical" and percent_of(name) != 100:
        lanes = ("vllm", "canonical")  # nothing else changes with the share
    return Row(name, shortened(load) if short else load, lanes, is_open)


def rows_of(names: Sequence[str], level: str, group: str, short: bool = False) -> list[Row]:
    """Of a command."""
    return [row_of(name, level, group, short) for name in names]


def left_out(names: Sequence[str], level: str) -> list[str]:
    """Rows that were never meant to run in this command."""
    return [name for name in every_row(level) if name not in names]


def estimate_s(rows: Sequence[Row], group: str) -> float:
    """Of a command with this machine's boot. What stands for vLLM from a row before is not taken off."""
    warming = len(GROUPS[group]) * (WARM_S + LANE_S)
    return BOOT_S[group] + warming + sum(row.seconds for row in rows)


def predicted(row: str, lane: str) -> float:
    """Output tokens per second."""
    shape, percent = shape_of(row), percent_of(row)
    ratios = {
        "vllm": 1.0, "invariant": INVARIANT.get(shape, 0.5), "canonical": CANONICAL[shape],
        "auto": AUTO[percent], "verify": VERIFY[percent],
    }  # fmt: skip
    rate = VLLM_TOK_S[shape] * ratios[lane]
    return round(min(rate, SATURATION * VLLM_TOK_S[shape]) if "_open_" in row else rate, 1)


def rate_of(load: Load, tok_s: float) -> float:
    """Requests per second of an open row, where vLLM has made so many tokens per second."""
    return SATURATION * tok_s / mean_tokens(load)


def is_low(row: str) -> bool:
    """Few requests at a time."""
    return shape_of(row) in LOW


def is_shape(row: str) -> bool:
    """One of the loads whose mean a figure is."""
    return shape_of(row) in SHAPES and "_open_" not in row
