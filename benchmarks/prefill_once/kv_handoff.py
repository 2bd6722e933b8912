"""Can vLLM take a prompt's KV from the verifier, so that a deterministic prompt is prefilled once?

python -m benchmarks.prefill_once.kv_handoff PART --model MODEL [--device cuda] [--dtype bfloat16] \
    [--out FILE]

MODEL: a GGUF file, a Hugging Face directory, or random-8b (for `cost`: both sides have random weights of
their own). The verifier runs in this process, vLLM's engine in another,
which reads the verifier's cache in place (kv_pool.py). Exits with 1 when a check fails.

  hand    outputs after a hand-over, prompt tokens computed, controls (wrong KV, requests without a handle,
          a pool that is gone, abort and resubmission, one step with everything)
  bare    vLLM without the connector generates the same (--against: what `hand` wrote to --out)
  preempt the same with too few blocks, so that requests are preempted
  cost    seconds to the first token and copy times, with and without a handle

In float32 every comparison is for equality. In bfloat16 the two sides round differently, so that outputs may
part after a while; then the log-probability of the first token must agree within BF16_LOGPROB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.report import Figure, report
from benchmarks.prefill_once.kv_handoff_sides import (
    Ask,
    Engine,
    Got,
    Prefilled,
    Source,
    from_files,
    random_8b,
)
from llm42.host.threads import set_threads
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT

RANDOM_8B = "random-8b"
LENGTHS = (5, 64, 150, 257, 400)
OUTPUT = 32
BF16_LOGPROB = 0.15
MIN_CONTEXT = 1024
ENVIRONMENT = CUBLAS_ENVIRONMENT | {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class Proof:
    """One engine, one source, the prompts; collects figures and failed checks."""

    def __init__(self, options: argparse.Namespace, connector: bool = True, **engine: Any) -> None:
        self.exact = options.dtype == "float32"
        max_len = max(MIN_CONTEXT, options.length + 64)
        if options.model == RANDOM_8B:
            model, directory, self.stream = random_8b()
            engine |= {"load_format": "dummy"}
        else:
            model, directory, self.stream = from_files(options.model, options.dtype, options.device, max_len)
        self.source = Source(model, max_len, 16384)
        cuts = [self.stream[11 * i : 11 * i + length] for i, length in enumerate(LENGTHS)]
        self.prompts = [self.source.prefill(tokens) for tokens in cuts]
        handle, trace = tempfile.mkstemp(suffix=".jsonl")
        os.close(handle)
        self.trace = Path(trace)
        if options.device == "cuda":
            engine = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.5} | engine
        self.engine = Engine(
            directory, self.trace if connector else None, dtype=options.dtype,
            max_model_len=max_len, **(options.engine | engine),
        )  # fmt: skip
        self.facts: dict[str, Any] = {"engine": self.engine.facts}
        print("    ", self.engine.facts, flush=True)
        self.failed: list[str] = []

    def check(self, name: str, holds: bool) -> None:
        """Notes a check."""
        print("ok  " if holds else "FAIL", name, flush=True)
        if not holds:
            self.failed.append(name)

    def same(self, name: str, ours: dict[str, Got], reference: dict[str, Got]) -> None:
        """Outputs agree: in float32 all tokens, in bfloat16 the first log-probability."""
        for key, got in ours.items():
            wanted = reference[key]
            gap = abs(got.logprobs[0] - wanted.logprobs[0])
            agree = agreement(got.tokens, wanted.tokens)
            self.facts.setdefault(name, {})[key] = {"agree": agree, "first_logprob_gap": gap}
            holds = got.tokens == wanted.tokens if self.exact else gap < BF16_LOGPROB
            self.check(f"{name} {key}: {agree} of {len(wanted.tokens)} tokens, gap {gap:.1e}", holds)

    def finish(self, options: argparse.Namespace, figures: dict[str, Figure] | None = None) -> None:
        """Writes what was found; ends everything."""
        self.engine.close()
        self.source.close()
        self.trace.unlink()
        raw = {"failed": self.failed, **self.facts}
        if options.out is not None:
            options.out.write_text(json.dumps(raw, indent=1) + "\n")
        if options.report is not None:
            failed = {"failed_checks": Figure(len(self.failed), "checks", 0)}
            print(report(options.report, failed | (figures or {}), raw))
        sys.exit(1 if self.failed else 0)


def agreement(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def handed(prompts: list[Prefilled], salt: str | None, length: int = OUTPUT) -> list[Ask]:
    """Requests with handles, named by the length of their prompts."""
    return [Ask(str(len(p.prompt)), p.prompt, length, p.handle, salt) for p in prompts]


def plain(prompts: list[Prefilled], salt: str | None, length: int = OUTPUT) -> list[Ask]:
    """The same without: best-effort requests."""
    return [replace(ask, handle=None) for ask in handed(prompts, salt, length)]


def one_by_one(engine: Engine, asks: list[Ask]) -> dict[str, Got]:
    """Each alone."""
    out: dict[str, Got] = {}
    for ask in asks:
        out |= engine.run([ask])
    return out


def hand(options: argparse.Namespace) -> None:
    """See the module's text."""
    proof = Proof(options)
    engine, ready = proof.engine, proof.prompts
    proof.facts["attention"] = next(note for note in engine.notes() if "layout" in note)
    reference = one_by_one(engine, plain(ready, "reference"))
    for key, got in reference.items():
        proof.check(f"plain {key}: {got.computed} prompt tokens computed", got.computed == int(key))
    proof.facts["reference"] = {key: got.tokens for key, got in reference.items()}

    alone = one_by_one(engine, handed(ready, "alone"))
    proof.same("after hand-over", alone, reference)
    for key, got in alone.items():
        text = f"hand-over {key}: {got.loaded} loaded, {got.computed} computed"
        proof.check(text, (got.loaded, got.computed) == (int(key) - 1, 1))
    _with_first_token(proof, reference)
    _mixed(proof, reference)
    _wrong(proof, reference)
    _gone(proof, reference)
    _abort(proof, reference)
    proof.finish(options)


