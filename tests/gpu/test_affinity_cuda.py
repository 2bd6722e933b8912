"""Providers with vLLM's arithmetic on the device: bits against the library and the compiler they follow, row
invariance of the runner on them, and certification that can fail."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from benchmarks.affinity.exact import attend, attention_bits, norm_bits
from benchmarks.lib.random_model import SMALL_64, random_model
from benchmarks.verifier.invariance import random_steps
from llm42.cache import KVCache
from llm42.config import VerifierSettings
from llm42.verifier.certify.certificate import CertificationFailed
from llm42.verifier.certify.cuda import CUDACertifier
from llm42.verifier.certify.plants_cuda import PLANTS
from llm42.verifier.cuda.runner import CudaRunner, attention_shape
from llm42_kernels.attention_flash import flash_shape, make_attention
from llm42_kernels.cuda import candidates, cuda_operators
from llm42_kernels.linear_cuda import round_in_place

BUCKETS = (1, 8, 64, 256)
NO_VLLM = importlib.util.find_spec("vllm") is None


@pytest.mark.skipif(NO_VLLM, reason="vLLM's FlashAttention 3 is not installed")
def test_attention_has_the_librarys_bits() -> None:
    for shape, shares in attention_bits().items():
        assert set(shares.values()) == {1.0}, (shape, shares)


@pytest.mark.skipif(NO_VLLM, reason="vLLM's FlashAttention 3 is not installed")
def test_the_usual_attention_has_not() -> None:
    """Negative control of the test above."""
    k, v = (torch.randn(16, 64, 3, 64, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(1, 9, 64, device="cuda").bfloat16()
    table = torch.arange(16, dtype=torch.int32, device="cuda")[None]
    want = attend(q, k, v, table, [900])
    flat = [x.flatten(0, 1) for x in (k, v)]
    shapes = (flash_shape(9, 3, 64, 64), attention_shape(9, 3, 64, 64))
    ours, usual = (make_attention(s, q.device).run(q, *flat, [899], [1], [list(range(16))]) for s in shapes)
    assert torch.equal(ours, want) and not torch.equal(usual, want)


def test_norms_and_gate_have_the_compilers_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 2,048 columns the compiler has one launch to choose; beyond, it is told to measure no times."""
    monkeypatch.setattr("benchmarks.affinity.exact.WIDTHS", (576, 2048, 4096))
    with torch.inference_mode(False):
        found = norm_bits()
    assert all(share == 1.0 for shares in found.values() for share in shares), found


def _runner(attention: str) -> CudaRunner:
    c, names = SMALL_64, candidates("vllm")
    ops = cuda_operators({op: names[op][0] for op in ("rms_norm", "silu_mul")})
    kv = KVCache(c.num_layers, 64, 64, c.num_kv_heads, c.head_dim, torch.bfloat16, "cuda")
    shape = flash_shape(c.num_heads, c.num_kv_heads, c.head_dim, 64)
    if attention == "other tile":
        shape = replace(shape, block_n=128)
    return CudaRunner(random_model(c), ops, kv, BUCKETS, 1024, shape=shape, round_logits=True)


def test_random_steps_change_no_bit() -> None:
    runner = _runner("usual")
    found = random_steps(runner, runner.kv, SMALL_64.vocab_size, 250, 3, 200)
    assert found.rows > 5000
    assert found.differing == 0, found.examples


def test_a_tile_that_follows_the_step_is_noticed() -> None:
    """Negative control: another key tile in every bucket but the largest."""
    runner, other = _runner("usual"), _runner("other tile")
    forward, body = runner._forward, runner._forward.body
    kept, switched = forward.attention, other._forward.attention
    runner._bodies.clear()

    def switching(rows: int, variant: str, hidden: torch.Tensor) -> None:
        forward.attention = kept if rows == BUCKETS[-1] else switched
        body(rows, variant, hidden)

    forward.body = switching  # type: ignore[method-assign]
    assert random_steps(runner, runner.kv, SMALL_64.vocab_size, 250, 2, 60).differing > 0


def test_logits_are_rounded_in_place() -> None:
    logits = torch.randn(3, 5003, device="cuda")
    want = logits.bfloat16().float()
    round_in_place(logits, torch.bfloat16)
    assert torch.equal(logits, want)


@pytest.mark.parametrize("plant", [None, *(p for p in PLANTS if p != "split-k")])
def test_certification_with_affinity(plant: str | None) -> None:
    settings = VerifierSettings(buckets=(1, 8, 64, 512), block_size=64, affinity="vllm")
    model = random_model(SMALL_64, max_len=4096)
    if plant is None:
        certificate = CUDACertifier(model, settings).run()
        chosen = {op: certificate.providers[op] for op in ("rms_norm", "silu_mul", "attention")}
        assert chosen == {"rms_norm": "carried", "silu_mul": "library-exp", "attention": "flash-order"}
        return
    with pytest.raises(CertificationFailed):
        CUDACertifier(model, settings, [plant]).run()
