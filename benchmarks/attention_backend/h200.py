"""vLLM's step with the verifier's attention as its backend, against vLLM's step as it comes, on one H200.

    python -m benchmarks.attention_backend.h200 --out DIR [--rounds 5] [--limit-s 470] [--small hopper|tma]

1. The kernels alone (check.py): float64, equal bits, microseconds beside FlashAttention 3; picks how decoding
   rows load their context.
2. Two engines in the shape of an 8B model, on the GPU at the same time, in turns: greedy tokens of both on
   equal weights; milliseconds of a decoding step; prompt tokens per second; output tokens per second.

DIR/h200-attention-backend.json is written after each cell; a cost is the ratio to vLLM as it comes in the
same round (median over the rounds; over 1 is slower). What no longer fits into --limit-s is left out and
said. DIR/*.log has what the processes said. The exit status counts what did not work. An engine whose tokens
are wrong is not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib.report import Figure, arguments, report
from benchmarks.lib.sides import Dead, Process

NAME = "h200-attention-backend"
HERE = "benchmarks.attention_backend"
ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""FlashInfer is not needed; weights.py is sent to the engine's process as a function."""
DECODE = [(64, 2048), (1, 32768), (256, 1024), (8, 32768)]
STEPS = 64
PROMPTS = [(1, 1024), (8, 1024), (1, 8192), (4, 8192)]
LOADS = [1, 8, 64, 256]
GREEDY = [5, 17, 64, 65, 200, 513, 1500, 20_000]
"""Prompt lengths of the comparison of tokens; the last one is prefilled in chunks."""
WITHIN = 1.03


def _process(kind: str, small: str, out: Path) -> Process:
    environment = os.environ | ENVIRONMENT
    if kind == "ours":
        environment["PYTHONPATH"] = f"{_plugin()}:{environment.get('PYTHONPATH', '')}"
    return Process(kind, f"{HERE}.side", [kind, small], environment, out)


def _plugin() -> str:
    """The folder by which vLLM's processes find the backend."""
    folder = Path(tempfile.mkdtemp())
    info = folder / "llm42_attention-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm42-attention\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nllm42_attention = {HERE}.backend:register\n"
    )
    return str(folder)


