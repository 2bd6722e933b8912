"""The verifier decoding by itself beside vLLM as it comes, on one H200: both alive, rounds in turns.

    python3 -m benchmarks.direct.beside_vllm --out DIR --limit-s 290 [--small tma] [--cells ...]
    python3 -m benchmarks.direct.beside_vllm --out DIR --limit-s 290 --sides ours invariant --cells ...
    python3 -m benchmarks.direct.beside_vllm --out DIR --cpu ...      all only wait: a check of this file

An 8B shape with random weights in bfloat16, each side in a process of its own (side.py), the same KV
memory, the same client loop. vLLM compiles and uses CUDA graphs; prefix caching is on in all. `invariant` is
vLLM with VLLM_BATCH_INVARIANT=1. Three sides do not fit at once: a ratio of two needs a run with both.

step_N: wall time between tokens of N requests at 1,024 tokens of context (step_N_32k: 32,768), prompts
cached: (a generation of 104 tokens - one of 8) / 96, from outside. load_A_B: output tokens/s, prompts of A
tokens, outputs of B, all known at the start, at most 256 in flight; a request enters when another has ended;
fresh prompts each round. `_sampled`: temperature 1; `_restricted`: 0.8, top_p 0.95, top_k 50, presence
penalty 0.5; with seeds in ours, without in vLLM (whose FlashInfer sampler is off). prefill_L: prompt
tokens/s, prompts of L tokens, outputs of one, many at once or `_alone`. ttft: time to first token of a mixed
load (side.py) whose requests come at random, at 60 % of the rate that vLLM takes in this run when saturated.
Ours has credit 64, which the client renews when half is used.

A figure is the median over the rounds of one side's value over another's in the same round. DIR/NAME.json is
written after each cell; a cell that does not fit into --limit-s is left out and said. A side that fails does
not stop the others. DIR/vllm.log and DIR/ours.log have what they said. The exit status counts what did not
work or was left out. Predicted before the first run: cells.py.
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
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.direct.cells import (
    LONG_CONTEXT,
    MEAN,
    PREDICTED,
    Cell,
    cells_of,
    usual_cells,
    warm_orders,
    with_rate,
)
from benchmarks.direct.engines import Options
from benchmarks.lib.report import Figure, arguments, report
from benchmarks.lib.sides import Dead, Process
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT

KINDS = ("ours", "invariant", "vllm")
"""Ratios are of an earlier one over a later one."""
SPARE_S = 3.0


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
            kv_tokens=args.kv_tokens, prefix_caching=not args.no_prefix_caching,
        )  # fmt: skip
        self.raw["options"] = asdict(options)
        for kind in args.sides:
            words, module = [kind, json.dumps(asdict(options))], "benchmarks.direct.side"
            self.sides[kind] = Process(kind, module, words, _environment(kind), args.out)
        self.save()  # torch is imported meanwhile
        end = min(began + args.boot_s, self.deadline - SPARE_S)
        # ours first: it is ready long before, and its answer is not lost if vLLM takes too long
        for kind in sorted(self.sides, key=KINDS.index):
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
        order, prepared = cell.order, dict[str, dict[str, Any]]()
        if cell.first is not None:
            prepared = self.both(limit_s, **cell.first)
            order = with_rate(cell, prepared)
        rounds: list[dict[str, dict[str, Any]]] = []
        expected = cell.round_s
        while len(rounds) < cell.rounds and self.sides and self.left_s > expected + SPARE_S:
            started = time.monotonic()
            seed = {"seed": 1000 * (number + 1) + len(rounds)} if cell.fresh else {}
            rounds.append(self.both(limit_s, **order, **seed))
            expected = 1.05 * (time.monotonic() - started)
        if len(rounds) < cell.rounds:
            self.note(f"{cell.name}: {len(rounds)} of {cell.rounds} rounds")
        self.raw["seconds"][cell.name] = round(time.monotonic() - began, 1)
        self.raw["cells"][cell.name] = {"order": order, "prepared": prepared, "rounds": rounds}
        for key in cell.keys:
            self.found(cell, key, rounds)
        self.found_costs(cell, rounds)
        self.found_mean()
        self.save()

    def found(self, cell: Cell, key: str, rounds: list[dict[str, dict[str, Any]]]) -> None:
        """Medians, ratios and spread of one field."""
        facts, name, unit = self.raw["cells"][cell.name], cell.field_name(key), cell.unit(key)
        values = {kind: [r[kind][key] for r in rounds if kind in r] for kind in KINDS}
        values = {kind: numbers for kind, numbers in values.items() if numbers}
        for kind, numbers in values.items():
            median = round(statistics.median(numbers), 3)
            self.figures[f"{name}_{kind}"] = Figure(median, unit, None, cell.better(key))
            facts.setdefault("spread", {})[f"{key} {kind}"] = [min(numbers), max(numbers)]
        for above, below in combinations(KINDS, 2):
            ratios = [r[above][key] / r[below][key] for r in rounds if {above, below} <= r.keys()]
            if ratios:
                title, target = cell.ratio(key, above, below)
                median = round(statistics.median(ratios), 4)
                self.figures[title] = Figure(median, "ratio", target, cell.better(key))
                facts.setdefault("ratios", {})[title] = [round(ratio, 4) for ratio in ratios]
        shown = {kind: [round(value, 3) for value in numbers] for kind, numbers in values.items()}
        print(name, shown, "ratios", facts.get("ratios"), flush=True)

    def found_costs(self, cell: Cell, rounds: list[dict[str, dict[str, Any]]]) -> None:
        """What a step of ours costs the host."""
        ours = [r["ours"] for r in rounds if "ours" in r and r["ours"]["steps"]]
        if ours:
            self.raw["cells"][cell.name]["host_ms_a_step"] = costs = {
                name: round(statistics.median(1e3 * r[f"{name}_s"] / r["steps"] for r in ours), 3)
                for name in ("loop", "process")
            }
            print(cell.name, "host ms a step", costs, flush=True)

    def found_mean(self) -> None:
        """The mean and the worst of the three loads, once all are there."""
        kept = [self.figures.get(name.replace("load", "kept")) for name in MEAN]
        values = [figure.value for figure in kept if figure is not None]
        if len(values) == len(MEAN):
            mean = round(statistics.mean(values), 4)
            self.figures["kept_100"] = Figure(mean, "ratio", 0.95, "higher")
            self.figures["worst_100"] = Figure(min(values), "ratio", 0.90, "higher")


def _environment(kind: str) -> dict[str, str]:
    """vLLM's cuBLAS is as it comes; FlashInfer is not needed."""
    plain = {key: value for key, value in os.environ.items() if key not in CUBLAS_ENVIRONMENT}
    if kind == "ours":
        return plain | CUBLAS_ENVIRONMENT
    invariant = {"VLLM_BATCH_INVARIANT": "1"} if kind == "invariant" else {}
    return plain | {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | invariant


def main() -> None:
    """Runs the cells in their order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="h200-direct-beside-vllm")
    parser.add_argument("--limit-s", type=float, default=290.0, help="of the whole run, boot included")
    parser.add_argument(
        "--boot-s", type=float, default=190.0, help="a side that is not ready then is left out"
    )
    parser.add_argument("--small", choices=["tma", "hopper"], default="hopper", help="how few rows load KV")
    parser.add_argument("--cells", nargs="+", choices=list(cells_of()), help="these, in this order")
    parser.add_argument("--skip", nargs="+", choices=list(cells_of()), default=[], help="not these")
    parser.add_argument("--rounds", type=int, help="of every cell, instead of its own number")
    parser.add_argument("--sides", nargs="+", choices=KINDS, default=["vllm", "ours"])
    parser.add_argument("--kv-tokens", type=int, default=Options.kv_tokens, help="KV cache of each side")
    parser.add_argument("--no-prefix-caching", action="store_true", help="vLLM computes prompts each time")
    parser.add_argument("--cpu", action="store_true", help="no GPU and no vLLM: the sides only wait")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    every = cells_of(short=args.cpu)
    names = args.cells or list(usual_cells(short=args.cpu))
    chosen = [every[name] for name in names if name not in args.skip]
    if args.rounds:
        chosen = [replace(cell, rounds=args.rounds) for cell in chosen]
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
