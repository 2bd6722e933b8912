"""Paged attention alone: tile shapes against each other, in time and in bits, and against torch's flash
attention.

    python -m benchmarks.verifier.attention_tiles [--compile I] [--out FILE]

`--compile I` only builds variant I (run all in parallel first: compiling is what takes the time).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.lib.timing import graph_ms
from llm42_kernels.attention import AttentionShape, Tile, TritonAttention, _upload, paged_reference
from llm42_kernels.attention_flash import make_attention

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 4
CASES = {  # name: (sequences, rows each, context before the rows)
    "16x32@2k": (16, 32, 2048),
    "512@2k": (1, 512, 2048),
    "2x32@2k": (2, 32, 2048),
    "64x1@2k": (64, 1, 2048),
    "16x32@16k": (16, 32, 16384),
}
VARIANTS = [  # (height, tile, segment, block size)
    ("L", Tile(128, 4, 3, 1, "hopper"), 512, 128),
    ("L", Tile(64, 4, 3, 2, "tma"), 512, 128),
    ("S", Tile(64, 4, 3, 2, "tma"), 512, 128),
]
SMALL = Tile(64, 4, 3, 2, "tma")


def shape_of(variant: tuple[str, Tile, int, int]) -> AttentionShape:
    """The attention shape that uses a variant for its height."""
    height, tile, segment, page = variant
    small = SMALL if page >= 64 else Tile(64, 4, 3, 2)
    shape = AttentionShape(HEADS, KV_HEADS, DIM, page, segment=segment, small=small)
    return replace(shape, large=tile) if height == "L" else replace(shape, small=tile)


class Work:
    """Queries, caches and block tables of one case; the same values whatever the block size."""

    def __init__(self, name: str, page: int, layers: int = LAYERS) -> None:
        self.sequences, self.rows, context = CASES[name]
        self.keys = context + self.rows
        per = -(-self.keys // page)
        generator = torch.Generator("cuda").manual_seed(0)
        order = torch.randperm(self.sequences * per, generator=torch.Generator().manual_seed(1))
        self.tables = order.view(self.sequences, per).tolist()
        at = torch.arange(self.keys, device="cuda")
        slots = (order.view(self.sequences, per).cuda()[:, at // page] * page + at % page).flatten()
        size = (self.sequences * self.keys, KV_HEADS, DIM)
        self.kv = []
        for _ in range(layers):
            pair = []
            for _ in range(2):
                cache = torch.full(
                    (order.numel() * page, KV_HEADS, DIM), float("nan"), dtype=torch.bfloat16
                ).cuda()
                cache[slots] = torch.randn(size, generator=generator, device="cuda").bfloat16()
                pair.append(cache)
            self.kv.append(tuple(pair))
        self.dense = [
            [c[slots].view(self.sequences, self.keys, KV_HEADS, DIM).transpose(1, 2) for c in p]
            for p in self.kv
        ]
        rows = self.sequences * self.rows
        self.q = torch.randn(rows, HEADS, DIM, generator=generator, device="cuda").bfloat16()
        self.start, self.count = [context] * self.sequences, [self.rows] * self.sequences


def run(shape: AttentionShape, work: Work) -> tuple[Tensor, float, int]:
    """Output of the first layer, microseconds per layer, number of split tiles."""
    engine = make_attention(shape, torch.device("cuda"))
    counts = np.array(work.count)
    offset = np.cumsum([0, *map(len, work.tables)])[:-1]
    plan = engine.planner.plan(np.cumsum(counts) - counts, counts, np.array(work.start), offset)
    flat = torch.tensor([b for t in work.tables for b in t], dtype=torch.int32, device="cuda")
    parts = [
        (tile, _upload(items, work.q.device), _upload(combine, work.q.device) if len(combine) else None)
        for tile, items, combine in (
            (shape.large, plan.large, plan.combine_large), (shape.small, plan.small, plan.combine_small)
        ) if len(items)
    ]  # fmt: skip
    sources = [engine.sources(k, v) for k, v in work.kv]
    outs = [torch.zeros_like(work.q) for _ in sources]

    def layers() -> None:
        for source, out in zip(sources, outs, strict=True):
            for tile, items, combine in parts:
                engine.attend(tile, work.q, out, source, flat, *items)
                if combine:
                    engine.combine(tile, out, *combine)

    micros = graph_ms(layers) * 1000 / len(sources)
    return outs[0], micros, len(plan.combine_large) + len(plan.combine_small)


def flash_micros(work: Work) -> float:
    """torch's flash attention on the same rows and keys, contiguous layout."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    q = work.q.view(work.sequences, work.rows, HEADS, DIM).transpose(1, 2)
    bias = causal_lower_right(work.rows, work.keys)

    def layers() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for k, v in work.dense:
                torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)

    return graph_ms(layers) * 1000 / len(work.dense)


