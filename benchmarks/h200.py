"""Everything that is measured on one H200, in one go: each part a process of its own with a limit of time.

    python -m benchmarks.h200 --out DIR [--model GGUF] [--parts NAME...] [--limit-s 1500]

Writes DIR/PART.log and the parts' JSON files, and a line for each part. A part that fails or takes too long
does not stop the others; one that no longer fits into --limit-s is left out and said. The exit status is the
number of parts that did not succeed. Results are copied into benchmarks/results by hand, once read.
With several GPUs, several of these run side by side, each with its own parts and CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from llm42.config import Settings
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT

GRAPHS = json.dumps(
    {
        "compilation_config": {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
        }
    }
)  # fmt: skip
HANDOFF = (
    "-m benchmarks.prefill_once.kv_handoff {part} --model {model} --device cuda --dtype bfloat16 --engine"
)
TESTS = "-m pytest -q --confcutdir=tests/gpu -o addopts= tests/gpu"
PARTS: dict[str, tuple[str, int]] = {
    "tests": (TESTS + " --ignore=tests/gpu/test_service_cuda.py", 300),
    "certify": ("-m benchmarks.verifier.h200 certify --dir {out}", 150),
    "steps": ("-m benchmarks.verifier.h200 steps attention --dir {out}", 150),
    "affinity": ("-m benchmarks.affinity.rollbacks --path {model} --out {out}", 420),
    "affinity-wide": (
        "-m benchmarks.affinity.rollbacks --path {model} --wide 16 --parts greedy --out {out}",
        420,
    ),
    "affinity-operators": ("-m benchmarks.affinity.wide {out}", 300),
    "rollback": (
        "-m benchmarks.engine.vllm_rollback --max-num-seqs 64 --queue 64 --rollbacks 60 --out {out}",
        240,
    ),
    "adapter": ("-m benchmarks.engine.vllm_adapter --rounds 4 --processor --memory 0.28 --out {out}", 420),
    "adapter-small": (
        "-m benchmarks.engine.vllm_adapter --rounds 4 --processor --memory 0.28 --model {model}"
        " --name h200-vllm-adapter-small --out {out}",
        300,
    ),
    "cost": ("-m benchmarks.engine.early_cost --parts shared --out {out}", 360),
    "invariant": ("-m benchmarks.engine.early_cost --parts invariant --out {out}", 300),
    "hand": (HANDOFF.format(part="hand", model="{model}") + " GRAPHS --out {out}/hand.json", 240),
    "preempt": (
        HANDOFF.format(part="preempt", model="{model}") + " GRAPHS --blocks 110 --out {out}/preempt.json",
        200,
    ),
    "handoff-cost": (
        HANDOFF.format(part="cost", model="random-8b") + " GRAPHS --length 1024 --out {out}/cost.json",
        200,
    ),
    "service": (TESTS + "/test_service_cuda.py", 300),
}
"""Name -> what Python runs, and the most seconds it may take."""
WORKSPACE = ("rollback", "adapter", "adapter-small", "cost", "invariant")
"""Parts whose vLLM keeps cuBLAS's workspace, as it comes."""


def command_of(part: str, model: str, out: Path) -> list[str]:
    """The part's command line."""
    words = PARTS[part][0].format(model=model, out=out).split()
    return [sys.executable, *(GRAPHS if word == "GRAPHS" else word for word in words)]


def run(part: str, model: str, out: Path, limit_s: float) -> tuple[str, float]:
    """How it ended, and after how many seconds."""
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    if part not in WORKSPACE:
        environment |= CUBLAS_ENVIRONMENT
    began = time.monotonic()
    with (out / f"{part}.log").open("w") as log:
        try:
            done = subprocess.run(
                command_of(part, model, out), env=environment, stdout=log, stderr=subprocess.STDOUT,
                timeout=limit_s, check=False,
            )  # fmt: skip
            state = "ok" if done.returncode == 0 else f"exit {done.returncode}"
        except subprocess.TimeoutExpired:
            state = "too long"
    return state, time.monotonic() - began


def main() -> None:
    """Runs the parts in their order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=Settings().model.path)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--limit-s", type=float, default=1500.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    deadline, missed = time.monotonic() + args.limit_s, 0
    for part in args.parts:
        left = deadline - time.monotonic()
        if left < 20:
            state, seconds = "left out", 0.0
        else:
            state, seconds = run(part, args.model, args.out, min(PARTS[part][1], left))
        missed += state != "ok"
        print(f"{part:14} {state:10} {seconds:6.0f} s", flush=True)
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
