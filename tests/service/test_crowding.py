"""What a replica makes of what verifiers say of their work: by whom it learns, how old that may be, and what
admission does with it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from llm42.config import Settings
from llm42.engine.base import EngineLoad
from llm42.telemetry.metrics import Metrics
from llm42_serve.replica import crowding, fastpath, verifier_pool
from llm42_serve.replica.crowding import NEWS_S, Crowding
from llm42_serve.replica.fastpath import FastPath
from llm42_serve.replica.member import Member
from llm42_serve.replica.verifier_pool import VerifierPool
from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.load import Limits
from tests.service.pools import Published, hangs, pool_of, raises, returns, window
from tests.support import PATIENCE_S, until

ROOMY: dict[str, Any] = {"places": 100, "kv_tokens": 1000, "direct": 80, "kv_used": 800, "step_s": 0.1}
FULL = VerifierStatus("ready", "a", **(ROOMY | {"direct": 95}))
EMPTY = VerifierStatus("ready", "a", places=100, kv_tokens=1000)


class Watch:
    """What a replica hears of verifiers, second by second."""

    def __init__(self) -> None:
        self.now, self.told = 100.0, list[bool]()
        self.crowding = Crowding(Limits(0.9, 1.0, 0.5), self.told.append, lambda: self.now)

    def hears(self, *members: tuple[VerifierStatus, float]) -> list[bool]:
        """What is told after a look at these, whose statuses are so old."""
        self.told.clear()
        named = [Member(f"v{i}", status=s, told_at=self.now - age) for i, (s, age) in enumerate(members)]
        self.crowding.judge(named)
        return list(self.told)


def test_nothing_is_told_twice() -> None:
    watch = Watch()
    assert watch.hears((FULL, 0.0)) == [True]
    watch.now += 0.5
    assert watch.hears((FULL, 0.52)) == [], "the status of the last look"
    watch.now += 0.5
    assert watch.hears((EMPTY, 0.0)) == [False]
    watch.now += 1.0
    assert watch.hears((FULL, 0.0), (EMPTY, 0.0)) == [False]
    watch.now += 1.0
    assert watch.hears((FULL, 0.0), (FULL, 0.0)) == [True]


def test_old_news_are_none() -> None:
    watch = Watch()
    assert watch.hears((FULL, 0.0)) == [True]
    watch.now += NEWS_S + 0.1
    assert watch.hears((FULL, NEWS_S + 0.1)) == [False], "there may be room"
    assert watch.hears() == [False]
    assert watch.hears((FULL, 0.0), (EMPTY, NEWS_S + 0.1)) == [True], "nobody knows that it is empty still"


def test_it_says_why_admission_is_closed_but_not_all_the_time(caplog: pytest.LogCaptureFixture) -> None:
    watch, slow = Watch(), VerifierStatus("ready", "a", **(ROOMY | {"step_s": 9.0}))
    with caplog.at_level("INFO"):
        for _ in range(5):
            watch.now += 1.0
            watch.hears((slow, 0.0))
    assert [r.getMessage().partition("(")[2] for r in caplog.records] == ["v0: step time)"]
    watch.now += crowding.SAY_AGAIN_S
    with caplog.at_level("INFO"):
        watch.hears((slow, 0.0))
    assert len(caplog.records) == 2


@pytest.mark.parametrize("excess", [{"direct": 95}, {"kv_used": 950}, {"step_s": 9.0}, {}])
def test_a_verifier_with_too_much_to_do_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, excess: dict[str, Any]
) -> None:
    """Whoever it is for: this replica has nothing there. The controls, {} and old news: then the prefix
    decides."""
    monkeypatch.setattr(crowding, "NEWS_S", 1e6)
    pool = pool_of(*[("ready", "a")] * 4)
    first = pool._choose(window(1, 2, 3))
    assert first is not None
    first.status, first.told_at = VerifierStatus("ready", "a", **(ROOMY | excess)), time.monotonic()
    assert (pool._choose(window(1, 2, 3)) is first) == (not excess)
    first.told_at -= 2e6
    assert pool._choose(window(1, 2, 3)) is first
    for member in pool.members:
        member.status, member.told_at = first.status, time.monotonic()
    assert pool._choose(window(1, 2, 3)) is first, "all of them have"


@pytest.mark.parametrize(
    "away",
    [returns(None), raises(RuntimeError("no room for a supervisor")), hangs()],
    ids=["silent", "not there", "a look that never ends"],
)
async def test_the_pool_tells_what_it_hears_and_when_it_hears_no_more(
    monkeypatch: pytest.MonkeyPatch, away: Any
) -> None:
    """A supervisor that is away, however its absence shows, closes nothing."""
    monkeypatch.setattr(verifier_pool, "WATCH_S", 0.01)
    monkeypatch.setattr(crowding, "SAME_S", 0.0)
    monkeypatch.setattr(crowding, "NEWS_S", 1e6)
    seen: list[bool] = []
    pool = VerifierPool(Settings.load({"server": {"verifiers": 2}}), Metrics(), look=seen.append)
    pool.members = pool_of(("ready", "a"), ("starting", None)).members
    pool.members[0].status = FULL
    pool._supervisor.handle = Published(pool)
    pool.start()
    await until(lambda: True in seen)
    seen.clear()
    await until(lambda: len(seen) > 3)
    assert set(seen) == {True}, "who is starting has no room yet"
    pool.members[0].status = EMPTY
    await until(lambda: seen[-1] is False)
    pool.members[0].status = FULL
    await until(lambda: seen[-1] is True)
    monkeypatch.setattr(pool._supervisor, "membership", away)
    await asyncio.sleep(0.1)
    seen.clear()
    await asyncio.sleep(0.1)
    assert seen == [], "nothing new"
    monkeypatch.setattr(crowding, "NEWS_S", 0.01)
    await until(lambda: bool(seen))
    assert set(seen) == {False}
    pool.close()


class Replica(FastPath):
    """Without an end of its own."""

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing is to be closed."""


