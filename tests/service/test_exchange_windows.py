"""Windows of mode verify over the exchange: each is computed once and answered once, whatever the transport
does."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from llm42.errors import Overloaded, StepFailed, VerificationFailed, VerifierUnavailable
from llm42.protocol import Commit, Failure, SamplingParams, Window
from llm42_serve.replica import exchange as exchanges
from llm42_serve.replica.exchange import CallLost, Exchange
from llm42_serve.verifiers import outboxes
from llm42_serve.verifiers.outbox import Outbox
from llm42_serve.wire import Answer, Down, Up
from tests.protocol.session_model import oracle, prompt_of, verify
from tests.service.wires import Both, GivesOnce, SaysOnce, Stepper, both, checked, read, request_of
from tests.support import PATIENCE_S, until

FATES = ("good", "good", "good", "good", "lost", "unsent", "twice", "slow", "slow")


LONG_S = 600.0
"""What no test waits for."""


@pytest.fixture(autouse=True)
def _a_pause_of_the_machine_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "FRESH_S", LONG_S)


async def played(
    count: int = 8, patience_s: float = PATIENCE_S, beside: int = 4, **changes: Any
) -> tuple[list[str], Both]:
    """What was noticed of the transport by requests in mode verify, beside others that are followed."""
    async with both(**changes) as made:
        asked = [checked(made.exchange, request_of(i), patience_s) for i in range(count)]
        followed = [read(made.exchange, request_of(100 + i), patience_s) for i in range(beside)]
        found, others = await asyncio.gather(asyncio.gather(*asked), asyncio.gather(*followed))
    noticed = []
    for i, each in enumerate(found):
        facts = {
            "another output": each.tokens != oracle(60, prompt_of(i))[0],
            "a failure": bool(each.failures),
            "silence": bool(each.silences),
        }
        noticed += [f"{i}: {fact}" for fact, holds in facts.items() if holds]
    if len(made.verifier.submitted) != sum(each.stats.windows for each in found):
        noticed.append("a window was computed more than once")
    if any(o.failures or o.silences for o in others):
        noticed.append("a request that is followed noticed")
    return noticed, made


@pytest.mark.parametrize("seed", range(6))
async def test_nobody_notices_what_the_transport_does(seed: int) -> None:
    noticed, made = await played(seed=seed, fates=FATES)
    assert noticed == []
    assert made.transport.most == 2


@pytest.mark.parametrize("fate", ["lost", "unsent", "twice", "slow"])
async def test_nor_of_each_alone(fate: str) -> None:
    noticed, _ = await played(4, fates=("good", "good", fate))
    assert noticed == []


class HearsAll(Outbox):
    """Takes a call, and a window, that comes again for another one."""

    def hears(self, number: int) -> bool:
        return True

    def begin(self, request_id: str, mark: int, call: int = 0) -> bool:
        super().begin(request_id, mark, call)
        return True


class TakesAll(Exchange):
    """Takes any answer for that of the window that is awaited, as one without marks."""

    def _say(self, name: str, mark: int, answer: Answer) -> None:
        super()._say(name, 0, answer)


async def test_control_an_answer_that_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "Outbox", GivesOnce)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(played(2, 0.1, 0, fates=("good", "lost")), 2.0)


async def test_control_a_call_that_is_not_repeated() -> None:
    noticed, _ = await played(4, 0.1, 0, fates=("good", "good", "unsent"), kind=SaysOnce)
    assert any("silence" in x for x in noticed)


async def test_control_calls_that_are_heard_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even then each window has its own answer: what is computed again belongs to an older one."""
    monkeypatch.setattr(outboxes, "Outbox", HearsAll)
    found = [(await played(beside=0, seed=seed, fates=("good", "twice", "lost")))[0] for seed in range(3)]
    assert {n for noticed in found for n in noticed} == {"a window was computed more than once"}


async def test_control_answers_without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "Outbox", HearsAll)
    runs = (played(beside=0, seed=seed, fates=("good", "twice", "lost"), kind=TakesAll) for seed in range(6))
    found = await asyncio.gather(*runs, return_exceptions=True)
    assert any("does not answer" in str(each) or "came twice" in str(each) for each in found)


