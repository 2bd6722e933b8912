"""Elementwise operators and sampling of one 8B step on one GPU: microseconds each, launched N times in a
graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.lib.timing import graph_ms
from llm42_kernels.gpu.elementwise import silu_mul_kernel
from llm42_kernels.gpu.launch import STRICT
from llm42_kernels.kv_write import launch_qkv
from llm42_kernels.rmsnorm import launch_rms_norm
from llm42_kernels.rotary import cos_sin_table
from llm42_kernels.sampling import row_stats
from llm42_kernels.silu_mul import launch_silu_mul

N = 32
WIDTH = 14336


def _silu(x: torch.Tensor, out: torch.Tensor, block: int, warps: int) -> None:
    grid = (x.shape[0], -(-WIDTH // block))
    silu_mul_kernel[grid](x, out, WIDTH=WIDTH, BLOCK=block, num_warps=warps, **STRICT)


def cases(rows: int) -> dict[str, Callable[[], object]]:
    """The operators of a step of `rows` rows."""
    device, dtype = "cuda", torch.bfloat16
    inv_freq = 500000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    table = cos_sin_table(inv_freq, 8192).to(device)
    x = torch.randn(rows, 4096, device=device).to(dtype)
    r, w, n = torch.randn_like(x), torch.ones(4096, dtype=dtype, device=device), torch.empty_like(x)
    gate_up = torch.randn(rows, 2 * WIDTH, device=device).to(dtype)
    inner = torch.empty(rows, WIDTH, dtype=dtype, device=device)
    qkv = torch.randn(rows, 6144, device=device).to(dtype)
    q = torch.empty(rows, 32, 128, dtype=dtype, device=device)
    k, v = (torch.zeros(2048, 8, 128, dtype=dtype, device=device) for _ in range(2))
    at = torch.arange(rows, dtype=torch.int32, device=device)
    logits = torch.randn(rows, 128256, device=device)
    out: dict[str, Callable[[], object]] = {
        "rms_norm": partial(launch_rms_norm, x, r, w, n, r, 1e-5),
        "silu_mul": partial(launch_silu_mul, gate_up, inner),
        "qkv": partial(launch_qkv, qkv, q, k, v, at, at, table, None, None, 1e-5),
        "row_stats": partial(row_stats, logits),
    }
    for block, warps in ((1024, 4), (1024, 8), (2048, 4), (4096, 8)):
        out[f"silu_mul {block} x {warps}"] = partial(_silu, gate_up, inner, block, warps)
    return out


def main() -> None:
    """Prints one line per operator and row count."""
    for rows in (64, 512, 1024):
        for name, work in cases(rows).items():

            def many(work: Callable[[], object] = work) -> None:
                for _ in range(N):
                    work()

            print(rows, name, round(graph_ms(many) * 1000 / N, 2), flush=True)


if __name__ == "__main__":
    main()
