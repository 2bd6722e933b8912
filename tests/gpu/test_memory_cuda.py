"""What a runner takes of the GPU beside weights and KV: no more than is reckoned for it (memory.py)."""

from __future__ import annotations

import torch

from benchmarks.lib.random_model import LLAMA_8B, random_model
from llm42.cache import BlockPool, KVCache
from llm42.config import GPU_DEFAULTS
from llm42.protocol import Commit, SamplingParams, Window
from llm42.verifier.cuda.memory import block_bytes, step_bytes
from llm42.verifier.cuda.runner import CudaRunner
from llm42.verifier.scheduler import Verifier
from llm42_kernels.cuda import cuda_operators

BLOCKS, MAX_LEN = 256, 16384


def test_graphs_and_the_largest_steps_fit_what_is_reckoned() -> None:
    """All graphs of an 8B shape, then steps of 1,024 rows that are all sampled, restricted and have
    alternatives."""
    c, size, buckets = LLAMA_8B, GPU_DEFAULTS["block_size"], GPU_DEFAULTS["buckets"]
    model = random_model(c, max_len=MAX_LEN)
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    kv = KVCache(c.num_layers, BLOCKS, size, c.num_kv_heads, c.head_dim, torch.bfloat16, "cuda")
    verifier = Verifier(
        CudaRunner(model, cuda_operators(), kv, buckets, MAX_LEN),
        BlockPool(BLOCKS, size), buckets=buckets, max_len=MAX_LEN, vocab_size=c.vocab_size, fingerprint="f",
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, presence_penalty=0.5)
    windows = [
        Window(f"r{i}", tuple(range(2, 130)), 128, tuple(range(7, 70)), sampling, 20, score=True)
        for i in range(64)
    ]
    futures = [verifier.submit(w) for w in windows]
    while verifier.step():
        pass
    assert all(isinstance(f.result(), Commit) for f in futures)
    after, _ = torch.cuda.mem_get_info()
    taken = before - after - BLOCKS * block_bytes(c, size, 2)
    reckoned = step_bytes(c, buckets[-1], MAX_LEN, size, 2)
    assert reckoned / 4 < taken <= reckoned, f"{taken / 2**30:.2f} of {reckoned / 2**30:.2f} GiB"
