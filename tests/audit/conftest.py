"""Settings of what audits and is audited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm42.config import Settings
from tests.audit.support import SECRET
from tests.support import Lab


@pytest.fixture(scope="session")
def settings(tiny: Lab, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """The lab's, with a key."""
    key = tmp_path_factory.mktemp("audit") / "key"
    key.write_bytes(SECRET)
    audit = {"keys": {"k1": str(key)}, "signing_key": "k1"}
    return Settings.load(tiny.settings.model_dump(mode="json") | {"audit": audit})


@pytest.fixture(scope="session")
def config(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a file, as --config reads it."""
    path = tmp_path_factory.mktemp("audit") / "settings.yaml"
    path.write_text(json.dumps(settings.model_dump(mode="json")))
    return path
