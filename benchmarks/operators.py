"""Elementwise operators, sampling and launch gaps of one 8B step on one GPU: microseconds each, beside the bytes."""

from __future__ import annotations

import torch

from benchmarks.timing import graph_ms
from kernels.kv_write import launch_qkv
from kernels.rmsnorm import launch_rms_norm
from kernels.rotary import cos_sin_table
from kernels.sampling import row_stats
from kernels.silu_mul import launch_silu_mul

N = 32


def main() -> None:
    """Prints one line per operator and row count; each is launched N times in a graph over N buffers."""
    device, dtype = "cuda", torch.bfloat16
    table = cos_sin_table(500000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128), 8192).to(device)
    for rows in (1, 64, 256, 512, 1024):
        x = torch.randn(rows, 4096, device=device).to(dtype)
        r, w, n = torch.randn_like(x), torch.ones(4096, dtype=dtype, device=device), torch.empty_like(x)
        gate_up = torch.randn(rows, 28672, device=device).to(dtype)
        inner = torch.empty(rows, 14336, dtype=dtype, device=device)
        qkv = torch.randn(rows, 6144, device=device).to(dtype)
        q = torch.empty(rows, 32, 128, dtype=dtype, device=device)
        k, v = (torch.zeros(2048, 8, 128, dtype=dtype, device=device) for _ in range(2))
        at = torch.arange(rows, dtype=torch.int32, device=device)
        logits = torch.randn(rows, 128256, device=device)
        cases = {
            "rms_norm": lambda: launch_rms_norm(x, r, w, n, r, 1e-5),
            "silu_mul": lambda: launch_silu_mul(gate_up, inner),
            "qkv": lambda: launch_qkv(qkv, q, k, v, at, at, table, None, None, 1e-5),
            "row_stats": lambda: row_stats(logits),
        }
        for name, work in cases.items():
            print(rows, name, round(graph_ms(lambda: [work() for _ in range(N)]) * 1000 / N, 2), flush=True)


main()
