"""Joining windows into actor calls: no window waits without need, none is lost, none ends with another."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from ray.exceptions import RayActorError

from llm42.errors import Overloaded
from llm42.protocol import Commit, SamplingParams, VerifyTimings, Window
from llm42_serve.replica import member as window_batches
from llm42_serve.replica.member import Answer, WindowBatches
from tests.service.pools import Handle, pool_of
from tests.service.stand_ins import answer


class Verifier:
    """Answers after `seconds`; may fail for all, or for calls with certain windows in them."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds, self.calls = seconds, list[list[str]]()
        self.error: Exception | None = None
        self.poison: str | None = None
        self.under_way = self.most = 0

    async def send(self, windows: list[Window]) -> list[Answer]:
        self.calls.append([w.request_id for w in windows])
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.under_way -= 1
        if self.error is not None:
            raise self.error
        if self.poison in self.calls[-1]:
            raise ValueError(f"cannot compute {self.poison}")
        return [answer(w) for w in windows]


def named(number: int) -> Window:
    return Window(f"r{number}", (number,), 1, (), SamplingParams())


async def ask_all(batches: WindowBatches, count: int) -> list[Answer | BaseException]:
    return await asyncio.gather(*(batches.ask(named(i)) for i in range(count)), return_exceptions=True)


async def test_few_windows_are_sent_at_once_each_in_a_call_of_its_own() -> None:
    verifier = Verifier()
    batches = WindowBatches(verifier.send, at_once=4)
    await ask_all(batches, 4)
    assert verifier.calls == [["r0"], ["r1"], ["r2"], ["r3"]]


async def test_many_share_calls_and_each_gets_its_own_answer() -> None:
    verifier = Verifier()
    batches = WindowBatches(verifier.send, at_once=4)
    found = await ask_all(batches, 100)
    assert [a.request_id for a in found if isinstance(a, Commit)] == [f"r{i}" for i in range(100)]
    assert len(verifier.calls) == 4 + 3
    assert max(len(call) for call in verifier.calls) == window_batches.TOGETHER
    assert verifier.most == 4
    assert not batches._waiting and not batches._calls


async def test_the_time_a_window_waits_here_is_queue_time() -> None:
    batches = WindowBatches(Verifier(0.1).send, at_once=1)
    first, second = await ask_all(batches, 2)
    assert isinstance(first, Commit) and isinstance(second, Commit)
    assert first.timings.queue_s < 0.05
    assert second.timings.queue_s > 0.08
    assert second.timings == VerifyTimings(queue_s=second.timings.queue_s)


async def test_a_window_nobody_waits_for_is_not_sent_and_a_leaver_takes_none_along() -> None:
    verifier = Verifier()
    batches = WindowBatches(verifier.send, at_once=1)
    asked = [asyncio.create_task(batches.ask(named(i))) for i in range(5)]
    await asyncio.sleep(0)
    asked[3].cancel()  # still waits
    await asyncio.sleep(0.03)
    asked[1].cancel()  # in a call with others by now
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert verifier.calls == [["r0"], ["r1", "r2", "r4"]]
    assert [isinstance(f, Commit) for f in found] == [True, False, True, False, True]


@pytest.mark.parametrize("error", [RayActorError(), Overloaded("full")])
async def test_what_is_wrong_for_all_is_told_to_all(error: Exception) -> None:
    verifier = Verifier()
    verifier.error = error
    found = await ask_all(WindowBatches(verifier.send, at_once=1), 6)
    assert found == [error] * 6
    assert len(verifier.calls) == 2, "they are not asked for one by one"


async def _poisoned(monkeypatch: pytest.MonkeyPatch, for_all: bool) -> list[bool]:
    if for_all:
        monkeypatch.setattr(window_batches, "_of_all", lambda _error: True)
    verifier = Verifier()
    verifier.poison = "r3"
    found = await ask_all(WindowBatches(verifier.send, at_once=1), 6)
    return [isinstance(f, Commit) for f in found]


async def test_a_window_that_breaks_its_call_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _poisoned(monkeypatch, False) == [True, True, True, False, True, True]


async def test_control_told_to_all_it_takes_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _poisoned(monkeypatch, True) == [True, False, False, False, False, False]


async def test_answers_that_do_not_fit_are_errors_and_nobody_waits_for_ever() -> None:
    async def none(_windows: list[Window]) -> list[Answer]:
        return []

    began = time.monotonic()
    found = await asyncio.wait_for(ask_all(WindowBatches(none, at_once=1), 3), 5.0)
    assert all(isinstance(f, ValueError) for f in found)
    assert time.monotonic() - began < 5.0


class Counting(Handle):
    """Counts its calls by their windows; audits, whose number is a matter of chance, apart."""

    def __init__(self) -> None:
        super().__init__(None)
        self.calls, self.audits = list[int](), list[int]()

    async def remote(self, windows: list[Window], cold: bool = False) -> Any:
        (self.audits if cold else self.calls).append(len(windows))
        await asyncio.sleep(0.01)
        return [answer(w) for w in windows]


async def test_a_requests_first_window_goes_alone_and_its_later_ones_share_calls() -> None:
    pool, handle = pool_of(("ready", "a")), Counting()
    pool.members[0].handle = handle
    for _ in range(2):
        await asyncio.gather(*(pool.verify([named(i)]) for i in range(40)))
    assert handle.calls[:40] == [1] * 40, "a prompt may be long: nobody waits for another's"
    assert handle.calls[40:] == [*[1] * window_batches.AT_ONCE, 32]
    await asyncio.gather(*(pool.verify([named(i)], cold=True) for i in range(40)))
    assert len(handle.audits) >= 40
    assert set(handle.audits) == {1}, "audits are no traffic"


async def test_calls_to_an_actor_that_hangs_do_not_hold_up_its_successor() -> None:
    pool = pool_of(("ready", "a"))
    pool.members[0].handle = hung = Handle(None)
    await asyncio.gather(*(pool.verify([named(i)]) for i in range(20)))
    hung.blocked = True
    waiting = [asyncio.create_task(pool.verify([named(i)])) for i in range(20)]
    await asyncio.sleep(0.01)
    pool.members[0].handle = Counting()
    await asyncio.wait_for(pool.verify([named(0)]), 5.0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
