"""Ends vLLM's engine processes when the process that started them is gone.

vLLM's engine process does not notice that its parent was killed: it would keep the GPU's memory, and the
replica that comes next could not start. So a small process watches from before vLLM starts. It reads from a
pipe, and the pipe ends with the parent, however that dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LOOK_S = 0.5
"""While vLLM starts, how often the watch looks for new processes."""
_READY, _QUIT = b"r", b"q"


class Guard:
    """The watching process, from the parent's side. Watched is what the parent starts until `ready`, with
    what that starts in turn."""

    def __init__(self) -> None:
        before = ",".join(map(str, descendants(os.getpid())))
        # a session of its own: Ctrl-C is for the parent
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__)), str(os.getpid()), before],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ready(self) -> None:
        """All processes that are to be watched exist."""
        self._send(_READY)

    def close(self) -> None:
        """Ends the watch without ending anything else."""
        self._send(_QUIT)
        self._process.wait()

    def _send(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody has killed the watch
            self._process.stdin.write(word)
            self._process.stdin.flush()


def watch(parent: int, before: set[int]) -> None:
    """Until it is told to quit, or standard input ends: then it kills."""
    for number in (signal.SIGINT, signal.SIGTERM):  # who stops the parent's processes must not begin here
        signal.signal(number, signal.SIG_IGN)
    watched: dict[int, str | None] = {}
    starting = True
    while True:
        readable = select.select([0], [], [], LOOK_S if starting else None)[0]
        received = os.read(0, 1) if readable else None
        if received == _QUIT:
            return
        if received == b"":
            break
        if starting:
            found = set(descendants(parent)) - before - {os.getpid()}
            watched |= {pid: started(pid) for pid in found if pid not in watched}
        starting = starting and received != _READY
    for pid, start in watched.items():
        if start is not None and started(pid) == start:  # else the number is another process's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> Iterator[int]:
    """Processes below one, at any depth."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    below = list(children.get(root, ()))
    while below:
        pid = below.pop()
        yield pid
        below += children.get(pid, ())


def started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None when there is none."""
    fields = _stat(pid)
    return fields[19] if fields else None


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from the state on: state, parent, ..., or nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    watch(int(sys.argv[1]), {int(pid) for pid in sys.argv[2].split(",") if pid})
