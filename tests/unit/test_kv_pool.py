"""A KV pool that another process reads in place (CPU)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.prefill_once.kv_pool import describe, open_pool, remove, slots_of
from llm42.cache import KVCache, slot_ids

READER = """
import json, sys
from benchmarks.prefill_once.kv_pool import open_pool
keys, values = open_pool(json.loads(sys.stdin.readline()))
print(float(keys.sum()), float(values.sum()), flush=True)
sys.stdin.readline()
print(float(keys.sum()), float(values.sum()), flush=True)
"""


@pytest.fixture
def shared() -> Iterator[tuple[KVCache, dict[str, Any]]]:
    kv = KVCache(2, 6, 4, 2, 8, torch.float32)
    description = describe(kv)
    yield kv, description
    remove(description)


def _write(kv: KVCache, value: float) -> None:
    slots = torch.tensor(slot_ids([3, 1], 0, 6, kv.block_size))
    for layer in range(2):
        kv.write(layer, slots, torch.full((6, 2, 8), value), torch.full((6, 2, 8), -value))


def test_another_process_sees_every_write(shared: tuple[KVCache, dict[str, Any]]) -> None:
    kv, description = shared
    _write(kv, 1.0)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        print(json.dumps(description), file=reader.stdin, flush=True)
        assert reader.stdout.readline().split() == ["192.0", "-192.0"]
        _write(kv, 2.0)
        print(file=reader.stdin, flush=True)
        assert reader.stdout.readline().split() == ["384.0", "-384.0"]


def test_a_pool_that_is_gone_is_an_error_not_zeros(shared: tuple[KVCache, dict[str, Any]]) -> None:
    _, description = shared
    open_pool(description)
    remove(description)
    with pytest.raises(OSError, match="llm42-kv-"):
        open_pool(description)


def test_slots_are_those_of_the_cache() -> None:
    blocks = [5, 0, 2]
    for begin, end in ((0, 12), (3, 9), (7, 8)):
        assert slots_of(blocks, begin, end, 4).tolist() == slot_ids(blocks, begin, end - begin, 4)
