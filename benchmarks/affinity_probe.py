"""Which arithmetic a fast path has: vLLM's own outputs scored by variants of the verifier's forward pass.

python -m benchmarks.affinity_probe GGUF DIRECTORY OUT [CONFIGURATION ...]

DIRECTORY holds what benchmarks/affinity_vllm.py wrote. Per configuration, load and variant: positions at
which the argmax is not vLLM's token (flips per 1,000), and the share of log-probabilities that are equal."""

from __future__ import annotations

import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.affinity_flash import flash_rows
from benchmarks.affinity_forward import Batch, Forward, Variant, linear, vllm_table
from benchmarks.affinity_kernels import norm, silu_mul
from llm42.checkpoint.load import load_model

V = Variant
CUSTOM = V("custom", "vllm", "rows", "activation")
VARIANTS = {
    "production": V(),
    "logits": V(logits="activation"),
    "logits, table": V(table="vllm", logits="activation"),
    "chain": V("chain", "vllm", "triton", "activation"),
    "rows": V("rounded", "vllm", "rows", "activation"),
    "chain, rows": V("chain", "vllm", "rows", "activation"),
    "chain, mixed": V("chain", "vllm", "mixed", "activation"),
    "chain 4 warps, mixed": V("chain", "vllm", "mixed", "activation", 4),
    "chain, mixed, float32 logits": V("chain", "vllm", "mixed"),
    "compiled, triton": V("compiled", "vllm", "triton", "activation"),
    "compiled, rows": V("compiled", "vllm", "rows", "activation"),
    "compiled, mixed": V("compiled", "vllm", "mixed", "activation"),
    "compiled, mixed, float32 logits": V("compiled", "vllm", "mixed"),
    "custom, rows": CUSTOM,
    "custom, mixed": V("custom", "vllm", "mixed", "activation"),
}
FEW = (
    "production", "chain, rows", "chain, mixed", "chain, mixed, float32 logits", "compiled, mixed",
    "compiled, mixed, float32 logits", "custom, rows", "custom, mixed",
)  # fmt: skip


class Watch:
    """Share of equal elements of keys and values per layer, prompt and output apart."""

    def __init__(self, batch: Batch, kept: dict[int, Tensor]) -> None:
        self.batch, self.kept, self.found = batch, kept, dict[str, list[list[float]]]()

    def __call__(self, layer: int, k: Tensor, v: Tensor) -> None:
        dim = k.shape[-1]
        for index, cache in self.kept.items():
            start, length, prompt = (
                x[index] for x in (self.batch.starts, self.batch.lengths, self.batch.prompts)
            )
            length = min(length, cache.shape[1])
            want = cache[layer][:length].cuda()
            shares = []
            for ours, theirs in ((k, want[..., :dim]), (v, want[..., dim:])):
                same = ours[start : start + length].view(torch.int16) == theirs.contiguous().view(torch.int16)
                rows = same.flatten(1).float().mean(1)
                shares += [float(rows[:prompt].mean()), float(rows[prompt:].mean())]
            self.found.setdefault(str(index), []).append(shares)


def score(forward: Forward, variant: Variant, kept: dict[int, Tensor]) -> dict[str, Any]:
    """Flips and equal shares of one variant; per layer shares of equal keys and values."""
    watch = Watch(forward.batch, kept)
    began = time.perf_counter()
    same, distance = forward.score(variant, forward.run(variant, watch if kept else None))
    return {
        "variant": asdict(variant),
        "rows": len(same),
        "flips_per_1000": float((~same).double().mean() * 1000),
        "equal_1e-6": float((distance <= 1e-6).double().mean()),
        "equal_1e-5": float((distance <= 1e-5).double().mean()),
        "equal_1e-4": float((distance <= 1e-4).double().mean()),
        "mean_distance": float(distance.mean()),
        "kv": {i: [[round(x, 5) for x in row] for row in rows] for i, rows in watch.found.items()},
        "seconds": time.perf_counter() - began,
    }


def pieces(forward: Forward) -> dict[str, Any]:
    """One layer on random rows: the compiled graph against hand-written kernels."""
    model, out = forward.model, {}
    c, w, layer = model.config, model.weights, model.weights.layers[3]
    graphs = forward.graphs(vllm_table(model, w.cos_sin.shape[0]))
    mixed, residual = (
        torch.randn(512, n, device="cuda").to(model.dtype) for n in (c.num_heads * c.head_dim, c.hidden_size)
    )
    with torch.inference_mode():
        want = graphs._chunked(
            graphs._last, (mixed, residual), layer.o, layer.post_norm, layer.gate_up, layer.down, w.final_norm
        )
        o = linear(mixed, layer.o)
        for warps, contract, divide, exact in itertools.product((1, 2, 4), *[(True, False)] * 3):
            kw: dict[str, Any] = {"warps": warps, "contract": contract, "divide": divide}
            for rounded in (False, True):
                x, s = norm((o, residual), layer.post_norm, c.rms_norm_eps, store=True, **kw)
                y = linear(silu_mul(linear(x, layer.gate_up), exact), layer.down)
                terms = (y, s) if rounded else (y, o, residual)
                got = norm(terms, w.final_norm, c.rms_norm_eps, store=True, **kw)
                out[f"{kw} exact={exact} rounded={rounded}"] = [
                    float((a == b).float().mean()) for a, b in zip(got, want, strict=True)
                ]
    return out


def guarded(results: dict[str, Any], out: Path, name: str, work: Callable[[], Any]) -> None:
    """One part: its failure is recorded and does not end the others."""
    try:
        results[name] = work()
    except Exception:
        results[name] = {"error": traceback.format_exc()[-3000:]}
    line = {k: v for k, v in results[name].items() if k not in ("kv", "variant")}
    print(name, json.dumps(line)[:600], flush=True)
    out.write_text(json.dumps(results, indent=1))


def main() -> None:
    gguf, directory, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    names = sys.argv[4:] or ["default", "unsplit", "custom", "eager"]
    results: dict[str, Any] = {}
    guarded(results, out, "flash", flash_rows)
    model = load_model(gguf, "bfloat16", "cuda", 2048)
    for name in names:
        if not (directory / f"{name}.pt").exists():
            continue
        data = torch.load(directory / f"{name}.pt")
        table = vllm_table(model, 2048)
        equal = (data["cos_sin"][:2048].cuda() == table.to(model.dtype)).float().mean()
        results[name] = {"runner": data["runner"], "boot_s": data["boot_s"], "table_equal": float(equal)}
        for load in ("64", "8", "1"):
            if load not in data:
                continue
            part = data[load]
            prompts = data["prompts"][: len(part["tokens"])]
            forward = Forward(model, Batch.make(prompts, part["tokens"], part["logprobs"]))
            if name == "default" and load == "64":
                guarded(results, out, "pieces", lambda f=forward: pieces(f))
            kept = data["kv"] if load == "64" else {}
            for label in VARIANTS if (name, load) == ("default", "64") else FEW:
                guarded(
                    results, out, f"{name} {load}: {label}",
                    lambda f=forward, v=VARIANTS[label], k=kept: score(f, v, k),
                )  # fmt: skip


if __name__ == "__main__":
    main()
