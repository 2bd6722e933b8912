"""Signals that come while a Ray cluster is starting are kept for when it can be shut down; a waiting server
hears them whichever thread they reach."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from llm42_serve.ray_node import signals_later

KINDS = [signal.SIGINT, signal.SIGTERM]


class Stopped(Exception):
    """What the program's own handler raises."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Stopped

    before = {kind: signal.signal(kind, stop) for kind in KINDS}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


def start_as_ray_does(kind: signal.Signals, steps: list[str]) -> None:
    """Ray's driver sets a handler of its own, then starts processes; the signal comes in between."""
    signal.signal(kind, lambda number, _: sys.exit(number))
    steps.append("half")
    signal.raise_signal(kind)
    steps.append("whole")


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_is_finished_and_then_the_own_handler_is_called(kind: signal.Signals) -> None:
    steps: list[str] = []
    with pytest.raises(Stopped), signals_later():
        start_as_ray_does(kind, steps)
    assert steps == ["half", "whole"]
    with pytest.raises(Stopped):
        signal.raise_signal(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_without_it_the_start_ends_in_the_middle(kind: signal.Signals) -> None:
    """The control."""
    steps: list[str] = []
    with pytest.raises(SystemExit):
        start_as_ray_does(kind, steps)
    assert steps == ["half"]


def test_other_signals_can_be_handled_meanwhile() -> None:
    came: list[int] = []
    before = signal.getsignal(signal.SIGUSR1)
    with signals_later():
        signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert came == [signal.SIGUSR1]


ELSEWHERE = """
import signal, sys, threading, time
from llm42.cli.main import _interrupt
from llm42.cli.serve import until_interrupted
signal.signal(signal.SIGTERM, _interrupt)

def other():
    main = threading.main_thread().ident  # a signal before it waits would be heard either way
    while sys._current_frames()[main].f_code.co_name not in ("until_interrupted", "wait"):
        time.sleep(0.01)
    time.sleep(0.5)
    print("up", flush=True)
    time.sleep(60)

threading.Thread(target=other, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # here: the other thread gets it
try:
    until_interrupted() if sys.argv[1] == "ours" else threading.Event().wait()
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize(("how", "ends"), [("ours", True), ("event", False)])
def test_a_signal_that_another_thread_gets_is_heard(how: str, ends: bool) -> None:
    """And the control: a plain wait sleeps on."""
    with subprocess.Popen([sys.executable, "-c", ELSEWHERE, how], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        try:
            process.wait(timeout=60 if ends else 3)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        process.kill()
    assert ended == ends