# ---- calls


def named(name: str) -> Window:
    return Window(name, (3, 1), 2, (), SamplingParams())


async def ask(exchange: Exchange, *names: str) -> list[Any]:
    """The answers, each once it is there."""
    heard: dict[str, asyncio.Future[Any]] = {n: asyncio.get_running_loop().create_future() for n in names}
    for name, future in heard.items():
        exchange.follow(named(name), future.set_result)
    return await asyncio.wait_for(asyncio.gather(*heard.values()), PATIENCE_S)


async def test_a_window_is_sent_at_once_and_its_answer_leaves_at_once() -> None:
    async with both(interval_s=LONG_S) as made:
        for i in range(5):
            await ask(made.exchange, f"r{i}")
        assert [len(up.windows) for up in made.transport.calls] == [1] * 5, "one call a window, and none open"


async def test_many_windows_share_calls() -> None:
    async with both(step_s=0.02) as made:
        found = await ask(made.exchange, *(f"r{i}" for i in range(100)))
        assert [a.request_id for a in found] == [f"r{i}" for i in range(100)]
        assert [len(up.windows) for up in made.transport.calls[:3]] == [1, 1, 98]


async def test_who_is_asked_no_more_says_nothing_and_waits_no_more() -> None:
    async with both() as made:
        heard, names = list[Any](), [f"r{i}" for i in range(8)]
        made.verifier.held = True
        for name in names:
            made.exchange.follow(named(name), heard.append)
        await until(lambda: len(made.verifier.waiting) == 8)
        for name in names:
            made.exchange.release(name)
        await until(lambda: sorted(made.verifier.released) == names)
        assert all(answer.cancelled() for _, answer in made.verifier.waiting)
        made.verifier.held = False
        await until(lambda: not made.verifier.waiting)
        await asyncio.sleep(0.05)
        assert heard == []


async def test_a_later_window_takes_the_place_of_an_earlier_one() -> None:
    async with both() as made:
        heard = list[Any]()
        made.verifier.held = True
        made.exchange.follow(named("r"), lambda _: heard.append("the first"))
        await until(lambda: len(made.verifier.submitted) == 1)
        made.exchange.follow(named("r"), heard.append)
        await until(lambda: len(made.verifier.submitted) == 2)
        made.verifier.held = False
        await until(lambda: not made.verifier.waiting and bool(heard))
        await asyncio.sleep(0.05)
        assert [type(h) for h in heard] == [Commit]


async def test_an_exchange_that_was_idle_does_not_take_the_verifier_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which has dropped its outbox meanwhile."""
    monkeypatch.setattr(exchanges, "FRESH_S", 0.05)
    async with both() as made:
        for i in range(3):
            (answer,) = await ask(made.exchange, f"r{i}")
            assert isinstance(answer, Commit)
            await asyncio.sleep(0.1)
            made.boxes.forget_silent(0.0)
            assert not made.boxes._boxes
        monkeypatch.setattr(exchanges, "FRESH_S", LONG_S)
        (answer,) = await ask(made.exchange, "control")
        assert "started anew" in str(answer)


@pytest.mark.parametrize("planted", [False, True])
async def test_a_replica_counts_once(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rest it has another box, and the one before is still there. What is free is shared among
    replicas: best effort would stay away from KV that nobody else takes. planted: each box counts, as the
    control."""
    monkeypatch.setattr(exchanges, "FRESH_S", -1.0)
    if planted:
        monkeypatch.setattr(outboxes, "owner_of", lambda name: name)
    async with both() as made:
        for i in range(3):
            (answer,) = await ask(made.exchange, f"r{i}")
            assert isinstance(answer, Commit)
            await until(lambda: not made.exchange._calls)
        assert len(made.boxes._boxes) == 3, "the case is one"
        told = made.exchange.told
        assert told is not None and told.replicas == (3 if planted else 1)


# ---- what goes wrong