class Bench:
    """The parts, and what they found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.deadline = args, time.monotonic() + args.limit_s
        self.raw: dict[str, Any] = {"arguments": arguments(args), "notes": [], "seconds": {}}
        self.figures: dict[str, Figure] = {}
        self.sides: dict[str, Process] = {}
        self.failed = 0

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self.deadline - time.monotonic()

    def note(self, text: str, failed: bool = True) -> None:
        """Something that a reader must know."""
        self.failed += failed
        self.raw["notes"].append(text)
        print(text, flush=True)

    def save(self) -> None:
        """Writes what there is."""
        report(self.args.name, self.figures, self.raw, self.args.out)

    def check(self) -> str | None:
        """The kernels alone; the way of loading to use, None where none is right."""
        path = self.args.out / "check.json"
        with (self.args.out / "check.log").open("w") as log:
            try:
                subprocess.run(
                    [sys.executable, "-m", f"{HERE}.check", str(path)], stdout=log, stderr=subprocess.STDOUT,
                    timeout=self.args.check_s, env=os.environ | ENVIRONMENT, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                self.note(f"check: not done after {self.args.check_s} s")
        found = json.loads(path.read_text()) if path.exists() else {"ways": {}}
        self.raw["check"] = found
        print(json.dumps(found, indent=1), flush=True)
        right = [way for way, facts in found["ways"].items() if facts["right"]]
        for way, facts in found["ways"].items():
            if not facts["right"]:
                self.note(f"check: the kernel with load {way} is wrong or does not compile")
        if self.args.small:
            return self.args.small if self.args.small in right else None
        # without times (a kernel that hangs when it is timed) the plainer one is safe
        return found.get("best") or ("tma" if "tma" in right else None)

    def start(self, kind: str, small: str) -> None:
        """An engine's process; `wait` waits until it is ready."""
        self.sides[kind] = _process(kind, small, self.args.out)

    def wait(self) -> None:
        """Until the engines that were started are ready, or given up."""
        end = time.monotonic() + self.args.boot_s
        for kind, side in list(self.sides.items()):
            try:
                side.answer(max(1.0, min(end - time.monotonic(), self.left_s)))
            except Dead as error:
                self.drop(kind, f"boot: {error}")

    def drop(self, kind: str, why: str) -> None:
        """Goes on without a side."""
        self.note(why)
        self.sides.pop(kind).kill()

    def both(self, limit_s: float, flip: bool, **order: Any) -> dict[str, dict[str, Any]]:
        """One order to each side, one after the other."""
        answers = {}
        for kind in sorted(self.sides, reverse=flip):
            try:
                answers[kind] = self.sides[kind].ask(min(limit_s, max(1.0, self.left_s)), **order)
            except Dead as error:
                self.drop(kind, f"{order}: {error}")
        return answers

    def agreement(self) -> None:
        """Equal weights in both, then greedy tokens; an engine that is wrong is dropped."""
        self.raw["filled"] = self.both(60, False, do="fill")
        if set(self.sides) != {"plain", "ours"}:
            return
        found = self.both(90, False, do="tokens", lengths=GREEDY, count=16)
        if len(found) < 2:
            return
        pairs = list(zip(found["plain"]["tokens"], found["ours"]["tokens"], strict=True))
        probabilities = [
            abs(a[0] - b[0])
            for a, b in zip(found["plain"]["logprobs"], found["ours"]["logprobs"], strict=True)
        ]
        equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True)) / (16 * len(pairs))
        first = sum(a[0] == b[0] for a, b in pairs)
        worst = max(probabilities)
        self.raw["agreement"] = {
            "first_tokens_equal": f"{first} of {len(pairs)}", "tokens_equal_share": equal,
            "first_logprob_distance": probabilities, "distinct": len({t for a, _ in pairs for t in a}),
        }  # fmt: skip
        print(self.raw["agreement"], flush=True)
        if first < len(pairs) - 2 or sorted(probabilities)[len(pairs) // 2] > 0.2:
            self.drop("ours", f"agreement: {first} first tokens equal, log-probabilities off by {worst:.2f}")

    def decode(self) -> None:
        """Milliseconds of a decoding step."""
        for number, (batch, context) in enumerate(DECODE):
            cell = f"decode {batch}x{context}"
            if self.skip(cell, 40):
                continue
            seed, began = 100 + number, time.monotonic()
            order = {"batch": batch, "context": context, "seed": seed}
            warm = self.both(90, False, do="warm", **order)
            self.both(60, False, do="decode", tokens=8, **order)  # kernels that are compiled at first use
            rounds = self.turns(60, do="decode", tokens=STEPS, **order)
            values = {kind: [r["ms"] for r in answers] for kind, answers in rounds.items()}
            self.raw.setdefault("decode_ms", {})[cell] = values | {"prefill": warm}
            self.compare(cell, values, "ms", lower=True)
            self.raw["seconds"][cell] = round(time.monotonic() - began, 1)
            self.save()

    def prompts(self) -> None:
        """Prompt tokens per second, without the prefix cache's help."""
        for number, (batch, length) in enumerate(PROMPTS):
            cell = f"prompt {batch}x{length}"
            if self.skip(cell, 20):
                continue
            self.both(60, False, do="prompt", batch=batch, length=length, seed=9000 + number)
            rounds = self.turns(60, 10_000 + 100 * number, do="prompt", batch=batch, length=length)
            values = {kind: [r["tok_s"] for r in answers] for kind, answers in rounds.items()}
            self.raw.setdefault("prompt_tok_s", {})[cell] = values
            self.compare(cell, values, "tokens/s", lower=False)
            self.save()

    def loads(self) -> None:
        """Output tokens per second: 256-token prompts, 128 tokens."""
        for number, batch in enumerate(LOADS):
            cell = f"load {batch} (256 in, 128 out)"
            if self.skip(cell, 20):
                continue
            base = 20_000 + 100 * number
            self.both(60, False, do="throughput", batch=batch, length=256, seed=base + 99, tokens=8)
            rounds = self.turns(60, base, 3, do="throughput", batch=batch, length=256, tokens=128)
            values = {kind: [r["tok_s"] for r in answers] for kind, answers in rounds.items()}
            self.raw.setdefault("load_tok_s", {})[cell] = values
            self.compare(cell, values, "tokens/s", lower=False)
            self.save()

    def skip(self, cell: str, need_s: float) -> bool:
        """Whether there is no time or no engine for it."""
        if not self.sides or self.left_s < need_s:
            self.note(f"{cell}: left out, {'no time' if self.sides else 'no engine'}")
            return True
        return False

    def turns(
        self, limit_s: float, first_seed: int | None = None, rounds: int | None = None, **order: Any
    ) -> dict[str, list[dict[str, Any]]]:
        """Answers by side and round; who begins alternates. first_seed: another one in each round, from
        this on."""
        found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in self.sides}
        for number in range(rounds or self.args.rounds):
            if self.left_s < 10:
                break
            if first_seed is not None:
                order["seed"] = first_seed + number
            for kind, answer in self.both(limit_s, bool(number % 2), **order).items():
                found[kind].append(answer)
        return found

    def compare(self, cell: str, values: dict[str, list[float]], unit: str, lower: bool) -> None:
        """Medians, and the cost of ours: over 1 is slower, whatever the unit."""
        key = cell.replace(" ", "_").replace("(", "").replace(")", "").replace(",", "")
        for kind, numbers in values.items():
            if numbers:
                better: Literal["lower", "higher"] = "lower" if lower else "higher"
                self.figures[f"{key}_{kind}"] = Figure(
                    round(statistics.median(numbers), 3), unit, None, better
                )
        plain, ours = values.get("plain", []), values.get("ours", [])
        if ours and len(plain) == len(ours):
            ratios = [o / p if lower else p / o for p, o in zip(plain, ours, strict=True)]
            cost = statistics.median(ratios)
            timed = not cell.startswith("load")
            self.figures[f"{key}_cost"] = Figure(round(cost, 4), "ratio", WITHIN if timed else None)
            self.raw.setdefault("ratios", {})[cell] = [round(r, 4) for r in ratios]
        shown = {
            k: f"{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for k, v in values.items() if v
        }
        print(cell, unit, shown, "ratios", self.raw.get("ratios", {}).get(cell), flush=True)


