"""Requests that change their way, over the exchange between a replica and a verifier: what is stopped there,
and what the answers tell of the verifier's load."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from llm42.protocol import Commit, Failure, Request, SamplingParams, Window
from llm42.session.actions import Renew
from llm42.session.machine import Session
from llm42_serve.replica.exchange import CallLost, Exchange
from llm42_serve.verifiers.outbox import Outbox
from llm42_serve.verifiers.outboxes import Outboxes
from llm42_serve.wire import Up
from tests.protocol.session_model import oracle, prompt_of
from tests.service.stand_ins import until
from tests.service.test_exchange import FATES, LONG_S, Full, both, window_of
from tests.service.wires import CREDIT, Transport, request_of


async def test_what_is_stopped_is_decoded_no_further() -> None:
    """At the verifier, too; its place is kept for windows."""
    async with both(interval_s=0.001) as made:
        heard = list[Any]()
        made.exchange.follow(window_of("a", credit=5000, max_len=9000), heard.append)
        await until(lambda: len(heard) > 3)
        made.exchange.stop("a")
        count = len(heard)
        await until(lambda: made.verifier.stopped == ["a"])
        assert made.exchange.followed == 1
        made.exchange.follow(window_of("a"), heard.append)
        await until(lambda: len(heard) > count)
        await asyncio.sleep(0.05)
        assert len(heard) == count + 1, "the window's answer alone"
        assert made.verifier.released == []


async def test_a_stop_that_comes_late_is_not_of_the_next_window() -> None:
    async with both(interval_s=0.001) as made:
        made.exchange.follow(window_of("a", credit=5000, max_len=9000), lambda _: None)
        await until(lambda: bool(made.verifier.requests))
        up = made.transport.calls[-1]
        heard = list[Any]()
        made.exchange.follow(window_of("a", credit=5000, max_len=9000), heard.append)
        await until(lambda: len(heard) > 3)
        late = replace(up, number=up.number + 500, windows=(), marks=(), stops=(("a", 1),))
        made.boxes._hear(made.boxes._boxes[up.replica], late)
        assert made.verifier.stopped == []
        made.boxes._hear(made.boxes._boxes[up.replica], replace(late, stops=(("a", 2),)))
        assert made.verifier.stopped == ["a"], "the control"


def exact_stops(boxes: Outboxes) -> list[tuple[str, int]]:
    """Has it hear only stops of the very window that is there. Those that it has not heard."""
    hear, unheard = boxes._hear, list[tuple[str, int]]()

    def planted(box: Outbox, up: Up) -> None:
        others = [stop for stop in up.stops if stop[1] != box.mark_of(stop[0])]
        hear(box, replace(up, stops=tuple(stop for stop in up.stops if stop not in others)))
        unheard.extend(others)

    boxes._hear = planted  # type: ignore[method-assign]
    return unheard


@pytest.mark.parametrize("planted", [False, True])
async def test_a_stop_of_a_window_that_never_left_is_of_the_one_before(planted: bool) -> None:
    """Planted: it is of that window alone. Then the one before is decoded for nobody: the control."""
    async with both(interval_s=0.001) as made:
        unheard = exact_stops(made.boxes) if planted else []
        made.exchange.follow(window_of("a", credit=5000, max_len=9000), lambda _: None)
        await until(lambda: bool(made.verifier.requests))
        made.exchange.follow(window_of("b", credit=5000, max_len=9000), lambda _: None)
        made.exchange.follow(window_of("a", credit=5000, max_len=9000), lambda _: None)  # no call is free
        made.exchange.stop("a")
        if planted:
            await until(lambda: unheard == [("a", 3)])
            assert made.verifier.stopped == []
            return
        await until(lambda: made.verifier.stopped == ["a"])
        assert [mark for up in made.transport.calls for mark in up.marks] == [1, 2], "it has not left"
        up = made.transport.calls[-1]
        late = replace(up, number=up.number + 500, windows=(), marks=(), stops=(("c", 1),))
        made.boxes._hear(made.boxes._boxes[up.replica], late)
        assert made.verifier.stopped == ["a"], "another one's request of that name"


async def test_a_lost_stop_is_said_again() -> None:
    async with both(interval_s=0.001) as made:
        made.exchange.follow(window_of("a", credit=5000, max_len=9000), lambda _: None)
        await until(lambda: bool(made.verifier.requests))
        made.transport.fates = ("unsent",)
        made.exchange.stop("a")
        await until(lambda: made.transport.losses > 0)
        made.transport.fates = ("good",)
        await until(lambda: made.verifier.stopped == ["a"])


@pytest.mark.parametrize("planted", [False, True])
async def test_a_lost_renewal_does_not_end_the_next_window(planted: bool) -> None:
    """The call that said it is lost only after a window without credit has taken the place of what it renews.
    planted: it is said again all the same, as the control."""
    async with both(interval_s=LONG_S) as made:
        exchange, verifier = made.exchange, made.verifier
        exchange.follow(window_of("a", credit=5000, max_len=9000), lambda _: None)
        await until(lambda: bool(verifier.requests))
        exchange.renew("a", 4000)
        await until(lambda: bool(made.transport.calls[-1].renewals))
        up, heard = made.transport.calls[-1], list[Any]()
        verifier.held = True
        exchange.stop("a")
        exchange.follow(window_of("a"), heard.append)
        exchange._repeat(replace(up, windows=(), marks=()), CallLost("planted"))
        if planted:
            exchange._renewals["a"] = 4000
        await until(lambda: verifier.stopped == ["a"] and bool(verifier.submitted))
        if planted:
            await until(lambda: bool(heard))
        verifier.held = False
        await until(lambda: bool(heard))
        assert isinstance(heard[0], Failure if planted else Commit)


async def changing(exchange: Exchange, request: Request, seed: int) -> list[int]:
    """Plays a session that is decoded directly, then verified, then decoded directly again, and so on."""
    session, answers, rng = Session(request, CREDIT, 0.0), asyncio.Queue[Any](), Random(seed)
    while not session.done:
        if (window := session.due(0.0)) is not None:
            exchange.follow(window, answers.put_nowait)
        for action in session.commit(await asyncio.wait_for(answers.get(), 10.0), 0.0):
            if isinstance(action, Renew):
                exchange.renew(request.request_id, action.until)
        if session.done or rng.random() < 0.5:
            continue
        answers = asyncio.Queue[Any]()
        exchange.stop(request.request_id)
        known = (*request.prompt, *session.committed)
        window = Window(request.request_id, known, len(request.prompt), (7, 8), SamplingParams())
        exchange.follow(window, answers.put_nowait)
        commit = await asyncio.wait_for(answers.get(), 10.0)
        assert isinstance(commit, Commit) and commit.base == len(known)
        session.lost()
        session.commit(replace(commit, decoded=()), 0.0)
        answers = asyncio.Queue[Any]()
    exchange.release(request.request_id)
    return session.committed


@pytest.mark.parametrize("seed", range(3))
async def test_requests_that_change_their_ways(seed: int) -> None:
    """Over a transport that loses, repeats and delays: each has the oracle's output."""
    async with both(seed=seed, fates=FATES) as made:
        requests = [request_of(i) for i in range(6)]
        found = await asyncio.gather(*(changing(made.exchange, r, seed) for r in requests))
        for i, tokens in enumerate(found):
            assert tokens == oracle(60, prompt_of(i))[0]
        assert made.verifier.stopped


