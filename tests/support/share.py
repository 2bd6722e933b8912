"""How much of a sweep the quick tier takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of a test: `make test` takes those in `quick`, `make test-all` all."""
    return [pytest.param(v, marks=() if v in quick else pytest.mark.slow) for v in values]
