"""Every peer in turns on one H200: vLLM as it comes, batch-invariant vLLM, and ours in its layouts.

    python -m benchmarks.peers.h200 --out DIR --level engine --group canonical [--limit-s 570]
    python -m benchmarks.peers.h200 --out DIR --level http --group auto [--rows 10_256_256 ...]
    python -m benchmarks.peers.h200 --out DIR --level engine --group canonical --cpu     tries the script
    python -m benchmarks.peers.h200 --out DIR --merge FILE FILE ...      one h200-peers.json of several runs'

An 8B's shape with random weights in bfloat16, the same files for all. Not all systems fit on one GPU: a group
is what one command has (cells.py), vLLM as it comes is in every group, and each ratio is taken within one
round of one command. level engine: each system's engine in a process, with the same client loop. level http:
`vllm serve` and `llm42 serve`, streams, one client process for all; its CPU share is in the result, and above
0.7 of a core the client is what is measured.

A row is PERCENT_LOAD: of its requests, so many are deterministic; they enter as others end, and what is
counted is a window after a ramp (benchmarks/verify_mode/loads.py). PERCENT_open_LOAD: requests come at
random, at 60 % of the tokens per second that vLLM made of the load in this run. Of each row and system:
output tokens/s, time to first token, time per token and gaps between deliveries by class (p50, p99:
latency.py), rollbacks and lost tokens, memory, the client's CPU, and what was predicted before any run.

kept_P: the mean over the six loads of auto (2, 10, 50 %) or canonical (100 %) over vLLM, as far as they were
run (loads_in_kept_P), worst_P the worst of them. DIR/NAME.json is written after each row; what did not
fit or was not meant to run is in `left_out`. The exit status counts what failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.direct.model import add_arguments, model_of
from benchmarks.lib.report import Figure, arguments, report, validate
from benchmarks.lib.sides import Dead
from benchmarks.peers.cells import (
    DEFAULT,
    GROUPS,
    LANE_S,
    LEVELS,
    PREDICTED,
    SECOND,
    SETTLE_S,
    WARM_S,
    Row,
    estimate_s,
    left_out,
    predicted,
    rows_of,
)
from benchmarks.peers.figures import figures_of, table
from benchmarks.peers.systems import Engines, Servers, Systems
from benchmarks.verify_mode.loads import Load
from llm42.checkpoint.description import read_config
from tests.support import write_model

NAME, SPARE_S = "h200-peers", 6.0
OURS_AND_OTHERS = ("invariant", "canonical", "auto", "verify")


class Peers:
    """The rows of one command, and what they found."""

    def __init__(self, args: argparse.Namespace, systems: Systems, rows: list[Row]) -> None:
        self.args, self.systems, self.rows = args, systems, rows
        self.deadline = time.monotonic() + args.limit_s
        self.found = dict[str, list[dict[str, Any]]]()
        self.recent = dict[Load, tuple[float, dict[str, Any]]]()
        """Of vLLM: when it ran a load, and what was found. It knows no deterministic requests."""
        self.failed = 0
        self.raw: dict[str, Any] = {
            "arguments": arguments(args), "predicted": {k: list(v) for k, v in PREDICTED.items()},
            "notes": [], "left_out": [*left_out([row.name for row in rows], args.level)], "rows": {},
            "not_in_group": [s for s in OURS_AND_OTHERS if s not in GROUPS[args.group]],
        }  # fmt: skip

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return float(self.deadline - time.monotonic())

    def note(self, text: str) -> None:
        """Something that did not work."""
        self.failed += 1
        self.raw["notes"].append(text)
        print(text, flush=True)

    def run(self) -> None:
        """Boots, warms up, and runs all rows that fit, round after round."""
        began = time.monotonic()
        for why in self.systems.start(min(began + self.args.boot_s, self.deadline - SPARE_S)):
            self.note(why)
        self.raw |= {"ready": self.systems.ready, "boot_s": round(time.monotonic() - began, 1)}
        print("ready after", self.raw["boot_s"], "s:", self.systems.lanes, flush=True)
        self.save()
        self.warm()
        self.raw["memory"] = self.systems.memory()
        for number in range(self.args.rounds):
            for row in self.rows:
                saved = row.load.seconds + LANE_S if self.known(row) else 0.0
                if (needed := row.seconds - saved) + SPARE_S <= self.left_s:
                    self.row(row, number)
                elif not number:
                    self.raw["left_out"].append(row.name)
                    print(f"{row.name}: left out, {needed:.0f} s, {self.left_s:.0f} left", flush=True)
        self.raw["memory_at_end"] = self.systems.memory()

    def warm(self) -> None:
        """Each system once, under the largest load: kernels are compiled."""
        largest = max(self.rows, key=lambda row: row.load.in_flight)
        load = replace(largest.load, percent=100, ramp_s=0.0, window_s=WARM_S)
        for lane in self.systems.lanes:
            self.lane(lane, replace(largest, load=load, open=False), "warm", None)
        print(f"warm: {self.left_s:.0f} s left", flush=True)

    def row(self, row: Row, number: int) -> None:
        """One round: the systems one after the other, another one first each time; an open row begins with
        vLLM's rate, if that is not known."""
        began, answers = time.monotonic(), dict[str, dict[str, Any]]()
        first, rate = number % len(row.lanes), self.rate(row)
        for lane in (*row.lanes[first:], *row.lanes[:first]):
            found = self.known(row) if lane == "vllm" else None
            if found is None and lane in self.systems.lanes:
                found = self.lane(lane, row, f"{row.name}.{number}", rate)
                if lane == "vllm" and found is not None and not row.open:
                    self.recent[replace(row.load, percent=0)] = time.monotonic(), found
            if found is not None:
                answers[lane] = found
                told = predicted(row.name, lane) if not self.args.cpu else None
                print(f"{row.name} {lane}: {found['tok_s']:.1f} tok/s, predicted {told}", flush=True)
        self.compare(row.name, answers)
        self.found.setdefault(row.name, []).append(answers)
        facts = self.raw["rows"].setdefault(row.name, {"load": asdict(row.load), "seconds": []})
        facts |= {"rounds": self.found[row.name], "rate": rate}
        facts["predicted_tok_s"] = {lane: predicted(row.name, lane) for lane in row.lanes}
        facts["seconds"].append(round(time.monotonic() - began, 1))
        self.save()

    def rate(self, row: Row) -> float | None:
        """vLLM's tokens per second under the load of an open row, when it is saturated."""
        if not row.open:
            return None
        for other in self.rows:
            rounds = self.found.get(other.name, []) if other.shape == row.shape and not other.open else []
            if rates := [each["vllm"]["tok_s"] for each in rounds if "vllm" in each]:
                return float(rates[-1])
        load = replace(row.load, ramp_s=4.5, window_s=5.0)
        found = self.lane("vllm", replace(row, load=load), f"{row.name}.rate", None)
        return float(found["tok_s"]) if found else 1000.0

    def known(self, row: Row) -> dict[str, Any] | None:
        """What vLLM has found a short while ago."""
        at, found = self.recent.get(replace(row.load, percent=0), (0.0, None))
        age = time.monotonic() - at
        fresh = found is not None and age < self.args.reuse_s and not row.open
        return found | {"reused_after_s": round(age, 1)} if fresh and found is not None else None

    def lane(self, lane: str, row: Row, seed: str, tok_s: float | None) -> dict[str, Any] | None:
        """What one system found; None where it failed."""
        load = row.load
        if lane == "auto" and load.ramp_s:
            load = replace(load, ramp_s=load.ramp_s + self.args.settle_s)
        try:
            limit_s = min(60.0 + 3 * load.seconds, max(1.0, self.left_s - 1))
            found = self.systems.flow(lane, load, seed, limit_s, tok_s)
        except (Dead, RuntimeError, OSError, TimeoutError, ExceptionGroup) as error:
            self.note(f"{row.name} {lane}: {error!r}"[:600])
            return None
        if not found.get("quiet", True):
            self.note(f"{row.name} {lane}: went on afterwards: {found.get('left')}")
        return found

    def compare(self, name: str, answers: dict[str, dict[str, Any]]) -> None:
        """What is deterministic is equal in all of ours."""
        given = [found.pop("digests", {}) for found in answers.values()]
        for number, one in enumerate(given):
            for other in given[number + 1 :]:
                if differ := [key for key in one.keys() & other.keys() if one[key] != other[key]]:
                    self.note(f"{name}: {len(differ)} answers DIFFER between modes")

    def save(self) -> None:
        """Writes what there is."""
        self.raw["table"] = table(self.found)
        report(self.args.name, figures_of(self.found, self.args.level), self.raw, self.args.out)


