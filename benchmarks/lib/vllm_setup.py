"""What the vLLM benchmarks share: model, settings, prompts. They run on a GPU and, small, on a CPU."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.random_model import LLAMA_8B
from benchmarks.lib.report import RESULTS
from llm42.config import Settings
from llm42.engine.vllm.export import config_json

CPU_KV_BYTES = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of all vLLM benchmarks."""
    parser.add_argument("--model", default="8b", help="a GGUF file, a directory, or 8b: random Llama 3 8B")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU for one engine")
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", help="NAME.json in --out; default: the device and the benchmark's name")


def settings_of(args: argparse.Namespace, sampled_agreement: bool = False) -> Settings:
    """Settings with engine.kind vllm."""
    vllm: dict[str, Any] = {
        "sampled_agreement": sampled_agreement,
        "dtype": args.dtype,
        "max_num_seqs": args.max_num_seqs,
        "enforce_eager": args.eager,
        "gpu_memory_utilization": args.memory,
    }
    path, extra = args.model, {}
    if path == "8b":
        path, extra = _random_8b(), {"load_format": "dummy"}
    if args.device == "cpu":
        vllm["gpu_memory_utilization"] = 0.05  # of the main memory, checked before the next one is looked at
        extra["kv_cache_memory_bytes"] = CPU_KV_BYTES
    model = {"path": path, "device": args.device, "max_model_len": args.max_model_len}
    engine = {"kind": "vllm", "vllm": vllm | {"extra_args": extra}}
    return Settings.load({"model": model, "engine": engine, "session": {"mode": "verify"}})


def _random_8b() -> str:
    place = Path(tempfile.mkdtemp())
    (place / "config.json").write_text(json.dumps(config_json(LLAMA_8B, "bfloat16")))
    return str(place)


def prompts_of(count: int, length: int, vocab: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random token ids; no two prompts share a prefix, so no cache helps."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, vocab) for _ in range(length)) for _ in range(count)]
