"""GPU tests need a CUDA device and a process without cuBLAS workspace:

CUBLASLT_WORKSPACE_SIZE=0 CUBLAS_WORKSPACE_CONFIG=:0:0 python -m pytest tests/gpu
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from llm42_kernels.cublas import CUBLAS_ENVIRONMENT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    reason = None
    if not torch.cuda.is_available():
        reason = "no CUDA device"
    elif any(os.environ.get(k) != v for k, v in CUBLAS_ENVIRONMENT.items()):
        reason = "cuBLAS workspace not ruled out: " + " ".join(
            f"{k}={v}" for k, v in CUBLAS_ENVIRONMENT.items()
        )
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
