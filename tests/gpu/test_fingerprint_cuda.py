"""What the fingerprint says of a GPU: loaded libraries, driver, TunableOp; and that neither configured step
sizes nor block sizes are in a bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lib.random_model import SMALL_64, random_model
from llm42.cache import BlockPool, KVCache
from llm42.config import VerifierSettings
from llm42.fingerprint import device
from llm42.fingerprint.environment import UnsteadyKernels, require_steady_kernels
from llm42.fingerprint.libraries import loaded_libraries
from llm42.models.weights import LoadedModel
from llm42.protocol import Commit, SamplingParams, Window
from llm42.verifier.certify.certificate import Certificate
from llm42.verifier.certify.cuda import CUDACertifier
from llm42.verifier.cuda.runner import CudaRunner, attention_shape
from llm42.verifier.scheduler import Verifier
from llm42_kernels.cuda import PROVIDERS, cuda_operators

PARTS = {
    "torch", "torch_cuda", "cublas", "cublasLt", "cudart", "libcuda", "ptxas", "libdevice", "openmp", "libm",
}  # fmt: skip


def test_the_loaded_libraries() -> None:
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    found = loaded_libraries("cuda")
    assert set(found) >= PARTS
    assert all(re.search(r"[0-9a-f]{16}$", value) for value in found.values()), found
    said = int(found["cublasLt"].split()[0])
    assert found["cublas"].split()[0] == f"{said // 10000}.{said // 100 % 100}.{said % 100}"
    assert found == loaded_libraries("cuda")


def test_the_driver_is_the_same_by_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = (device._nvml_version, device._module_version, device._library_version)
    found = {way() for way in ways} - {None}
    assert len(found) == 1, found
    assert device.driver_version() in found
    monkeypatch.setattr(device, "NVML", "no-such-library.so")
    monkeypatch.setattr(device, "DRIVER", Path("/nonexistent"))
    assert device.driver_version(), "without NVML and /proc/driver there is the driver's library"


def test_tunable_op_is_refused() -> None:
    require_steady_kernels("cuda")
    torch.cuda.tunable.enable(True)
    try:
        with pytest.raises(UnsteadyKernels, match="TunableOp"):
            require_steady_kernels("cuda")
    finally:
        torch.cuda.tunable.enable(False)


def _answers(model: LoadedModel, certificate: Certificate, block: int) -> list[Any]:
    c, blocks = model.config, 4096 // block
    kv = KVCache(c.num_layers, blocks, block, c.num_kv_heads, c.head_dim, model.dtype, "cuda")
    ops = cuda_operators({op: name for op, name in certificate.providers.items() if op in PROVIDERS})
    shape = attention_shape(c.num_heads, c.num_kv_heads, c.head_dim, block)
    runner = CudaRunner(model, ops, kv, certificate.buckets, 2048, shape=shape, graphs=False)
    verifier = Verifier(
        runner, BlockPool(blocks, block), buckets=certificate.buckets, max_len=2048,
        vocab_size=c.vocab_size, fingerprint="",
    )  # fmt: skip
    gen, found = torch.Generator().manual_seed(3), []
    for number, length in enumerate((1, 30, 70, 515, 1300)):
        ids = torch.randint(0, c.vocab_size, (length + 9,), generator=gen).tolist()
        params = SamplingParams(temperature=0.8, top_p=0.9, seed=number)
        window = Window(f"r{number}", tuple(ids[:length]), length, tuple(ids[length:]), params, 2)
        future = verifier.submit(window)
        while not future.done():
            verifier.step()
        answer = future.result()
        assert isinstance(answer, Commit), answer
        found.append((answer.accepted, answer.next_token, answer.logprobs))
    return found


def test_step_and_block_sizes_change_no_bit() -> None:
    model, base = random_model(SMALL_64), VerifierSettings(buckets=(1, 8, 64), block_size=64)
    first = CUDACertifier(model, base).run()
    want = _answers(model, first, 64)
    for sizes, block in (((7, 100, 1024), 64), ((1, 8, 64), 128), ((64, 512), 32), ((3,), 16)):
        found = CUDACertifier(model, base.model_copy(update={"buckets": sizes, "block_size": block})).run()
        assert found.golden == first.golden
        assert found.providers == first.providers
        assert _answers(model, found, block) == want, (sizes, block)
