"""Without a helm binary every test here is skipped, with one reason."""

from __future__ import annotations

import pytest

from tests.chart import helm


@pytest.fixture(scope="session", autouse=True)
def helm_binary() -> None:
    """Fetches the binary before the first test."""
    try:
        helm.binary()
    except helm.NoHelm as error:
        pytest.skip(f"no chart tests: {error}")
