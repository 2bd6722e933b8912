"""What the pool makes of verifiers that are dead, silent, full or wrong, without Ray processes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from llm42.config import Settings
from llm42.errors import Overloaded, VerifierUnavailable
from llm42.telemetry.metrics import Metrics
from llm42_serve.replica import following, supervisor_link, verifier_pool
from llm42_serve.replica.admission import Admission
from llm42_serve.replica.member import Member
from llm42_serve.replica.verifier_pool import VerifierPool
from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.membership import MemberInfo, Membership
from tests.service.pools import Handle, Published, pool_of, returns, window
from tests.service.stand_ins import answer
from tests.support import Clock


async def test_a_dead_verifier_is_not_chosen_again_before_it_has_been_heard_from() -> None:
    pool = pool_of(("ready", "a"), ("ready", "a"))
    preferred = pool._choose(window(1))
    assert preferred is not None
    preferred.handle = Handle(RayActorError())
    with pytest.raises(VerifierUnavailable):
        await pool.verify([window(1)])
    assert await pool.verify([window(1)]) == [answer(window(1))], "the retry goes to the other one"
    assert all(m.in_flight == 0 for m in pool.members)


async def test_news_from_before_a_death_do_not_bring_a_verifier_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(("ready", "a"))
    pool._supervisor.handle = supervisor = Published(pool, VerifierStatus("ready", "a"))
    pool.members[0].handle = Handle(RayActorError())
    with pytest.raises(VerifierUnavailable):
        await pool.verify([window(1)])
    supervisor.age_s = 1000.0
    await pool.refresh()
    assert pool.ready == [], "it was ready before it died"
    supervisor.age_s = 0.0
    await pool.refresh()
    assert pool.ready == pool.members, "it has been heard from since"


async def test_another_actor_of_that_name_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(("ready", "a"))
    pool.members[0].handle = Handle(RayActorError())
    with pytest.raises(VerifierUnavailable):
        await pool.verify([window(1)])
    fresh: Any = Handle(None)
    fresh._actor_id = SimpleNamespace(hex=lambda: "new")
    monkeypatch.setattr(verifier_pool, "get_actor", lambda _: fresh)
    info = MemberInfo("verifier-0", "new", VerifierStatus("ready", "a"), 1000.0)
    pool._supervisor.handle = supervisor = Published(pool)
    monkeypatch.setattr(supervisor, "remote", returns(Membership((info,), "a")))
    await pool.refresh()
    assert pool.ready
    assert await pool.verify([window(1)]) == [answer(window(1))]


async def test_what_is_published_of_one_actor_is_not_believed_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor has not noticed yet that the name belongs to another actor."""
    pool = pool_of(("ready", "a"))
    fresh: Any = Handle(None)
    fresh._actor_id = SimpleNamespace(hex=lambda: "newer")
    monkeypatch.setattr(verifier_pool, "get_actor", lambda _: fresh)
    pool._supervisor.handle = supervisor = Published(pool)
    info = MemberInfo("verifier-0", "older", VerifierStatus("ready", "a"))
    monkeypatch.setattr(supervisor, "remote", returns(Membership((info,), "a")))
    await pool.refresh()
    assert pool.ready == []


@pytest.mark.parametrize(
    ("waited", "called", "blamed"),
    [(0.0, 60.0, True), (10.0, 50.0, True), (59.5, 0.5, False), (0.0, 50.0, False)],
)
async def test_a_silent_verifier_is_avoided_also_when_the_window_had_waited_for_it(
    monkeypatch: pytest.MonkeyPatch, waited: float, called: float, blamed: bool
) -> None:
    """The caller's timeout of 60 s runs from before the wait."""
    clock = Clock()
    monkeypatch.setattr(following, "time", clock)
    pool = pool_of(("starting", None))
    pool.members[0].handle = handle = Handle(None)
    handle.blocked = True
    call = asyncio.create_task(pool.verify([window(1)]))
    await asyncio.sleep(0.01)
    clock.now += waited
    pool.members[0].status = VerifierStatus("ready", "a")
    while not pool.members[0].in_flight:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    clock.now += called
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (pool.members[0].avoid_until > clock.now) == blamed


async def test_admission_hears_of_windows_that_were_refused() -> None:
    admission = Admission(8, 8, 0.5, 0.5)
    pool = VerifierPool(Settings.load({"server": {"verifiers": 1}}), Metrics(), admission.observe)
    handle = Handle(Overloaded("full"))
    pool.members = [Member("verifier-0", "0", handle, VerifierStatus("ready", "a"))]
    async with AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(admission.place(True))
        with pytest.raises(Overloaded):
            await pool.verify_cold([window(1)])
        assert admission.deterministic_limit == 8, "an audit's window is not a request's"
        with pytest.raises(Overloaded):
            await pool.verify([window(1)])
        assert 5 < admission.deterministic_limit < 6


