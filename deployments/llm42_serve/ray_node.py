"""Around Ray's start on this machine: where its files go, what it must not start, and signals meanwhile."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm42.errors import LaunchFailed

MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103
"""Bytes in the path of a Unix socket."""
SESSION = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""What Ray puts after its directory, at its longest (the last number is a process id)."""
SHORT = Path("/tmp/ray")


def temp_dir(say: Callable[[str], None] = lambda _: None) -> Path:
    """Ray's directory for sockets and logs: where Ray puts it, or /tmp/ray where that path is too long for a
    socket's. Raises LaunchFailed for one that cannot be written."""
    told = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    wanted = Path(os.path.abspath(told)) / "ray"
    length = len(os.fsencode(str(wanted))) + len(SESSION)
    chosen = wanted
    if length > MAX_SOCKET_PATH:
        chosen = SHORT
        most = MAX_SOCKET_PATH - len(SESSION) - len("/ray")
        say(f"TMPDIR has a path of over {most} bytes, too long for Ray's sockets. Ray's files go to {chosen}")
    try:
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchFailed(
            f"Ray's directory {chosen} cannot be made: {error.strerror} (TMPDIR): set TMPDIR to another one"
        ) from error
    if not os.access(chosen, os.W_OK | os.X_OK):
        raise LaunchFailed(f"Ray's directory {chosen} cannot be written (TMPDIR): set TMPDIR to another one")
    return chosen


@contextmanager
def no_dashboard() -> Iterator[int]:
    """A port for `dashboard_port` at which no dashboard can start.

    Without a dashboard Ray starts its process all the same, for usage statistics alone: it asks the cloud's
    metadata addresses who it is, whether statistics are on or not, and no switch ends that. When its port is
    taken Ray goes on without the process; its error about that is dropped.
    """
    log, port_taken = logging.getLogger("ray._private.services"), socket.socket()

    def others(record: logging.LogRecord) -> bool:
        return "already occupied" not in record.getMessage()

    log.addFilter(others)
    try:
        port_taken.bind(("127.0.0.1", 0))
        port_taken.listen()
        yield int(port_taken.getsockname()[1])
    finally:
        log.removeFilter(others)
        port_taken.close()


@contextmanager
def signals_later() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the block's end: half a Ray cluster cannot be shut down.

    Nobody else sets handlers meanwhile: `ray.init` would make SIGTERM an exit there and then. Its C++ part
    sets one beneath Python's that prints a stack and goes on; that one is gone after the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda number, _: came.append(number)) for kind in kinds}
    register = signal.signal

    def register_others(kind: int, handler: Any) -> Any:
        return signal.getsignal(kind) if kind in kinds else register(kind, handler)

    signal.signal = register_others  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = register
        for kind, handler in before.items():
            signal.signal(kind, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def nothing_left(directory: Path) -> Iterator[None]:
    """Around `ray.init`: when it fails, what it left is removed, but for logs with something in them. An
    interruption is not its failure: `Service.stop` cleans up after that."""
    try:
        yield
    except Exception:
        import ray

        ray.shutdown()
        for session in directory.glob(f"session_*_{os.getpid()}"):
            if not any(file.stat().st_size for file in session.glob("logs/**/*") if file.is_file()):
                shutil.rmtree(session, ignore_errors=True)
        latest = directory / "session_latest"
        if latest.is_symlink() and not latest.exists():
            latest.unlink(missing_ok=True)
        raise
