"""The verifier's actor decoding live streams, beside the same verifier driven in process; rounds in turns.

    python -m benchmarks.direct.actor --out DIR [--limit-s 280]     one H200, an 8B shape, random weights
    python -m benchmarks.direct.actor --out DIR --cpu               a tiny model on a CPU: tries the script

A private Ray cluster of one node with the supervisor and one verifier of the service. This process is the
replica: a pool of verifiers and a generator, without an engine; every request is a stream that is read to its
end. `in process`: the same settings, model and certificate in a process of its own (built.py), both alive on
one GPU, with half of the memory each.

actor_tok_s: output tokens of all streams over the time from the first request to the last token, at most
--in-flight at a time. gap_ms: between the deltas of a stream; new_tokens: in a delta. first_ms: until the
first delta. replica_cpu: CPU seconds of this process for each second. actor_over_in_process is the median
over the rounds. DIR/NAME.json is written after each round. Needs CUBLASLT_WORKSPACE_SIZE=0
CUBLAS_WORKSPACE_CONFIG=:0:0 on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm42_serve.launch import prepare_environment

prepare_environment()

import ray  # noqa: E402

from benchmarks.direct.model import add_arguments, model_of  # noqa: E402
from benchmarks.direct.side import prompts_of  # noqa: E402
from benchmarks.lib.report import Figure, arguments, report  # noqa: E402
from benchmarks.lib.sides import Dead, Process  # noqa: E402
from llm42.checkpoint.description import load_tokenizer  # noqa: E402
from llm42.config import Settings  # noqa: E402
from llm42.protocol import Request  # noqa: E402
from llm42.session.driver import Generator  # noqa: E402
from llm42.telemetry.metrics import Metrics  # noqa: E402
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT  # noqa: E402
from llm42_serve.replica.verifier_pool import VerifierPool  # noqa: E402

PREDICTED = {"actor_over_in_process": 0.97}
READY_S = 200.0


@dataclass
class Seen:
    """What the readers of one round saw, in seconds."""

    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """In each delta."""


def settings_of(args: argparse.Namespace) -> Settings:
    """Of all processes."""
    path, args.vocab = model_of(args)
    length = args.input + args.output + 16
    verifier = {
        "kv_tokens": args.in_flight * (-(-length // 64) * 64 + 64), "audit_share": 0.0,
        "certificate_dir": str(args.out / "certificates"), "max_waiting": 4 * args.requests, "gpus": 0.5,
    }  # fmt: skip
    tree = {
        "model": {
            "path": path, "name": "m", "device": "cpu" if args.cpu else "cuda", "max_model_len": length,
        },
        "session": {"mode": "direct"},
        "verifier": verifier,
        "server": {"verifiers": 1},
    }  # fmt: skip
    return Settings.load(tree)


class Replica:
    """What a fast-path replica has for directly decoded requests."""

    def __init__(self, settings: Settings) -> None:
        self.pool = VerifierPool(settings, Metrics())
        engine: Any = None  # no request reaches it
        self.generator = Generator(engine, load_tokenizer(settings.model), settings, self.pool)
        self.count = 0

    async def ready(self) -> None:
        """Raises RuntimeError with what the verifier says."""
        self.pool.start()
        async with asyncio.timeout(READY_S):
            await self.pool.settled()
        if not self.pool.ready:
            raise RuntimeError(self.pool.explain())

    async def stats(self) -> dict[str, Any]:
        """The verifier's counters."""
        found: dict[str, Any] = await self.pool.ready[0].handle.stats.remote()
        return found

    async def load(self, args: argparse.Namespace, requests: int, output: int, seed: int) -> dict[str, Any]:
        """One round."""
        gate, seen = asyncio.Semaphore(args.in_flight), Seen()
        before, spent = await self.stats(), time.process_time()
        prompts, began = list(prompts_of(str(seed), requests, args.input, args.vocab)), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(self._stream(gate, tuple(prompt), output, seen))
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        after = await self.stats()
        steps = after["steps"] - before["steps"]
        return {
            "tok_s": requests * output / seconds, "seconds": seconds, "replica_cpu": spent / seconds,
            "first_ms": _spread(seen.firsts), "gap_ms": _spread(seen.gaps), "deltas": len(seen.tokens),
            "new_tokens": statistics.mean(seen.tokens), "steps": steps,
            "step_ms": 1e3 * (after["step_s"] - before["step_s"]) / max(1, steps),
            "preemptions": after["preemptions"] - before["preemptions"],
        }  # fmt: skip

    async def _stream(
        self, gate: asyncio.Semaphore, prompt: tuple[int, ...], output: int, seen: Seen
    ) -> None:
        async with gate:
            self.count += 1
            request = Request(f"r{self.count}", prompt, output, deterministic=True)
            last, total = time.perf_counter(), 0
            async with aclosing(self.generator.generate(request)) as deltas:
                async for delta in deltas:
                    now = time.perf_counter()
                    (seen.gaps if total else seen.firsts).append(now - last)
                    seen.tokens.append(len(delta.token_ids))
                    total, last = total + len(delta.token_ids), now
            if total != output:
                raise RuntimeError(f"{total} tokens of {output}")


