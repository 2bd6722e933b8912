"""A start that fails is one line, whatever raised it, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import ray

from llm42.cli import main as cli
from llm42.config import Settings
from llm42.errors import LaunchFailed
from llm42_serve import launch, ray_node
from llm42_serve.launch import Service
from llm42_serve.ray_node import SESSION, SHORT, nothing_left, temp_dir
from tests.conftest import free_port
from tests.service.serve_process import tiny_tree
from tests.service.test_serve_command import left_running
from tests.support import write_model


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a service whose preflight passes; tracebacks go to a folder of their own."""
    write_model(tmp_path / "tiny")
    (tmp_path / "tracebacks").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tracebacks"))
    return Settings.load(tiny_tree(tmp_path) | {"server": {"port": free_port()}})


def shown(capsys: pytest.CaptureFixture[str], error: BaseException, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command prints when this is raised in it."""

    def raising() -> NoReturn:
        raise error

    monkeypatch.setattr(cli, "app", raising)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/tmp/ray/session_x/logs"),
        RuntimeError("The current node timed out during startup.\nThis could happen because\n  ..."),
        ConnectionError("ray::x\n" + "frames\n" * 500 + "the cause"),
        json.JSONDecodeError("Expecting value", "<html>", 0),
        PermissionError(errno.EACCES, "Permission denied", "/tmp/ray"),
        TypeError("object of type 'NoneType' has no len()"),
        ValueError(""),
    ],
    ids=lambda e: type(e).__name__,
)
def test_whatever_ray_raises(
    error: Exception,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line with its last words; the frames are in a file that the line names."""

    def init(**_: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(LaunchFailed) as caught, Service(settings):
        pass
    (line,) = shown(capsys, caught.value, monkeypatch).splitlines()
    assert line.startswith("Error: The start failed: ")
    assert type(error).__name__ in line
    if words := str(error).split():
        assert words[-1] in line
    assert len(line) < 1200
    kept = Path(line.partition("(traceback: ")[2].rstrip(")"))
    assert "in init" in kept.read_text()


def test_an_error_of_another_command_is_a_line_too(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = shown(capsys, KeyError("a field"), monkeypatch).splitlines()
    assert line.startswith("Error: KeyError: 'a field' (traceback: ")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")  # a disk that takes nothing
    assert shown(capsys, KeyError("a field"), monkeypatch) == "Error: KeyError: 'a field'\n"


@pytest.fixture
def short_directory() -> Iterator[Callable[[str], Path]]:
    """Makes folders whose paths are short enough for Ray's sockets, which pytest's are not."""
    made: list[Path] = []

    def make(prefix: str) -> Path:
        made.append(Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp")))
        return made[-1]

    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.service
def test_rays_own_refusal(tmp_path: Path, short_directory: Callable[[str], Path]) -> None:
    """The command itself, with a setting that makes `ray.init` raise."""
    write_model(tmp_path / "tiny")
    config = tmp_path / "tiny.yaml"
    config.write_text(json.dumps(tiny_tree(tmp_path)))
    place = short_directory("s")
    marker = f"started-by-test-{os.getpid()}-refusal"
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    env |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": "/none",
        "HOME": str(tmp_path),
        "TMPDIR": str(place),
        "LLM42_TEST_MARKER": marker,
    }
    command = [sys.executable, "-m", "llm42", "serve", "-c", str(config), "--port", str(free_port())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    (line,) = [x for x in done.stderr.splitlines() if not x.startswith("✓")]
    assert line.startswith("Error: The start failed: ")
    assert "token" in line.lower()
    assert left_running(marker) == []
    left = [file.name for file in place.rglob("*") if file.is_file() and "llm42-error" not in file.name]
    assert left == []
    assert not list(place.glob("ray/session_*"))


def test_a_failed_init_leaves_no_session(tmp_path: Path) -> None:
    """But for logs that say something: those may hold the cause."""
    mine = tmp_path / f"session_2026-01-01_00-00-00_1_{os.getpid()}"
    other = tmp_path / f"session_2026-01-01_00-00-00_1_{os.getpid() + 1}"
    for session in (mine, other):
        (session / "logs").mkdir(parents=True)
        (session / "logs" / "raylet.out").touch()
    (tmp_path / "session_latest").symlink_to(mine)
    with pytest.raises(OSError, match="full"), nothing_left(tmp_path):
        raise OSError("full")
    assert [p.name for p in tmp_path.iterdir()] == [other.name]
    (mine / "logs").mkdir(parents=True)
    (mine / "logs" / "raylet.out").write_text("the cause")
    with pytest.raises(OSError, match="full"), nothing_left(tmp_path):
        raise OSError("full")
    assert mine.exists()


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_directory_too_long_for_sockets(
    name: str, tmp_path: Path, short_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest path that a socket can have there is used; a longer one is not, and that is said."""
    for other in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(other, raising=False)
    said: list[str] = []
    fits = short_directory("x" * 25)
    monkeypatch.setenv(name, str(fits))
    assert temp_dir(said.append) == fits / "ray"
    assert said == []
    longest = fits / "ray" / SESSION.lstrip("/")
    longest.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(longest))
    monkeypatch.setenv(name, str(tmp_path / ("long" * 20)))
    assert temp_dir(said.append) == SHORT
    assert "too long" in said[0]


def test_a_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setattr(ray_node, "MAX_SOCKET_PATH", 1000)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file"))
    with pytest.raises(LaunchFailed, match=r"cannot be made: Not a directory \(TMPDIR\)"):
        temp_dir()


def test_health_that_is_not_the_services(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection, no JSON, no object: the wait goes on, and its end is one typed error."""
    service = Service(settings)
    monkeypatch.setattr(launch, "log_dir", lambda: "/logs")

    def answering(what: Any) -> Any:
        def health() -> Any:
            if isinstance(what, Exception):
                raise what
            return what

        return health

    for what, said in (
        (ConnectionRefusedError("refused"), "refused"),
        (json.JSONDecodeError("Expecting value", "<html>", 0), "JSONDecodeError"),
        ({"error": {"message": "starting"}}, "starting"),
    ):
        monkeypatch.setattr(service, "health", answering(what))
        with pytest.raises(LaunchFailed, match=said):
            service.wait_deterministic(timeout_s=0.3)
