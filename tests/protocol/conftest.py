"""One tiny model, certified once, for the tests that need an engine and a verifier together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import Lab


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The model and its certificate."""
    return Lab.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def lab(tiny: Lab) -> Iterator[Lab]:
    """The lab; whatever a test starts is closed after it."""
    yield tiny
    tiny.close()
