"""Requests that verifiers of a pool decode: each has one place, and finds another when that is gone or
silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from llm42.errors import VerifierUnavailable
from llm42.protocol import Commit, Request, SamplingParams, Window
from llm42.session.interfaces import Sink
from llm42.session.machine import Session
from llm42.session.verify_call import verify
from llm42.telemetry.tracing import Tracer
from llm42_serve.replica import following, verifier_pool
from llm42_serve.replica.following import Following
from llm42_serve.replica.member import Member
from llm42_serve.replica.verifier_pool import VerifierPool
from llm42_serve.verifiers.outboxes import Outboxes
from llm42_serve.wire import Down, Up
from tests.protocol import session_model
from tests.protocol.session_model import oracle, prompt_of
from tests.service.pools import pool_of
from tests.service.stand_ins import Call
from tests.service.wires import CREDIT, Read, Stepper, checked, read, request_of
from tests.support import PATIENCE_S, Clock, until


def cold(window: Window) -> Commit:
    """The canonical answer, as an audit gets it."""
    return session_model.verify(window)


class Actor:
    """A verifier's handle: it may die, hang, or be out of reach for some calls."""

    def __init__(self, verifier: Stepper | None = None) -> None:
        self.verifier = verifier or Stepper()
        self.verify_cold = Call(lambda windows: [cold(w) for w in windows])
        self.self_test = Call(lambda: True)
        self.boxes = Outboxes(self.verifier)
        self.exchange = self
        self.dead, self.hung, self.unreachable, self.calls = asyncio.Event(), False, 0, 0
        self.restarts = False
        """Whether Ray starts it anew when it dies, under the same handle: calls wait for that."""

    async def remote(self, up: Up) -> Down:
        self.calls += 1
        if self.restarts and self.dead.is_set():
            await asyncio.Event().wait()
        if self.unreachable:
            self.unreachable -= 1
            raise ActorUnavailableError("planted", None)
        if self.hung:
            await asyncio.Event().wait()
        answer, death = (
            asyncio.ensure_future(self.boxes.exchange(up)),
            asyncio.ensure_future(self.dead.wait()),
        )
        await asyncio.wait((answer, death), return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if self.dead.is_set():
            answer.cancel()
            raise ActorUnavailableError("planted", None) if self.restarts else ActorDiedError()
        return answer.result()


class ByPool:
    """A pool as a reader asks it."""

    def __init__(self, pool: VerifierPool) -> None:
        self.pool = pool

    def follow(self, window: Window, sink: Sink) -> None:
        self.pool.follow(window, sink)

    def renew(self, request_id: str, until: int) -> None:
        self.pool.renew(request_id, until, lambda _: None)

    def release(self, request_id: str) -> None:
        self.pool.release(request_id)


@asynccontextmanager
async def pool_with(
    *actors: Actor, timeout_s: float = 60.0, attempts: int = 4, audit_share: float = 0.0
) -> AsyncIterator[VerifierPool]:
    session = {"verify_timeout_s": timeout_s, "verify_attempts": attempts}
    sections: dict[str, dict[str, Any]] = {"session": session, "verifier": {"audit_share": audit_share}}
    pool = pool_of(*[("ready", "fp")] * len(actors), **sections)
    for member, actor in zip(pool.members, actors, strict=True):
        member.handle = actor
    try:
        yield pool
    finally:
        pool.close()
        for actor in actors:
            await asyncio.to_thread(actor.verifier.close)


async def all_of(
    pool: VerifierPool, count: int, patience_s: float = PATIENCE_S, errors: int = 3
) -> list[Read]:
    readers = (read(ByPool(pool), request_of(i), patience_s, errors) for i in range(count))
    found = list(await asyncio.gather(*readers))
    for i, each in enumerate(found):
        assert each.tokens == oracle(60, prompt_of(i))[0]
    assert [m.in_flight for m in pool.members] == [0] * len(pool.members)
    assert not len(pool._following)
    return found


class ByVerify(ByPool):
    """Windows of mode verify as a session asks for them."""

    def __init__(self, pool: VerifierPool) -> None:
        super().__init__(pool)
        self.tasks = set[asyncio.Task[None]]()
        self.retries = 0

    def follow(self, window: Window, sink: Sink) -> None:
        task = asyncio.create_task(self._verify(window, sink))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _verify(self, window: Window, sink: Sink) -> None:
        sink(await verify(self.pool, window, self.pool._settings.session, Tracer(), "", self._retried))

    def _retried(self) -> None:
        self.retries += 1


async def all_checked(pool: VerifierPool, count: int) -> tuple[int, int]:
    """Retries and windows of requests in mode verify, read to their ends."""
    client = ByVerify(pool)
    found = await asyncio.gather(*(checked(client, request_of(i)) for i in range(count)))
    for i, each in enumerate(found):
        assert each.tokens == oracle(60, prompt_of(i))[0]
        assert not each.failures
    assert [m.in_flight for m in pool.members] == [0] * len(pool.members)
    assert not len(pool._following)
    return client.retries, sum(each.stats.windows for each in found)


def names_at(actor: Actor) -> set[str]:
    return {w.request_id for w in actor.verifier.submitted}


async def test_each_request_stays_where_it_began() -> None:
    waits = list[float]()
    async with pool_with(Actor(), Actor()) as pool:
        pool._following._observe = waits.append
        found = await all_of(pool, 12)
        assert {f.stats.windows for f in found} == {1}
        assert all(m.handle.calls for m in pool.members), "both have their share"
        assert waits == [0.0] * 12, "admission hears of each once"


async def test_when_a_verifier_dies_its_requests_go_on_at_the_other() -> None:
    first, second = Actor(), Actor()
    async with pool_with(first, second) as pool:
        reading = asyncio.create_task(all_of(pool, 12))
        await until(lambda: bool(first.verifier.requests and second.verifier.requests))
        places = pool._following._places.values()
        moved = sum(place.member is pool.members[0] for place in places)
        first.dead.set()
        found = await reading
        assert sum(f.stats.windows > 1 for f in found) <= moved
        assert any(f.stats.windows > 1 for f in found)
        assert all(isinstance(x, VerifierUnavailable) for f in found for x in f.failures)
        assert not pool.members[0].ready


async def test_what_a_condemned_verifier_decodes_goes_on_at_the_other() -> None:
    """At once, though the supervisor is away and cannot kill it."""
    first, second = Actor(), Actor()
    async with pool_with(first, second) as pool:
        reading = asyncio.create_task(all_of(pool, 12, patience_s=60.0))
        while not first.verifier.requests or not second.verifier.requests:
            await asyncio.sleep(0.001)
        first.verifier.held = True  # so that none of them ends before
        pool._supervisor.handle = None
        await pool.condemn(pool.members[0], "its bits differ")
        found = await reading
        assert any(f.stats.windows > 1 for f in found)
        assert not any(f.silences for f in found)
        assert not any(place.member is pool.members[0] for place in pool._following._places.values())


async def test_windows_stay_too_and_their_verifier_alone_hears_of_the_end() -> None:
    waits, first, second = list[float](), Actor(), Actor()
    async with pool_with(first, second) as pool:
        pool._following._observe = waits.append
        retries, windows = await all_checked(pool, 12)
        await until(lambda: all(names_at(a) == set(a.verifier.released) for a in (first, second)))
        assert retries == 0
        assert not names_at(first) & names_at(second)
        assert len(names_at(first) | names_at(second)) == 12
        assert len(waits) == windows, "admission hears of each window"


async def test_windows_of_a_verifier_that_dies_go_on_at_the_other() -> None:
    first, second = Actor(), Actor()
    async with pool_with(first, second) as pool:
        reading = asyncio.create_task(all_checked(pool, 12))
        await until(lambda: len(first.verifier.submitted) >= 12)
        first.dead.set()
        retries, _ = await reading
        assert 0 < retries <= 12
        assert names_at(first) & names_at(second)


async def test_windows_of_one_that_hangs_go_to_another_after_the_time_out() -> None:
    first, second = Actor(), Actor()
    async with pool_with(first, second, timeout_s=0.4, attempts=100) as pool:
        reading = asyncio.create_task(all_checked(pool, 12))
        await until(lambda: len(first.verifier.submitted) >= 12)
        first.verifier.held = True
        retries, _ = await reading
        assert retries > 0
        assert names_at(first) & names_at(second)


async def test_a_verifier_that_is_wanted_no_more_gets_no_further_window() -> None:
    first, second = Actor(), Actor()
    async with pool_with(first, second) as pool:
        reading = asyncio.create_task(all_checked(pool, 12))
        await until(lambda: len(first.verifier.submitted) >= 12)
        _, exchange = pool._following._exchanges[pool.members[0].name]
        pool.members, had = pool.members[1:], exchange._count
        retries, _ = await reading
        assert (exchange._count, retries) == (had, 0)
        await until(lambda: names_at(first) <= set(first.verifier.released))


async def test_a_gap_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that comes again though its verifier has answered goes there again, and nobody avoids it."""
    clock, first, second = Clock(), Actor(), Actor()
    for module in (following, verifier_pool):
        monkeypatch.setattr(module, "time", clock)
    async with pool_with(first, second, timeout_s=0.2) as pool:
        heard, request = asyncio.Queue[Any](), request_of(1)
        window = Window("r1", request.prompt, 5, (), request.sampling, credit=2, max_len=60)
        for _ in range(6):
            pool.follow(window, heard.put_nowait)
            await asyncio.wait_for(heard.get(), PATIENCE_S)
        place = pool._following._places["r1"]
        assert [m.avoid_until for m in pool.members] == [0.0, 0.0]
        place.member.handle.verifier.held = True
        await until(lambda: place.exchange.progressed_s > 0.1)
        while not heard.empty():
            heard.get_nowait()
        pool.follow(window, heard.put_nowait)
        clock.now += 0.2
        await until(lambda: place.exchange.progressed_s > 0.1)
        pool.follow(window, heard.put_nowait)  # the control: this one has waited in vain
        await asyncio.wait_for(heard.get(), PATIENCE_S)
        assert pool._following._places["r1"].member is not place.member
        assert place.member.avoid_until > 0.0


async def test_calls_to_an_actor_that_hangs_do_not_hold_up_its_successor() -> None:
    hung, fresh = Actor(), Actor()
    hung.hung = True
    async with pool_with(hung) as pool:
        waiting = [asyncio.create_task(pool.verify([named(i)])) for i in range(20)]
        await asyncio.sleep(0.01)
        pool.members[0].handle = fresh
        await asyncio.wait_for(pool.verify([named(0)]), PATIENCE_S)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert pool.members[0].in_flight == 0
    await asyncio.to_thread(fresh.verifier.close)


def named(number: int) -> Window:
    return Window(f"r{number}", prompt_of(number), 5, (), SamplingParams())


async def test_a_call_out_of_reach_is_made_again_and_nobody_notices() -> None:
    actor = Actor()
    actor.unreachable = 2
    async with pool_with(actor) as pool:
        found = await all_of(pool, 4)
        assert {f.stats.windows for f in found} == {1}
        assert not any(f.failures for f in found)


async def killed_while_read(pool: VerifierPool, actor: Actor, patience_s: float = PATIENCE_S) -> list[Read]:
    """Requests of a pool, one of whose verifiers is killed and begins to start anew."""
    actor.restarts = True
    reading = asyncio.create_task(all_of(pool, 12))
    await until(lambda: bool(actor.verifier.requests))
    actor.dead.set()
    return await asyncio.wait_for(reading, patience_s)


async def test_nobody_waits_for_a_verifier_that_is_started_anew_while_there_is_another() -> None:
    first, second = Actor(), Actor()
    async with pool_with(first, second) as pool:
        found = await killed_while_read(pool, first)
        assert any(f.stats.windows > 1 for f in found)
        assert not any(f.silences for f in found)


async def test_control_who_asks_the_same_one_again_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Following, "_others", lambda self, member: False)
    first, second = Actor(), Actor()
    async with pool_with(first, second) as pool:
        with pytest.raises(TimeoutError):
            await killed_while_read(pool, first, 1.0)


async def test_who_has_waited_in_vain_goes_to_another() -> None:
    first, second = Actor(), Actor()
    first.hung = True
    async with pool_with(first, second, timeout_s=0.3) as pool:
        found = await all_of(pool, 8, patience_s=0.3)
        assert any(f.silences for f in found)
        assert all(f.stats.windows == 1 + f.silences for f in found)


async def test_control_a_lone_verifier_that_hangs_is_asked_in_vain() -> None:
    actor = Actor()
    actor.hung = True
    async with pool_with(actor) as pool:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(all_of(pool, 1, patience_s=0.1), 0.5)


async def test_without_a_verifier_it_waits_until_it_is_released() -> None:
    actor, heard = Actor(), list[Any]()
    async with pool_with(actor) as pool:
        pool.members[0].status, status = None, pool.members[0].status
        request = request_of(1)
        window = Window("r1", request.prompt, 5, (), request.sampling, credit=5, max_len=20)
        pool.follow(window, heard.append)
        await asyncio.sleep(0.15)
        pool.release("r1")
        pool.members[0].status = status
        await asyncio.sleep(0.15)
        assert not heard and not actor.calls
        assert not pool._following._starting


class WrongOnce(Stepper):
    """Of the twentieth token of each request it says another log-probability, or another token."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def said(self, commit: Commit) -> Commit:
        if commit.base != 5 + 19:
            return commit
        (found,) = commit.logprobs
        if self.what == "logprob":
            return replace(commit, logprobs=(replace(found, logprob=found.logprob - 2.0**-40),))
        other = (commit.next_token + 1) % session_model.VOCAB or 1
        return replace(commit, next_token=other, logprobs=(replace(found, token=other),))


@pytest.mark.parametrize(
    ("what", "share", "condemned"),
    [("logprob", 1.0, ["verifier-1"]), ("token", 1.0, ["verifier-1"]), ("token", 0.0, [])],
)
async def test_a_verifier_that_decodes_one_token_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, what: str, share: float, condemned: list[str]
) -> None:
    """Its answers are audited whole, at their end, by others; without audits nobody notices."""
    found = list[str]()

    async def condemn(_: VerifierPool, member: Member, reason: str) -> None:
        found.append(member.name)

    monkeypatch.setattr(VerifierPool, "condemn", condemn)
    async with pool_with(Actor(), Actor(WrongOnce(what)), Actor(), audit_share=share) as pool:
        for i in range(12):
            await read(ByPool(pool), request_of(i))
            assert (len(pool._auditor._running) > 0) == (share > 0)
            await asyncio.gather(*pool._auditor._running)
        assert sorted(set(found)) == condemned
        assert not pool._auditor.kept._kept, "nothing is kept of what is over"


