"""Every `llm42` command on one H200, from the command line, with SmolLM2 and with an 8B's shape.

    python -m benchmarks.commands.h200 --out DIR [--parts NAME...] [--model GGUF] [--limit-s 520]

Writes DIR/commands.json after each command: what was run, its exit status and the one that was expected,
seconds, and the figures that it printed; DIR/NAME.log has what it said. A command that fails or takes too
long does not stop the others; a part that no longer fits into --limit-s is left out and said. The exit status
is the number of commands that did not end as expected. `--device cpu` is for trying the script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.commands.lab import QUESTION, Lab, plain_record
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT

LLM42 = (sys.executable, "-m", "llm42")
PLANTS = {
    "cuda": ("one-ulp", "topp-scan", "attention-split", "attention-tile", "dirty-tail"),
    "cpu": ("one-ulp", "row-count"),
}


def certify(lab: Lab) -> None:
    """SmolLM2 without and with plants."""
    config = lab.config("small")
    lab.run("certify", [*LLM42, "certify", "--json", "-c", config], figures=_certified)

    def planted(plant: str) -> None:
        command = [*LLM42, "certify", "--json", "--plant", plant, "-c", config]
        lab.run(f"plant-{plant}", command, 240, expected=1, figures=_refuted)

    with ThreadPoolExecutor() as beside:
        list(beside.map(planted, PLANTS[lab.device]))
    unknown = [*LLM42, "certify", "--plant", "nothing", "-c", config]
    lab.run("plant-unknown", unknown, expected=2)
    if lab.device == "cuda":
        where = wide_model(lab, layers=1, name="one-layer-8b")
        wide = lab.config("wide", model={"path": where})
        command = [*LLM42, "certify", "--json", "--plant", "split-k", "-c", wide]
        lab.run("plant-split-k", command, expected=1, figures=_refuted)


def certify_8b(lab: Lab) -> None:
    """All layers of an 8B's shape, random weights, as files."""
    began = time.monotonic()
    where = wide_model(lab, layers=32, name="8b")
    lab.note("write-8b", ["benchmarks.lib.random_model.write_random"], True, began)
    config = lab.config("8b", model={"path": where, "max_model_len": 4096})
    lab.run("certify-8b", [*LLM42, "certify", "--json", "-c", config], 240, figures=_certified)


def wide_model(lab: Lab, layers: int, name: str) -> str:
    """A directory with random weights in the shape of an 8B model, with SmolLM2's tokenizer."""
    from benchmarks.lib.random_model import LLAMA_8B, write_random

    config = replace(LLAMA_8B, num_layers=layers, vocab_size=49152 if layers == 1 else LLAMA_8B.vocab_size)
    return str(write_random(config, Tokenizer.load(lab.model), lab.out.parent / f"{lab.out.name}-{name}"))


def _certified(reply: dict[str, Any]) -> dict[str, Any]:
    names = ("passed", "providers", "buckets", "compared_rows", "seconds", "operator", "violations")
    return {name: reply[name] for name in names if name in reply}


def _refuted(reply: dict[str, Any]) -> dict[str, Any]:
    return {
        "passed": reply["passed"],
        "operator": reply.get("operator"),
        "first": reply.get("violations", [])[:1],
    }


def generate(lab: Lab) -> None:
    """Greedy and sampled, twice each, which must be one; best effort; then the audit of all."""
    _generate(lab, "generate", lab.config("small"))


