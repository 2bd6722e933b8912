"""How many KV blocks a verifier takes of a GPU that it has to itself: the arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm42.config import Settings
from llm42.models.config import ModelConfig
from llm42.models.rope import RopeSettings
from llm42.verifier import build
from llm42.verifier.cuda.memory import block_bytes, blocks_left, kv_blocks, step_bytes
from llm42.verifier.cuda.runner import OutOfDeviceMemory

GIB = 1 << 30
LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, RopeSettings(500000.0), 8192)


def test_a_block_is_keys_and_values_of_all_layers() -> None:
    assert block_bytes(LLAMA_8B, 64, 2) == 64 * 131072, "131 kB a token, as docs/operations.md says"


def test_what_is_left_under_the_share_beside_what_is_in_use_and_a_step() -> None:
    assert blocks_left(100 * GIB, 80 * GIB, 0.9, 5 * GIB, GIB, 1) == 65
    assert blocks_left(100 * GIB, 80 * GIB, 0.5, 5 * GIB, GIB, 1) == 25
    assert blocks_left(100 * GIB, 80 * GIB, 0.9, 5 * GIB + 1, GIB, 1) == 64, "a part of a block is none"


@pytest.mark.parametrize(("free", "least", "fits"), [(31, 16, True), (31, 17, False), (10, 1, False)])
def test_less_than_one_request_is_an_error_that_says_what_to_do(free: int, least: int, fits: bool) -> None:
    asked = (100 * GIB, free * GIB, 0.9, 5 * GIB, GIB, least)
    if fits:
        assert blocks_left(*asked) == least
        return
    with pytest.raises(OutOfDeviceMemory) as caught:
        blocks_left(*asked)
    for word in ("gpu_memory_utilization 0.9", "model.max_model_len", "verifier.buckets", f"needs {least}"):
        assert word in str(caught.value)


def test_a_step_of_an_8b_model_is_some_gib() -> None:
    small, large = (step_bytes(LLAMA_8B, rows, 16384, 64, 2) for rows in (64, 1024))
    logits = 4 * 128256
    assert large - small > 960 * logits, "each row has logits"
    assert GIB < small < large < 6 * GIB


class Gpu:
    """Stands for torch.cuda: 140 GiB, of which so many are free."""

    def __init__(self, free: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.emptied = int(free * GIB), False
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.info)

    def empty(self) -> None:
        self.emptied = True

    def info(self, device: str) -> tuple[int, int]:
        assert self.emptied, "what certification has left in the allocator counts as in use"
        assert device == "cuda"
        return self.free, 140 * GIB


MODEL: Any = SimpleNamespace(config=LLAMA_8B, dtype=torch.bfloat16, device="cuda")


def settings_of(**verifier: Any) -> Settings:
    model = {"device": "cuda", "max_model_len": 8192}
    return Settings.load({"model": model, "engine": {"kind": "canonical"}, "verifier": verifier})


def test_the_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An 8B model on an H200: about 105 GiB of KV."""
    Gpu(124, monkeypatch)
    tokens = 64 * kv_blocks(MODEL, settings_of(), 1024)
    assert 750_000 < tokens < 900_000
    assert 64 * kv_blocks(MODEL, settings_of(gpu_memory_utilization=0.5), 1024) < tokens / 2
    Gpu(16, monkeypatch)  # somebody else is there
    with pytest.raises(OutOfDeviceMemory):
        kv_blocks(MODEL, settings_of(), 1024)


def test_a_number_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is asked; null asks it."""
    certificate: Any = SimpleNamespace(buckets=(64, 1024))
    assert build._kv_blocks(settings_of(kv_tokens=65536), MODEL, certificate) == 1024
    Gpu(124, monkeypatch)
    assert build._kv_blocks(settings_of(), MODEL, certificate) == kv_blocks(MODEL, settings_of(), 1024)
