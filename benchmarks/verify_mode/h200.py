"""Verify mode and auto beside vLLM as it comes, on one H200, in turns with both alive.

    python -m benchmarks.verify_mode.h200 --out DIR --limit-s 560 --cells kept_2 ... [--rounds 2]
    python -m benchmarks.verify_mode.h200 --out DIR --cpu [--engine vllm]     tries the script, on two cores
    python -m benchmarks.verify_mode.h200 --out DIR --merge FILE FILE ...     one result of several runs'

Sides, each a process: `vllm`, untouched; `ours` (replica.py): vLLM through the adapter, driver, sessions
and the pool of a replica, the verifier's actor in a process of its own in a private Ray cluster. The same
files, an 8B's shape with random weights in bfloat16, or SmolLM2.

kept_P, auto_kept_P: output tokens/s of a load of which P percent is deterministic, with mode verify pinned or
auto, over vLLM's with none; requests enter as others end, and what is counted is a window after a ramp
(loads.py). auto_over_pinned: auto over the better pinned mode. rollbacks_per_1000_*: verify pinned, all
deterministic, prompts of 20 to 320 tokens and outputs of 64 to 384. prefill_once_gain_P: what prefilling once
gains at most at 1024/256: verify with the prompts in vLLM's cache over verify (warmed.py).
best_effort_step_max: the time between tokens of best effort through the adapter, over vLLM's, of the worst
number of sequences and context.

All rows of a stage run once, then those of --again, for as long as they fit into --limit-s; DIR/NAME.json
is written after each, and DIR/STAGE/SIDE.log has what a side said. Within --reuse-s, what vLLM found under
a load stands for the same load with another share of deterministic requests, of which it knows nothing.
Predictions, loads and targets: cells.py. Deterministic answers of the modes in a round are compared: equal,
or the run has failed. The exit status counts what did not work or was left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.direct.beside_vllm import SPARE_S, Bench
from benchmarks.lib.sides import Dead, Process
from benchmarks.verify_mode.arguments import merge, model_directory, parsed
from benchmarks.verify_mode.cells import (
    BOOT_S,
    KV,
    LANE_S,
    LONGEST,
    PREDICTED,
    Row,
    estimate_s,
    fits,
    rows_of,
    stage_of,
    stages,
    steps_of,
)
from benchmarks.verify_mode.figures import MOSTLY, differing, figures_of, rates, steps_figure, wrongly_cached
from benchmarks.verify_mode.loads import Load
from benchmarks.verify_mode.options import Options
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT

CLOSE_S, WARM_S = 20.0, 2.5
SHORT_MOSTLY = 0.4
"""Of short prompts, whose last block is computed anew."""


class VerifyBench(Bench):
    """The stages, and what they found."""

    def __init__(self, args: argparse.Namespace, model: str) -> None:
        super().__init__(args)
        self.model, self.rows = model, dict[str, list[dict[str, Any]]]()
        self.recent = dict[Load, tuple[float, dict[str, Any]]]()
        """Of vLLM untouched: when it ran such a load, and what was found."""
        self.raw["predicted"] = {name: list(told) for name, told in PREDICTED.items()}
        self.raw |= {"rows": {}, "stages": {}, "answers": {"compared": 0, "differ": 0}}

    def stage(self, stage: str, cells: list[str]) -> None:
        """Boots what it needs, runs all that fits, and ends it."""
        rows, steps = rows_of(cells, self.args.cpu), stage == "steps"
        lanes = {lane for row in rows for lane in row.lanes}
        if not self.args.cpu and not fits(BOOT_S[stage], self.left_s, SPARE_S):
            self.note(f"{stage}: left out, {BOOT_S[stage]:.0f} s to boot, {self.left_s:.0f} left")
            return
        kinds = ["vllm", "ours"] if steps or "vllm" in lanes else ["ours"]
        self.start(stage, kinds)
        try:
            if steps:
                self.steps()
            else:
                self.warm(rows)
                self.turns(rows, [cell for cell in self.args.again or cells if cell in cells])
        finally:
            self.end()

    def start(self, stage: str, kinds: list[str]) -> None:
        """Waits until the sides are ready, or given up."""
        args, began = self.args, time.monotonic()
        kv_tokens, verifier = (8192, 8192 if KV[stage][1] else 0) if args.cpu else KV[stage]
        certificates = str(Path(args.scratch or args.out) / "certificates")
        options = Options(
            args.tokenizer if stage == "smollm2" and not args.cpu else self.model, args.engine, args.cpu,
            args.affinity, 512 if args.cpu else LONGEST[stage], kv_tokens, verifier,
            batched_tokens=args.batched_tokens, certificates=certificates,
        )  # fmt: skip
        logs = args.out / stage
        logs.mkdir(exist_ok=True)
        told = self.raw["stages"].setdefault(stage, {"options": asdict(options)})
        print(f"{stage}: about {BOOT_S[stage]:.0f} s to boot {kinds}, {self.left_s:.0f} left", flush=True)
        for kind in kinds:
            words = [kind, json.dumps(asdict(options))]
            environment = environment_of(kind, options)
            self.sides[kind] = Process(kind, "benchmarks.verify_mode.side", words, environment, logs)
        end = min(began + args.boot_s, self.deadline - SPARE_S)
        for kind in kinds:
            try:
                told[kind] = self.sides[kind].answer(max(1.0, end - time.monotonic()))
            except Dead as error:
                self.drop(kind, f"boot: {error}")
        told["seconds"] = round(time.monotonic() - began, 1)
        print(stage, "ready after", told["seconds"], "s", {k: told.get(k) for k in kinds}, flush=True)
        self.save()

    def end(self) -> None:
        """Ends the sides; ours has a cluster to end."""
        for kind, side in self.sides.items():
            try:
                if kind == "ours":
                    side.ask(CLOSE_S, do="close")
            except Dead as error:
                print(error, flush=True)
            side.kill()
        self.sides.clear()

    def drop(self, kind: str, why: str) -> None:
        """As Bench's; a cluster is ended if that is still possible."""
        self.note(why)
        side = self.sides.pop(kind)
        if kind == "ours" and side.process.poll() is None:
            side.process.send_signal(signal.SIGTERM)
            time.sleep(1.0)
        side.kill()

    # ---- loads

    def warm(self, rows: list[Row]) -> None:
        """Each side and mode once, under the largest load: kernels are compiled, and auto has seen both."""
        if not rows:
            return
        largest = max(rows, key=lambda row: row.load.in_flight)
        load = replace(largest.load, percent=100, ramp_s=0.0, window_s=WARM_S)
        for lane in dict.fromkeys(("verify", "direct", *(x for x in largest.lanes if x != "warmed"))):
            self.run_lane(lane, replace(largest, load=load), "warm")
        print(f"warm: {self.left_s:.0f} s left", flush=True)

    def turns(self, rows: list[Row], again: list[str]) -> None:
        """All rows, then those of the cells to be run again, round after round, while they fit."""
        done = 0
        for number in range(self.args.rounds):
            for row in rows_of(again, self.args.cpu) if number else rows:
                needed = row.round_s - (LANE_S + row.load.seconds) * (self.known(row) is not None)
                needed += self.args.settle_s * ("auto" in row.lanes)
                if "ours" in self.sides and fits(needed, self.left_s, SPARE_S):
                    self.row(row, number)
                    done += 1
                elif not number:
                    self.note(f"{row.name}: left out, {needed:.0f} s needed, {self.left_s:.0f} left")
        print(f"{done} turns of {len(rows)} rows", flush=True)

    def known(self, row: Row) -> dict[str, Any] | None:
        """What vLLM untouched has found a short while ago. It knows no deterministic requests: the share of
        them is nothing to it."""
        at, found = self.recent.get(replace(row.load, percent=0), (-math.inf, None))
        age = time.monotonic() - at
        return None if found is None or age > self.args.reuse_s else found | {"reused_after_s": round(age, 1)}

    def row(self, row: Row, number: int) -> None:
        """One round: the lanes one after the other, another one first each time."""
        told = {name: PREDICTED[name] for name in row.cells if name in PREDICTED}
        print(f"{row.name} round {number}: about {row.round_s:.0f} s of {self.left_s:.0f}", flush=True)
        first = number % len(row.lanes)
        seed, began = f"{row.name}.{number}", time.monotonic()
        answers = {}
        for lane in (*row.lanes[first:], *row.lanes[:first]):
            known = self.known(row) if lane == "vllm" else None
            found = known or self.run_lane(lane, row, seed)
            if found is not None:
                answers[lane] = found
            if lane == "vllm" and found is not None and not known:
                self.recent[replace(row.load, percent=0)] = time.monotonic(), found
        self.compare(row.name, answers)
        for text in wrongly_cached(answers, SHORT_MOSTLY if self.args.cpu else MOSTLY):
            self.note(f"{row.name} round {number} {text}")
        self.rows.setdefault(row.name, []).append(answers)
        facts = self.raw["rows"].setdefault(
            row.name, {"load": asdict(row.load), "predicted": told, "seconds": []}
        )
        facts["seconds"].append(round(time.monotonic() - began, 1))
        facts |= {"rounds": self.rows[row.name], "tok_s": rates(self.rows[row.name])}
        self.figures |= figures_of(self.rows)
        own = {row.name, *row.cells, *(cell.replace("once", "once_gain") for cell in row.cells)}
        mine = {n: f.value for n, f in self.figures.items() if n in own or n.endswith(f"_{row.name}")}
        print(row.name, facts["tok_s"], mine, "predicted", {k: v[0] for k, v in told.items()}, flush=True)
        self.save()

    def run_lane(self, lane: str, row: Row, seed: str) -> dict[str, Any] | None:
        """What one side found; None where it is gone."""
        kind = "vllm" if lane == "vllm" else "ours"
        if kind not in self.sides:
            return None
        mode = {} if kind == "vllm" else {"mode": lane}
        load = row.load
        if lane == "auto" and load.ramp_s:
            load = replace(load, ramp_s=load.ramp_s + self.args.settle_s)
        limit_s = min(60.0 + 3 * load.seconds, max(1.0, self.left_s - 1))
        try:
            found = self.sides[kind].ask(limit_s, do="flow", load=asdict(load), seed=seed, **mode)
        except Dead as error:
            self.drop(kind, f"{row.name} {lane}: {error}")
            return None
        if "failed" in found or not found.get("quiet", True):
            went_on = f"went on afterwards: {found.get('left')}"
            self.note(f"{row.name} {lane}: {found.get('failed', went_on)}")
        return None if "failed" in found else found

    def compare(self, name: str, answers: dict[str, dict[str, Any]]) -> None:
        """What is deterministic is equal in all modes."""
        compared, differ = differing(answers)
        for lane in answers.values():
            lane.pop("digests", None)
        self.raw["answers"]["compared"] += compared
        self.raw["answers"]["differ"] += differ
        if differ:
            self.note(f"{name}: {differ} of {compared} answers DIFFER between modes")

    # ---- steps

    def steps(self) -> None:
        """The decode steps of best effort."""
        ratios = dict[str, float]()
        for number, cell in enumerate(steps_of(self.args.cpu)):
            needed = cell.first_s + cell.rounds * cell.round_s
            print(f"{cell.name}: about {needed:.0f} s of {self.left_s:.0f}", flush=True)
            self.cell(number, cell)
            if (figure := self.figures.get(f"{cell.name}_over_vllm")) is not None:
                ratios[cell.name] = figure.value
                self.figures |= steps_figure(list(ratios.values()))
                self.save()
        print("best_effort_step_max", ratios, "predicted", PREDICTED["best_effort_step_max"], flush=True)


