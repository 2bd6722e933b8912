"""Who comes and goes does not split the tokens of the others: when an exchange calls, and what an answer
takes along."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llm42.protocol import SamplingParams, Window
from llm42_serve.replica import exchange as exchanges
from llm42_serve.verifiers import outbox as outboxes
from llm42_serve.verifiers.outbox import Outbox
from llm42_serve.wire import Up
from tests.protocol.session_model import prompt_of
from tests.service.test_exchange import commit
from tests.service.wires import Both, both
from tests.support import PATIENCE_S, until

LONG_S = 600.0
"""An interval that no test waits for."""


class Reader:
    """Counts the answers and tokens of one request."""

    def __init__(self, made: Both, number: int, credit: int = 1000, max_len: int = 5000) -> None:
        self.answers, self.tokens, self.name = 0, 0, f"p{number}"
        prompt = prompt_of(number)
        window = Window(self.name, prompt, len(prompt), (), SamplingParams(), credit=credit, max_len=max_len)
        made.exchange.follow(window, self)

    def __call__(self, answer: Any) -> None:
        self.answers += 1
        self.tokens += 1 + len(answer.decoded)


async def beside_others(made: Both) -> Reader:
    """One request that is decoded while ten others come and go."""
    one = Reader(made, 0)
    await until(lambda: one.answers == 1)
    for i in range(1, 11):
        other = Reader(made, i)
        await until(lambda r=other: r.answers > 0)  # type: ignore[misc]
        made.exchange.release(other.name)
    return one


async def test_the_first_token_of_one_takes_no_other_along() -> None:
    async with both(interval_s=LONG_S) as made:
        one = await beside_others(made)
        assert one.answers == 1
        decoded = made.verifier.requests[one.name]
        await until(lambda: len(decoded.tokens) > len(prompt_of(0)) + 1)
        assert one.answers == 1


@pytest.mark.parametrize(("ends", "heard"), [(outboxes._ends, True), (lambda *_: False, False)])
async def test_the_last_token_leaves_at_once(ends: Any, heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads it may begin another request. The control: it waits for the interval."""
    monkeypatch.setattr(outboxes, "_ends", ends)
    async with both(interval_s=LONG_S) as made:
        one = Reader(made, 0, max_len=len(prompt_of(0)) + 20)
        requests = made.verifier.requests
        await until(lambda: one.name in requests and requests[one.name].over)
        Reader(made, 1)  # calls, and so opens the call before
        if heard:
            await until(lambda: one.tokens == 20)
        else:
            await asyncio.sleep(0.3)
            assert one.tokens == 1


async def test_control_all_that_waits_goes_with_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(self: Outbox, up: Any) -> Any:
        due, self._waiting = self._waiting, {}
        self._urgent, self._told = {}, False
        return due

    monkeypatch.setattr(Outbox, "_due", everything)
    async with both(interval_s=LONG_S) as made:
        assert (await beside_others(made)).answers > 1


async def test_what_was_left_goes_when_the_interval_is_over() -> None:
    async with both(interval_s=0.2) as made:
        one = await beside_others(made)
        await until(lambda: one.answers > 2)
        assert one.tokens > one.answers, "several at a time"


async def test_what_was_left_is_given_again_after_a_loss() -> None:
    """An answer with a part of what waits is lost: nothing of either part is."""
    async with both(interval_s=0.05, fates=("good", "lost")) as made:
        readers = [Reader(made, i, credit=40) for i in range(6)]
        await until(lambda: all(r.tokens == 41 for r in readers))


@pytest.mark.parametrize(("later_s", "together"), [(LONG_S, True), (0.0, False)])
async def test_renewals_and_releases_go_up_together(
    later_s: float, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: each with a call of its own."""
    monkeypatch.setattr(exchanges, "RENEWAL_S", later_s)
    monkeypatch.setattr(exchanges, "RELEASE_S", later_s)
    async with both(interval_s=LONG_S) as made:
        readers = [Reader(made, i, credit=1) for i in range(20)]
        await until(lambda: all(r.answers for r in readers))
        before = len(made.transport.calls)
        for i, reader in enumerate(readers):
            if i % 2:
                made.exchange.release(reader.name)
            else:
                made.exchange.renew(reader.name, len(prompt_of(i)) + 5)
            await asyncio.sleep(0.001)
        made.exchange._now()  # the time is over
        await until(lambda: len(made.verifier.released) == 10)
        await until(lambda: all(len(r.tokens) == r.until for r in made.verifier.requests.values()))
        assert (len(made.transport.calls) - before <= 3) == together


@pytest.mark.parametrize(("renewal_s", "told"), [(0.0, True), (LONG_S, False)], ids=["", "control"])
async def test_a_renewal_does_not_wait_as_long_as_a_release(
    renewal_s: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the release along. Else the credit might be used up before it goes."""
    monkeypatch.setattr(exchanges, "RENEWAL_S", renewal_s)
    monkeypatch.setattr(exchanges, "RELEASE_S", LONG_S)
    async with both(interval_s=LONG_S) as made:
        readers = [Reader(made, i, credit=1) for i in range(2)]
        await until(lambda: all(r.answers for r in readers))
        made.exchange.release(readers[0].name)
        made.exchange.renew(readers[1].name, len(prompt_of(1)) + 5)
        if told:
            await until(lambda: made.verifier.released == [readers[0].name])
            await until(lambda: len(made.verifier.requests[readers[1].name].tokens) > len(prompt_of(1)) + 2)
        else:
            await asyncio.sleep(0.1)
            assert made.verifier.released == []


class Asleep(Outbox):
    """Thinks that its loop has been told, once it was, until an answer is given: the control."""

    def _look(self) -> None:
        told = self._told
        super()._look()
        self._told = told or self._told


@pytest.mark.parametrize(("kind", "heard"), [(Outbox, True), (Asleep, False)])
async def test_a_release_does_not_put_others_to_sleep(kind: type[Outbox], heard: bool) -> None:
    """What the loop had been told of was released before any call could take it along."""
    box = kind()
    first = asyncio.create_task(box.take(Up("r", 1, 0, 0, LONG_S)))
    await asyncio.sleep(0)
    box.put("x", commit("x", 2), urgent=False)
    box.put("z", commit("z", 2), urgent=True)
    assert (await first).number == 1
    box.forget("x", 2)
    second = asyncio.create_task(box.take(Up("r", 2, 0, 1, 0.01)))
    await asyncio.sleep(0)
    box.put("z", commit("z", 3), urgent=False)
    done, _ = await asyncio.wait([second], timeout=PATIENCE_S if heard else 0.2)
    assert bool(done) == heard
    second.cancel()