def merge(out: Path, name: str, files: list[Path]) -> Path:
    """One result of several commands: figures anew, from the rounds of all; item 2's are taken over, and say
    which run they are of. A file may be joined already."""
    documents = [json.loads(file.read_text()) for file in files]
    runs = [run for document in documents for run in _runs(document)]
    figures, raw = dict[str, Figure](), dict[str, Any]()
    for level in LEVELS:
        rows: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            if run.get("arguments", {}).get("level") == level:
                for row, facts in run["rows"].items():
                    rows.setdefault(row, []).extend(facts["rounds"])
        if rows:
            figures |= figures_of(rows, level)
            raw[level] = {"left_out": left_out(list(rows), level), "table": table(rows)}
    told = {key: asdict(figure) | {"met": figure.met} for key, figure in figures.items()}
    for number, run in enumerate(runs, 1):
        told |= {key: figure | {"run": number} for key, figure in run.get("figures", {}).items()}
    whole = documents[-1] | {
        "command": "; ".join(run["command"] for run in runs), "figures": told, "raw": raw | {"runs": runs},
    }  # fmt: skip
    validate(whole)
    path = out / f"{name}.json"
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path


def _runs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """With when and how, and the figures that follow from no rows."""
    raw = document["raw"]
    if "runs" in raw:
        return list(raw["runs"])
    of_its_own = {} if "rows" in raw else {"figures": document["figures"]}
    return [{"date": document["date"], "command": document["command"], **of_its_own, **raw}]


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default=NAME)
    parser.add_argument("--level", choices=LEVELS, default="engine")
    parser.add_argument("--group", choices=list(GROUPS), default="canonical")
    parser.add_argument("--rows", nargs="+", help="in this order; `second`: those of a second command")
    parser.add_argument("--rounds", type=int, default=1, help="of all rows, while they fit")
    parser.add_argument("--limit-s", type=float, default=570.0, help="of the whole run")
    parser.add_argument("--boot-s", type=float, default=280.0, help="who is not ready then is left out")
    parser.add_argument("--reuse-s", type=float, default=110.0, help="how long a rate of vLLM's is good")
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="what auto has to find its plan in")
    parser.add_argument("--engine", choices=["vllm", "torch"], help="ours; by default vllm, with --cpu torch")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="only joins results")
    add_arguments(parser)
    args = parser.parse_args()
    args.engine = args.engine or ("torch" if args.cpu else "vllm")
    args.verifiers = 1
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    return args


