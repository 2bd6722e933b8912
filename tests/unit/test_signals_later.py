"""Signals that come while a Ray cluster is starting are kept for when it can be shut down."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.launch import signals_later

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
