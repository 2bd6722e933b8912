"""Which operator of a wide model (hidden size 4,096, random weights) has other bits in vLLM than in ours.

python -m benchmarks.affinity.wide OUT [--layers 4] [--configurations service fixed unsplit]

vLLM runs in a process of its own for each configuration (vllm_outputs.py), meanwhile this one compares
products of the library at many row counts with those at 64 rows, and the norms of a compiled graph with every
launch of ours, with and without the compiler's `deterministic` option. Then vLLM's outputs and KV are scored
by variants of the verifier's forward pass. OUT/h200-affinity-operators.json is written as each part ends. The
process must be started without cuBLAS workspace (llm42_kernels.cublas.CUBLAS_ENVIRONMENT)."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.affinity.compiled import EXAMPLE_ROWS, inductor_options
from benchmarks.affinity.exact import EPS, _graph
from benchmarks.affinity.forward import Batch, Forward, Variant, linear, score
from benchmarks.affinity.vllm_outputs import compiled_kernels
from benchmarks.lib.random_model import LLAMA_8B, write_random
from benchmarks.lib.report import Figure, report
from benchmarks.lib.vllm_setup import prompts_of
from llm42.checkpoint.load import load_model
from llm42.config import Settings
from llm42.models.config import ModelConfig
from llm42.text.tokenizer import Tokenizer
from llm42_kernels.linear_cuda import lm_head_cublas_into
from llm42_kernels.rmsnorm import launch_sum_norm
from llm42_kernels.silu_mul import silu_mul_library_exp

VOCAB = 49152
ROWS = (1, 2, 8, 16, 17, 32, 65, 128, 200, 256, 512, 1024, 2048, 4096, 8192)
LAUNCHES = [(1, block, warps) for block in (1024, 2048, 4096) for warps in (8, 16)]
LAUNCHES += [(2, 2048, 16), (1, 8192, 16)]
WIDTHS = (4096, 3072, 3584, 5120, 8192)
WHOLE, HALVES = (1, 4096, 16), (1, 2048, 16)


def variants() -> dict[str, Variant]:
    """Every choice of a launch for each norm (w: 4,096 columns at once, h: 2,048), and some of the rest."""
    out = {"compiled rows": Variant(None)}
    for launches in itertools.product((WHOLE, HALVES), (WHOLE, HALVES), (WHOLE, HALVES), (WHOLE, HALVES)):
        out["".join("w" if x is WHOLE else "h" for x in launches)] = Variant(launches)
    for launch in (WHOLE, HALVES):
        every = (launch, launch, launch, launch)
        out[f"{launch[1]} mixed"] = Variant(every, attention="mixed")
        out[f"{launch[1]} rounded"] = Variant(every, logits="rounded")
    return out


def products(config: ModelConfig) -> dict[str, Any]:
    """Share of equal elements of a row's product at many row counts, against 64 rows."""
    c, gen, out = config, torch.Generator("cuda").manual_seed(1), {}
    width = c.num_heads * c.head_dim
    shapes = {
        "qkv": ((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size), "o": (c.hidden_size, width),
        "gate_up": (2 * c.intermediate_size, c.hidden_size), "down": (c.hidden_size, c.intermediate_size),
        "head": (c.vocab_size, c.hidden_size),
    }  # fmt: skip
    for name, (rows, columns) in shapes.items():
        weight = torch.randn(rows, columns, generator=gen, device="cuda").bfloat16() * columns**-0.5
        x = torch.randn(max(ROWS), columns, generator=gen, device="cuda").bfloat16()
        want = F.linear(x[:64], weight)
        shares = {}
        for count in ROWS:
            if name == "head" and count > 1024:
                continue
            got = F.linear(x[:count], weight)[:64]
            shares[str(count)] = float((got == want[: len(got)]).float().mean())
        if name == "head":
            logits = torch.empty(64, rows, device="cuda")
            lm_head_cublas_into(x[:64], weight, logits)
            shares["float32, rounded"] = float((logits.to(want.dtype) == want).float().mean())
        other = {k: v for k, v in shares.items() if v != 1.0}
        out[name] = other | {"equal at": len(shares) - len(other)}
        del weight, x
    return out


def norms(width: int, deterministic: bool) -> dict[str, Any]:
    """How many elements differ between launches of ours and a compiled graph, and which it chose."""
    gen = torch.Generator("cuda").manual_seed(width)

    def make(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=gen, device="cuda").bfloat16()

    up, down = make(2 * width, width) * width**-0.5, make(width, width) * width**-0.5
    w1, w2 = (make(1, width)[0] * 0.1 + 1 for _ in range(2))
    torch._dynamo.reset()
    gc.collect()
    graph = torch.compile(_graph, options=inductor_options(width if deterministic else 0))
    for rows in (EXAMPLE_ROWS, 37, 512, 4096):
        o, residual = make(rows, width), make(rows, width)
        for x in (o, residual):
            torch._dynamo.mark_dynamic(x, 0)
        want = [y.clone() for y in graph(o, residual, w1, up, down, w2)]
    x, normed, summed = (torch.empty_like(o) for _ in range(3))
    found = {}
    for first, second in itertools.product(LAUNCHES, LAUNCHES):
        launch_sum_norm((o, residual), w1, x, None, EPS, first)
        y = linear(silu_mul_library_exp(linear(x, up)), down)
        launch_sum_norm((y, o, residual), w2, normed, summed, EPS, second)
        found[f"{first} {second}"] = int((normed != want[0]).sum())
    best = sorted(found.items(), key=lambda item: item[1])
    chosen = reductions_of(compiled_kernels())
    return {"elements": normed.numel(), "differing": best[:12], "worst": best[-1], "chosen": chosen}


@contextmanager
def vllm_processes(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """vLLM with each configuration, all at the same time."""
    found = {}
    for name in args.configurations:
        places = (str(directory), str(args.scratch))
        command = [sys.executable, "-m", "benchmarks.affinity.vllm_outputs", name, *places]
        with (args.out / f"vllm-{name}.log").open("w") as log:
            found[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield found
    finally:
        for process in found.values():
            process.kill()
            process.wait()


def scores(
    args: argparse.Namespace, directory: Path, name: str, process: subprocess.Popen[bytes]
) -> dict[str, Any]:
    """One configuration's outputs, scored by every variant."""
    if process.wait(args.limit_s):
        raise RuntimeError(f"vLLM ended with {process.returncode}: see vllm-{name}.log")
    model = load_model(str(directory), "bfloat16", "cuda", 2048)
    data, out = torch.load(args.scratch / f"{name}.pt"), {}
    forward = Forward(model, Batch.make(data["prompts"], data["tokens"], data["logprobs"]))
    for label, variant in variants().items():
        out[label] = score(forward, variant, data["kv"])
        print(name, label, out[label], flush=True)
    kernels = json.loads((args.scratch / f"{name}.kernels.json").read_text())
    out["kernels"] = reductions_of(kernels)
    return out


def reductions_of(kernels: list[dict[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """Name, size and chosen launch of every compiled kernel that reduces."""
    found = (k for k in kernels if {"red", "per"} & set(str(k["name"]).split("_")) and k["configs"])
    return [(k["name"], k["hints"], k["configs"]) for k in found]


def figures_of(results: dict[str, Any]) -> dict[str, Figure]:
    """The launch of llm42_kernels.rmsnorm against vLLM with the compilation that the service asks for."""
    if "flips_per_1000" not in results.get("fixed", {}).get("hhhh", {}):
        return {}
    found = results["fixed"]["hhhh"]
    return {
        "flips_per_1000": Figure(found["flips_per_1000"], "per 1000 output tokens", 1.0),
        "equal_logprobs": Figure(found["equal_1e-5"], "share", None, "higher"),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--configurations", nargs="+", default=["service", "fixed"])
    parser.add_argument("--limit-s", type=float, default=300.0, help="for each vLLM process")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/affinity-wide"))
    args = parser.parse_args()
    results: dict[str, Any] = {}

    def part(name: str, work: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            results[name] = work()
        except Exception:
            results[name] = {"error": traceback.format_exc()[-3000:]}
        torch.cuda.empty_cache()
        print(name, round(time.perf_counter() - began, 1), "s", json.dumps(results[name])[:3000], flush=True)
        report("h200-affinity-operators", figures_of(results), results, args.out)

    args.out.mkdir(parents=True, exist_ok=True)
    args.scratch.mkdir(parents=True, exist_ok=True)
    config = replace(LLAMA_8B, vocab_size=VOCAB, num_layers=args.layers, eos_token_ids=(2,), bos_token_id=1)
    directory = write_random(config, Tokenizer.load(Path(Settings().model.path)), args.scratch / "model")
    (directory / "prompts.json").write_text(json.dumps([list(p) for p in prompts_of(64, 256, VOCAB)]))
    with vllm_processes(args, directory) as processes:
        part("products", lambda: products(config))
        part("norms", lambda: norms(config.hidden_size, False))
        for width in WIDTHS:
            part(f"norms {width}, deterministic", lambda w=width: norms(w, True))  # type: ignore[misc]
        for name, process in processes.items():
            part(name, lambda n=name, p=process: scores(args, directory, n, p))  # type: ignore[misc]


if __name__ == "__main__":
    main()