def _generate(lab: Lab, prefix: str, config: str, limit_s: float = 120) -> None:
    records = []
    for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
        words = [
            "generate",
            QUESTION,
            "--json",
            "--max-tokens",
            "64",
            "--temperature",
            str(temperature),
            "--seed",
            "7",
        ]
        replies = [
            lab.run(f"{prefix}-{name}-{i}", [*LLM42, *words, "-c", config], limit_s, figures=_generated)
            for i in range(2)
        ]
        if all(replies):
            parts = [(r["token_ids"], r["system_fingerprint"]) for r in replies]
            lab.note(f"{prefix}-{name}-equal", words, parts[0] == parts[1], time.monotonic())
            records.append(plain_record(name, lab.model, replies[0], temperature))
            lab.replies[f"{prefix}-{name}"] = replies[0]
    words = ["generate", QUESTION, "--json", "--max-tokens", "64", "--best-effort"]
    lab.run(f"{prefix}-best-effort", [*LLM42, *words, "-c", config], limit_s, figures=_generated)
    if records:
        _audit(lab, prefix, records, config)


def _audit(lab: Lab, prefix: str, records: list[dict[str, Any]], config: str) -> None:
    """The records as they are, and with one token changed."""
    altered = json.loads(json.dumps(records[:1]))
    altered[0]["output"][5] += 1
    for name, lines, expected in (("audit", records, 0), ("audit-altered", altered, 1)):
        file = lab.out / f"{prefix}-{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [*LLM42, "audit", str(file), "--json", "-c", config]
        lab.run(f"{prefix}-{name}", command, expected=expected, figures=_audited)


def _audited(reply: dict[str, Any]) -> dict[str, Any]:
    verdicts = [f.get("verdict") for f in reply["findings"]]
    return {"exit_code": reply["exit_code"], "records_s": reply.get("records_s"), "odd": verdicts}


def _generated(reply: dict[str, Any]) -> dict[str, Any]:
    evidence = {k: reply["llm42"].get(k) for k in ("windows", "rollbacks", "verified_tokens")}
    return {"tokens": len(reply["token_ids"]), "fingerprint": reply["system_fingerprint"]} | evidence


def affinity(lab: Lab) -> None:
    """Mismatches per 1,000 of the torch engine, under each load."""
    command = [*LLM42, "affinity", "--json", "--requests", "16", "--tokens", "64", "-c", lab.config("small")]
    lab.run("affinity", command, figures=_near)


def _near(reply: dict[str, Any]) -> dict[str, Any]:
    names = ("tokens", "mismatches", "mismatches_per_1000", "equal_share")
    loads = {
        f"{load['load']}_{load['concurrent']}": {name: load[name] for name in names}
        for load in reply["loads"]
    }
    return {"engine": reply["engine"], "loads": loads}


def demo(lab: Lab) -> None:
    """With the torch engine."""
    words = ["demo", "--json", "--requests", "8", "--load", "12", "--tokens", "96"]
    lab.run("demo", [*LLM42, *words, "-c", lab.config("small")], 180, figures=_shown)


def _shown(reply: dict[str, Any]) -> dict[str, Any]:
    names = (
        "deterministic_diverged",
        "best_effort_diverged",
        "numerics",
        "fast_path_products",
        "fingerprint",
    )
    speeds = {
        f"{m}_{s}": reply[m][s]
        for m in ("best_effort", "deterministic")
        for s in ("tokens_s_alone", "tokens_s_loaded")
    }
    return {name: reply[name] for name in names} | speeds | {"rollbacks": reply["deterministic"]["rollbacks"]}


def serve(lab: Lab) -> None:
    """`llm42 serve`: one request twice, the fingerprint beside the one of `generate`, and an orderly end."""
    _serve(lab, "serve", lab.config("small", server={"port": 8642}), 200)