async def test_a_dead_verifier_is_said_to_every_window_that_waits() -> None:
    async def dead(up: Up) -> Down:
        await asyncio.sleep(0.01)
        raise ConnectionResetError("gone")

    exchange = Exchange("replica", dead, lambda: LONG_S)
    found = await ask(exchange, *(f"r{i}" for i in range(5)))
    assert [type(f) for f in found] == [VerifierUnavailable] * 5


async def test_so_is_one_that_no_call_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "AGAIN_S", (0.01, 0.01))

    async def lost(up: Up) -> Down:
        raise CallLost("nowhere")

    (found,) = await ask(Exchange("replica", lost, lambda: LONG_S), "r")
    assert isinstance(found, VerifierUnavailable)


class Refuses(Stepper):
    """Fails with the windows of one request, at once or in a step."""

    def __init__(self, failure: Failure | Exception, at_once: bool) -> None:
        super().__init__()
        self.failure, self.at_once = failure, at_once

    def submit(self, window: Window) -> Future[Commit | Failure]:
        if window.request_id != "bad":
            return super().submit(window)
        if self.at_once and isinstance(self.failure, Exception):
            raise self.failure
        answer: Future[Commit | Failure] = Future()
        if isinstance(self.failure, Failure):
            answer.set_result(self.failure)
        else:
            answer.set_exception(self.failure)
        return answer


@pytest.mark.parametrize(
    ("failure", "at_once", "told"),
    [
        (Overloaded("planted"), True, Overloaded),
        (VerifierUnavailable("planted"), True, VerifierUnavailable),
        (ValueError("a bug"), True, VerificationFailed),
        (ValueError("a bug"), False, VerificationFailed),
        (StepFailed("planted"), False, StepFailed),
        (Failure("bad", "non_finite_logits", "planted"), False, Failure),
    ],
)
async def test_what_is_wrong_with_a_window_is_its_own(
    failure: Failure | Exception, at_once: bool, told: type[Any]
) -> None:
    async with both() as made:
        await asyncio.to_thread(made.verifier.close)
        made.verifier = made.boxes._verifier = Refuses(failure, at_once)
        good, bad, other = await ask(made.exchange, "good", "bad", "other")
        assert isinstance(bad, told), bad
        assert [good, other] == [verify(named("good")), verify(named("other"))]
        assert made.exchange.dead is None


def call_of(number: int, beside: int, answer_s: float = PATIENCE_S, **says: Any) -> Up:
    return Up("replica", number, beside, interval_s=0.0, answer_s=answer_s, **says)


@pytest.mark.parametrize("credit", [0, 8])
async def test_a_release_that_was_overtaken_ends_nothing(credit: int) -> None:
    """Calls to an actor may overtake each other: the next window of the same request is there already."""
    async with both() as made:
        made.verifier.held = True
        window = replace(named("r"), credit=credit, max_len=40 if credit else 0)
        later = asyncio.create_task(made.boxes.exchange(call_of(3, 0, windows=(window,), marks=(2,))))
        await asyncio.sleep(0.001)
        overtaken = asyncio.create_task(made.boxes.exchange(call_of(2, 3, releases=("r",))))
        await until(later.done)
        made.verifier.held = False
        given = await asyncio.gather(later, overtaken)
        assert made.verifier.released == []
        assert sum(down.commits is not None for down in given) == 1
        await made.boxes.exchange(call_of(4, 2, 0.1, releases=("r",)))  # this one is of the window
        assert made.verifier.released == ["r"]


async def test_a_window_that_its_release_has_overtaken_is_not_begun() -> None:
    async with both() as made:
        over = asyncio.create_task(made.boxes.exchange(call_of(2, 1, releases=("r",))))
        await asyncio.sleep(0.001)
        late = call_of(1, 2, 0.1, windows=(named("r"),), marks=(1,))
        await asyncio.gather(over, made.boxes.exchange(late))
        assert made.verifier.submitted == []
        again = call_of(3, 1, windows=(named("r"),), marks=(2,))
        assert (await made.boxes.exchange(again)).commits is not None
