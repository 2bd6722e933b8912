"""The kernels alone, before any engine: right? equal bits in every way of loading and splitting? how fast?

python -m benchmarks.attention_backend.check OUT.json
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention_backend.step import StepAttention, facts, shape_of, split_cache
from benchmarks.lib.timing import graph_ms
from llm42_kernels.attention import paged_reference

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
SHAPES = [(HEADS, KV_HEADS, DIM), (9, 3, 64)]
WAYS = ["hopper", "tma"]
MIXED = [(0, 70), (512, 1), (1300, 37), (62, 1), (2047, 1), (4000, 130), (0, 1)]
"""(tokens before, rows) of each sequence: prompts, chunks of prompts and decoding rows in one step."""
DECODE = [(n, 1) for n in (0, 63, 512, 2047, 4100, 20000)]
CELLS = {"64x2048": (64, 2048), "256x1024": (256, 1024), "1x32768": (1, 32768), "8x32768": (8, 32768)}
WORST = 0.02
"""Relative distance of a row from float64 that bfloat16 output and weights explain."""


class Paged:
    """Random keys, values and queries of sequences; every slot that none of them has reached is NaN."""

    def __init__(
        self, parts: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, layers: int = 1,
        device: str = "cuda", dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.parts = parts
        blocks = [-(-(before + rows) // BLOCK) for before, rows in parts]
        order = torch.randperm(sum(blocks) + 1, generator=torch.Generator().manual_seed(1)).tolist()
        self.lists = [[order.pop() for _ in range(n)] for n in blocks]
        self.tables = torch.zeros(len(parts), max(blocks) + 3, dtype=torch.int32)
        for row, table in zip(self.tables, self.lists, strict=True):
            row[: len(table)] = torch.tensor(table)
        self.tables = self.tables.to(device)
        generator = torch.Generator(device).manual_seed(0)
        size = (2, sum(blocks) + 1, BLOCK, kv_heads, dim)
        self.caches = [torch.empty(size, dtype=dtype, device=device) for _ in range(layers)]
        for cache in self.caches:
            cache.normal_(generator=generator)
            cache[:, order] = float("nan")
            for table, (before, rows) in zip(self.lists, parts, strict=True):
                if tail := -(before + rows) % BLOCK:
                    cache[:, table[-1], BLOCK - tail :] = float("nan")
        count = sum(rows for _, rows in parts)
        self.q = torch.empty(count, heads, dim, dtype=dtype, device=device).normal_(generator=generator)
        self.starts = np.cumsum([0, *(rows for _, rows in parts)]).astype(np.int32)
        self.ends = np.array([sum(part) for part in parts], np.int32)

    def reference(self) -> Tensor:
        """float64 rounded once."""
        keys, values = split_cache(self.caches[0])
        start, count = zip(*self.parts, strict=True)
        return paged_reference(self.q, keys, values, list(start), list(count), self.lists, BLOCK)


def attend(paged: Paged, runner: StepAttention) -> Tensor:
    """The first layer of one step; rows that nobody wrote are NaN."""
    out = torch.full_like(paged.q, float("nan"))
    decode = bool((np.diff(paged.starts) <= 1).all())
    step = runner.plan(paged.starts, paged.ends, paged.tables, decode)
    runner.run(step, paged.q, out, runner.attention.sources(*split_cache(paged.caches[0])))
    return out


def correctness(small: str, heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    """Worst relative row errors against float64, and whether the bits follow from the row alone."""
    found: dict[str, Any] = {}
    shape = shape_of(heads, kv_heads, dim, BLOCK, small)
    for name, parts in (("mixed", MIXED), ("decode", DECODE)):
        paged = Paged(parts, heads, kv_heads, dim)
        runner = StepAttention(shape, torch.device("cuda"), 1024, 16)
        out = attend(paged, runner)
        want = paged.reference().double()
        error = (out.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
        for planner in (runner._decode, runner._mixed):
            planner.programs = 1
        equal = torch.equal(out.view(torch.int16), attend(paged, runner).view(torch.int16))
        case = f"{heads}/{kv_heads}x{dim} {name}"
        found[case] = {"worst": float(error.nan_to_num(9.0).max()), "unsplit_equal": equal}
        found[case]["sum"] = hashlib.sha256(out.view(torch.int16).cpu().numpy().tobytes()).hexdigest()
    return found


def side_by_side(limit_s: float) -> dict[str, dict[str, Any]]:
    """`correctness` of each way of loading, in processes of their own: compiling is what takes the time."""
    running = [
        (small, subprocess.Popen(
            [sys.executable, "-m", "benchmarks.attention_backend.check", small, *map(str, shape)],
            stdout=subprocess.PIPE, text=True,
        )) for small in WAYS for shape in SHAPES
    ]  # fmt: skip
    end, found = time.monotonic() + limit_s, {small: {"right": True, "cases": {}} for small in WAYS}
    for small, process in running:
        way: dict[str, Any] = found[small]
        try:
            said, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        try:
            way["cases"] |= json.loads(said.splitlines()[-1])
        except (IndexError, ValueError):  # a kernel that does not compile must not end the others
            way |= {"right": False, "error": f"exit status {process.returncode}; see check.log"}
    for way in found.values():
        cases = way["cases"].values()
        way["right"] &= all(case["worst"] < WORST and case["unsplit_equal"] for case in cases)
    return found


def micros(name: str, small: str) -> float:
    """Microseconds of one layer of a decoding step, as a graph replays it."""
    count, context = CELLS[name]
    layers = 2 if count * context > 200_000 else 4
    paged = Paged([(context - 1, 1)] * count, HEADS, KV_HEADS, DIM, layers)
    if small == "flash":
        flash = _flash(paged, context)
        torch.cuda.synchronize()  # a graph has a stream of its own
        return graph_ms(flash) * 1000 / layers
    runner = StepAttention(shape_of(HEADS, KV_HEADS, DIM, BLOCK, small), torch.device("cuda"), 1024, 256)
    step = runner.plan(paged.starts, paged.ends, paged.tables, True)
    sources = [runner.attention.sources(*split_cache(cache)) for cache in paged.caches]
    out = torch.empty_like(paged.q)
    torch.cuda.synchronize()

    def work() -> None:
        for source in sources:
            runner.run(step, paged.q, out, source)

    return graph_ms(work) * 1000 / layers


def _flash(paged: Paged, context: int) -> Any:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    starts = torch.from_numpy(paged.starts).cuda()
    used = torch.from_numpy(paged.ends).cuda()

    def work() -> None:
        for cache in paged.caches:
            flash_attn_varlen_func(
                paged.q, cache[0], cache[1], max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=context,
                seqused_k=used, causal=True, block_table=paged.tables, fa_version=3,
            )  # fmt: skip

    return work


def plan_micros(small: str) -> float:
    """Host time of planning 256 decoding rows, copies included."""
    paged = Paged([(1023, 1)] * 256, HEADS, KV_HEADS, DIM)
    runner = StepAttention(shape_of(HEADS, KV_HEADS, DIM, BLOCK, small), torch.device("cuda"), 1024, 256)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        runner.plan(paged.starts, paged.ends, paged.tables, True)
        times.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def main() -> None:
    """Writes OUT.json after each part; exit status 1 where no way of loading is right."""
    if len(sys.argv) > 2:
        heads, kv_heads, dim = map(int, sys.argv[2:5])
        print(json.dumps(correctness(sys.argv[1], heads, kv_heads, dim)), flush=True)
        return
    path = Path(sys.argv[1])
    result: dict[str, Any] = {"facts": facts(shape_of(HEADS, KV_HEADS, DIM, BLOCK)), "us": {}}
    result["ways"] = side_by_side(75.0)
    sums = [{name: case["sum"] for name, case in way["cases"].items()} for way in result["ways"].values()]
    result["equal_bits"] = {name: sums[0][name] == sums[1].get(name) for name in sums[0]}
    path.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1), flush=True)
    right = [small for small, way in result["ways"].items() if way["right"]]
    for way in ["flash", *(w for w in reversed(WAYS) if w in right)]:  # the newest kernel last
        for name in CELLS:
            try:
                result["us"].setdefault(name, {})[way] = round(micros(name, way), 2)
            except Exception as error:
                print(name, way, repr(error)[:500], flush=True)
        print(way, {name: cell.get(way) for name, cell in result["us"].items()}, flush=True)
        path.write_text(json.dumps(result, indent=1))
    timed = [w for w in right if all(w in cell for cell in result["us"].values())]
    if timed:
        result["plan_us"] = plan_micros(timed[0])
        result["best"] = min(timed, key=lambda w: sum(cell[w] for cell in result["us"].values()))
    path.write_text(json.dumps(result, indent=1))
    print("best:", result.get("best"), "plan_us:", result.get("plan_us"), flush=True)
    raise SystemExit(0 if timed else 1)


if __name__ == "__main__":
    main()
