"""What `llm42 serve` prints once it is ready, and of settings that are wrong."""

from __future__ import annotations

import json
import shlex

import pydantic
import pytest

from llm42.cli.errors import setting_error
from llm42.cli.serve import _announce
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


@pytest.mark.parametrize(
    ("kind", "words"), [("torch", "Best-effort only:"), ("canonical", "Nothing is answered yet:")]
)
def test_what_a_start_without_verifiers_leaves(
    capfd: pytest.CaptureFixture[str], kind: str, words: str
) -> None:
    _announce("http://127.0.0.1:1", Settings.load({"engine": {"kind": kind}}), "It failed.")
    assert f"{words} It failed." in capfd.readouterr().out


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"engine": {"max_bacth": 3}},
         "engine.max_bacth: unknown setting: correct or remove it (serve_config.yaml has all)"),
        ({"verifier": {"affinity": "vllm"}},
         "verifier.affinity 'vllm' needs model.device 'cuda': leave it at 'none'"),
    ],
    ids=["unknown", "contradiction"],
)  # fmt: skip
def test_a_wrong_setting_is_one_line(tree: dict[str, object], line: str) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        Settings.load(tree)
    assert [setting_error(e) for e in caught.value.errors()] == [line]