async def test_an_actor_that_has_started_anew_has_no_manifest() -> None:
    with pytest.raises(VerifierUnavailable, match="started anew"):
        await pool_of(("ready", "a")).manifest()


async def test_a_verifier_that_keeps_failing_is_a_last_resort_although_it_says_it_is_ready() -> None:
    pool = pool_of(("ready", "a"), ("ready", "a"))
    preferred = pool._choose(window(1))
    assert preferred is not None
    preferred.handle = Handle(VerifierUnavailable("a verifier step failed"))
    with pytest.raises(VerifierUnavailable):
        await pool.verify([window(1)])
    assert await pool.verify([window(1)]) == [answer(window(1))], "the retry goes to the other one"
    other = next(m for m in pool.members if m is not preferred)
    other.status = None
    assert pool._choose(window(1)) is preferred, "better than none"
    preferred.avoid_until = 0.0
    other.status = preferred.status
    assert pool._choose(window(1)) is preferred, "forgiven after a while"


async def test_a_client_that_leaves_is_not_the_verifiers_fault() -> None:
    pool = pool_of(("ready", "a"))
    pool.members[0].handle = handle = Handle(None)
    handle.blocked = True
    call = asyncio.create_task(pool.verify([window(1)]))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert pool.members[0].avoid_until == 0.0
    assert pool.members[0].in_flight == 0


class Condemning(Published):
    """A supervisor that notes who is condemned, after having failed `failures` times."""

    def __init__(self, pool: VerifierPool, failures: int = 0) -> None:
        super().__init__(pool, VerifierStatus("ready", "a"))
        self.condemn, self.failures, self.condemned = Condemn(self), failures, list[tuple[str, str]]()
        self.gone = True
        """What it says of whom it is asked to condemn."""


class Condemn:
    """`condemn` of such a handle."""

    def __init__(self, owner: Condemning) -> None:
        self._owner = owner

    async def remote(self, name: str, actor_id: str, _: str) -> bool:
        if self._owner.failures:
            self._owner.failures -= 1
            raise ActorDiedError()
        self._owner.condemned.append((name, actor_id))
        return self._owner.gone


async def test_a_condemned_verifier_is_not_asked_again_although_it_is_still_published() -> None:
    pool = pool_of(("ready", "a"), ("ready", "a"))
    wrong, good = pool.members
    pool._supervisor.handle = supervisor = Condemning(pool)
    await pool.condemn(wrong, "its bits differ")
    assert supervisor.condemned == [(wrong.name, wrong.actor_id)]
    await pool.refresh()  # what it answers may have been under way
    assert pool.ready == [good]


@pytest.mark.parametrize("missing", [False, True])
async def test_condemning_is_repeated_until_the_supervisor_has_heard_it(
    monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    pool = pool_of(("ready", "a"), ("ready", "a"))
    wrong = pool.members[0]
    supervisor = Condemning(pool, failures=0 if missing else 2)
    pool._supervisor.handle = None if missing else supervisor
    monkeypatch.setattr(supervisor_link, "get_or_create_supervisor", lambda *_: supervisor)
    await pool.condemn(wrong, "its bits differ")
    assert supervisor.condemned == []
    for _ in range(3):
        await pool.refresh()
    assert (wrong.name, wrong.actor_id) in supervisor.condemned
    assert wrong not in pool.ready
    count = len(supervisor.condemned)
    others = tuple(MemberInfo(m.name, m.actor_id, m.status) for m in pool.members if m is not wrong)
    monkeypatch.setattr(supervisor, "remote", returns(Membership(others, "a")))
    await pool.refresh()
    assert len(supervisor.condemned) == count, "it is gone"


@pytest.mark.parametrize("failures", [0, 1])
async def test_one_that_is_no_longer_published_is_condemned_until_it_is_gone(failures: int) -> None:
    """Scaling gave it up: it may work on for other replicas."""
    pool = pool_of(("ready", "a"), ("ready", "a"))
    good, wrong = pool.members
    pool._supervisor.handle = supervisor = Condemning(pool, failures)
    supervisor.gone = False
    others = (MemberInfo(good.name, good.actor_id, good.status),)
    supervisor.remote = returns(Membership(others, "a"))  # type: ignore[method-assign]
    await pool.condemn(wrong, "its bits differ")
    for _ in range(2):
        await pool.refresh()
    assert supervisor.condemned == [(wrong.name, wrong.actor_id)] * (3 - failures)
    supervisor.gone = True
    for _ in range(2):
        await pool.refresh()
    assert len(supervisor.condemned) == 4 - failures, "it is gone"
