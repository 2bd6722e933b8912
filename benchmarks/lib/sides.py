"""Engines that are compared on one machine, each in a process of its own: they take orders one at a time, as
JSON lines on stdin, and answer on a pipe, so that what they print goes into a log."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.processes import family, runs
from llm42.host.garbage import keep_what_is_there

LAST_WORDS_S = 10.0
"""For each process that is given up."""


class Dead(Exception):
    """A side does not answer any more."""


class Process:
    """One side, seen by who gives the orders. Its first answer comes without one, when it is ready."""

    def __init__(
        self, kind: str, module: str, words: Sequence[str], environment: Mapping[str, str], out: Path
    ):
        """Runs `python -m module words... FD` (`serve`); its output goes to out/kind.log."""
        self.kind, self._rest = kind, b""
        reader, writer = os.pipe()
        self._reader = reader
        with (out / f"{kind}.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *words, str(writer)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, pass_fds=(writer,),
                env=dict(environment), start_new_session=True, text=True,
            )  # fmt: skip
        os.close(writer)

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next line. Raises Dead."""
        end = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            if self.process.poll() is not None and not select.select([self._reader], [], [], 0)[0]:
                raise Dead(f"{self.kind} ended with {self.process.returncode}: see {self.kind}.log")
            if time.monotonic() > end:
                raise Dead(f"{self.kind} said nothing for {limit_s:.0f} s")
            if select.select([self._reader], [], [], 0.5)[0]:
                data = os.read(self._reader, 1 << 16)
                if not data:
                    raise Dead(f"{self.kind} ended: see {self.kind}.log")
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        value: dict[str, Any] = json.loads(line)
        if "error" in value:
            raise Dead(f"{self.kind}: {value['error']}")
        return value

    def ask(self, limit_s: float, **order: Any) -> dict[str, Any]:
        """Sends an order and waits. Raises Dead."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Dead(f"{self.kind} is gone: {error}") from error
        return self.answer(limit_s)

    def end_with_stacks(self) -> None:
        """Ends it and its children. Started with PYTHONFAULTHANDLER=1, each says in the log first where its
        threads stand."""
        for pid in sorted(family(self.process.pid), reverse=True):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
            end = time.monotonic() + LAST_WORDS_S
            while runs(pid) and time.monotonic() < end:
                time.sleep(0.05)  # one after the other: they write into one file
        self.kill()

    def kill(self) -> None:
        """Ends it and the engine's process."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _made(make: Callable[[], Any]) -> Any:
    side = make()
    keep_what_is_there()  # as those that serve do, and as vLLM's server
    return side


def serve(make: Callable[[], Any], pipe: int) -> None:
    """A side's main: makes what takes the orders ({"do": method, ...}), then answers until stdin ends. What
    `make` gives may have `ready`, a dict for the first answer."""
    os.set_inheritable(pipe, False)
    with os.fdopen(pipe, "w", buffering=1) as replies:

        def reply(work: Callable[[], Any]) -> Any:
            try:
                value = work()
            except Exception as error:
                traceback.print_exc()
                value = {"error": repr(error)[:1000]}
            line = value if isinstance(value, dict) else {"ready": True, **getattr(value, "ready", {})}
            replies.write(json.dumps(line) + "\n")
            return value

        side = reply(lambda: _made(make))
        if isinstance(side, dict):
            raise SystemExit(1)
        for line in sys.stdin:
            order = json.loads(line)
            name = order.pop("do")
            reply(partial(getattr(side, name), **order))
    os._exit(0)  # vLLM's own end may take long
