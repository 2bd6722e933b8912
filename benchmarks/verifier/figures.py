"""Figures of the canonical verifier from the parts' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.lib.report import Figure, report

NAME = "h200-verifier"


def assemble(directory: Path) -> None:
    """Reads DIR/*.json (parts that are missing leave their figures out) and writes DIR/h200-verifier.json."""
    parts = {p.stem: json.loads(p.read_text()) for p in sorted(directory.glob("*.json")) if p.stem != NAME}
    figures: dict[str, Figure] = {}
    if "steps" in parts:
        figures |= _steps(parts["steps"]["mixes"])
    if "attention" in parts:
        figures |= _attention(parts["attention"], parts.get("fa3", {}))
    rows, differing = _rows(parts)
    if rows:
        figures["rows_compared"] = Figure(rows, "rows", 1_000_000, "higher")
        figures["differing_rows"] = Figure(differing, "rows", 0)
    if "vllm" in parts and "steps" in parts:
        for n in (64, 256):
            ours = parts["steps"]["mixes"][f"{n} as {n}x1 at 512"]["step_ms"]
            figures[f"decode_{n}_over_vllm"] = Figure(
                parts["vllm"][str(n)]["step_ms"] / ours, "ratio", None, "higher"
            )
    if "scheduler" in parts:
        through = parts["scheduler"]["two in flight"]
        figures["scheduled_tok_s"] = Figure(through["window_rows_s"], "rows/s", None, "higher")
        figures["scheduled_prefill_tok_s"] = Figure(through["prefill_rows_s"], "rows/s", None, "higher")
    if "certify" in parts:
        figures["certify_8b_s"] = Figure(parts["certify"]["8b"]["seconds"], "s", 60)
    report(NAME, figures, parts, directory)


def _steps(mixes: dict[str, Any]) -> dict[str, Figure]:
    worst = max(row["over_products"] for name, row in mixes.items() if name.startswith("512 "))
    big, small = mixes["1024 as 32x32"], mixes["64 as 2x32"]
    return {
        "step_64_over_gemm": Figure(small["over_products"], "ratio", 1.35),
        "step_512_over_gemm": Figure(worst, "ratio", 1.25),
        "step_1024_over_gemm": Figure(big["over_products"], "ratio", 1.2),
        "verified_tok_s": Figure(big["rows"] / big["wall_ms"] * 1000, "rows/s", 35_000, "higher"),
        "decode_64_over_floor": Figure(mixes["64 as 64x1"]["over_both"], "ratio", 1.25),
        "host_ms_64": Figure(max(0.0, small["wall_ms"] - small["step_ms"]), "ms", 0.3),
        "host_blocking_ms_64": Figure(small["host_begin_ms"] + small["host_finish_ms"], "ms"),
    }


def _attention(ours: dict[str, Any], fa3: dict[str, Any]) -> dict[str, Figure]:
    out = {}
    for figure, cases in (
        ("attention_2k_share", ("16x32@2k", "512@2k")),
        ("attention_16k_share", ("16x32@16k",)),
    ):
        shares = []
        for case in cases:
            best = min([ours[case]["torch_flash_us"], *([fa3[case]["us"]] if case in fa3 else [])])
            shares.append(best / ours[case]["ours_us"])
        out[figure] = Figure(min(shares), "ratio", 0.6, "higher")
    return out


def _rows(parts: dict[str, Any]) -> tuple[int, int]:
    found = [x for x in parts.get("invariance", {}).values() if isinstance(x, dict)]
    if "smollm2" in parts:
        found.append(parts["smollm2"]["random"])
    return sum(x["rows"] for x in found), sum(x["differing"] for x in found)