def main() -> None:
    """Runs the parts in their order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default=NAME)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", choices=["hopper", "tma"], help="how decoding rows load (the faster)")
    parser.add_argument("--limit-s", type=float, default=470.0)
    parser.add_argument("--check-s", type=float, default=110.0)
    parser.add_argument("--boot-s", type=float, default=260.0)
    parser.add_argument("--no-check", action="store_true", help="the kernels were checked; with --small")
    parser.add_argument("--only-check", action="store_true", help="no engines")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    try:
        parts = [bench.agreement, bench.decode, bench.prompts, bench.loads]
        began = time.monotonic()
        if not args.only_check:
            bench.start("plain", "-")  # it compiles on the host while the kernels are checked
        small = args.small if args.no_check else bench.check()
        bench.raw |= {"small": small}
        bench.raw["seconds"]["check"] = round(time.monotonic() - began, 1)
        bench.save()
        if not args.only_check:
            began = time.monotonic()
            if small:
                bench.start("ours", small)
            bench.wait()
            bench.raw["seconds"]["boot"] = round(time.monotonic() - began, 1)
            for part in parts:
                began = time.monotonic()
                part()
                bench.raw["seconds"][part.__name__] = round(time.monotonic() - began, 1)
                bench.save()
    finally:
        for side in bench.sides.values():
            side.kill()
        bench.save()
    raise SystemExit(bench.failed)


if __name__ == "__main__":
    main()
