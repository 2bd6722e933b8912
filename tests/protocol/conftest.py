"""The lab with the torch engine or with vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support import Lab, RandomWays, VllmPool, vllm_missing


@pytest.fixture(scope="session")
def vllm_pool() -> Iterator[VllmPool]:
    """vLLM engines for the whole session; skips where vLLM is not installed."""
    if missing := vllm_missing():
        pytest.skip(missing)
    pool = VllmPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_vllm(tmp_path_factory: pytest.TempPathFactory, vllm_pool: VllmPool) -> Lab:
    """A tiny model that vLLM can run, and its certificate."""
    return Lab.make(tmp_path_factory.mktemp("tiny-vllm"), head_dim=32, vllm=vllm_pool)


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab; whatever a test starts is closed after it. With the torch engine, unless `both_engines` or
    `all_ways` says otherwise."""
    kind = getattr(request, "param", "torch")
    made: Lab = request.getfixturevalue("tiny_vllm" if kind == "vllm" else "tiny")
    if kind == "direct":
        made = replace(made, mode="direct", parts=[])
    elif kind == "switching":
        made = replace(made, mode="auto", decide=RandomWays(7), parts=[])
    yield made
    made.close()
