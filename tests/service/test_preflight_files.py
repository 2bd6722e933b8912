"""What a start refuses in a second that a replica would refuse after Ray's start."""

from __future__ import annotations

import builtins
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from llm42.config import Settings
from llm42.errors import LaunchFailed
from llm42_serve.launch import Service
from llm42_serve.preflight import check, require_free_port
from tests.conftest import free_port
from tests.support import write_model


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """Settings that the preflight accepts."""
    return {
        "model": {"path": str(write_model(tmp_path / "tiny")), "max_model_len": 512},
        "server": {"port": free_port()},
    }


def test_files_of_keys(tree: dict[str, Any], tmp_path: Path) -> None:
    check(Settings.load(tree))
    file = tmp_path / "key"
    for secret, said in ((None, "No such file"), (b"short", "16 bytes")):
        if secret is not None:
            file.write_bytes(secret)
        with pytest.raises(LaunchFailed, match=rf"audit\.keys\.k: .*{said}"):
            check(Settings.load(tree | {"audit": {"keys": {"k": str(file)}}}))
    file.write_bytes(b"x" * 32)
    check(Settings.load(tree | {"audit": {"keys": {"k": str(file)}, "signing_key": "k"}}))


def test_an_exporter_that_is_not_installed(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(name)
        return real(name, *rest)

    for name in [n for n in sys.modules if n.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(LaunchFailed, match=r"telemetry\.traces: otlp needs its exporter"):
        check(Settings.load(tree | {"telemetry": {"traces": "otlp"}}))


def test_a_port_of_ipv6(tree: dict[str, Any]) -> None:
    """Taken or free; and the address of the service is one that can be asked."""
    with socket.socket(socket.AF_INET6) as taken:
        try:
            taken.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchFailed, match=f"::1:{port} cannot be used .Address already in use"):
            require_free_port("::1", port)
    require_free_port("::1", port)
    assert Service(Settings.load({"server": {"host": "::1", "port": port}})).url == f"http://[::1]:{port}"