def _with_first_token(proof: Proof, reference: dict[str, Got]) -> None:
    """The verifier's first token goes along: vLLM computes no row twice."""
    asks = [
        Ask(str(len(p.prompt)), [*p.prompt, p.next_token], OUTPUT - 1, p.handle, "first")
        for p in proof.prompts
    ]
    for (key, got), p in zip(one_by_one(proof.engine, asks).items(), proof.prompts, strict=True):
        tokens = [p.next_token, *got.tokens]
        agree = agreement(tokens, reference[key].tokens)
        text = f"with the verifier's first token {key}: {agree} of {OUTPUT} tokens, {got.computed} computed"
        equal = agree == OUTPUT or not proof.exact
        proof.check(text, equal and (got.loaded, got.computed) == (int(key), 1))


def _mixed(proof: Proof, reference: dict[str, Got]) -> None:
    """Everything in one batch: with a handle and without, the same prompts."""
    asks = [
        Ask(f"{kind} {a.name}", a.tokens, a.max_tokens, a.handle, f"mixed {kind}")
        for kind, some in (("plain", plain(proof.prompts, None)), ("handed", handed(proof.prompts, None)))
        for a in some
    ]
    both = proof.engine.run(asks)
    proof.same("in one batch", both, {a.name: reference[a.name.split()[1]] for a in asks})
    for key, got in both.items():
        kind, length = key.split()
        wanted = 1 if kind == "handed" else int(length)
        proof.check(f"one batch, {key}: {got.computed} prompt tokens computed", got.computed == wanted)


def _wrong(proof: Proof, reference: dict[str, Got]) -> None:
    """Controls: KV in the wrong order or of another text changes the output; and who else reads it."""
    engine, p, other = proof.engine, proof.prompts[-1], proof.source.prefill(proof.prompts[-1].prompt[::-1])
    key, runs = str(len(p.prompt)), {}
    wrong = {"shuffled": p.handle | {"blocks": p.handle["blocks"][::-1]}, "other text": other.handle}
    for kind, salt in itertools.product(wrong, ("salt", None)):
        for handle in (wrong[kind], None):
            name = f"{kind}, {salt or 'no salt'}, {'handle' if handle else 'somebody else'}"
            got = engine.run([Ask(name, p.prompt, OUTPUT, handle, salt if handle else None)])[name]
            gap = abs(got.logprobs[0] - reference[key].logprobs[0])
            agree = agreement(got.tokens, reference[key].tokens)
            runs[name] = {"agree": agree, "first_logprob_gap": gap, "computed": got.computed}
            print("    ", name, runs[name], flush=True)
        engine.forget()
    proof.facts["wrong"] = runs
    for kind in wrong:
        with_salt, without = runs[f"{kind}, salt, handle"], runs[f"{kind}, no salt, somebody else"]
        seen = with_salt["agree"] < OUTPUT or with_salt["first_logprob_gap"] > BF16_LOGPROB
        proof.check(f"{kind}: the output shows it", seen)
        clean = runs[f"{kind}, salt, somebody else"]
        proof.check(f"{kind}: a salt keeps it from others", clean["computed"] == len(p.prompt))
        proof.check(f"{kind}: without one others read it (known)", without["computed"] < len(p.prompt))