def _serve(lab: Lab, name: str, config: str, limit_s: float) -> None:
    command, began = [*LLM42, "serve", "-c", config], time.monotonic()
    with (lab.out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            health = _healthy(process, limit_s)
            ready = round(time.monotonic() - began, 1)
            replies = [_ask() for _ in range(2)] if health.get("deterministic") else []
        finally:
            process.terminate()
            try:
                status: int | None = process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = None
    equal = len(replies) == 2 and replies[0]["choices"] == replies[1]["choices"]
    here = lab.replies.get("generate-greedy", {}).get("system_fingerprint")
    there = replies[0]["system_fingerprint"] if replies else None
    found = {"ready_s": ready, "health": health, "equal": equal, "fingerprint": there, "of_generate": here}
    lab.note(name, command, equal and status == 0, began, exit_status=status, **found)


def _healthy(process: subprocess.Popen[bytes], limit_s: float) -> dict[str, Any]:
    """The last health reply: with a ready verifier, or what it was when time or the process ended."""
    health: dict[str, Any] = {}
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen("http://127.0.0.1:8642/health", timeout=5) as reply:
                health = json.load(reply)
            if health.get("deterministic"):
                break
        except OSError:
            pass
        time.sleep(0.5)
    return health


def _ask() -> dict[str, Any]:
    body = {
        "model": Settings().model.name, "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 64, "temperature": 0.8, "seed": 7, "deterministic": True, "logprobs": True,
    }  # fmt: skip
    request = urllib.request.Request(
        "http://127.0.0.1:8642/v1/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=120) as reply:
        return dict(json.load(reply))


def with_vllm(lab: Lab) -> None:
    """The same commands with vLLM as the fast path; `generate` with a vLLM that starts quickly."""
    # a fixed cache: what others on the GPU take and free while it starts does not matter then
    common = {
        "gpu_memory_utilization": 0.4,
        "export_dir": str(lab.out.parent / "exports"),
        "extra_args": {"kv_cache_memory_bytes": 4 << 30},
    }
    near = {"verifier": {"affinity": "vllm"}}
    compiled = lab.config("vllm", engine={"kind": "vllm", "vllm": common}, **near)
    words = ["affinity", "--json", "--requests", "16", "--tokens", "64", "-c", compiled]
    lab.run("vllm-affinity", [*LLM42, *words], 260, figures=_near)
    words = ["demo", "--json", "--requests", "8", "--load", "12", "--tokens", "96", "-c", compiled]
    lab.run("vllm-demo", [*LLM42, *words], 200, figures=_shown)
    eager = {"kind": "vllm", "vllm": common | {"enforce_eager": True}}
    words = [
        "generate",
        QUESTION,
        "--json",
        "--max-tokens",
        "64",
        "-c",
        lab.config("vllm-eager", engine=eager, **near),
    ]
    lab.run("vllm-generate", [*LLM42, *words], 150, figures=_generated)
    config = lab.config("vllm-serve", engine={"kind": "vllm", "vllm": common}, server={"port": 8642}, **near)
    _serve(lab, "vllm-serve", config, 200)


def tests(lab: Lab) -> None:
    """tests/gpu, its results as JUnit's XML."""
    words = "-m pytest -q --confcutdir=tests/gpu -o addopts= -p no:cacheprovider tests/gpu --junitxml"
    variables = [f"{name}={value}" for name, value in CUBLAS_ENVIRONMENT.items()]
    command = ["env", *variables, sys.executable, *words.split(), str(lab.out / "tests-gpu.xml")]
    lab.run("tests-gpu", command, 420)


PARTS: dict[str, tuple[Callable[[Lab], None], int]] = {
    "generate": (generate, 60),
    "certify": (certify, 60),
    "affinity": (affinity, 30),
    "demo": (demo, 30),
    "serve": (serve, 60),
    "certify-8b": (certify_8b, 120),
    "vllm": (with_vllm, 200),
    "tests": (tests, 120),
}
"""Name -> what it does, and the fewest seconds that must be left for it to begin."""


def main() -> None:
    """Runs the parts in their order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=Settings().model.path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--limit-s", type=float, default=520.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lab = Lab(args.out.absolute(), str(Path(args.model).absolute()), args.device)
    deadline, left_out = time.monotonic() + args.limit_s, 0
    for name in args.parts:
        part, least_s = PARTS[name]
        if deadline - time.monotonic() < least_s:
            left_out += 1
            print(f"{name}: left out, no time", flush=True)
            continue
        part(lab)
    raise SystemExit(left_out + sum(not d.as_expected for d in lab.done))


if __name__ == "__main__":
    main()
