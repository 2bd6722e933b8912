"""How busy a verifier is, as a replica knows it: by what it said last, without the replica's own requests."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import pytest

from llm42.errors import Overloaded
from llm42.protocol import Commit, Request, SamplingParams, VerifyTimings, Window
from llm42.step_times import Costs
from llm42_serve.replica.admission import Admission
from llm42_serve.replica.following import Following, _Place
from llm42_serve.replica.verifier_pool import VerifierPool
from tests.service.stand_ins import until
from tests.service.test_following import Actor, pool_with

STEPS, WINDOWS = Costs(((1.0, 0.1),), 0.01), Costs(((16.0, 0.2),))
SAID: dict[str, Any] = {
    "direct": 7,
    "places": 64,
    "kv_tokens": 1000,
    "kv_used": 300,
    "waited_s": 0.5,
    "decode_steps": STEPS,
    "window_steps": WINDOWS,
}


def publish(pool: VerifierPool, **said: Any) -> None:
    """A look at the verifiers."""
    for member in pool.members:
        assert member.status is not None
        member.status, member.told_at = replace(member.status, **SAID | said), time.monotonic()


def followed(name: str) -> Window:
    return Window(name, (3, 1), 2, (), SamplingParams(), credit=500, max_len=900)


def request(name: str) -> Request:
    return Request(name, (3, 1), 898, deterministic=True)


def as_if_none_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Place, "yields", False)


@pytest.mark.parametrize("planted", [False, True])
async def test_how_best_effort_fares_tells_nothing_of_others(
    planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused window of one that gives way neither lets fewer deterministic requests in nor sends them to
    another verifier; nor does it tell how long they wait. Planted: as any window, the control."""
    if planted:
        as_if_none_yields(monkeypatch)
    admission, waited = Admission(128, 100, 0.5, 0.5), list[float]()

    def observe(queue_s: float) -> None:
        waited.append(queue_s)
        admission.observe(queue_s)

    async with pool_with(Actor()) as pool, admission.place(True), admission.place(True):
        (member,), following = pool.members, pool._following
        following._observe = observe
        place = _Place(member, member.actor_id, member.handle, following._exchange(member))
        place.window = replace(followed("moved"), yields=True)
        following._hear("moved", place, Commit("moved", 2, 0, 7, (), "fp", VerifyTimings(9.0)))
        following._hear("moved", place, Overloaded("planted"))
        assert waited == ([9.0, math.inf] if planted else [])
        assert (admission.limit, member.avoid_until > 0.0) == ((1, True) if planted else (128, False))


async def test_by_the_last_look_before_anything_is_asked() -> None:
    async with pool_with(Actor(), Actor()) as pool:
        assert pool.load(None) is not None
        publish(pool)
        load = pool.load(request("new"))
        assert load is not None
        assert (load.direct, load.others, load.places, load.kv_free) == (7, 7, 64, 700)
        assert (load.waited_s, load.decode_steps, load.window_steps, load.share) == (0.5, STEPS, WINDOWS, 0.5)
        for member in pool.members:
            member.status = None
        assert pool.load(request("new")) is None


async def test_answers_are_newer_and_own_requests_are_nobody_elses() -> None:
    async with pool_with(Actor()) as pool:
        publish(pool)
        for name in ("a", "b"):
            pool.follow(followed(name), lambda _: None)
        (member,) = pool.members
        await until(lambda: (load := pool.load(request("a"))) is not None and load.direct == 2)
        load = pool.load(request("a"))
        assert load is not None
        assert (load.others, load.kv_free, load.places, load.decode_steps) == (0, 1 << 20, 64, STEPS)
        pool.stop("a")
        pool.stop("b")
        assert member.direct == 0 and member.in_flight == 0
        publish(pool, direct=2)  # of a moment ago, when these were among them
        load = pool.load(request("a"))
        assert load is not None and (load.direct, load.others) == (2, 0)
        publish(pool, direct=9)
        load = pool.load(request("a"))
        assert load is not None and load.others == 7


@pytest.mark.parametrize("name", ["placed", "new"])
async def test_of_the_verifier_that_the_request_has_or_would_get(name: str) -> None:
    async with pool_with(Actor(), Actor()) as pool:
        publish(pool)
        pool.follow(followed("placed"), lambda _: None)
        await until(lambda: pool.asked("placed") != "")
        wanted = pool._preferred((3, 1))
        assert wanted is not None and wanted.name == pool.asked("placed")
        other = next(m for m in pool.members if m is not wanted)
        for member in pool.members:
            assert member.status is not None
            member.status = replace(member.status, places=1 if member is other else 2)
        if name == "placed":
            wanted.in_flight = 100  # a new one would go elsewhere
        load = pool.load(request(name))
        assert load is not None and load.places == 2
        if name == "placed":
            load = pool.load(request("new"))
            assert load is not None and load.places == 1, "the control"


