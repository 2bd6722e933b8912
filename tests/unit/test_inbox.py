"""The driver's inbox: who is woken when, and that nothing is lost between two threads."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from llm42.engine.base import EngineOutput
from llm42.errors import LLM42Error
from llm42.protocol import FinishReason
from llm42.session.inbox import ANY, NONE, Inbox
from tests.support import PATIENCE_S


def output(
    start: int, *tokens: int, finish: FinishReason | None = None, error: str | None = None
) -> EngineOutput:
    return EngineOutput("r", 0, start, tokens, finish=finish, error=error)


async def woken(inbox: Inbox, wake_at: float, *outputs: EngineOutput, before: bool, seconds: float) -> bool:
    """Whether a driver that waits is woken by outputs that come meanwhile, or were there `before`."""
    if before:
        for each in outputs:
            inbox.sink(each)
    waiting = asyncio.create_task(inbox.wait(wake_at))
    await asyncio.sleep(0)
    if not before:
        for each in outputs:
            inbox.sink(each)
    await asyncio.wait([waiting], timeout=seconds)
    ended = waiting.done()
    waiting.cancel()
    return ended


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("wake_at", "outputs", "wakes"),
    [
        (ANY, [output(0, 5)], True),
        (NONE, [output(0, 5), output(1, 6)], False),
        (3, [output(0, 5), output(1, 6)], False),
        (3, [output(0, 5), output(1, 6), output(2, 7)], True),
        (3, [output(0, 5, 6, 7)], True),
        (NONE, [output(0, 5), output(1, 9)], True),
        (NONE, [output(0, 5, finish=FinishReason.LENGTH)], True),
        (NONE, [output(0, error="gone")], True),
    ],
)
async def test_who_is_woken(before: bool, wake_at: float, outputs: list[EngineOutput], wakes: bool) -> None:
    inbox = Inbox(stops=(9,))
    seconds = PATIENCE_S if wakes else 0.05
    assert await woken(inbox, wake_at, *outputs, before=before, seconds=seconds) is wakes
    assert inbox.take()[0] == outputs, "what did not wake is taken along"


async def test_an_answer_always_wakes_and_comes_after_the_candidates() -> None:
    inbox, answer = Inbox(), LLM42Error("an answer")
    inbox.sink(output(0, 5))
    inbox.put(answer)
    await asyncio.wait_for(inbox.wait(NONE), PATIENCE_S)
    assert inbox.take() == ([output(0, 5)], [answer])


class Unheard(Inbox[int]):
    """Leaves an answer of another thread where it is."""

    def post(self, answer: int) -> None:
        self._answers.append(answer)


async def _posted(inbox: Inbox[int], count: int, seconds: float) -> list[int]:
    """What a driver hears of a thread that posts `count` answers, until nothing comes for so long."""
    got, thread = list[int](), threading.Thread(target=lambda: [inbox.post(n) for n in range(count)])
    waiting = asyncio.create_task(inbox.wait(NONE))
    await asyncio.sleep(0.01)  # it waits before the first one comes
    thread.start()
    while len(got) < count:
        done, _ = await asyncio.wait([waiting], timeout=seconds)
        if not done:
            break
        got += inbox.take()[1]
        waiting = asyncio.create_task(inbox.wait(NONE))
    waiting.cancel()
    thread.join()
    return got


async def test_answers_of_another_thread_wake_and_come_in_order() -> None:
    assert await _posted(Inbox(), 3000, PATIENCE_S) == list(range(3000))


async def test_control_without_a_wakening_they_wait() -> None:
    assert await _posted(Unheard(), 3, 0.5) == []


async def test_the_wait_ends_with_its_time() -> None:
    await asyncio.wait_for(Inbox().wait(ANY, 0.05), PATIENCE_S)


async def test_outputs_of_a_closed_loop_are_dropped() -> None:
    inbox = Inbox()
    inbox._loop = asyncio.new_event_loop()
    inbox._loop.close()
    inbox.sink(output(0, 5, finish=FinishReason.LENGTH))
    assert inbox._woken, "it tried to"


class Forgetful(Inbox):
    """Does not look at what is there already when it begins to wait."""

    async def wait(self, wake_at: float, timeout_s: float | None = None) -> None:
        self._wake_at = wake_at
        await self._ready.wait()


async def _race(inbox: Inbox, count: int, seed: int) -> bool:
    """A thread hands over `count` tokens as fast as it can while the driver asks for random numbers of them.
    Whether the driver got all of them, in order, without waiting in vain."""
    rng, got = random.Random(seed), list[int]()

    def produce() -> None:
        for number in range(count):
            inbox.sink(output(number, number))

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        while len(got) < count:
            wanted = min(count, len(got) + rng.randrange(1, 9))
            await asyncio.wait_for(inbox.wait(wanted), PATIENCE_S)
            outputs, _ = inbox.take()
            got += [t for each in outputs for t in each.tokens]
    except TimeoutError:
        return False
    finally:
        thread.join()
    return got == list(range(count))


async def test_two_threads_lose_no_wakening() -> None:
    for seed in range(20):
        assert await _race(Inbox(), 3000, seed)


async def _there_before(inbox: Inbox, seconds: float) -> None:
    """What came while nobody wanted it is wanted now."""
    inbox.sink(output(0, 5))
    await asyncio.wait_for(inbox.wait(1), seconds)


async def test_what_is_there_already_ends_the_wait() -> None:
    await _there_before(Inbox(), PATIENCE_S)


async def test_control_without_the_second_look_it_is_lost() -> None:
    with pytest.raises(TimeoutError):
        await _there_before(Forgetful(), 0.2)
