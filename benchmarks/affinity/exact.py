"""The providers of `verifier.affinity: vllm` against what they follow, bit by bit, on one GPU.

python -m benchmarks.affinity.exact OUT [PART ...]

Parts: attention against FlashAttention 3 (single rows, no splits); norms and gate against torch.compile's
graph at many widths; random steps; plants; times."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.affinity.compiled import EXAMPLE_ROWS, inductor_options
from benchmarks.affinity.forward import linear
from benchmarks.lib.random_model import LLAMA_8B, SMALL_64, random_model
from benchmarks.verifier.invariance import random_steps
from llm42.cache import KVCache
from llm42.config import VerifierSettings
from llm42.models.config import ModelConfig
from llm42.verifier.certify.certificate import CertificationFailed
from llm42.verifier.certify.cuda import CUDACertifier
from llm42.verifier.certify.plants_cuda import PLANTS
from llm42.verifier.cuda.runner import CudaRunner
from llm42_kernels.attention_flash import flash_shape, make_attention
from llm42_kernels.cuda import candidates, cuda_operators
from llm42_kernels.rmsnorm import launch_sum_norm
from llm42_kernels.silu_mul import silu_mul_library_exp

SHAPES = ((9, 3, 64), (14, 2, 64), (32, 8, 64), (32, 8, 128), (28, 4, 128), (16, 2, 128))
ENDS = (48, 130, 193, 600, 2000, 4096)
WIDTHS = (576, 896, 1536, 2048, 3072, 3584, 4096, 5120)
EPS = 1e-5


def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, ends: list[int]) -> Tensor:
    """FlashAttention 3: each row of q [T, heads, head_dim] a sequence with the keys before ends[i], which lie
    in the blocks of table[i]."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q, k, v, max_seqlen_q=1, max_seqlen_k=4096, causal=True, fa_version=3, num_splits=1,
        block_table=table,
        cu_seqlens_q=torch.arange(len(q) + 1, dtype=torch.int32, device="cuda"),
        seqused_k=torch.tensor(ends, dtype=torch.int32).cuda(),
    )  # fmt: skip


def attention_bits() -> dict[str, Any]:
    """Share of equal elements, ours against the library's, for 32 rows before each end."""
    out: dict[str, Any] = {}
    for heads, kv_heads, dim in SHAPES:
        gen = torch.Generator("cuda").manual_seed(dim)
        k, v = (torch.randn(64, 64, kv_heads, dim, generator=gen, device="cuda").bfloat16() for _ in range(2))
        q = torch.randn(32, heads, dim, generator=gen, device="cuda").bfloat16() * 2
        table = torch.randperm(64, generator=gen, device="cuda").int()[None]
        engine = make_attention(flash_shape(heads, kv_heads, dim, 64), q.device)
        shares = {}
        for end in ENDS:
            ends = list(range(end - 31, end + 1))
            want = attend(q, k, v, table.expand(32, -1).contiguous(), ends)
            flat = (x.flatten(0, 1) for x in (k, v))
            got = engine.run(q, *flat, [end - 32], [32], [table[0].tolist()])
            shares[end] = float((got.view(torch.int16) == want.view(torch.int16)).float().mean())
        out[f"{heads}/{kv_heads}/{dim}"] = shares
    return out


def norm_bits() -> dict[str, Any]:
    """One compiled graph per width: two norms around products, and the gate; share of equal elements."""
    out = {}
    for width in WIDTHS:
        gen = torch.Generator("cuda").manual_seed(width)

        def make(rows: int, columns: int, gen: torch.Generator = gen) -> Tensor:
            return torch.randn(rows, columns, generator=gen, device="cuda").bfloat16()

        up, down = make(2 * width, width) * width**-0.5, make(width, width) * width**-0.5
        w1, w2 = make(1, width)[0] * 0.1 + 1, make(1, width)[0] * 0.1 + 1
        torch._dynamo.reset()
        graph = torch.compile(_graph, options=inductor_options(width))
        for rows in (EXAMPLE_ROWS, 37, 512):
            o, residual = make(rows, width), make(rows, width)
            for x in (o, residual):
                torch._dynamo.mark_dynamic(x, 0)
            want = [y.clone() for y in graph(o, residual, w1, up, down, w2)]
        x, normed, summed = (torch.empty_like(o) for _ in range(3))
        launch_sum_norm((o, residual), w1, x, None, EPS)
        y = linear(silu_mul_library_exp(linear(x, up)), down)
        launch_sum_norm((y, o, residual), w2, normed, summed, EPS)
        out[width] = [float((a == b).float().mean()) for a, b in zip((normed, summed), want, strict=True)]
    return out