def main() -> None:
    """Prints a table; writes JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", type=int)
    parser.add_argument("--out")
    parser.add_argument("--cases")
    options = parser.parse_args()
    if options.compile is not None:
        variant = VARIANTS[options.compile]
        name = "2x32@2k" if variant[0] == "L" else "64x1@2k"
        run(shape_of(variant), Work(name, variant[3], 1))
        return
    results: dict[str, object] = {}
    for name in options.cases.split(",") if options.cases else CASES:
        works = {page: Work(name, page) for page in (128,)}
        base: dict[int, Tensor] = {}
        try:
            results[f"{name} flash"] = flash_micros(works[128])
        except RuntimeError as error:
            results[f"{name} flash"] = str(error)[:200]
        print(name, "flash", results[f"{name} flash"], flush=True)
        for variant in VARIANTS:
            if (variant[0] == "S") != (name == "64x1@2k"):
                continue
            try:
                out, micros, split = run(shape_of(variant), works[variant[3]])
            except Exception as error:  # one variant must not end the sweep
                print(name, variant, repr(error)[:200], flush=True)
                continue
            base.setdefault(variant[2], out.clone())
            equal = torch.equal(out.view(torch.int16), base[variant[2]].view(torch.int16))
            work, rows = works[variant[3]], CASES[name][1]
            page = variant[3]
            want = paged_reference(
                work.q[:rows], *work.kv[0], work.start[:1], work.count[:1], work.tables[:1], page
            ) if name != "16x32@16k" else out[:rows]  # fmt: skip
            error = float((out[:rows].double() - want.double()).norm() / want.double().norm())
            results[f"{name} {variant}"] = {"us": micros, "equal": equal, "error": error, "split": split}
            print(
                f"{name:10} {variant!s:70} {micros:8.1f} us equal={equal} err={error:.1e} split={split}",
                flush=True,
            )
        if name == "2x32@2k":
            _heights(works[128])
        del works
    if options.out:
        with open(options.out, "w") as file:
            json.dump(results, file, indent=1)


def _heights(work: Work) -> None:
    """The same rows through tiles of several heights and loads: which rows differ from the tallest?"""
    want = paged_reference(work.q, *work.kv[0], work.start, work.count, work.tables, 128).double()
    outs = {}
    for height, load in ((128, "hopper"), (64, "tma"), (64, "pointer"), (16, "pointer")):
        tile = Tile(height, 4 if load == "hopper" else max(1, height // 16), 3, 1, load)  # type: ignore[arg-type]
        shape = AttentionShape(HEADS, KV_HEADS, DIM, 128, large=Tile(128, 8, 3, 1, "tma"), small=tile)
        if height == 128:
            shape = replace(shape, large=tile, small=Tile(16, 1, 3, 1, "tma"))
        engine = TritonAttention(shape, torch.device("cuda"))
        engine.planner.programs = 1 if height == 128 else 1000
        for attempt in range(1):
            out = engine.run(work.q, *work.kv[0], work.start, work.count, work.tables)
            outs[height, load, attempt] = out
            base = outs[128, "hopper", 0].view(torch.int16)
            if load != "hopper" and height in (64, 128):
                print("  float32 partials equal to the hopper kernel's:", _partials(work, load, height))
            rows = (out.view(torch.int16) != base).flatten(1).any(1).nonzero().flatten().tolist()
            error = (out.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
            print(
                "height",
                height,
                load,
                attempt,
                "rows that differ:",
                rows[:40],
                "worst row error",
                float(error.max()),
                flush=True,
            )


def _partials(work: Work, load: str, height: int) -> bool:
    """Unrounded segment sums of full 32-token tiles, this kernel against the hopper kernel."""
    sums = []
    for name, tall in (("hopper", 128), (load, height)):
        tile = Tile(tall, 4 if tall == 64 or name == "hopper" else 8, 3, 1, name)  # type: ignore[arg-type]
        engine = TritonAttention(
            AttentionShape(HEADS, KV_HEADS, DIM, 128, large=tile, small=SMALL), torch.device("cuda")
        )
        engine.planner.programs = 60  # split, but with tall tiles
        engine._acc.zero_()
        engine.run(work.q, *work.kv[0], work.start, work.count, work.tables)
        acc = engine._acc.view(-1, KV_HEADS, tall, DIM)
        segments = -(-work.keys // engine.shape.segment)
        rows = acc[: segments * len(work.start) * 32 * 4 // tall]
        tiles = 128 // tall
        # later tiles have more keys and come first
        rows = (
            rows.view(tiles, len(work.start), segments, KV_HEADS, tall, DIM).flip(0).permute(1, 2, 3, 0, 4, 5)
        )
        sums.append(rows.reshape(-1, 128, DIM))
    return torch.equal(sums[0].view(torch.int32), sums[1].reshape(sums[0].shape).view(torch.int32))


if __name__ == "__main__":
    main()
