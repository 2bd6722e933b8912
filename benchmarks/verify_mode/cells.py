"""What h200.py can measure: loads, the sides that run them, seconds, and what is predicted of each figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.direct.cells import Cell, step_cell
from benchmarks.verify_mode.loads import Load

LANE_S, WARMING_S = 1.0, 1.5
"""Of each run of one side: prompts are made, and what is left over is ended; prompts are computed before."""
LANES = ("vllm", "verify", "warmed", "direct", "auto")
"""`warmed`: verify, with deterministic prompts in vLLM's cache before they come (warmed.py)."""
WITHIN = 0.97
"""What auto may lose against the better of the pinned modes."""
ROUNDS_OF_STEPS = 5
KV = {"beside": (152_064, 280_064), "steps": (300_032, 0), "smollm2": (196_608, 262_144)}
"""Tokens of KV of each vLLM, and of the verifier. `beside`: what 256 requests of 512 tokens, or 112 of 1,280,
need; the verifier has twice that, since the policy moves best effort into half of it. Three copies of the
weights (48 GB), this (77 GB) and some 13 GB of graphs and buffers fit one H200."""
LONGEST = {"beside": 2048, "steps": 33_792, "smollm2": 2048}
BOOT_S = {"beside": 130.0, "steps": 110.0, "smollm2": 100.0}
SHAPES = {
    "256_256": Load(256, (256,), (256,), ramp_s=4.5, window_s=5.0),
    "1024_256": Load(112, (1024,), (256,), ramp_s=6.5, window_s=5.0),
}
LOW = {
    "at_1": Load(1, (256,), (256,), ramp_s=1.0, window_s=4.5),
    "at_8": Load(8, (256,), (256,), ramp_s=1.5, window_s=4.0),
    "at_64": Load(64, (256,), (256,), ramp_s=2.5, window_s=4.0),
}
MIXED = {
    f"at_{count}": Load(count, (20, 100, 200, 320), (64, 128, 256, 384), window_s=window_s)
    for count, window_s in ((8, 8.0), (64, 8.0), (256, 12.0))
}
STEPS = (
    (1, 32_768), (1, 8192), (1, 2048), (8, 2048), (8, 8192), (64, 2048), (4, 8192), (4, 2048),
    (4, 32_768), (256, 1024), (8, 32_768),
)  # fmt: skip
"""The worst of before first, and then what says most for its time: sequences, and tokens of context. 64
x 8k and 256 x 2k have 69 GB of KV each, which two engines do not have beside their weights: of 256 there are
1k."""
PINNED = {2: ("verify",), 10: ("verify",), 50: ("verify", "direct"), 100: ("direct",)}
"""Which pinned modes auto is compared with. Left out is what is known to be far behind: by the measured steps
direct is at 0.52 of vLLM at 2 %, and 0.66 at 10 %, verify at 0.55 at 100 %."""

PREDICTED: dict[str, tuple[float, str]] = {
    "best_effort_step_max": (
        1.02,
        "vLLM splits as it comes now (1 x 32k had 2.3 unsplit), so that the engines differ by how norms are"
        " launched, cuBLAS without a workspace and the adapter's way through AsyncLLM",
    ),
    "rollbacks_per_1000_wide": (
        0.0,
        "at head size 128 FlashAttention 3 gave single rows equal bits beside 512 others, and from 64"
        " requests on vLLM does not split: 0 of 305,000 tokens before",
    ),
    "rollbacks_per_1000_smollm2": (
        4.0,
        "head size 64: 3.1 at 64 mixed and 4.3 at 256 were measured, and nothing in the kernels has changed"
        " since; 0.5 would be missed",
    ),
    "kept_0": (
        0.94,
        "kept_2 was measured first, 0.92 and 0.96: its verified tokens should cost 0.016, the rest is what"
        " best effort pays for driver and adapter",
    ),
    "kept_2": (
        0.98,
        "a token costs vLLM 70 us (256/256) and 190 us (1024/256), a verified one 58 and 140 us more, its"
        " prompt included: 0.984 and 0.985; half a percent for the driver",
    ),
    "kept_10": (0.92, "by the same costs 0.924 and 0.93; five early requests of each hundred cost no more"),
    "kept_50": (0.69, "by the same costs 0.707 and 0.73; windows are computed between vLLM's steps, 2 %"),
    "prefill_once_10": (
        1.05,
        "a token costs 190 us in vLLM, 25 us of them for each of its four prompt tokens, and 14 us more where"
        " one in ten is verified: 204 over 194",
    ),
    "prefill_once_50": (1.22, "the same: 260 us over 210, and the verifier has its prompts' time to itself"),
    "auto_kept_2": (0.97, "as pinned verify; best effort moves only where that is faster for all"),
    "auto_kept_10": (
        0.92, "verify 0.92; all decoded canonically, in vLLM's order of attention, 0.92 too: either way",
    ),
    "auto_kept_50": (
        0.89, "all moved: decoding as at 100 %, less what stays behind on the fast path while KV is promised",
    ),
    "auto_kept_100": (
        0.90,
        "own attention through the actor had 0.94 at 256/256; vLLM's order of attention costs 1.2 times the"
        " time of a third of the step: 0.92 and 0.88",
    ),
    "auto_kept_100_at_1": (0.93, "0.98 with own attention; unsplit rows of 256 to 512 keys cost 0.2 ms of 5"),
    "auto_kept_100_at_8": (0.94, "as at 1, but unsplit attention has eight times as many blocks"),
    "auto_kept_100_at_64": (0.93, "0.96 of the time in steps, prompts at 0.9, commits and calls 2 %"),
    "auto_over_pinned": (0.96, "moving takes seconds of a window of five, and costs prompts twice"),
}  # fmt: skip
"""Written before the first run; of a figure with several loads, the worst one."""
TARGETS: dict[str, float | None] = {
    "best_effort_step_max": 1.03, "rollbacks_per_1000_wide": 0.1, "rollbacks_per_1000_smollm2": 0.5,
    "kept_0": None, "kept_2": 0.97, "kept_10": 0.90, "kept_50": 0.70,
    "prefill_once_10": None, "prefill_once_50": None,
    "auto_kept_2": 0.97, "auto_kept_10": 0.92, "auto_kept_50": 0.80, "auto_kept_100": 0.90,
    "auto_kept_100_at_1": 0.90, "auto_kept_100_at_8": 0.90, "auto_kept_100_at_64": 0.90,
    "auto_over_pinned": WITHIN,
}  # fmt: skip
STAGE = {"best_effort_step_max": "steps", "rollbacks_per_1000_smollm2": "smollm2"}
"""Where it is not `beside`."""
CELLS = tuple(name for name in TARGETS if name != "auto_over_pinned")
"""The names that --cells takes."""