async def test_of_answers_that_are_not_chosen_nothing_is_kept() -> None:
    async with pool_with(Actor(), audit_share=0.5) as pool:
        reading = asyncio.create_task(all_of(pool, 40))
        await until(lambda: len(pool._auditor.kept._kept) == 40)
        chosen = [k is not None for k in pool._auditor.kept._kept.values()]
        assert 5 < sum(chosen) < 35
        await reading


async def test_with_many_streams_tokens_wait_longer() -> None:
    async with pool_with(Actor()) as pool:
        following = pool._following
        assert following._interval_s() == 0.05
        following._places.update(dict.fromkeys(map(str, range(500)), None))  # type: ignore[arg-type]
        assert following._interval_s() == pytest.approx(0.2)
        following._places.clear()


def window_of(request: Request) -> Window:
    """Its first one, without credit."""
    window = Session(request, CREDIT, 0.0).due(0.0)
    assert window is not None
    return replace(window, credit=0)


async def gives_up(pool: VerifierPool, turns: int) -> tuple[str, asyncio.Task[Any]]:
    """Somebody who asks for a window, and is gone so many turns of the event loop later."""
    window = window_of(request_of(0))
    waits = asyncio.create_task(verify(pool, window, pool._settings.session, Tracer(), "", lambda: None))
    for _ in range(turns):
        await asyncio.sleep(0)
    waits.cancel()
    return window.request_id, waits


@pytest.mark.parametrize("turns", range(8))
async def test_whoever_leaves_at_once_is_not_followed_for_ever(turns: int) -> None:
    """However far its window has come: it must not be sent behind the release."""
    async with pool_with(Actor()) as pool:
        name, waits = await gives_up(pool, turns)
        pool.release(name)
        await asyncio.wait([waits])
        for _ in range(20):
            await asyncio.sleep(0)
        assert not len(pool._following)
        assert [m.in_flight for m in pool.members] == [0]


@pytest.mark.parametrize("turns", range(8))
async def test_a_window_that_is_given_up_never_takes_the_place_of_the_next(turns: int) -> None:
    """As where a request is decoded directly from now on."""
    async with pool_with(Actor()) as pool:
        await gives_up(pool, turns)
        found = await read(ByPool(pool), request_of(0))
        assert found.tokens == oracle(60, prompt_of(0))[0]
        assert not found.silences