def _gone(proof: Proof, reference: dict[str, Got]) -> None:
    """A pool that cannot be opened: vLLM computes the prompt itself."""
    missing: Any = {"name": "gone", "shape": [1, 1, 1, 1, 1], "dtype": "float32"}
    missing |= {"keys": "/dev/shm/llm42-gone", "values": "/dev/shm/llm42-gone"}
    asks = [replace(a, handle=a.handle | {"pool": missing}) for a in handed(proof.prompts, "gone")]
    proof.same("pool is gone", proof.engine.run(asks), reference)
    failures = sum("failed" in note for note in proof.engine.notes())
    proof.check(f"pool is gone: {failures} loads failed", failures == len(asks))


def _abort(proof: Proof, reference: dict[str, Got]) -> None:
    """Abort in mid-output, then resubmit prompt + half of the output with the same handle."""
    first = proof.engine.run(handed(proof.prompts, "abort"), abort_after=20)
    asks = [
        Ask(a.name, a.tokens + first[a.name].tokens[:10], OUTPUT - 10, a.handle, "abort")
        for a in handed(proof.prompts, "abort")
    ]
    second = proof.engine.run(asks)
    whole = {key: Got(first[key].tokens[:10] + g.tokens, first[key].logprobs) for key, g in second.items()}
    proof.same("abort and resubmit", whole, reference)
    proof.facts["resubmitted (loaded, computed)"] = {k: (g.loaded, g.computed) for k, g in second.items()}


def bare(options: argparse.Namespace) -> None:
    """Without the connector."""
    proof = Proof(options, connector=False)
    reference = json.loads(options.against.read_text())["reference"]
    for key, got in one_by_one(proof.engine, plain(proof.prompts, "reference")).items():
        proof.check(f"no connector {key}: same tokens", got.tokens == reference[key])
    proof.finish(options)


def preempt(options: argparse.Namespace) -> None:
    """Too few blocks for all."""
    length, proof = 300, Proof(options, num_gpu_blocks_override=options.blocks)
    engine = proof.engine
    reference = one_by_one(engine, plain(proof.prompts, "reference", length))
    got = engine.run(handed(proof.prompts, "tight", length))
    preempted = sum(note.get("preempted", 0) for note in engine.notes())
    proof.facts["preempted"] = preempted
    proof.check(f"requests were preempted: {preempted} times", preempted > 0)
    proof.same("after preemption", got, reference)
    proof.finish(options)


def cost(options: argparse.Namespace) -> None:
    """Prompts of --length tokens, one after another."""
    proof = Proof(options)
    engine, times = proof.engine, {"plain": [], "handed": []}
    for i in range(8):
        p = proof.source.prefill(proof.stream[i : i + options.length])
        for name, handle in (("plain", None), ("handed", p.handle)):
            ask = Ask(name, p.prompt, 1, handle, f"cost {i} {name}")
            got = engine.run([ask])[name]
            times[name].append(got.seconds)
            proof.check(f"{name}: {got.computed} computed", got.computed == (1 if handle else options.length))
    loads = [note for note in engine.notes() if note.get("tokens") == options.length - 1][1:]
    queued_ms, load_ms = (statistics.median(note[k] for note in loads) * 1e3 for k in ("queued_s", "done_s"))
    figures = {
        **{f"first_token_{k}_ms": Figure(statistics.median(v[1:]) * 1e3, "ms") for k, v in times.items()},
        "load_queued_ms": Figure(queued_ms, "ms"),
        "load_ms": Figure(load_ms, "ms"),
        "load_us_per_token": Figure(load_ms * 1e3 / (options.length - 1), "us"),
    }
    proof.facts["tokens"] = options.length
    proof.finish(options, figures)


def main() -> None:
    """Reads the command line and runs one part."""
    parts = {f.__name__: f for f in (hand, bare, preempt, cost)}
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", help="a name below benchmarks/results")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--blocks", type=int, default=14)
    parser.add_argument("--length", type=int, default=960, help="prompt length of `cost`")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of vLLM's LLM, JSON")
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    set_threads(1)
    torch.set_grad_enabled(False)
    parts[options.part](options)


if __name__ == "__main__":
    main()
