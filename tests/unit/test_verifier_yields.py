"""Best effort that a verifier decodes gives way to every other request: KV, rows, places in the queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llm42.errors import LLM42Error, Overloaded
from llm42.protocol import SamplingParams, Window
from llm42.verifier.scheduler import Verifier
from tests.unit.test_verifier_queue import verifier_of, window_of

STEPS = 200


def long_window(name: str, first: int, tokens: int, yields: bool = False) -> Window:
    """Windows with another first token share nothing."""
    prompt = (first, *[1] * (tokens - 1))
    return Window(name, prompt, 1, (), SamplingParams(), credit=40, max_len=tokens + 10, yields=yields)


class Heard(dict[str, list[Any]]):
    """What each has been told."""

    def follow(self, verifier: Verifier, window: Window) -> None:
        self[window.request_id] = []
        verifier.follow(window, self[window.request_id].append)

    def refused(self, name: str) -> bool:
        return isinstance(self[name][-1], Overloaded)


def step_until(verifier: Verifier, holds: Callable[[], bool]) -> bool:
    """Whether it has come to hold."""
    for _ in range(STEPS):
        if holds():
            return True
        verifier.step()
    return holds()


def runs(verifier: Verifier, name: str) -> Callable[[], bool]:
    return lambda: name in verifier._followers.running


@pytest.mark.parametrize("yields", [True, False])
@pytest.mark.parametrize("state", ["decoded", "its prompt is computed", "in the queue"])
def test_with_kv_for_one_it_is_the_others(state: str, yields: bool) -> None:
    """Not yielding, the control: who was first has it."""
    verifier, heard = verifier_of(blocks=16), Heard()
    heard.follow(verifier, long_window("first", 1, 20, yields))
    if state == "decoded":
        assert step_until(verifier, runs(verifier, "first"))
    elif state != "in the queue":
        verifier.step()
        assert verifier.stats().active == 1
    heard.follow(verifier, long_window("second", 2, 20))
    first, second = ("second", "first") if yields else ("first", "second")
    assert step_until(verifier, runs(verifier, first))
    assert second not in verifier._followers.running
    if yields and state != "in the queue":
        assert heard.refused("first"), "it is told at once, and forgotten"
        assert "first" not in verifier._followers._known
        assert verifier.stats().preemptions == 1
    elif yields:
        assert heard["first"] == [], "it waits"
    for name in ("first", "second"):
        verifier.release(name)
    verifier.step()
    assert verifier.stats().kv_held_blocks == 0


def test_nobody_gives_way_in_vain() -> None:
    """One that does not fit beside those that stay takes nothing from anybody."""
    verifier, heard = verifier_of(blocks=24), Heard()
    heard.follow(verifier, long_window("stays", 1, 16))
    heard.follow(verifier, long_window("yields", 2, 14, yields=True))
    assert step_until(verifier, lambda: len(verifier._followers.running) == 2)
    heard.follow(verifier, long_window("big", 0, 36))
    verifier.step()
    verifier.step()
    assert not heard.refused("yields")
    assert verifier.stats().preemptions == 0
    verifier.release("stays")  # the control: now it does
    assert step_until(verifier, lambda: heard.refused("yields"))
    assert step_until(verifier, runs(verifier, "big"))


def test_who_yields_is_the_first_to_lose_its_kv_and_the_last_to_come() -> None:
    verifier, heard = verifier_of(max_waiting=9), Heard()
    heard.follow(verifier, long_window("old", 1, 4, yields=True))
    heard.follow(verifier, long_window("new", 2, 4))
    assert step_until(verifier, lambda: len(verifier._followers.running) == 2)
    assert verifier._followers.preempt_youngest(yielding=True) is not None
    assert heard.refused("old"), "though it is older"
    assert not any(isinstance(answer, LLM42Error) for answer in heard["new"])
    assert verifier._followers.preempt_youngest(yielding=True) is None
    for number, yields in enumerate((True, False, True, False)):
        heard.follow(verifier, long_window(f"{number}", 0, 4, yields))
    verifier._drain()
    assert [job.window.request_id for job in verifier._followers.fresh] == ["1", "3", "0", "2"]


def test_rows_that_do_not_suffice_are_others() -> None:
    verifier, heard = verifier_of(max_waiting=9), Heard()
    for number in range(4):
        heard.follow(verifier, long_window(f"{number}", number % 3, 3, yields=number < 2))
    assert step_until(verifier, lambda: len(verifier._followers.running) == 4)
    for _ in range(3):
        planned = [d.follower.window.request_id for d in verifier._followers.plan(3)]
        assert {"2", "3"} < {*planned}
    assert {d.follower.window.request_id for d in verifier._followers.plan(2)} == {"2", "3"}


def test_half_of_the_queue_is_kept_from_them() -> None:
    verifier, heard = verifier_of(max_waiting=4), Heard()
    for name in "ab":
        heard.follow(verifier, long_window(name, 1, 4, yields=True))
    with pytest.raises(Overloaded, match="2 windows"):
        heard.follow(verifier, long_window("c", 1, 4, yields=True))
    heard.follow(verifier, long_window("d", 1, 4))
    verifier.submit(window_of("e", 1, 2))
    with pytest.raises(Overloaded, match="4 windows"):  # the control
        verifier.submit(window_of("f", 1, 2))


def test_what_it_says_of_them() -> None:
    verifier, heard = verifier_of(max_waiting=9), Heard()
    heard.follow(verifier, long_window("a", 1, 8, yields=True))
    heard.follow(verifier, long_window("b", 2, 8))
    verifier._drain()
    stats = verifier.stats()
    assert (stats.direct, stats.yielding, stats.yielding_kv) == (2, 1, 0)
    assert step_until(verifier, lambda: len(verifier._followers.running) == 2)
    stats = verifier.stats()
    assert (stats.direct, stats.yielding) == (2, 1)
    assert 8 <= stats.yielding_kv <= 18
    verifier.release("a")
    verifier.step()
    assert (verifier.stats().yielding, verifier.stats().yielding_kv) == (0, 0)


def test_a_later_window_of_it_is_as_any() -> None:
    """Its words reach its present window alone: nothing of the one that gave way is heard again."""
    verifier, heard = verifier_of(blocks=16), Heard()
    window = long_window("first", 1, 20, yields=True)
    heard.follow(verifier, window)
    assert step_until(verifier, runs(verifier, "first"))
    heard.follow(verifier, long_window("second", 2, 20))
    assert step_until(verifier, runs(verifier, "second"))
    told = list[bool]()
    verifier.renew("first", 30, told.append)
    verifier.release("second")
    heard.follow(verifier, replace(window, yields=True))
    assert step_until(verifier, runs(verifier, "first"))
    assert told == [False]
    assert not heard.refused("first")
