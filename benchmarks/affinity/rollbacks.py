"""Rollbacks of the whole path on one GPU: vLLM proposes, the verifier with `verifier.affinity: vllm` decides.

python -m benchmarks.affinity.rollbacks [--path GGUF | --wide LAYERS] [--parts greedy sampled] [--unsplit]
                                       [--out DIR]

Start the process without cuBLAS workspace (llm42_kernels.cublas.CUBLAS_ENVIRONMENT); vLLM inherits it.
Every deterministic output is compared with the oracle, the verifier decoding alone. `sampled` is a run at
temperature 0.8 with the canonical sampler's proposals (engine.vllm.sampled_agreement). A part that is not run
is taken from the result that is in DIR. --unsplit: vLLM is told not to split contexts, also in small batches;
the result's name ends in -unsplit. --wide: random weights in the shape of Llama 3 8B (hidden size
4,096) with that many layers, random prompts of 256 tokens; the result is h200-affinity-wide.json."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benchmarks.affinity.vllm_outputs import UNSPLIT_ATTENTION
from benchmarks.lib.random_model import LLAMA_8B, write_random
from benchmarks.lib.report import RESULTS, Figure, report
from benchmarks.lib.vllm_setup import prompts_of
from llm42.config import Settings
from llm42.local.affinity_loads import chat_prompts
from llm42.local.assembly import Local
from llm42.protocol import Commit, Request, RequestStats, SamplingParams, Window
from llm42.text.tokenizer import Tokenizer
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT

OUTPUT = 512
LOADS = {64: 64, 8: 16, 1: 2}
"""Requests at a time -> requests."""


def settings_of(path: str, sampled: bool, unsplit: bool = False) -> Settings:
    """Engine and verifier on one GPU."""
    vllm: dict[str, Any] = {
        "gpu_memory_utilization": 0.4, "sampled_agreement": sampled,
        "extra_args": {"attention_config": UNSPLIT_ATTENTION} if unsplit else {},
    }  # fmt: skip
    return Settings.load(
        {
            "model": {"path": path, "device": "cuda"},
            "engine": {"kind": "vllm", "vllm": vllm},
            "verifier": {"affinity": "vllm", "certificate_dir": None},
            "session": {"mode": "verify"},
        }
    )


async def decode(local: Local, request: Request) -> tuple[list[int], list[float], RequestStats]:
    """One request to its end."""
    tokens: list[int] = []
    logprobs: list[float] = []
    stats = RequestStats()
    async with aclosing(local.generator.generate(request)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            logprobs += [x.logprob for x in delta.logprobs]
            stats = delta.stats or stats
    return tokens, logprobs, stats


async def load(
    local: Local,
    prompts: list[list[int]],
    concurrent: int,
    sampling: list[SamplingParams],
    deterministic: bool = True,
    prefix: str = "",
) -> dict[str, Any]:
    """All prompts, `concurrent` at a time."""
    gate = asyncio.Semaphore(concurrent)

    async def one(index: int) -> tuple[list[int], list[float], RequestStats]:
        name = f"{prefix}{concurrent}-{deterministic}-{sampling[index].temperature}-{index}"
        request = Request(
            name, tuple(prompts[index]), OUTPUT, sampling[index], deterministic,
            num_logprobs=0 if deterministic else None,
        )  # fmt: skip
        async with gate:
            return await decode(local, request)

    began = time.perf_counter()
    done = await asyncio.gather(*(one(i) for i in range(len(prompts))))
    seconds = time.perf_counter() - began
    committed = sum(len(tokens) for tokens, _, _ in done)
    totals = {
        key: sum(getattr(stats, key) for _, _, stats in done)
        for key in ("windows", "rollbacks", "rolled_back_tokens", "verified_tokens", "candidate_tokens")
    }
    return {
        "outputs": [(tokens, logprobs) for tokens, logprobs, _ in done],
        "committed": committed,
        "seconds": seconds,
        "tok_s": committed / seconds,
        "rollbacks_per_1000": 1000 * totals["rollbacks"] / max(1, committed),
        "wasted_share": totals["rolled_back_tokens"] / max(1, committed + totals["rolled_back_tokens"]),
        **totals,
    }


def oracle(
    local: Local, prompts: list[list[int]], sampling: list[SamplingParams]
) -> list[tuple[list[int], list[float]]]:
    """The verifier decoding alone, one token at a time."""
    verifier = local.verifier
    out: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    for _ in range(OUTPUT):
        windows = [
            Window(f"oracle-{i}", (*prompt, *tokens), len(prompt), (), params)
            for i, (prompt, (tokens, _), params) in enumerate(zip(prompts, out, sampling, strict=True))
        ]
        for (tokens, logprobs), answer in zip(out, asyncio.run(verifier.verify(windows)), strict=True):
            assert isinstance(answer, Commit), answer
            tokens.append(answer.next_token)
            logprobs.append(answer.logprobs[0].logprob)
    for i in range(len(prompts)):
        verifier.release(f"oracle-{i}")
    return out


def direct_tok_s(local: Local, prompts: list[list[int]], turn: int) -> float:
    """vLLM's own tokens per second for the same requests, without the adapter."""
    engine: Any = local.engine
    arguments = {"temperature": 0.0, "max_tokens": OUTPUT, "ignore_eos": True}

    async def one(index: int, prompt: list[int]) -> int:
        count = 0
        async for output in engine._connection.generate(f"direct-{turn}-{index}", prompt, arguments, 0):
            count += len(output.outputs[0].token_ids)
        return count

    async def every() -> int:
        return sum(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))

    began = time.perf_counter()
    tokens = asyncio.run_coroutine_threadsafe(every(), engine._loop).result()
    return tokens / (time.perf_counter() - began)


