"""cuBLAS without workspace: it cannot split K then, so a row's bits do not depend on the number of rows.

Imports no PyTorch: a process sets the variables before it does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

CUBLAS_ENVIRONMENT = {"CUBLASLT_WORKSPACE_SIZE": "0", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}
"""Without workspace cuBLAS cannot split K. Read by the library when CUDA starts: set it in the process's
environment."""


class CublasEnvironmentError(RuntimeError):
    """cuBLAS could split K in this process, so that a row's bits would depend on the number of rows."""


def rule_out_workspace() -> None:
    """Sets the variables in this process, whatever they were. To be called before CUDA starts."""
    os.environ.update(CUBLAS_ENVIRONMENT)


def allow_workspace() -> None:
    """Takes the variables out of this process's environment: the library as it comes."""
    for name in CUBLAS_ENVIRONMENT:
        os.environ.pop(name, None)


@contextmanager
def workspace_for_children() -> Iterator[None]:
    """Processes that are started within get cuBLAS as it comes. No product may run in this one meanwhile."""
    kept = {name: os.environ[name] for name in CUBLAS_ENVIRONMENT if name in os.environ}
    allow_workspace()
    try:
        yield
    finally:
        os.environ.update(kept)


def check_cublas_environment() -> None:
    """Raises CublasEnvironmentError unless this process was started without cuBLAS workspace."""
    wrong = {
        name: os.environ.get(name)
        for name, value in CUBLAS_ENVIRONMENT.items()
        if os.environ.get(name) != value
    }
    if wrong:
        wanted = " ".join(f"{name}={value}" for name, value in CUBLAS_ENVIRONMENT.items())
        raise CublasEnvironmentError(f"the verifier's process must be started with {wanted}; found {wrong}")
