"""`llm42 serve` as a process: whenever it is told to stop, it ends by itself and leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.support import sweep

pytestmark = pytest.mark.service


def left_running(marker: str) -> list[str]:
    """Commands of processes that inherited `marker` through their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
            except OSError:
                continue
    return [command for command in found if command]


@pytest.mark.parametrize(
    ("after_s", "kind"),
    sweep(
        [(0.0, signal.SIGINT), (0.5, signal.SIGTERM), (2.0, signal.SIGTERM)], quick=[(0.5, signal.SIGTERM)]
    ),
)
def test_a_stop_during_the_start_leaves_nothing_running(after_s: float, kind: signal.Signals) -> None:
    """Counted from Ray's first process: they come up one after another."""
    marker = f"started-by-test-{os.getpid()}-{after_s}"
    command = [sys.executable, "-m", "llm42", "serve", "--port", str(free_port())]
    with subprocess.Popen(
        command, env=os.environ | {"LLM42_TEST_MARKER": marker}, stderr=subprocess.PIPE, text=True
    ) as process:
        while len(left_running(marker)) < 2 and process.poll() is None:
            time.sleep(0.05)
        time.sleep(after_s)
        assert left_running(marker), "the control: what is running can be seen"
        process.send_signal(kind)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "nothing is left running" in errors
    assert "Traceback" not in errors
    deadline = time.monotonic() + 10
    while (left := left_running(marker)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
