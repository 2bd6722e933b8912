"""What beside_vllm.py asks of its sides, what is predicted of it, and how a figure is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.direct.side import FEW

TOKENS, CONTEXT, IN_FLIGHT = 96, 1024, 256
STEPS = (64, 1, 8, 200, 12, 100, 300)
WARM_STEPS = 200
"""Larger ones have their prompts computed when it is their turn."""
LONG_CONTEXT = 32_768
GREEDY: dict[str, Any] = {}
WARM: dict[str, Any] = {"temperature": 1.0}
RESTRICTED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "presence_penalty": 0.5}
SATURATED = 0.6
"""Share of the saturated rate at which requests arrive."""
BATCH_INVARIANT_TARGET = 1.10
PREDICTED = {
    "step_64": 0.95, "step_1": 1.0, "step_8": 1.0, "step_200": 0.95,
    "load_256_256": 1.0, "load_256_256_sampled": 0.95, "load_1024_256": 0.9,
    "load_512_512": 0.98, "load_256_256_restricted": 0.8,
    "step_300": 1.0, "step_1_32k": 1.1, "step_8_32k": 1.12,
    "prefill_1k": 1.0, "prefill_4k": 0.97, "prefill_1k_alone": 1.1, "prefill_4k_alone": 1.0,
    "ttft_p50": 1.0, "ttft_p99": 1.0,
    "over_batch_invariant_256_256": 1.4, "over_batch_invariant_512_512": 1.22,
    "over_batch_invariant_1024_256": 1.2,
}  # fmt: skip
PROMPT_TOK_S, LONG_TOK_S, OUTPUT_TOK_S, MIXED_REQ_S = 35_000.0, 18_000.0, 12_000.0, 25.0
"""Of either side, to judge what fits."""
MEAN = ("load_1024_256", "load_256_256", "load_512_512")
"""The loads of which `kept_100` is the mean."""


@dataclass(frozen=True)
class Cell:
    """What is asked of all sides in turns. Seconds are of all together, as expected."""

    name: str
    order: dict[str, Any]
    rounds: int
    round_s: float
    first: dict[str, Any] | None = None
    """Asked once before, not timed."""
    first_s: float = 0.0
    target: float = 1.05
    keys: tuple[str, ...] = ("ms",)
    """The answer's fields that are compared."""

    @property
    def fresh(self) -> bool:
        """Whether each round has prompts of its own."""
        return bool(self.order["do"] != "steps")

    def unit(self, key: str) -> str:
        """Of a field."""
        return "ms" if key.endswith("ms") else "tokens/s"

    def better(self, key: str) -> Literal["higher", "lower"]:
        """Which of two values of a field."""
        return "lower" if key.endswith("ms") else "higher"

    def field_name(self, key: str) -> str:
        """What the field of this cell is called."""
        return self.name if len(self.keys) == 1 else f"{self.name}_{key.removesuffix('_ms')}"

    def ratio(self, key: str, above: str, below: str) -> tuple[str, float | None]:
        """The name and the target of one side's value over another's."""
        name = self.field_name(key)
        if (above, below) == ("ours", "vllm"):
            loads = self.order["do"] == "load"
            return (name.replace("load", "kept") if loads else f"{name}_over_vllm"), self.target
        if (above, below) == ("ours", "invariant") and self.order["do"] == "load":
            return name.replace("load", "over_batch_invariant"), BATCH_INVARIANT_TARGET
        return f"{name}_{above}_over_{below}", None


def step_cell(name: str, count: int, context: int = CONTEXT, target: float = 1.05) -> Cell:
    """The time between tokens of so many requests, each after so many tokens of context."""
    step_s = 0.005 + 3.4e-5 * count * context / CONTEXT
    new = 0 if context == CONTEXT and count <= WARM_STEPS else count * context
    brief = {"do": "brief", "count": count, "context": context}
    order = {"do": "steps", "count": count, "context": context, "tokens": TOKENS}
    speed = PROMPT_TOK_S if context == CONTEXT else LONG_TOK_S
    first_s = 2 * (FEW * step_s + 0.2 + new / speed)
    return Cell(name, order, 3, 2 * ((2 * FEW + TOKENS) * step_s + 0.1), brief, first_s, target)