def _graph(o: Tensor, residual: Tensor, w1: Tensor, up: Tensor, down: Tensor, w2: Tensor) -> Any:
    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        s = x.float() + residual.float()
        y = s * torch.rsqrt(s.pow(2).mean(dim=-1, keepdim=True) + EPS)
        return y.to(weight.dtype) * weight, s.to(x.dtype)

    x, residual = add_norm(o, residual, w1)
    gate, other = F.linear(x, up).chunk(2, dim=-1)
    return add_norm(F.linear(F.silu(gate) * other, down), residual, w2)


def invariance(config: ModelConfig) -> dict[str, Any]:
    """Random steps on a random model with the providers of the affinity."""
    model = random_model(replace(config, num_layers=4, vocab_size=32000), max_len=8192)
    names = candidates("vllm")
    ops = cuda_operators({op: names[op][0] for op in ("rms_norm", "silu_mul")})
    c = model.config
    kv = KVCache(c.num_layers, 200, 64, c.num_kv_heads, c.head_dim, model.dtype, "cuda")
    shape = flash_shape(c.num_heads, c.num_kv_heads, c.head_dim, 64)
    runner = CudaRunner(model, ops, kv, (1, 8, 64, 256, 512), 2048, shape=shape, round_logits=True)
    found = random_steps(runner, kv, c.vocab_size, 500, 3, 120)
    return {"rows": found.rows, "differing": found.differing, "examples": found.examples[:3]}


def plants() -> dict[str, str]:
    """Every plant, certified with the affinity."""
    model, out = random_model(SMALL_64, max_len=4096), {}
    settings = VerifierSettings(buckets=(1, 8, 64, 512), block_size=64, affinity="vllm")
    out["none"] = str(CUDACertifier(model, settings).run().providers)
    for plant in PLANTS:
        if plant == "split-k":
            continue
        try:
            CUDACertifier(model, settings, [plant]).run()
            out[plant] = "NOT CAUGHT"
        except CertificationFailed as error:
            out[plant] = str(error)[:200]
    return out


def times() -> dict[str, Any]:
    """Microseconds of a layer's attention, 8B heads: both providers."""
    from benchmarks.verifier.attention_tiles import CASES, Work
    from benchmarks.verifier.attention_tiles import run as measure
    from llm42.verifier.cuda.runner import attention_shape

    out: dict[str, Any] = {}
    for name in CASES:
        work = Work(name, 64)
        for label, shape in (
            ("triton", attention_shape(32, 8, 128, 64)),
            ("flash-order", flash_shape(32, 8, 128, 64)),
        ):
            out[f"{name} {label}"] = measure(shape, work)[1]
        del work
    return out


def main() -> None:
    out = Path(sys.argv[1])
    results: dict[str, Any] = {"environment": os.environ.get("CUBLAS_WORKSPACE_CONFIG")}
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("attention", attention_bits),
        ("times", times),
        ("norms", norm_bits),
        ("steps 64", lambda: invariance(SMALL_64)),
        ("steps 128", lambda: invariance(LLAMA_8B)),
        ("plants", plants),
    ]
    for name, work in parts:
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        began = time.perf_counter()
        try:
            results[name] = work()
        except Exception:
            results[name] = {"error": traceback.format_exc()[-3000:]}
        print(name, round(time.perf_counter() - began, 1), "s", json.dumps(results[name])[:1500], flush=True)
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
