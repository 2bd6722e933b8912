"""The verifier decoding by itself beside vLLM as it comes, on one H200: both alive, rounds in turns.

    python3 -m benchmarks.direct.beside_vllm --out DIR --limit-s 290 [--small hopper] [--long] [--cells ...]
    python3 -m benchmarks.direct.beside_vllm --out DIR --cpu ...      both only wait: a check of this file

An 8B shape with random weights in bfloat16, each side in a process of its own (side.py), the same KV memory,
the same client loop. vLLM compiles and uses CUDA graphs; prefix caching is on in both.

step_N: wall time between tokens of N requests at 1,024 tokens of context, prompts cached: (a generation of
104 tokens - one of 8) / 96, from outside. load_A_B: output tokens/s, prompts of A tokens, outputs of B, all
known at the start, at most 256 in flight; a request enters when another has ended; fresh prompts each round.
`_sampled`: temperature 1, with seeds in ours, without in vLLM. Ours has credit 64, which the client renews
when half is used.

A figure is the median over the rounds of ours / vLLM in the same round. DIR/NAME.json is written after each
cell; a cell that does not fit into --limit-s is left out and said. A side that fails does not stop the other.
DIR/vllm.log and DIR/ours.log have what they said. The exit status counts what did not work or was left out.
Predicted before the first run: `PREDICTED`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.direct.side import FEW, Options
from benchmarks.lib.report import Figure, arguments, report
from benchmarks.lib.sides import Dead, Process
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT

TOKENS, CONTEXT, IN_FLIGHT = 96, 1024, 256
STEPS = (64, 1, 8, 200, 12, 100, 300)
WARM_STEPS = 200
"""Larger ones have their prompts computed when it is their turn."""
LONG = {1: "step_1_32k", 8: "step_8_32k"}
LONG_CONTEXT = 32_768
PREDICTED = {
    "step_64": 0.95, "step_1": 1.0, "step_8": 1.0, "step_200": 0.95,
    "load_256_256": 1.0, "load_256_256_sampled": 0.95, "load_1024_256": 0.9,
}  # fmt: skip
PROMPT_TOK_S, OUTPUT_TOK_S = 35_000.0, 12_000.0
"""Of either side, to judge what fits."""
SPARE_S = 3.0


@dataclass(frozen=True)
class Cell:
    """What is asked of both sides in turns. Seconds are of both together, as expected."""

    name: str
    order: dict[str, Any]
    rounds: int
    round_s: float
    first: dict[str, Any] | None = None
    """Asked once before, not timed."""
    first_s: float = 0.0
    target: float = 1.05

    @property
    def loads(self) -> bool:
        """Whether it is a throughput."""
        return bool(self.order["do"] == "load")

    @property
    def key(self) -> str:
        """The answer's field that is compared."""
        return "tok_s" if self.loads else "ms"

    @property
    def figure(self) -> str:
        """The ratio's name."""
        return self.name.replace("load", "kept") if self.loads else f"{self.name}_over_vllm"


def _step(name: str, count: int, context: int = CONTEXT, target: float = 1.05) -> Cell:
    step_s = 0.005 + 3.4e-5 * count * context / CONTEXT
    new = 0 if context == CONTEXT and count <= WARM_STEPS else count * context
    brief = {"do": "brief", "count": count, "context": context}
    order = {"do": "steps", "count": count, "context": context, "tokens": TOKENS}
    first_s = 2 * (FEW * step_s + 0.2 + new / PROMPT_TOK_S)
    return Cell(name, order, 3, 2 * ((2 * FEW + TOKENS) * step_s + 0.1), brief, first_s, target)


def _load(name: str, count: int, length: int, tokens: int, temperature: float = 0.0) -> Cell:
    order = {
        "do": "load", "count": count, "length": length, "tokens": tokens, "in_flight": IN_FLIGHT,
        "temperature": temperature,
    }  # fmt: skip
    seconds = count * (length / PROMPT_TOK_S + tokens / OUTPUT_TOK_S)
    return Cell(name, order, 2, 2 * seconds, target=0.95)


