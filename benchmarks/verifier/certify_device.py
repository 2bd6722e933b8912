"""Certification on the device: an 8B model's time, every plant, small models; then random steps over whole
models."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace

import torch

from benchmarks.lib.random_model import LLAMA_8B, SMALL_64, SMALL_96, SMALL_QK, random_model
from benchmarks.verifier.invariance import random_steps
from llm42.cache import KVCache
from llm42.config import VerifierSettings
from llm42.verifier.certify.certificate import CertificationFailed
from llm42.verifier.certify.cuda import CUDACertifier
from llm42.verifier.certify.plants_cuda import PLANTS
from llm42.verifier.cuda.runner import CudaRunner
from llm42_kernels.cuda import cuda_operators

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def main() -> None:
    """Prints and writes what was found. Argument: the output file."""
    out: dict[str, object] = {}
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        _split_k()
        return
    big = random_model(LLAMA_8B)
    certificate = CUDACertifier(big, VerifierSettings(buckets=BUCKETS, block_size=128)).run()
    out["certificate_8b"] = certificate.to_json()
    print(
        "8B certified in",
        certificate.seconds,
        "s,",
        certificate.compared_rows,
        "rows",
        certificate.providers,
        flush=True,
    )
    small = random_model(SMALL_64)
    settings = VerifierSettings(buckets=(1, 8, 64, 512), block_size=64)
    for plant in PLANTS:
        if plant == "split-k":
            continue
        try:
            CUDACertifier(small, settings, [plant]).run()
            found = "NOT CAUGHT"
        except CertificationFailed as error:
            found = str(error)
        out[f"plant {plant}"] = found
        print(plant, "->", found[:150], flush=True)
    for name, config, dtype, block in (
        ("64", SMALL_64, torch.bfloat16, 64), ("64 fp16", SMALL_64, torch.float16, 16),
        ("96", SMALL_96, torch.bfloat16, 16), ("qk", SMALL_QK, torch.bfloat16, 128),
    ):  # fmt: skip
        t = time.time()
        try:
            other = settings.model_copy(update={"block_size": block})
            found = CUDACertifier(random_model(config, dtype), other).run()
            print(name, "certified", found.seconds, "s", found.compared_rows, found.providers, flush=True)
        except CertificationFailed as error:
            print(name, "FAILED", error, time.time() - t, flush=True)
    for name, model, steps, block in (("small", small, 1500, 64), ("8B", big, 250, 128)):
        c = model.config
        blocks = 9 * -(-1000 // block)
        kv = KVCache(c.num_layers, blocks, block, c.num_kv_heads, c.head_dim, model.dtype, "cuda")
        t = time.time()
        runner = CudaRunner(model, cuda_operators(), kv, BUCKETS, 1024)
        started = time.time() - t
        t = time.time()
        count = random_steps(runner, kv, c.vocab_size, 1000, 4, steps)
        print(
            name,
            "start",
            round(started, 1),
            "s; random steps:",
            count,
            round(time.time() - t, 1),
            "s",
            flush=True,
        )
        out[f"random {name}"] = {"rows": count.rows, "differing": count.differing, "examples": count.examples}
        del runner
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(out, file, indent=1)


def _split_k() -> None:
    """In a process with cuBLAS's default workspace: the product must fail its check."""
    model = random_model(replace(LLAMA_8B, num_layers=1))
    try:
        CUDACertifier(model, VerifierSettings(buckets=BUCKETS, block_size=128), ["split-k"]).run()
        print("split-k: NOT CAUGHT")
    except CertificationFailed as error:
        print("split-k:", error)


main()