def _spread(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(seconds) or [0.0]
    return {
        f"p{p}": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2) for p in (50, 99)
    }


def start_ray(args: argparse.Namespace) -> None:
    """A cluster of this machine alone. Workers find the code as this process does."""
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20,
        num_cpus=4, num_gpus=0 if args.cpu else 1,
    )  # fmt: skip


def figures_of(rounds: list[dict[str, Any]]) -> dict[str, Figure]:
    """Medians over the rounds."""

    def median(side: str, *path: str) -> float:
        values = []
        for found in rounds:
            value = found.get(side)
            for key in path:
                value = value[key] if value else None
            if value is not None:
                values.append(value)
        return round(statistics.median(values), 3) if values else float("nan")

    figures = {
        "actor_tok_s": Figure(median("actor", "tok_s"), "tokens/s", None, "higher"),
        "in_process_tok_s": Figure(median("in_process", "tok_s"), "tokens/s", None, "higher"),
        "gap_ms_p50": Figure(median("actor", "gap_ms", "p50"), "ms"),
        "gap_ms_p99": Figure(median("actor", "gap_ms", "p99"), "ms"),
        "replica_cpu": Figure(median("actor", "replica_cpu"), "cores"),
    }
    ratios = [r["actor"]["tok_s"] / r["in_process"]["tok_s"] for r in rounds if "in_process" in r]
    if ratios:
        ratio = round(statistics.median(ratios), 4)
        figures["actor_over_in_process"] = Figure(ratio, "ratio", None, "higher")
    return {name: f for name, f in figures.items() if f.value == f.value}


async def measure(
    args: argparse.Namespace, replica: Replica, beside: Process | None, raw: dict[str, Any]
) -> None:
    """All rounds that fit, after a short one."""
    await replica.load(args, args.in_flight, 8, 0)
    order = {
        "do": "load", "length": args.input, "in_flight": args.in_flight, "sampling": {},
    }  # fmt: skip
    if beside is not None:
        await asyncio.to_thread(beside.ask, 120, **order, count=args.in_flight, tokens=8, seed=0)
    longest = 0.0
    for number in range(args.rounds):
        if time.monotonic() + 1.1 * longest > args.deadline:
            raw["notes"].append(f"{number} of {args.rounds} rounds")
            return
        began, found = time.monotonic(), dict[str, Any]()
        found["actor"] = await replica.load(args, args.requests, args.output, 100 + number)
        if beside is not None:
            whole = order | {"count": args.requests, "tokens": args.output, "seed": 100 + number}
            found["in_process"] = await asyncio.to_thread(beside.ask, 300, **whole)
        raw["rounds"].append(found)
        longest = max(longest, time.monotonic() - began)
        print(json.dumps(found), flush=True)
        report(args.name, figures_of(raw["rounds"]), raw, args.out)


async def run(args: argparse.Namespace, settings: Settings, raw: dict[str, Any]) -> None:
    """The actor first: it leaves the certificate that the other one takes."""
    replica, began, beside = Replica(settings), time.monotonic(), None
    try:
        await replica.ready()
        raw["ready"] = {"actor_s": round(time.monotonic() - began, 1)}
        print("actor ready", raw["ready"], flush=True)
        if not args.alone:
            file = args.out / "settings.json"
            file.write_text(json.dumps(settings.model_dump(mode="json")))
            environment = os.environ | (CUBLAS_ENVIRONMENT if not args.cpu else {})
            beside = Process("built", "benchmarks.direct.built", [str(file)], environment, args.out)
            try:
                left = max(1.0, args.deadline - time.monotonic())
                raw["ready"]["in_process"] = await asyncio.to_thread(beside.answer, left)
            except Dead as error:
                raw["notes"].append(str(error))
                beside = None
        await measure(args, replica, beside, raw)
    finally:
        replica.pool.close()
        if beside is not None:
            beside.kill()


def main() -> None:
    """Runs everything. The exit status counts what was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="h200-direct-actor")
    parser.add_argument("--limit-s", type=float, default=280.0)
    for name, default in (
        ("in-flight", 256),
        ("requests", 512),
        ("input", 256),
        ("output", 256),
        ("rounds", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--alone", action="store_true", help="nothing in process beside it")
    add_arguments(parser)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    args.deadline = time.monotonic() + args.limit_s
    settings = settings_of(args)
    raw: dict[str, Any] = {
        "arguments": arguments(args), "predicted": PREDICTED, "notes": [], "rounds": [],
    }  # fmt: skip
    start_ray(args)
    try:
        asyncio.run(run(args, settings, raw))
    finally:
        ray.shutdown()
        report(args.name, figures_of(raw["rounds"]), raw, args.out)
    print(raw["notes"], figures_of(raw["rounds"]), flush=True)
    raise SystemExit(len(raw["notes"]))


if __name__ == "__main__":
    main()