def cells_of(long: bool) -> dict[str, Cell]:
    """The most important first."""
    cells = [_step(f"step_{count}", count) for count in STEPS]
    cells.append(_load("load_256_256", 512, 256, 256))
    cells.append(_load("load_1024_256", 384, 1024, 256))
    cells.append(_load("load_256_256_sampled", 512, 256, 256, 1.0))
    if long:
        cells += [_step(name, count, LONG_CONTEXT, 1.1) for count, name in LONG.items()]
    return {cell.name: cell for cell in cells}


def warm_orders(cells: list[Cell]) -> list[dict[str, Any]]:
    """What a side does once before it is ready: the prompts of the larger cells hold those of the others."""
    steps = [c.first for c in cells if c.first and c.first["context"] == CONTEXT]
    few = [order for order in steps if order["count"] <= WARM_STEPS]
    first: list[dict[str, Any]] = sorted(few, key=lambda order: -order["count"])
    kinds = {c.order["temperature"] for c in cells if c.loads}
    loads = [_load("", IN_FLIGHT, 256, 4, kind).order | {"seed": 0} for kind in sorted(kinds)]
    return first + loads


class Bench:
    """The cells, and what they found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.deadline = args, time.monotonic() + args.limit_s
        self.raw: dict[str, Any] = {
            "arguments": arguments(args), "predicted": PREDICTED, "notes": [], "seconds": {}, "cells": {},
        }  # fmt: skip
        self.figures: dict[str, Figure] = {}
        self.sides: dict[str, Process] = {}
        self.failed, self.turn = 0, 0

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return float(self.deadline - time.monotonic())

    def note(self, text: str) -> None:
        """Something that did not work, or was left out."""
        self.failed += 1
        self.raw["notes"].append(text)
        print(text, flush=True)

    def save(self) -> None:
        """Writes what there is."""
        report(self.args.name, self.figures, self.raw, self.args.out)

    def boot(self, cells: list[Cell]) -> None:
        """Starts both at once and waits until they are ready, or given up."""
        args, began = self.args, time.monotonic()
        longest = LONG_CONTEXT + 1024 if any(c.order.get("context") == LONG_CONTEXT for c in cells) else 8192
        options = Options(
            small=args.small, max_len=longest, cpu=args.cpu, warm=warm_orders(cells),
            prefix_caching=not args.no_prefix_caching,
        )  # fmt: skip
        self.raw["options"] = asdict(options)
        for kind in args.sides:
            words, module = [kind, json.dumps(asdict(options))], "benchmarks.direct.side"
            self.sides[kind] = Process(kind, module, words, _environment(kind), args.out)
        self.save()  # torch is imported meanwhile
        end = min(began + args.boot_s, self.deadline - SPARE_S)
        # ours first: it is ready long before, and its answer is not lost if vLLM takes too long
        for kind in sorted(self.sides):
            try:
                self.raw.setdefault("ready", {})[kind] = self.sides[kind].answer(
                    max(1.0, end - time.monotonic())
                ) | {"after_s": round(time.monotonic() - began, 1)}
            except Dead as error:
                self.drop(kind, f"boot: {error}")
        self.raw["seconds"]["boot"] = round(time.monotonic() - began, 1)
        print("ready", self.raw.get("ready"), flush=True)
        self.save()

    def drop(self, kind: str, why: str) -> None:
        """Goes on without a side."""
        self.note(why)
        self.sides.pop(kind).kill()

    def both(self, limit_s: float, **order: Any) -> dict[str, dict[str, Any]]:
        """One order to each side, one after the other; who begins alternates."""
        answers = {}
        self.turn += 1
        for kind in sorted(self.sides, reverse=bool(self.turn % 2)):
            try:
                answers[kind] = self.sides[kind].ask(min(limit_s, max(1.0, self.left_s - 1)), **order)
            except Dead as error:
                self.drop(kind, f"{order}: {error}")
        return answers

    def cell(self, number: int, cell: Cell) -> None:
        """All of its rounds that fit."""
        needed = cell.first_s + cell.round_s + SPARE_S
        if not self.sides or self.left_s < needed:
            left = f"{needed:.0f} s needed, {self.left_s:.0f} left" if self.sides else "no engine"
            self.note(f"{cell.name}: left out, {left}")
            return
        began, limit_s = time.monotonic(), 10 + 2 * (cell.round_s + cell.first_s)
        if cell.first is not None:
            self.both(limit_s, **cell.first)
        rounds: list[dict[str, dict[str, Any]]] = []
        expected = cell.round_s
        while len(rounds) < cell.rounds and self.sides and self.left_s > expected + SPARE_S:
            started = time.monotonic()
            seed = {"seed": 1000 * (number + 1) + len(rounds)} if cell.loads else {}
            rounds.append(self.both(limit_s, **cell.order, **seed))
            expected = 1.05 * (time.monotonic() - started)
        if len(rounds) < cell.rounds:
            self.note(f"{cell.name}: {len(rounds)} of {cell.rounds} rounds")
        self.raw["seconds"][cell.name] = round(time.monotonic() - began, 1)
        self.found(cell, rounds)
        self.save()

    def found(self, cell: Cell, rounds: list[dict[str, dict[str, Any]]]) -> None:
        """Medians, ratios, spread, and what a step of ours costs the host."""
        better: Literal["higher", "lower"] = "higher" if cell.loads else "lower"
        values = {kind: [r[kind][cell.key] for r in rounds if kind in r] for kind in ("ours", "vllm")}
        facts: dict[str, Any] = {"order": cell.order, "rounds": rounds, "spread": {}}
        for kind, numbers in values.items():
            if numbers:
                median = round(statistics.median(numbers), 3)
                unit = "tokens/s" if cell.loads else "ms"
                self.figures[f"{cell.name}_{kind}"] = Figure(median, unit, None, better)
                facts["spread"][kind] = [min(numbers), max(numbers)]
        ratios = [r["ours"][cell.key] / r["vllm"][cell.key] for r in rounds if len(r) == 2]
        if ratios:
            facts["ratios"] = [round(ratio, 4) for ratio in ratios]
            median = round(statistics.median(ratios), 4)
            self.figures[cell.figure] = Figure(median, "ratio", cell.target, better)
        ours = [r["ours"] for r in rounds if "ours" in r]
        if ours:
            facts["host_ms_a_step"] = {
                name: round(statistics.median(1e3 * r[f"{name}_s"] / r["steps"] for r in ours), 3)
                for name in ("loop", "process")
            }
        self.raw["cells"][cell.name] = facts
        shown = {kind: [round(value, 3) for value in numbers] for kind, numbers in values.items()}
        print(cell.name, shown, "ratios", facts.get("ratios"), facts.get("host_ms_a_step"), flush=True)


def _environment(kind: str) -> dict[str, str]:
    """vLLM's cuBLAS is as it comes; FlashInfer is not needed."""
    plain = {key: value for key, value in os.environ.items() if key not in CUBLAS_ENVIRONMENT}
    return plain | (CUBLAS_ENVIRONMENT if kind == "ours" else {"VLLM_USE_FLASHINFER_SAMPLER": "0"})


