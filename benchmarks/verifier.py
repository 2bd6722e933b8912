"""The canonical verifier on one GPU. First version: step times."""

from __future__ import annotations

import json
import sys
import time

import torch

from benchmarks.random_model import LLAMA_8B, SMALL_64, random_model
from benchmarks.verifier_steps import MIXES, kv_ms, pipelined_ms, products_ms, sequences_of, step_ms
from kernels.cuda import cuda_operators
from llm42.cache import KVCache
from llm42.verifier.cuda_runner import CudaRunner

def make(config, buckets, tokens, block=128, **kw):
    t=time.time()
    model = random_model(config)
    torch.cuda.synchronize(); print("model", time.time()-t, flush=True); t=time.time()
    kv = KVCache(config.num_layers, tokens//block, block, config.num_kv_heads, config.head_dim, model.dtype, "cuda")
    runner = CudaRunner(model, cuda_operators(), kv, buckets, 32768, **kw)
    print("runner", time.time()-t, "mem", torch.cuda.memory_allocated()/2**30, torch.cuda.memory_reserved()/2**30, flush=True)
    return model, runner

def main():
    out = {}
    model, runner = make(LLAMA_8B, (64, 256, 512, 1024), 200_000)
    for mix in MIXES:
        seqs = sequences_of(mix, 128, model.config.vocab_size)
        gemm = products_ms(model, mix.total, mix.head_rows)
        r = step_ms(runner, mix.total, seqs)
        r["wall"] = pipelined_ms(runner, mix.total, seqs)
        r["gemm"], r["kv"] = gemm, kv_ms(mix, model)
        r["ratio"] = r["device"]/gemm; r["ratio_both"]=r["device"]/(gemm+r["kv"])
        print(mix.name, {k: round(v,3) for k,v in r.items()}, flush=True)
        out[mix.name]=r
    if len(sys.argv)>1: json.dump(out, open(sys.argv[1],"w"), indent=1)

main()
