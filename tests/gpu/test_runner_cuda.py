"""The CUDA runner on small random models: bits over random steps, sampling, errors that stay with their
request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.lib.random_model import SMALL_64, SMALL_96, SMALL_QK, random_model
from benchmarks.verifier.invariance import random_steps
from llm42.cache import KVCache
from llm42.config import VerifierSettings
from llm42.models.config import ModelConfig
from llm42.protocol import SamplingParams
from llm42.sampling import sample_row
from llm42.verifier.certify.certificate import CertificationFailed
from llm42.verifier.certify.cuda import CUDACertifier
from llm42.verifier.certify.plants_cuda import PLANTS
from llm42.verifier.cuda.runner import CudaRunner, OutOfDeviceMemory, memory_advice
from llm42.verifier.runner import SequenceRows
from llm42_kernels.attention import Tile, TritonAttention
from llm42_kernels.cuda import cuda_operators

BUCKETS = (1, 8, 64, 256)


def _runner(config: ModelConfig, block: int, graphs: bool = True) -> CudaRunner:
    model = random_model(config)
    kv = KVCache(
        config.num_layers, 4096 // block, block, config.num_kv_heads, config.head_dim, model.dtype, "cuda"
    )
    return CudaRunner(model, cuda_operators(), kv, BUCKETS, 1024, graphs=graphs)


@pytest.mark.parametrize(("config", "block"), [(SMALL_64, 64), (SMALL_96, 16), (SMALL_QK, 128)])
def test_random_steps_change_no_bit(config: ModelConfig, block: int) -> None:
    runner = _runner(config, block)
    found = random_steps(runner, runner.kv, config.vocab_size, 250, 3, 300)
    assert found.rows > 5000
    assert found.differing == 0, found.examples


def test_broken_attention_is_noticed_by_random_steps() -> None:
    """Negative control: another key tile in every bucket but the largest."""
    runner = _runner(SMALL_64, 64, graphs=False)
    forward, kept = runner._forward, runner._forward.attention
    tiles = {"large": Tile(128, 8, 2, 1), "small": Tile(64, 4, 2, 2)}
    other = TritonAttention(replace(kept.shape, block_n=32, **tiles), torch.device("cuda"), 8)
    body = forward.body

    def switching(rows: int, variant: str, hidden: torch.Tensor) -> None:
        forward.attention = kept if rows == BUCKETS[-1] else other
        body(rows, variant, hidden)

    forward.body = switching  # type: ignore[method-assign]
    found = random_steps(runner, runner.kv, SMALL_64.vocab_size, 250, 2, 60)
    assert found.differing > 0


def _sequence(tokens: list[int], params: SamplingParams, table: list[int], logprobs: int = 0) -> SequenceRows:
    return SequenceRows(tokens, 0, len(tokens), table, len(tokens) - 3, 2, params, logprobs)


def test_sampled_tokens_are_those_of_the_row_sampler() -> None:
    runner = _runner(SMALL_64, 64)
    tokens = torch.randint(0, SMALL_64.vocab_size, (30,)).tolist()
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.1, top_p=0.8, top_k=50, seed=4),
        SamplingParams(temperature=0.7, min_p=0.02, repetition_penalty=1.3, seed=2**40),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.2, logit_bias=((11, 40.0),)),
    ]
    sequences = [_sequence(tokens, p, [i], 4 if i % 2 else 0) for i, p in enumerate(params)]
    logits = runner.logits(256, sequences).cpu()
    pending = [runner.begin(256, sequences) for _ in range(2)]  # two steps in flight
    both = [runner.finish(p) for p in pending]
    assert both[0] == both[1]
    row = 0
    for i, (p, got) in enumerate(zip(params, both[0], strict=True)):
        for j, s in enumerate(got):
            want = sample_row(logits[row], p, tokens[: 28 + j], 2, 4 if i % 2 else 0)
            assert s.token == want.token, (i, j)
            assert abs(s.logprob.logprob - want.logprob.logprob) < 1e-4
            assert [t for t, _ in s.logprob.top] == [t for t, _ in want.logprob.top]
            row += 1


def test_nan_ends_one_request_and_leaves_the_others() -> None:
    runner = _runner(SMALL_64, 64)
    tokens = torch.randint(0, SMALL_64.vocab_size, (80,)).tolist()
    healthy = SequenceRows(tokens, 0, 20, [0], 19, 20, SamplingParams())
    want = runner.step(64, [healthy])
    runner.kv.fill([5], float("nan"))
    torch.cuda.synchronize()
    sick = SequenceRows(tokens, 64, 3, [5, 6], 64, 20, SamplingParams(temperature=1.0))
    got = runner.step(64, [sick, healthy])
    assert all(not s.finite for s in got[0])
    assert got[1] == want[0]


def test_graphs_and_eager_steps_agree() -> None:
    a, b = _runner(SMALL_64, 64), _runner(SMALL_64, 64, graphs=False)
    tokens = torch.randint(0, SMALL_64.vocab_size, (200,)).tolist()
    rows = [SequenceRows(tokens, 0, 200, [3, 1, 0, 2], 0, 200, SamplingParams())]
    assert torch.equal(a.logits(256, rows).view(torch.int32), b.logits(256, rows).view(torch.int32))


def test_copy_block_is_ordered_with_steps() -> None:
    runner = _runner(SMALL_64, 64)
    tokens = torch.randint(0, SMALL_64.vocab_size, (70,)).tolist()
    runner.step(256, [SequenceRows(tokens, 0, 64, [0], 63, 70, SamplingParams())])
    want = runner.step(8, [SequenceRows(tokens, 64, 6, [0, 1], 64, 70, SamplingParams())])
    runner.copy_block(0, 7)
    assert runner.step(8, [SequenceRows(tokens, 64, 6, [7, 2], 64, 70, SamplingParams())]) == want


def test_certificate_and_plants() -> None:
    model, settings = random_model(SMALL_64), VerifierSettings(buckets=(1, 8, 64), block_size=64)
    certificate = CUDACertifier(model, settings).run()
    assert all(r.passed for r in certificate.reports)
    for plant in PLANTS:
        if plant == "split-k":
            continue  # needs a process with cuBLAS's default workspace
        with pytest.raises(CertificationFailed):
            CUDACertifier(model, settings, [plant]).run()


def test_out_of_memory_names_the_setting() -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"verifier\.kv_tokens"), memory_advice():
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