def main() -> None:
    """Runs the rows of one command."""
    args = parsed()
    if args.merge:
        print(merge(args.out, args.name, args.merge))
        return
    names = args.rows or DEFAULT.get((args.level, args.group)) or DEFAULT["http", args.group]
    rows = rows_of(SECOND if list(names) == ["second"] else names, args.level, args.group, args.cpu)
    print(f"about {estimate_s(rows, args.group):.0f} s of {args.limit_s:.0f}", flush=True)
    path, vocab = model_of(args)
    if args.cpu and args.engine == "vllm":  # for CPUs, it has no attention for the usual tiny one
        path = str(write_model(Path(args.scratch or args.out) / "tiny-64", head_dim=64, positions=4096))
    c = read_config(Path(path))
    args.kv_token_bytes = c.num_layers * 2 * c.num_kv_heads * c.head_dim * 2
    systems = Engines(args, path) if args.level == "engine" else Servers(args, path, vocab)
    stop: Callable[..., None] = lambda *_: sys.exit(1)  # noqa: E731 (so that the systems are ended)
    signal.signal(signal.SIGTERM, stop)
    bench = Peers(args, systems, rows)
    try:
        bench.run()
    finally:
        systems.end()
        bench.save()
    raise SystemExit(bench.failed)


if __name__ == "__main__":
    main()