def main() -> None:
    """Runs the cells in their order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="h200-direct-beside-vllm")
    parser.add_argument("--limit-s", type=float, default=290.0, help="of the whole run, boot included")
    parser.add_argument(
        "--boot-s", type=float, default=190.0, help="a side that is not ready then is left out"
    )
    parser.add_argument("--small", choices=["tma", "hopper"], default="tma", help="how few rows load KV")
    parser.add_argument("--long", action="store_true", help="also 1 and 8 requests at 32k, at the end")
    parser.add_argument("--cells", nargs="+", choices=list(cells_of(True)), help="these, in this order")
    parser.add_argument("--sides", nargs="+", choices=["ours", "vllm"], default=["vllm", "ours"])
    parser.add_argument("--no-prefix-caching", action="store_true", help="vLLM computes prompts each time")
    parser.add_argument("--cpu", action="store_true", help="no GPU and no vLLM: both sides only wait")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [cells_of(True)[name] for name in args.cells or cells_of(args.long)]
    stop: Callable[..., None] = lambda *_: sys.exit(1)  # noqa: E731 (so that the sides are ended)
    signal.signal(signal.SIGTERM, stop)
    bench, began = Bench(args), time.monotonic()
    try:
        bench.boot(chosen)
        for number, cell in enumerate(chosen):
            bench.cell(number, cell)
    finally:
        for side in bench.sides.values():
            side.kill()
        bench.raw["seconds"]["all"] = round(time.monotonic() - began, 1)
        bench.save()
    raise SystemExit(bench.failed)


if __name__ == "__main__":
    main()
