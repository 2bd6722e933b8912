"""Fixtures of the vLLM adapter's tests, and the real model's tokenizer, ours and the library's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llm42.text.tokenizer import Tokenizer
from tests.support import smollm2_file
from tests.unit.fake_vllm import Make, Scene


@pytest.fixture(scope="session")
def ours() -> Tokenizer:
    """SmolLM2's tokenizer."""
    return Tokenizer.load(smollm2_file())


@pytest.fixture(scope="session")
def theirs() -> Any:
    """What transformers makes of the same file."""
    import transformers

    path = smollm2_file()
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


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