async def test_answers_say_how_busy_the_verifier_is() -> None:
    worked = [100.0]
    async with both(interval_s=0.001) as made:
        made.exchange._worked_s = lambda: worked[0]
        made.exchange.follow(window_of("a", credit=5000, max_len=9000), lambda _: None)
        await until(lambda: made.exchange.told is not None)
        told = made.exchange.told
        assert told is not None and (told.direct, told.kv_free, told.worked_s) == (1, 1 << 20, 12.5)
        made.verifier.worked_s, worked[0] = 20.0, 105.0
        await until(lambda: made.exchange.neighbour.seconds >= 7.5)
        assert made.exchange.neighbour.seconds == pytest.approx(7.5, abs=1.0)
        made.exchange.renew("a", 6000)
        neighbour = made.verifier.neighbour
        assert neighbour is not None
        await until(lambda: neighbour() >= 5.0)
        assert neighbour() == pytest.approx(5.0, abs=1.0)


async def test_one_that_does_not_say_is_not_asked_again() -> None:
    exchange = Exchange("replica", Transport(Outboxes(Full()).exchange, Random(0)), lambda: LONG_S)  # type: ignore[arg-type]
    heard = list[Any]()
    exchange.follow(window_of("a"), heard.append)
    await until(lambda: bool(heard))
    assert exchange.told is None
    exchange.close()