def prompts_for(local: Local, wide: bool) -> list[list[int]]:
    """As many prompts as the largest load has requests."""
    count, vocab = max(LOADS.values()), local.tokenizer.vocab_size
    if wide:
        return [list(prompt) for prompt in prompts_of(count, 256, vocab)]
    return chat_prompts(local.tokenizer, count)


def measure(path: str, sampled: bool, wide: bool = False, unsplit: bool = False) -> dict[str, Any]:
    """Every load; with `sampled`, at temperature 0.8 instead."""
    out: dict[str, Any] = {}
    began = time.perf_counter()
    with Local(settings_of(path, sampled, unsplit), progress=lambda s: print(s, flush=True)) as local:
        out["start_s"] = time.perf_counter() - began
        print("started", out["start_s"], flush=True)
        prompts = prompts_for(local, wide)
        sampling = [
            SamplingParams(temperature=0.8, seed=i) if sampled else SamplingParams() for i in range(64)
        ]
        asyncio.run(load(local, prompts[:8], 8, sampling))  # warm
        want = oracle(local, prompts, sampling)
        for concurrent, count in (LOADS if not sampled else {64: 64}).items():
            found = asyncio.run(load(local, prompts[:count], concurrent, sampling))
            outputs = found.pop("outputs")
            found["equal_to_oracle"] = sum(a == b for a, b in zip(outputs, want, strict=False))
            found["requests"] = count
            out[str(concurrent)] = found
            print(concurrent, found, flush=True)
        greedy, pairs = [SamplingParams()] * 64, []
        for turn in range(5):  # in turns, because the first run of a kind is slower
            ours = asyncio.run(load(local, prompts, 64, greedy, False, f"{turn}-"))
            pairs.append((ours["tok_s"], direct_tok_s(local, prompts, turn)))
        out["best_effort_and_direct_tok_s"] = pairs
        out["manifest"] = local.verifier.manifest
        out["engine"] = getattr(local.engine, "facts", {})
    return out


def _adapter_share(run: dict[str, Any], target: float | None = None) -> Figure:
    """Best effort with text through adapter and driver, over vLLM's own stream without text."""
    pairs = run["best_effort_and_direct_tok_s"][1:]
    share = statistics.median(ours / direct for ours, direct in pairs)
    return Figure(share, "share of vLLM's tok/s without text", target, "higher")


def figures(raw: dict[str, Any]) -> dict[str, Figure]:
    """The named figures."""
    greedy = raw["greedy"]
    out = {
        "rollbacks_per_1000_64": Figure(greedy["64"]["rollbacks_per_1000"], "per 1000 committed tokens", 1.0),
        "wasted_share_64": Figure(greedy["64"]["wasted_share"], "share of decoded tokens", 0.03),
        "adapter_share": _adapter_share(greedy, 0.99),
    }
    for n in (1, 8):
        out[f"rollbacks_per_1000_{n}"] = Figure(
            greedy[str(n)]["rollbacks_per_1000"], "per 1000 committed tokens"
        )
    if "sampled" in raw:
        found = raw["sampled"]["64"]["rollbacks_per_1000"]
        out["rollbacks_per_1000_sampled_64"] = Figure(found, "per 1000 committed tokens")
        out["adapter_share_with_processor"] = _adapter_share(raw["sampled"])
    wrong = sum(
        part["requests"] - part["equal_to_oracle"]
        for run in raw.values()
        for part in run.values()
        if isinstance(part, dict) and "equal_to_oracle" in part
    )
    return out | {"outputs_unlike_oracle": Figure(wrong, "requests", 0.0)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default=Settings().model.path)
    parser.add_argument("--wide", type=int, metavar="LAYERS")
    parser.add_argument("--parts", nargs="+", choices=["greedy", "sampled"], default=["greedy", "sampled"])
    parser.add_argument("--unsplit", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    missing = {k: v for k, v in CUBLAS_ENVIRONMENT.items() if os.environ.get(k) != v}
    if missing:
        raise SystemExit(f"start this process with {missing}")
    path, name = options.path, "h200-affinity"
    if options.wide:
        shape = replace(
            LLAMA_8B, num_layers=options.wide, vocab_size=49152, eos_token_ids=(2,), bos_token_id=1
        )
        tokenizer = Tokenizer.load(Path(options.path))
        path, name = str(write_random(shape, tokenizer, Path(mkdtemp()) / "wide")), "h200-affinity-wide"
    name += "-unsplit" if options.unsplit else ""
    file = options.out / f"{name}.json"
    raw: dict[str, Any] = json.loads(file.read_text())["raw"] if file.exists() else {}
    for part in options.parts:
        raw[part] = measure(path, part == "sampled", bool(options.wide), options.unsplit)
        if "greedy" in raw:
            print({k: asdict(f) for k, f in figures(raw).items()}, flush=True)
            report(name, figures(raw), raw, options.out)
        else:
            (options.out / f"{name}-part.json").write_text(json.dumps(raw))


if __name__ == "__main__":
    main()
