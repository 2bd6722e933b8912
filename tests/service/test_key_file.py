"""API keys out of a file: counted with those of the settings, and never an open API by mistake."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm42.api.keys import configured_keys
from llm42.config import Settings
from llm42.config.serve_file import absolute
from llm42.receipt import KeyProblem
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import client


def key(name: str) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()}


def settings(file: Path, *keys: str) -> Settings:
    return Settings.load({"server": {"api_keys_file": str(file), "api_keys": [key(k) for k in keys]}})


async def test_keys_of_file_and_settings_count(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"api_keys": [key("filed") | {"deterministic_share": 0}]}))
    async with client(tokenizer, settings=settings(file, "told")) as (http, _):
        for name, status in (("filed", 200), ("told", 200), ("other", 401)):
            reply = await http.get("/v1/models", headers={"Authorization": f"Bearer {name}"})
            assert reply.status_code == status, name
    found = {k.name: k.deterministic_share for k in configured_keys(settings(file, "told").server)}
    assert found == {"told": 1.0, "filed": 0.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("", "a mapping with api_keys as its only name"),
        ("[1]", "a mapping"),
        ("api_keys: []", "there are no keys in it"),
        ("{api_keys: [], more: 1}", "as its only name"),
        ("api_keys: [{name: x, sha256: the-key-itself}]", "wrong or missing: 0.sha256"),
        ("api_keys: 7", "wrong or missing: api_keys"),
    ],
)
def test_a_file_without_keys_opens_nothing(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "keys.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(KeyProblem, match=said) as caught:
        configured_keys(settings(file, "told").server)
    assert "the-key-itself" not in str(caught.value)


def test_without_a_file_there_are_the_settings_own() -> None:
    assert configured_keys(Settings.load({}).server) == ()


def test_its_path_is_made_absolute() -> None:
    made = absolute(Settings.load({"server": {"api_keys_file": "keys.yaml"}}))
    assert made.server.api_keys_file == str(Path("keys.yaml").absolute())
    assert absolute(Settings.load({})).server.api_keys_file is None
