"""Fixtures of the vLLM adapter's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.fake_vllm import Make, Scene


@pytest.fixture
def make() -> Iterator[Make]:
    """Scenes (an engine over a fake vLLM) that are closed after the test."""
    scenes: list[Scene] = []

    def build(*args: Any, **kwargs: Any) -> Scene:
        scenes.append(Scene(*args, **kwargs))
        return scenes[-1]

    yield build
    for scene in scenes:
        scene.close()
