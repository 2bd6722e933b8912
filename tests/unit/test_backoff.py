"""For how long no best effort goes to verifiers, and what a plan is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from llm42.config import Settings
from llm42.session import backoff, ways
from llm42.session.backoff import FIRST_S, LASTS_S, MOST_S, Backoff
from llm42.session.load import Load, Rounds
from llm42.session.ways import Ways
from llm42.step_times import Costs, StepTimes, VerifierLoad

MOVED = Rounds(verify=0.04, direct=0.03, moved=0.02)
"""So long rounds are; verifiers have room for all."""


def failures(found: Backoff, count: int, now: float = 0.0) -> float:
    """One each time the last has been waited out. When the last one was."""
    for _ in range(count - 1):
        found.failed(now)
        while found.holds(now):
            now += FIRST_S / 2
    found.failed(now)
    return now


def test_it_holds_longer_each_time_and_lasts_when_it_is_no_burst() -> None:
    held, found, now = list[float](), Backoff(), 0.0
    assert not found.holds(now) and not found.lasts(now)
    for count in range(1, 12):
        found.failed(now)
        found.failed(now)
        assert found.came_back == 2 * count
        began, lasts = now, found.lasts(now)
        while found.holds(now):
            now += FIRST_S / 2
        held.append(now - began)
        assert lasts == (held[-1] >= LASTS_S)
        assert not found.lasts(now)
    assert held == [min(FIRST_S * 2**n, MOST_S) for n in range(11)]
    found.worked()
    found.failed(now)
    assert found.holds(now) and not found.lasts(now)


class Asked:
    """Stands in for a replica's plan, and keeps what it is told."""

    changes = 0

    def __init__(self) -> None:
        self.room = self.kept = False

    def next(self, now: float, count: int, done: Any, rounds: Any, room: bool, kept: bool = False) -> str:
        """As it says."""
        self.room, self.kept = room, kept
        return "direct"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> tuple[Ways, Asked, Load, list[float]]:
    """One replica's, and a clock."""
    now = [1000.0]
    engine = SimpleNamespace(times=StepTimes(lambda: now[0]))
    found, plan = Ways(Settings(), cast(Any, engine)), Asked()
    found._standing = cast(Any, plan)
    monkeypatch.setattr(ways, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(ways, "rounds", lambda *_: MOVED)
    costs = Costs(((1.0, 0.01), (64.0, 0.02)), 1e-5)
    verifier = VerifierLoad(costs, costs, places=256, kv_tokens=1 << 20, kv_free=1 << 20)
    return found, plan, Load(8, 8, False, 8, costs, verifier), now


def test_a_plan_is_told(asked: tuple[Ways, Asked, Load, list[float]]) -> None:
    """For a moment: nothing is measured of it. For longer: there is no room."""
    found, plan, load, now = asked
    found._planned(load)
    assert (plan.room, plan.kept) == (True, False)
    found.came_back()
    found._planned(load)
    assert (plan.room, plan.kept) == (True, True)
    now[0] = failures(found.backoff, 4, now[0] + FIRST_S)
    found._planned(load)
    assert (plan.room, plan.kept) == (False, True)
    now[0] += MOST_S
    found._planned(load)
    assert (plan.room, plan.kept) == (True, False)


def test_control_nothing_is_held_back(
    asked: tuple[Ways, Asked, Load, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, plan, load, now = asked
    monkeypatch.setattr(backoff, "FIRST_S", 0.0)
    monkeypatch.setattr(backoff, "MOST_S", 0.0)
    now[0] = failures(found.backoff, 4, now[0])
    found._planned(load)
    assert (plan.room, plan.kept) == (True, False)