def _load(
    name: str, count: int, length: int, tokens: int, sampling: dict[str, Any] = GREEDY, target: float = 0.95
) -> Cell:
    order = {
        "do": "load", "count": count, "length": length, "tokens": tokens, "in_flight": IN_FLIGHT,
        "sampling": sampling,
    }  # fmt: skip
    seconds = count * (length / PROMPT_TOK_S + tokens / OUTPUT_TOK_S) * (2 if sampling is RESTRICTED else 1)
    return Cell(name, order, 2, 2 * seconds, target=target, keys=("tok_s",))


def _prefill(name: str, count: int, length: int, in_flight: int = IN_FLIGHT) -> Cell:
    order = {"do": "prefill", "count": count, "length": length, "in_flight": in_flight}
    seconds = count * length / PROMPT_TOK_S + 0.2
    return Cell(name, order, 5, 2 * seconds, target=0.95, keys=("tok_s",))


def _arrivals(seconds: float, count: int) -> Cell:
    """The rate comes from what `first` finds."""
    first = {"do": "mixed", "count": count, "in_flight": IN_FLIGHT, "seed": 1}
    order = {"do": "arrivals", "seconds": seconds}
    first_s = 2 * count / MIXED_REQ_S
    return Cell("ttft", order, 2, 2 * (seconds + 5), first, first_s, 1.2, ("p50_ms", "p99_ms"))


def cells_of(short: bool = False) -> dict[str, Cell]:
    """The most important first. short: of few requests, to try the script."""
    part = 8 if short else 1
    cells = [step_cell(f"step_{count}", count) for count in STEPS]
    cells += [
        _load("load_256_256", 512 // part, 256, 256),
        _load("load_1024_256", 384 // part, 1024, 256),
        _load("load_256_256_sampled", 512 // part, 256, 256, WARM),
        _load("load_512_512", 512 // part, 512, 512),
        _load("load_256_256_restricted", 384 // part, 256, 256, RESTRICTED, 0.85),
        _prefill("prefill_1k", 64 // part, 1024),
        _prefill("prefill_4k", 16 // part, 4096),
        _prefill("prefill_1k_alone", 16 // part, 1024, 1),
        _prefill("prefill_4k_alone", 8 // part, 4096, 1),
        _arrivals(25.0 / part, 512 // part),
        step_cell("step_1_32k", 1, LONG_CONTEXT, 1.1),
        step_cell("step_8_32k", 8, LONG_CONTEXT, 1.1),
    ]
    return {cell.name: cell for cell in cells}


def usual_cells(short: bool = False) -> dict[str, Cell]:
    """Those that need no longer contexts than the others."""
    return {name: cell for name, cell in cells_of(short).items() if not name.endswith("_32k")}


def warm_orders(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """What a side does once before it is ready: the prompts of the larger cells hold those of the others."""
    steps = [c.first for c in cells if c.first and c.first.get("context") == CONTEXT]
    few = [order for order in steps if order["count"] <= WARM_STEPS]
    first: list[dict[str, Any]] = sorted(few, key=lambda order: -order["count"])
    kinds = [c.order["sampling"] for c in cells if "sampling" in c.order]
    distinct = [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]] or [GREEDY]
    return first + [_load("", IN_FLIGHT, 256, 4, kind).order | {"seed": 0} for kind in distinct]


def with_rate(cell: Cell, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The order of a cell whose requests arrive: at a share of what vLLM takes when saturated, of what ours
    does where vLLM is not there."""
    if cell.order["do"] != "arrivals":
        return cell.order
    side = next((s for s in ("vllm", "invariant", "ours") if s in found), "")
    return cell.order | {"rate": SATURATED * found[side]["req_s"]} if side else cell.order