async def test_a_stopped_request_keeps_its_place() -> None:
    """Its windows go where its KV is, though another verifier has less to do."""
    async with pool_with(Actor(), Actor()) as pool:
        pool.follow(followed("a"), lambda _: None)
        await until(lambda: pool.asked("a") != "")
        first = next(m for m in pool.members if m.name == pool.asked("a"))
        await until(lambda: bool(first.handle.verifier.requests))
        pool.stop("a")
        await until(lambda: first.handle.verifier.stopped == ["a"])
        first.in_flight = 100
        window = Window("a", (3, 1, 4), 2, (7, 8), SamplingParams())
        await pool.verify([window])
        assert first.handle.verifier.submitted == [window]
        assert first.handle.verifier.released == []
        first.in_flight = 0
        pool.release("a")


def as_it_was(following: Following, window: Window, starting: Any, late: bool) -> None:
    """Whoever has the id is taken for the window that nobody waits for."""
    following._cancel(window.request_id)
    if (place := following._places.get(window.request_id)) is not None:
        place.await_answers(False)


async def after_a_cancelled_window(ready: bool) -> tuple[int, bool]:
    """A window is cancelled, and the request decoded directly at once. How many requests count as decoded,
    and whether somebody still looks for a verifier or has one. ready: one is, or it is being looked for."""
    async with pool_with(Actor()) as pool:
        (member,) = pool.members
        member.handle.verifier.held = True
        status = member.status
        member.status = status if ready else None
        verifying = asyncio.create_task(pool.verify([Window("a", (3, 1), 2, (7, 8), SamplingParams())]))
        await until(lambda: bool(member.handle.verifier.submitted if ready else pool._following._starting))
        for _ in range(3):  # so that somebody waits for the answer
            await asyncio.sleep(0)
        verifying.cancel()
        pool.follow(followed("a"), lambda _: None)
        await asyncio.wait([verifying])
        counted, known = member.direct, bool(pool._following._starting or pool._following._places)
        member.status = status
        if known:
            member.handle.verifier.held = False
            await until(lambda: bool(member.handle.verifier.requests))
        pool.release("a")
        return counted, known


@pytest.mark.parametrize("ready", [True, False])
async def test_a_cancelled_window_is_not_the_next_one(ready: bool) -> None:
    assert await after_a_cancelled_window(ready) == (int(ready), True)


@pytest.mark.parametrize("ready", [True, False])
async def test_control_it_would_be(ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Following, "_unwanted", as_it_was)
    assert await after_a_cancelled_window(ready) == (0, ready)


async def test_the_pool_tells_how_long_an_engine_beside_it_has_computed() -> None:
    async with pool_with(Actor()) as pool:
        worked = [50.0]
        pool.beside(lambda: worked[0])
        pool.follow(followed("a"), lambda _: None)
        (member,) = pool.members
        verifier = member.handle.verifier
        await until(lambda: verifier.neighbour is not None and pool._following.told(member)[0] is not None)
        worked[0], verifier.worked_s = 55.0, 20.0
        await until(lambda: pool.worked_s >= 7.5)
        assert pool.worked_s == pytest.approx(7.5, abs=1.0)
        pool.follow(followed("b"), lambda _: None)
        await until(lambda: verifier.neighbour() >= 5.0)
        assert verifier.neighbour() == pytest.approx(5.0, abs=1.0)


@pytest.mark.parametrize("planted", [False, True])
async def test_who_is_gone_computes_nothing(planted: bool) -> None:
    """Nor is what the others compute halved by it. planted: none is, the control."""
    async with pool_with(Actor(), Actor()) as pool:
        first, second = pool.members
        for name in "abcdef":
            pool.follow(followed(name), lambda _: None)
        await until(lambda: all(pool._following.told(m)[0] is not None for m in (first, second)))
        first.handle.verifier.worked_s = 20.5
        await until(lambda: pool.worked_s >= 4.0)
        assert pool.worked_s < 4.0 + 1.0, "the mean of both"
        if not planted:
            second.handle.dead.set()
            pool.follow(followed("g"), lambda _: None)
            await until(lambda: pool.worked_s >= 8.0)
        assert pool.worked_s == pytest.approx(4.0 if planted else 8.0, abs=1.0)
