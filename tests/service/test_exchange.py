"""The exchange between a replica and a verifier, over a transport that loses, repeats and delays: nobody
notices but by the time it takes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from llm42.errors import Overloaded, VerifierUnavailable
from llm42.protocol import Commit, Failure, SamplingParams, Window
from llm42.session.verify_call import SEND_IN_FULL
from llm42_serve.replica import exchange as exchanges
from llm42_serve.replica.exchange import CallLost, Exchange
from llm42_serve.verifiers import outboxes
from llm42_serve.verifiers.outbox import Outbox
from llm42_serve.verifiers.outboxes import Outboxes
from llm42_serve.wire import Down, Up, unpack
from tests.protocol.session_model import oracle, prompt_of
from tests.service.wires import Both, GivesOnce, Read, SaysOnce, Transport, both, read, request_of
from tests.support import PATIENCE_S, until

FATES = ("good", "good", "good", "good", "lost", "unsent", "twice", "slow", "slow")
LONG_S = 600.0
"""An interval that no test waits for."""


@pytest.fixture(autouse=True)
def _a_pause_of_the_machine_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "FRESH_S", LONG_S)


async def played(count: int = 8, patience_s: float = PATIENCE_S, **changes: Any) -> tuple[list[str], Both]:
    """What was noticed of the transport by requests that were read together."""
    async with both(**changes) as made:
        requests = [request_of(i) for i in range(count)]
        found = await asyncio.gather(*(read(made.exchange, r, patience_s) for r in requests))
    return [w for i, f in enumerate(found) for w in wrong(i, f)], made


def wrong(number: int, found: Read) -> list[str]:
    want = oracle(60, prompt_of(number))[0]
    facts = {
        "another output": found.tokens != want,
        "more than one window": found.stats.windows != 1,
        "a failure": bool(found.failures),
        "silence": bool(found.silences),
    }
    return [f"{number}: {fact}" for fact, holds in facts.items() if holds]


@pytest.mark.parametrize("seed", range(6))
async def test_nobody_notices_what_the_transport_does(seed: int) -> None:
    noticed, made = await played(seed=seed, fates=FATES)
    assert noticed == []
    assert made.transport.most == 2


@pytest.mark.parametrize("fate", ["lost", "unsent", "twice", "slow"])
async def test_nor_of_each_alone(fate: str) -> None:
    noticed, _ = await played(4, fates=("good", "good", fate))
    assert noticed == []


class InAnyOrder(Exchange):
    """Hands on what comes as it comes."""

    def _take(self, down: Down) -> None:
        self._arrived = max(self._arrived, down.number)
        self._hand_on(down)


async def test_control_an_answer_that_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "Outbox", GivesOnce)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(played(2, 0.1, fates=("good", "lost")), 2.0)


async def test_control_answers_out_of_order() -> None:
    fates = ("good", "slow")
    found = [(await played(8, 1.0, seed=seed, fates=fates, kind=InAnyOrder))[0] for seed in range(8)]
    assert any("window" in n for noticed in found for n in noticed)


async def test_control_a_call_that_is_not_repeated() -> None:
    async with both(fates=("good", "unsent"), seed=1, kind=SaysOnce) as made:
        found = await asyncio.gather(*(read(made.exchange, request_of(i), 0.5) for i in range(8)))
    assert any(f.silences for f in found)


# ---- when calls are made and answered


async def decoded(count: int, interval_s: float) -> tuple[float, int]:
    """The seconds and the calls until so many tokens of a request have come."""
    async with both(interval_s=interval_s, step_s=0.002) as made:
        began, tokens = time.monotonic(), list[int]()

        def sink(answer: Any) -> None:
            tokens.extend((answer.next_token, *answer.decoded))

        made.exchange.follow(window_of("a", credit=1000, max_len=400), sink)
        await until(lambda: len(tokens) >= count)
        return time.monotonic() - began, len(made.transport.calls)


async def test_the_first_token_leaves_at_once_and_later_ones_wait_for_others() -> None:
    await decoded(1, LONG_S)
    seconds, calls = await decoded(300, 0.1)
    assert calls <= 3 + seconds / 0.1, "tokens come together"


async def test_a_new_window_never_waits_for_the_open_call() -> None:
    async with both(interval_s=LONG_S) as made:
        for name in ("a", "b", "c"):
            heard = asyncio.Event()
            made.exchange.follow(window_of(name, credit=50), lambda _, e=heard: e.set())  # type: ignore[misc]
            await asyncio.wait_for(heard.wait(), PATIENCE_S)
        assert made.transport.most == 2
        assert made.transport.under_way == 1, "one call lies open"


async def test_many_words_go_together() -> None:
    async with both(interval_s=LONG_S) as made:
        for i in range(50):
            made.exchange.follow(window_of(f"r{i}", credit=5), lambda _: None)
        await until(lambda: sum(len(up.windows) for up in made.transport.calls) == 50)
        assert len(made.transport.calls) < 10


async def test_nobody_calls_for_nobody() -> None:
    async with both() as made:
        assert not made.transport.calls
        await read(made.exchange, request_of(1, 5))
        await until(lambda: made.verifier.released == ["r1"] and len(made.exchange._calls) == 1)
        count = len(made.transport.calls)
        await asyncio.sleep(0.1)
        assert len(made.transport.calls) == count
        assert made.exchange.followed == 0


@pytest.mark.parametrize(("answer_s", "heard"), [(0.05, True), (LONG_S, False)])
async def test_a_verifier_that_has_nothing_to_say_says_that_it_goes_on(answer_s: float, heard: bool) -> None:
    """The control: one that speaks only when something is due."""
    async with both(interval_s=LONG_S, answer_s=answer_s) as made:
        assert made.exchange.progressed_s > 1e9, "it has said nothing yet"
        got = asyncio.Event()
        made.exchange.follow(window_of("a"), lambda _: got.set())
        await asyncio.wait_for(got.wait(), PATIENCE_S)
        got.clear()
        made.exchange.follow(window_of("b", credit=1), lambda _: got.set())
        await asyncio.wait_for(got.wait(), PATIENCE_S)
        before = made.exchange._progressed
        if heard:
            await until(lambda: made.exchange._progressed > before)
        else:
            await asyncio.sleep(0.6)
            assert made.exchange._progressed == before
        made.verifier.held = True
        await until(lambda: made.exchange.progressed_s > 0.4, "answers alone are no progress")


# ---- what goes wrong


async def test_a_dead_verifier_is_said_to_every_request() -> None:
    heard = list[Any]()

    async def dead(up: Up) -> Down:
        await asyncio.sleep(0.01)
        raise ConnectionResetError("gone")

    exchange = Exchange("replica", dead, lambda: LONG_S)
    for name in ("a", "b"):
        exchange.follow(window_of(name), heard.append)
    await until(lambda: len(heard) == 2)
    assert [type(h) for h in heard] == [VerifierUnavailable] * 2
    assert "ConnectionResetError: gone" in str(heard[0])
    with pytest.raises(VerifierUnavailable, match="gone"):
        exchange.follow(window_of("c"), heard.append)


async def test_a_verifier_that_no_call_reaches_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm42_serve.replica.exchange.AGAIN_S", (0.01, 0.01))
    heard, calls = list[Any](), 0

    async def lost(up: Up) -> Down:
        nonlocal calls
        calls += 1
        raise CallLost("nowhere")

    exchange = Exchange("replica", lost, lambda: LONG_S)
    exchange.follow(window_of("a"), heard.append)
    await until(lambda: bool(heard))
    assert calls == 3
    assert len(heard) == 1 and isinstance(heard[0], VerifierUnavailable)


async def test_a_verifier_that_does_not_know_a_request_says_so() -> None:
    async with both() as made:
        heard: asyncio.Queue[Any] = asyncio.Queue()
        made.exchange.follow(window_of("a", credit=1, max_len=90), heard.put_nowait)
        await asyncio.wait_for(heard.get(), PATIENCE_S)
        made.verifier.release("a")
        made.exchange.renew("a", 50)
        while not isinstance(answer := await asyncio.wait_for(heard.get(), PATIENCE_S), Failure):
            pass
        assert (answer.request_id, answer.code) == ("a", SEND_IN_FULL)


async def test_a_verifier_that_has_started_anew_is_another_one() -> None:
    """Its numbers begin anew, and it knows nothing of what was asked before."""
    async with both(interval_s=0.001) as made:
        heard = list[Any]()
        made.exchange.follow(window_of("a", credit=5000, max_len=9000), heard.append)
        await until(lambda: bool(heard))
        made.boxes._boxes.clear()
        made.exchange.follow(window_of("b", credit=5), heard.append)
        await until(lambda: made.exchange.dead is not None)
        assert "started anew" in str(made.exchange.dead)
        assert sum(isinstance(h, VerifierUnavailable) for h in heard) == 2


class Full:
    """Refuses every window."""

    def follow(self, *_: Any) -> Any:
        raise Overloaded("planted")

    submit = follow

    def renew(self, *_: Any) -> None: ...

    def release(self, *_: Any) -> None: ...

    def load(self, *_: Any) -> None: ...

    def progressed_s(self, *_: Any) -> float:
        return 0.0


async def test_a_refusal_is_its_windows_alone() -> None:
    transport = Transport(Outboxes(Full()).exchange, Random(0))  # type: ignore[arg-type]
    exchange, heard = Exchange("replica", transport, lambda: LONG_S), list[Any]()
    exchange.follow(window_of("a"), heard.append)
    await until(lambda: bool(heard))
    assert [type(h) for h in heard] == [Overloaded]
    assert exchange.dead is None
    exchange.close()


async def test_what_is_released_hears_nothing_more() -> None:
    async with both(interval_s=0.001) as made:
        heard = list[Any]()
        made.exchange.follow(window_of("a", credit=5000, max_len=9000), heard.append)
        await until(lambda: bool(heard))
        made.exchange.release("a")
        count = len(heard)
        await until(lambda: made.verifier.released == ["a"])
        await asyncio.sleep(0.05)
        assert len(heard) == count


# ---- the outbox alone


def window_of(name: str, credit: int = 0, max_len: int = 60) -> Window:
    return Window(name, (3, 1), 2, (), SamplingParams(), credit=credit, stop_token_ids=(), max_len=max_len)


def commit(name: str, base: int) -> Commit:
    from tests.protocol.session_model import canonical, logprob

    tokens = [3, 1]
    while len(tokens) <= base:
        tokens.append(canonical(tokens))
    return Commit(name, base, 0, tokens[base], (logprob(tokens[:base], tokens[base]),), "fp")


def bases(down: Down) -> list[tuple[str, int, int]]:
    """Of each commit, its request and what it reaches from and to."""
    return [(c.request_id, c.base, c.end) for c in unpack(down.commits)] if down.commits else []


async def ask(box: Outbox, number: int, acknowledged: int = 0, beside: int = 0) -> asyncio.Task[Down]:
    task = asyncio.create_task(box.take(Up("r", number, beside, acknowledged, LONG_S)))
    await asyncio.sleep(0.01)
    return task


async def test_one_commit_per_request_and_answer() -> None:
    box = Outbox()
    for name, base in (("a", 2), ("b", 2), ("a", 3), ("a", 4)):
        box.put(name, commit(name, base), urgent=True)
    down = await (await ask(box, 1))
    assert bases(down) == [("a", 2, 5), ("b", 2, 3)]
    assert (down.after, down.number) == (0, 1)


async def test_the_open_call_is_answered_when_the_next_one_comes() -> None:
    box = Outbox()
    first = await ask(box, 1)
    box.put("a", commit("a", 2), urgent=False)
    await asyncio.sleep(0.02)
    assert not first.done(), "a token waits for others"
    second = await ask(box, 2, beside=1)
    assert first.done() and not second.done()
    assert bases(first.result()) == [], "and waits on"
    box.put("b", commit("b", 2), urgent=True)
    found = await second
    assert (found.after, found.number, bases(found)) == (0, 1, [("b", 2, 3)])
    third = await ask(box, 3, acknowledged=1)
    box.put("a", commit("a", 3), urgent=True)
    found = await third
    assert (found.after, found.number, bases(found)) == (1, 2, [("a", 2, 4)])


async def test_what_was_lost_comes_again_and_what_arrived_does_not() -> None:
    box = Outbox()
    box.put("a", commit("a", 2), urgent=True)
    await (await ask(box, 1))
    box.put("a", commit("a", 3), urgent=True)
    await (await ask(box, 2, acknowledged=1))
    box.put("a", commit("a", 4), urgent=False)
    again = await (await ask(box, 3, acknowledged=1))
    assert (again.after, again.number, bases(again)) == (1, 3, [("a", 3, 5)])
    quiet = await ask(box, 4, acknowledged=3)
    assert not quiet.done()
    quiet.cancel()


async def test_a_call_that_was_cancelled_takes_nothing_along() -> None:
    box = Outbox()
    (await ask(box, 1)).cancel()
    await asyncio.sleep(0.01)
    box.put("a", commit("a", 2), urgent=True)
    assert bases(await (await ask(box, 2))) == [("a", 2, 3)]


async def test_failures_keep_their_place() -> None:
    box, failure = Outbox(), Failure("a", SEND_IN_FULL, "planted")
    box.put("a", commit("a", 2), urgent=True)
    box.put("a", failure, urgent=True)
    box.put("a", commit("a", 3), urgent=True)
    down = await (await ask(box, 1))
    assert down.failures == ((1, "a", failure),)
    heard, exchange = list[Any](), Exchange("replica", lambda _: asyncio.sleep(9), lambda: 0.0)  # type: ignore[arg-type,return-value]
    exchange.follow(window_of("a", credit=5), heard.append)
    exchange._take(down)
    assert [h if isinstance(h, Failure) else h.base for h in heard] == [2, failure, 3]
    exchange.close()


async def test_what_cannot_be_packed_ends_its_requests() -> None:
    box = Outbox()
    box.put("a", replace(commit("a", 2), next_token=99), urgent=True)
    down = await (await ask(box, 1))
    assert [(name, type(f).__name__) for _, name, f in down.failures] == [("a", "VerificationFailed")]


async def test_boxes_of_replicas_that_are_gone_are_dropped() -> None:
    async with both() as made:
        await read(made.exchange, request_of(1, 5))
        (box,) = made.boxes._boxes.values()
        await until(lambda: box.is_open)
        made.boxes.forget_silent(0.0)
        assert made.boxes._boxes, "its call lies open"
        made.exchange.close()
        await until(lambda: not box.is_open)
        made.boxes.forget_silent(60.0)
        assert made.boxes._boxes
        made.boxes.forget_silent(0.0)
        assert not made.boxes._boxes
