"""The canonical verifier on one GPU: parts that each write a JSON file, and the result assembled from them.

    python -m benchmarks.verifier.h200 PART... --dir DIR     writes DIR/PART.json
    python -m benchmarks.verifier.h200 assemble --dir DIR    writes DIR/h200-verifier.json

Parts: steps attention scheduler certify invariance smollm2 vllm fa3. Last result: benchmarks/results.
Needs CUBLASLT_WORKSPACE_SIZE=0 CUBLAS_WORKSPACE_CONFIG=:0:0. `smollm2` needs the model (SMOLLM2, a GGUF
file) and transformers; `vllm` and `fa3` need vLLM. What is measured and how: docs/measurements/verifier.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.random_model import LLAMA_8B, SMALL_64, SMALL_96, SMALL_QK, random_model
from benchmarks.verifier import figures
from benchmarks.verifier.invariance import Count, random_steps
from benchmarks.verifier.steps import MIXES, host_ms, kv_ms, pipelined_ms, sequences_of, step_and_products_ms
from llm42.cache import KVCache
from llm42.config import VerifierSettings
from llm42.models.weights import LoadedModel
from llm42.verifier.certify.certificate import CertificationFailed
from llm42.verifier.certify.cuda import CUDACertifier
from llm42.verifier.certify.plants_cuda import PLANTS
from llm42.verifier.cuda.runner import CudaRunner
from llm42_kernels.cuda import cuda_operators

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BLOCK = 128


def runner_for(
    model: LoadedModel, tokens: int, buckets: tuple[int, ...] = BUCKETS, block: int = BLOCK
) -> CudaRunner:
    """A runner with a KV cache of `tokens` tokens."""
    c = model.config
    kv = KVCache(c.num_layers, tokens // block, block, c.num_kv_heads, c.head_dim, model.dtype, "cuda")
    return CudaRunner(model, cuda_operators(), kv, buckets, 32768)


def steps() -> dict[str, Any]:
    """Every mix: device time of a step beside its products and KV bytes, host time, wall time in a
    pipeline."""
    model = random_model(LLAMA_8B)
    began = time.perf_counter()
    runner = runner_for(model, 200_000)
    out: dict[str, Any] = {"start_s": time.perf_counter() - began, "mixes": {}}
    for mix in MIXES:
        sequences = sequences_of(mix, BLOCK, model.config.vocab_size)
        step, products = step_and_products_ms(runner, mix, sequences)
        begin, finish = host_ms(runner, mix, sequences)
        row = {
            "step_ms": step,
            "products_ms": products,
            "kv_ms": kv_ms(mix, model),
            "over_products": step / products,
            "over_both": step / (products + kv_ms(mix, model)),
            "wall_ms": pipelined_ms(runner, mix.total, sequences),
            "host_begin_ms": begin,
            "host_finish_ms": finish,
            "rows": mix.total,
        }
        out["mixes"][mix.name] = row
        print(mix.name, {k: round(v, 3) for k, v in row.items()}, flush=True)
    return out


def attention() -> dict[str, Any]:
    """Attention of 512 rows over contexts 2k and 16k, against torch's flash attention on contiguous
    tensors."""
    from benchmarks.verifier.attention_tiles import Work, flash_micros, run
    from llm42.verifier.cuda.runner import attention_shape

    out = {}
    for name in ("16x32@2k", "512@2k", "16x32@16k", "64x1@2k", "2x32@2k"):
        work = Work(name, BLOCK)
        ours = run(attention_shape(32, 8, 128, BLOCK), work)[1]
        out[name] = {"ours_us": ours, "torch_flash_us": flash_micros(work)}
        print(name, out[name], flush=True)
        del work
    return out


def certify() -> dict[str, Any]:
    """Certification of the 8B model (time), of small ones, and what each plant does."""
    out: dict[str, Any] = {"plants": {}, "small": {}}
    large = VerifierSettings(buckets=BUCKETS, block_size=BLOCK)
    out["8b"] = CUDACertifier(random_model(LLAMA_8B), large).run().to_json()
    print("8B certified in", out["8b"]["seconds"], "s", flush=True)
    settings = VerifierSettings(buckets=(1, 8, 64, 512), block_size=64)
    small = random_model(SMALL_64)
    for plant in PLANTS:
        if plant == "split-k":
            continue  # needs another environment: benchmarks/verifier/certify_device.py
        try:
            CUDACertifier(small, settings, [plant]).run()
            out["plants"][plant] = None
        except CertificationFailed as error:
            out["plants"][plant] = str(error)[:300]
        print(plant, "->", str(out["plants"][plant])[:120], flush=True)
    cases = (
        ("head 96", SMALL_96, torch.bfloat16, 16),
        ("fp16", SMALL_64, torch.float16, 16),
        ("qk-norm", SMALL_QK, torch.bfloat16, 128),
    )
    for name, config, dtype, block in cases:
        other = settings.model_copy(update={"block_size": block})
        found = CUDACertifier(random_model(config, dtype), other).run()
        out["small"][name] = found.to_json()
        print(name, found.seconds, "s", found.providers, flush=True)
    return out


def invariance() -> dict[str, Any]:
    """Random steps over whole models with random weights."""
    out = {}
    for name, config, count in (
        ("8B", LLAMA_8B, 1500),
        ("head 64", SMALL_64, 4000),
        ("qk-norm", SMALL_QK, 500),
    ):
        out[name] = _random(random_model(config), count)
        print(name, out[name], flush=True)
    return out


def _random(model: LoadedModel, count: int, length: int = 1000) -> dict[str, Any]:
    runner = runner_for(model, 9 * -(-length // BLOCK) * BLOCK)
    began = time.perf_counter()
    found: Count = random_steps(runner, runner.kv, model.config.vocab_size, length, 4, count)
    return {**asdict(found), "seconds": time.perf_counter() - began}


def smollm2() -> dict[str, Any]:
    """A real model: certification, random steps, teacher-forced log-probabilities against transformers to
    8k."""
    import os

    from benchmarks.verifier.reference import compare
    from llm42.checkpoint.load import load_model

    model = load_model(os.environ["SMOLLM2"], "bfloat16", "cuda", 8192)
    settings = VerifierSettings(buckets=BUCKETS, block_size=BLOCK)
    out: dict[str, Any] = {"certificate": CUDACertifier(model, settings).run().to_json()}
    print("SmolLM2 certified in", out["certificate"]["seconds"], flush=True)
    out["random"] = _random(model, 3000)
    print(out["random"], flush=True)
    out["reference"] = compare(model, runner_for(model, 16384, (1024,)))
    print(out["reference"], flush=True)
    return out


def scheduler() -> dict[str, Any]:
    """Rows per second through the verifier's queue, scheduler and cache."""
    from benchmarks.verifier.scheduler import rows_per_second

    model = random_model(LLAMA_8B)
    return rows_per_second(model, runner_for(model, 300_000))


def vllm() -> dict[str, Any]:
    """vLLM's decode step with the same model shape, 64 and 256 sequences at context 512."""
    from benchmarks.verifier.vllm_comparison import decode_steps

    return decode_steps()


def fa3() -> dict[str, Any]:
    """vLLM's FlashAttention 3 on the same paged rows."""
    from benchmarks.verifier.vllm_comparison import attention_micros

    return attention_micros()


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    f.__name__: f for f in (steps, attention, scheduler, certify, invariance, smollm2, vllm, fa3)
}


def main() -> None:
    """Runs parts, or assembles their files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "assemble"])
    parser.add_argument("--dir", type=Path, required=True)
    options = parser.parse_args()
    for part in options.parts:
        if part == "assemble":
            figures.assemble(options.dir)
            continue
        began = time.perf_counter()
        found = PARTS[part]()
        (options.dir / f"{part}.json").write_text(
            json.dumps({**found, "seconds": time.perf_counter() - began}, indent=1)
        )


if __name__ == "__main__":
    main()
