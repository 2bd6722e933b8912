"""Elementwise, norm and product kernels against their float64 references, and bit equality where it is
promised."""

from __future__ import annotations

import pytest
import torch

from llm42_kernels import cublas, kv_write, linear_cpu, linear_cuda, rmsnorm, rotary, silu_mul

DTYPES = [torch.float16, torch.bfloat16]


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.isfinite().all()
    step = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want.double(), rtol=2 * step, atol=2 * step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, r = torch.randn(5, width).to(dtype), torch.randn(5, width).to(dtype)
    w = torch.rand(width).to(dtype)
    for residual in (None, r):
        got = rmsnorm.rms_norm_triton(x, residual, w, 1e-5)
        want = rmsnorm.rms_norm_reference(x, residual, w, 1e-5)
        _close(got[0], want[0])
        _close(got[1], want[1])
    alone = rmsnorm.rms_norm_triton(x[3:4].contiguous(), r[3:4].contiguous(), w, 1e-5)
    assert torch.equal(alone[0], got[0][3:4]) and torch.equal(alone[1], got[1][3:4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2 * 100) * 3).to(dtype)
    _close(silu_mul.silu_mul_triton(x), silu_mul.silu_mul_reference(x))


def _table(dim: int) -> torch.Tensor:
    return rotary.cos_sin_table(10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim), 64)


@pytest.mark.parametrize("dim", [64, 96])
def test_rotary_has_the_bits_of_plain_torch(dim: int) -> None:
    q, k = torch.randn(4, 6, dim).half(), torch.randn(4, 2, dim).half()
    positions = torch.tensor([0, 1, 7, 63])
    got, want = (
        rotary.rotary_triton(q, k, positions, _table(dim)),
        rotary.rotary_torch(q, k, positions, _table(dim)),
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    _close(got[0], rotary.rotary_reference(q, k, positions, _table(dim))[0])


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_fused_qkv_has_the_bits_of_its_parts(dim: int) -> None:
    rows, hq, hk, slots = 4, 6, 2, 8
    qkv = torch.randn(rows, (hq + 2 * hk) * dim).half()
    qkv[2, (hq + hk) * dim + 5] = float("inf")  # a value that is not finite
    where, positions = (
        torch.tensor([3, -1, 0, 6], dtype=torch.int32),
        torch.tensor([5, 6, 7, 8], dtype=torch.int32),
    )
    caches = [torch.full((slots, hk, dim), 7.0).half() for _ in range(6)]
    q_out = torch.empty(rows, hq, dim).half()
    kv_write.launch_qkv(qkv, q_out, caches[0], caches[1], positions, where, _table(dim), None, None, 1e-5)
    q, k, v = qkv.view(rows, -1, dim).split((hq, hk, hk), dim=1)
    q_want, k_want = rotary.rotary_triton(q, k, positions.long(), _table(dim))
    kv_write.kv_write_triton(k_want, v, where, caches[2], caches[3])
    kv_write.kv_write_torch(k_want, v, where, caches[4], caches[5])
    assert torch.equal(q_out, q_want)
    for a, b, c in (caches[0::2], caches[1::2]):
        bits = [x.view(torch.int16) for x in (a, b, c)]
        same = [torch.equal(torch.nan_to_num(a, 99.0), torch.nan_to_num(x, 99.0)) for x in (b, c)]
        assert all(same) and bits[0].shape == bits[1].shape
    assert caches[0][0, 0].isnan().all() and (caches[1][0, 0] == 0).all(), "the key must carry the poison"
    assert caches[0][0, 1].isfinite().all() and (caches[0][1] == 7).all(), "other heads and slots stay"


def test_fused_qk_norm() -> None:
    rows, hq, hk, dim = 3, 4, 2, 64
    qkv = torch.randn(rows, (hq + 2 * hk) * dim).half()
    wq, wk = torch.rand(dim).half(), torch.rand(dim).half()
    positions, where = torch.tensor([1, 2, 3], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    k_cache, v_cache = torch.zeros(4, hk, dim).half(), torch.zeros(4, hk, dim).half()
    q_out = torch.empty(rows, hq, dim).half()
    kv_write.launch_qkv(qkv, q_out, k_cache, v_cache, positions, where, _table(dim), wq, wk, 1e-5)
    q, k, v = qkv.view(rows, -1, dim).split((hq, hk, hk), dim=1)
    q = rmsnorm.rms_norm_reference(q, None, wq, 1e-5)[0]
    k = rmsnorm.rms_norm_reference(k, None, wk, 1e-5)[0]
    want = rotary.rotary_reference(q, k, positions.long(), _table(dim))
    torch.testing.assert_close(q_out, want[0], rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(k_cache[:3], want[1], rtol=4e-3, atol=4e-3)
    assert torch.equal(v_cache[:3], v)


@pytest.mark.parametrize("bias", [False, True])
def test_matmul(bias: bool) -> None:
    x, w = torch.randn(19, 200).half(), torch.randn(150, 200).half() * 0.1
    b = torch.randn(150).half() if bias else None
    got = linear_cuda.linear_triton(x, w, b)
    torch.testing.assert_close(got, linear_cpu.linear_reference(x, w, b), rtol=2e-3, atol=2e-3)
    assert linear_cuda.CUDA_LM_HEAD_PROVIDERS["triton"](x, w, None).dtype == torch.float32


def test_environment_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cublas.CUBLAS_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    cublas.check_cublas_environment()
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE")
    with pytest.raises(cublas.CublasEnvironmentError, match="CUBLASLT_WORKSPACE_SIZE=0"):
        cublas.check_cublas_environment()