@dataclass(frozen=True)
class Row:
    """One load, run in turns: vLLM untouched (`vllm`), and ours in some modes."""

    name: str
    load: Load
    lanes: tuple[str, ...]
    cells: tuple[str, ...]
    """Whose figures come of it."""

    @property
    def round_s(self) -> float:
        """Of all lanes, as expected."""
        return len(self.lanes) * (self.load.seconds + LANE_S) + WARMING_S * ("warmed" in self.lanes)


def stage_of(cell: str) -> str:
    """Which processes it needs."""
    return STAGE.get(cell, "beside")


def stages(cells: Sequence[str]) -> list[str]:
    """In the order in which their cells are named."""
    return list(dict.fromkeys(map(stage_of, cells)))


def lanes_of(cell: str) -> tuple[str, ...]:
    """Whose rates a figure needs."""
    if cell.startswith("rollbacks"):
        return ("verify",)
    if cell.startswith("prefill"):
        return ("verify", "warmed")
    if cell.startswith("auto"):
        return ("vllm", *PINNED[percent_of(cell)], "auto")
    return ("vllm", "verify")


def rows_of(cells: Iterable[str], short: bool = False) -> list[Row]:
    """The loads of these cells, each once, with the lanes of all that need it. short: to try the script."""
    found: dict[str, Row] = {}
    for cell in cells:
        for name, load in loads_of(cell).items():
            before = found.get(name, Row(name, _shortened(load) if short else load, (), ()))
            lanes = dict.fromkeys((*before.lanes, *lanes_of(cell)))
            ordered = tuple(lane for lane in LANES if lane in lanes)
            found[name] = replace(before, lanes=ordered, cells=(*before.cells, cell))
    return list(found.values())


def loads_of(cell: str) -> dict[str, Load]:
    """By the name of their row."""
    if stage_of(cell) == "steps":
        return {}
    if cell.startswith("rollbacks"):
        return {f"{cell}_{at}": load for at, load in MIXED.items()}
    percent = percent_of(cell)
    long_prompts = {"1024_256": SHAPES["1024_256"]}
    shapes = long_prompts if cell.startswith("prefill") else SHAPES
    if "_at_" in cell:
        at = cell[cell.index("at_") :]
        return {f"{percent}_{at}": replace(LOW[at], percent=percent)}
    return {f"{percent}_{shape}": replace(load, percent=percent) for shape, load in shapes.items()}


def steps_of(short: bool = False) -> list[Cell]:
    """The decode steps of best effort."""
    if short:
        few = [step_cell(f"best_effort_{count}x{n}", count, n, 1.03) for count, n in ((1, 64), (2, 32))]
        return [replace(c, rounds=2, round_s=8.0, first_s=4.0, order=c.order | {"tokens": 48}) for c in few]
    cells = [step_cell(f"best_effort_{count}x{context}", count, context, 1.03) for count, context in STEPS]
    return [replace(cell, rounds=ROUNDS_OF_STEPS) for cell in cells]


def fits(needed_s: float, left_s: float, spare_s: float) -> bool:
    """Whether something that takes so long is begun."""
    return needed_s + spare_s <= left_s


def estimate_s(cells: Sequence[str], rounds: int, short: bool = False) -> float:
    """Seconds of a whole run."""
    total = sum(BOOT_S[stage] for stage in stages(cells)) if not short else 0.0
    total += rounds * sum(row.round_s for row in rows_of(cells, short))
    if "best_effort_step_max" in cells:
        total += sum(cell.first_s + cell.rounds * cell.round_s for cell in steps_of(short))
    return total


def percent_of(cell: str) -> int:
    """Of its requests, how many are deterministic."""
    return int(cell.split("_at_")[0].rsplit("_", 1)[1])


def _shortened(load: Load) -> Load:
    few = min(load.in_flight, 2 + load.in_flight.bit_length() // 3)
    return replace(
        load, in_flight=few, prompts=tuple(max(8, n // 16) for n in load.prompts),
        outputs=tuple(max(8, n // 16) for n in load.outputs), ramp_s=0.4, window_s=1.2,
    )  # fmt: skip
