"""Ending a loop whose thread is between two looks: what wakes it may be taken in by the step before."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support import PATIENCE_S, Lab


@pytest.mark.parametrize("kind", ["verifier", "engine"])
@pytest.mark.parametrize("told", [True, False], ids=["as it is", "control: closed is not looked at"])
def test_a_close_during_a_step_is_not_missed(lab: Lab, kind: str, told: bool) -> None:
    part: Any = lab.verifier() if kind == "verifier" else lab.engine(start=False)
    in_step, closed, step = threading.Event(), threading.Event(), part.step

    def late_step() -> bool:
        """The close comes after the loop has looked whether there is one."""
        in_step.set()
        closed.wait()
        busy = bool(step())
        if not told:
            part._closed = False  # what the loop sees
        return busy

    part.step = late_step
    part.start()
    in_step.wait()
    closing = threading.Thread(target=part.close, daemon=True)
    closing.start()
    while not part._closed:
        pass
    waiting = part._inbox if kind == "verifier" else part._commands
    while waiting.empty():
        pass
    closed.set()
    closing.join(PATIENCE_S if told else 0.5)
    missed = closing.is_alive()
    part._closed = True
    waiting.put(None if kind == "verifier" else lambda: None)  # ends it after all
    closing.join(PATIENCE_S)
    assert missed is not told
    assert not closing.is_alive()
