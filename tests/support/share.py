"""How much of a sweep the quick tier takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """A test's parameters, a tuple being several: `make test` takes those in `quick`, `make test-all` all."""
    marks = [(v, () if v in quick else pytest.mark.slow) for v in values]
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=mark) for v, mark in marks]