def environment_of(kind: str, options: Options) -> dict[str, str]:
    """As a replica has it, and as vLLM comes. Nothing of ours is in the latter's."""
    plain = {key: value for key, value in os.environ.items() if key not in CUBLAS_ENVIRONMENT}
    plain |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if options.cpu:
        plain |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    alike = kind == "ours" and options.affinity == "vllm" and not options.cpu
    return plain | (CUBLAS_ENVIRONMENT if alike else {})


def main() -> None:
    """Runs the stages in the order of their cells."""
    args = parsed(__doc__)
    if args.merge:
        print(merge(args.out, args.name, args.merge))
        return
    print(f"about {estimate_s(args.cells, args.rounds, args.cpu):.0f} s of {args.limit_s:.0f}", flush=True)
    stop: Callable[..., None] = lambda *_: sys.exit(1)  # noqa: E731 (so that the sides are ended)
    signal.signal(signal.SIGTERM, stop)
    bench, began = VerifyBench(args, model_directory(args)), time.monotonic()
    try:
        for stage in stages(args.cells):
            bench.stage(stage, [cell for cell in args.cells if stage_of(cell) == stage])
    finally:
        bench.end()
        bench.raw["seconds"]["all"] = round(time.monotonic() - began, 1)
        bench.save()
    raise SystemExit(bench.failed)


if __name__ == "__main__":
    main()