def replica_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A replica whose `__init__` is to be called, without an engine of its own."""
    engine = SimpleNamespace(alive=True, load=lambda: EngineLoad(0, 0, 0, 0))
    monkeypatch.setattr(fastpath.serve, "get_replica_context", lambda: SimpleNamespace(replica_tag="r"))
    monkeypatch.setattr(fastpath, "RayMetrics", lambda *_, **__: Metrics())
    monkeypatch.setattr(fastpath, "request_facts", lambda *_: {})
    monkeypatch.setattr(Replica, "_build", lambda _: (engine, SimpleNamespace(tokenizer=None)))
    return object.__new__(Replica)


async def test_the_replica_begins_once_its_pool_is_introduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else requests would come that it refuses, for it knows of no verifier."""
    known = asyncio.Event()
    monkeypatch.setattr(VerifierPool, "introduced", lambda _: known.wait())
    made = replica_of(monkeypatch)
    begins = asyncio.create_task(
        FastPath.__init__(made, Settings.load({"server": {"verifiers": 0}}).model_dump(mode="json"))
    )
    await until(lambda: hasattr(made, "_facts"))
    assert not begins.done()
    known.set()
    await asyncio.wait_for(begins, PATIENCE_S)
    made._reporter.cancel()


async def test_the_replica_hands_its_admission_to_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowding, "NEWS_S", 1e6)
    made = replica_of(monkeypatch)
    await FastPath.__init__(made, Settings.load({"server": {"verifiers": 0}}).model_dump(mode="json"))
    made._reporter.cancel()
    admission, member = made._admission, Member("v", status=FULL, told_at=time.monotonic())
    assert admission.limit == admission.places
    made._pool._crowding.judge([member])
    assert admission.limit == 1
    admission.classes[True].running = 10
    made._pool._observe(9.0)
    assert admission.deterministic_limit == pytest.approx(7.0)
