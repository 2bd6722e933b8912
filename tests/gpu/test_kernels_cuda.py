"""Kernels on the device: against float64, and bit equality between providers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llm42.engine.vllm.agreement import leave_only_drawn, warm_up
from llm42.protocol import SamplingParams
from llm42.sampling import Draw
from llm42.verifier.cuda.runner import attention_shape
from llm42_kernels import kv_write, linear_cpu, linear_cuda, rmsnorm, rotary, silu_mul
from llm42_kernels.attention import AttentionShape, Tile, TritonAttention, paged_reference

SHAPES = [(6144, 4096), (4096, 14336), (1152, 576), (576, 1536)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cublas_has_the_bits_of_a_k_ordered_product(n: int, k: int, dtype: torch.dtype) -> None:
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).to(dtype)
    x = torch.randn(1024, k, device="cuda").to(dtype)
    want = linear_cuda.linear_triton(x, weight, None)
    reference = linear_cpu.linear_reference(x[:4].cpu(), weight.cpu(), None)
    torch.testing.assert_close(want[:4].cpu(), reference, rtol=1.6e-2, atol=1e-2)
    head = linear_cuda.CUDA_LM_HEAD_PROVIDERS
    for rows in (1, 2, 17, 64, 200, 1024):
        got = linear_cuda.linear_cublas(x[:rows], weight, None)
        assert torch.equal(got.view(torch.int16), want[:rows].view(torch.int16)), rows
        logits = [head[p](x[:rows], weight, None).view(torch.int32) for p in ("cublas", "triton")]
        assert torch.equal(*logits), rows


def test_bias_is_added_before_the_one_rounding() -> None:
    x, weight = torch.randn(7, 512, device="cuda").bfloat16(), torch.randn(256, 512, device="cuda").bfloat16()
    bias = torch.randn(256, device="cuda").bfloat16()
    got, want = linear_cuda.linear_cublas(x, weight, bias), linear_cuda.linear_triton(x, weight, bias)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_norm_and_gate_against_float64() -> None:
    x, r = (torch.randn(33, 4096, device="cuda").bfloat16() for _ in range(2))
    w = torch.rand(4096, device="cuda").bfloat16()
    for got, want in zip(
        rmsnorm.rms_norm_triton(x, r, w, 1e-5), rmsnorm.rms_norm_reference(x, r, w, 1e-5), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(
        silu_mul.silu_mul_triton(x), silu_mul.silu_mul_reference(x), rtol=1e-2, atol=1e-3
    )


def test_fused_qkv_has_the_bits_of_its_parts() -> None:
    rows, hq, hk, dim = 40, 32, 8, 128
    table = rotary.cos_sin_table(1e4 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim), 512).cuda()
    qkv = torch.randn(rows, (hq + 2 * hk) * dim, device="cuda").bfloat16()
    qkv[3, (hq + hk) * dim + 9] = float("nan")
    at = torch.arange(rows, dtype=torch.int32, device="cuda")
    caches = [torch.zeros(64, hk, dim, device="cuda").bfloat16() for _ in range(4)]
    q_out = torch.empty(rows, hq, dim, device="cuda").bfloat16()
    kv_write.launch_qkv(qkv, q_out, caches[0], caches[1], at, at, table, None, None, 1e-5)
    q, k, v = qkv.view(rows, -1, dim).split((hq, hk, hk), dim=1)
    q_want, k_want = rotary.rotary_torch(q, k, at.long(), table)
    kv_write.kv_write_torch(k_want, v, at, caches[2], caches[3])
    for got, want in ((q_out, q_want), (caches[0], caches[2]), (caches[1], caches[3])):
        assert torch.equal(got.nan_to_num(99.0), want.nan_to_num(99.0))
    assert caches[0][3, 0].isnan().all()
    assert caches[1].isfinite().all()


def _case(shape: AttentionShape, start: list[int], count: list[int]) -> tuple[object, ...]:
    size = shape.block_size
    blocks = [-(-(s + c) // size) for s, c in zip(start, count, strict=True)]
    order = torch.randperm(sum(blocks)).tolist()
    tables = [[order.pop() for _ in range(n)] for n in blocks]
    slots = (sum(blocks) * size, shape.kv_heads, shape.dim)
    k, v = (torch.randn(slots, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(sum(count), shape.heads, shape.dim, device="cuda").bfloat16()
    return q, k, v, start, count, tables


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), [
    (32, 8, 128, 128), (9, 3, 64, 64), (8, 8, 96, 16), (16, 2, 128, 16), (28, 4, 128, 64),
])  # fmt: skip
def test_attention_against_float64(heads: int, kv_heads: int, dim: int, size: int) -> None:
    shape = attention_shape(heads, kv_heads, dim, size)
    case = _case(shape, [0, 700, 1300, 5], [70, 33, 1, 1])
    got = TritonAttention(shape, torch.device("cuda")).run(*case)  # type: ignore[arg-type]
    torch.testing.assert_close(got, paged_reference(*case, size), rtol=2e-2, atol=4e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), [(32, 8, 128, 128), (9, 3, 64, 64)])
@pytest.mark.parametrize(("starts", "counts"), [
    ([2000, 0], [100, 40]), ([0, 63, 511, 2047, 4100], [1, 1, 1, 1, 1]),
])  # fmt: skip
def test_attention_tiles_agree_to_the_last_bit_before_rounding(
    starts: list[int], counts: list[int], heads: int, kv_heads: int, dim: int, size: int
) -> None:
    """The loading-warp kernels, tensor-map tiles and addressed tiles; fused and split segments; rows of
    prompts, and rows that are decoded."""
    shape = attention_shape(heads, kv_heads, dim, size)
    assert (shape.large.load, shape.small.load) == ("hopper", "hopper"), "this test needs Hopper"
    case = _case(shape, starts, counts)
    plain = replace(shape, large=Tile(64, 4, 3, 2), small=Tile(64, 4, 3, 2))
    maps = replace(shape, small=Tile(64, 4, 3, 2, "tma"))
    outs = []
    for s in (shape, maps, plain):
        for programs in (1, 30, 10**6):
            engine = TritonAttention(s, torch.device("cuda"))
            engine.planner.programs = programs
            outs.append(engine.run(*case, torch.float32))  # type: ignore[arg-type]
    assert all(torch.equal(o.view(torch.int32), outs[0].view(torch.int32)) for o in outs)


def test_another_key_tile_gives_other_bits() -> None:
    """Negative control of the test above."""
    shape = replace(attention_shape(32, 8, 128, 128), large=Tile(64, 4, 3, 2), small=Tile(64, 4, 3, 2))
    case = _case(shape, [2000], [100])
    narrow = replace(shape, block_n=32)
    a, b = (
        TritonAttention(s, torch.device("cuda")).run(*case, torch.float32)  # type: ignore[arg-type]
        for s in (shape, narrow)
    )
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_after_the_warm_up_no_draw_compiles() -> None:
    from triton import knobs

    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **told: compiled.append(str(told["repr"]))
    asked = [SamplingParams(temperature=0.8, top_p=0.9 if i % 2 else 1.0, seed=i) for i in range(33)]
    draws = [Draw(p, list(range(20 + i)), 5) for i, p in enumerate(asked)]

    def draw(vocab: int, count: int) -> int:
        compiled.clear()
        logits = torch.randn(count, vocab, device="cuda")
        leave_only_drawn(logits, list(range(count)), draws[:count])
        return len(compiled)

    try:
        warm_up(49150, torch.device("cuda"))
        assert [draw(49150, count) for count in (1, 2, 16, 33)] == [0] * 4
        assert draw(65536, 2) > 0, "control: the hook sees a compilation"
    finally:
        knobs.runtime.jit_post_compile_hook = None


def test_the_fast_path_draws_its_rows_together_as_one_by_one() -> None:
    logits = torch.randn(70, 49152, device="cuda").bfloat16()
    asked = [SamplingParams(temperature=0.8, top_p=0.9 if i % 2 else 1.0, seed=i) for i in range(70)]
    draws = [Draw(p, list(range(20 + i)), 5) for i, p in enumerate(asked)]
    alone = logits.float().cpu()
    leave_only_drawn(logits.clone(), list(range(70)), draws)  # compiled now
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        leave_only_drawn(logits, list(range(70)), draws)
        with pytest.raises(RuntimeError, match="synchroniz"):  # control: a number as a value waits
            logits[torch.arange(2, device="cuda"), torch.arange(2, device="cuda")] = 0.0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    leave_only_drawn(alone, list(range(70)), draws)
    assert logits.argmax(-1).tolist() == alone.argmax(-1).tolist()
