"""What `llm42 serve` prints once it is ready."""

from __future__ import annotations

import json
import shlex

import pytest

from llm42.cli import _announce
from llm42.config import Settings


@pytest.mark.parametrize("keys", [[], [{"name": "me", "sha256": "0" * 64}]])
def test_the_printed_request_can_be_pasted(
    capfd: pytest.CaptureFixture[str], keys: list[dict[str, str]]
) -> None:
    """With a place for the key where the server asks for one."""
    _announce("http://127.0.0.1:1", Settings.load({"server": {"api_keys": keys}}), "")
    (line,) = (x for x in capfd.readouterr().out.splitlines() if x.startswith("curl"))
    words = shlex.split(line)
    assert json.loads(words[words.index("-d") + 1])["deterministic"] is True
    assert ("Authorization: Bearer YOUR_KEY" in words) == bool(keys)
