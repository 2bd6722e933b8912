"""The pool's choices, without Ray processes: who is ready, who is chosen, what a failing call becomes."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from deployments import verifier_actor, verifier_pool
from deployments.actors import verifier_names
from deployments.supervisor import MemberInfo, Membership
from deployments.verifier_actor import VerifierActor, VerifierStatus
from deployments.verifier_pool import AFFINITY_TOKENS, Member, VerifierPool
from llm42.config import Settings
from llm42.metrics import NullMetrics
from llm42.protocol import SamplingParams, VerifierUnavailable, Window
from llm42.verifier.jobs import VerifierStats


def pool_of(*states: tuple[str, str | None]) -> VerifierPool:
    """A pool whose members have these states and fingerprints."""
    pool = VerifierPool(Settings.load({"server": {"verifiers": len(states)}}), NullMetrics())
    for number, (state, fingerprint) in enumerate(states):
        status = VerifierStatus(state, fingerprint, "because" if state == "failed" else "")  # type: ignore[arg-type]
        pool.members.append(Member(f"verifier-{number}", str(number), Handle(None), status))
    return pool


def window(*tokens: int) -> Window:
    return Window("r", tokens, len(tokens), (), SamplingParams())


def test_names_follow_the_settings_that_matter() -> None:
    def names(tree: dict[str, Any], identity: str = "a") -> list[str]:
        return verifier_names(Settings.load(tree), identity, 3)

    assert names({}) == names({"engine": {"max_batch": 3}})
    assert not {*names({})} & {*names({"verifier": {"threads": 2}})}
    assert not {*names({})} & {*names({}, "b")}, "other model files"
    assert len({*names({})}) == 3


@pytest.mark.parametrize("states", [(), (("starting", None),), (("failed", None),)])
async def test_without_a_ready_member_requests_are_refused_with_the_reason(states: Any) -> None:
    pool = pool_of(*states)
    pool._supervisor = Published(pool)
    with pytest.raises(VerifierUnavailable) as refused:
        await pool.require_ready()
    reason = {0: "switched off", 1: "because" if ("failed", None) in states else "starting"}[len(states)]
    assert reason in str(refused.value)
    await pool_of(("ready", "a")).require_ready()


async def test_a_refusal_looks_again_first() -> None:
    """A verifier that has become ready since the last look is used, not refused."""
    pool = pool_of(("starting", None))
    pool._supervisor = supervisor = Published(pool, VerifierStatus("ready", "a"))
    await asyncio.gather(*(pool.require_ready() for _ in range(5)))
    assert supervisor.asked == 1


def test_requests_with_a_common_prefix_share_a_verifier_until_it_is_busy() -> None:
    pool = pool_of(*[("ready", "a")] * 4)
    prefix = tuple(range(AFFINITY_TOKENS))
    chosen = {pool._choose(window(*prefix, extra)).name for extra in range(50)}  # type: ignore[union-attr]
    assert len(chosen) == 1
    spread = {pool._choose(window(first)).name for first in range(50)}  # type: ignore[union-attr]
    assert spread == {m.name for m in pool.members}
    busy = next(m for m in pool.members if m.name in chosen)
    busy.in_flight = 5
    other = pool._choose(window(*prefix))
    assert other is not None
    assert other is not busy


class Handle:
    """Stands for a verifier's handle: verify echoes the windows, or fails."""

    def __init__(self, error: Exception | None) -> None:
        self.verify = self
        self.error, self.blocked = error, False

    async def remote(self, windows: list[Window], cold: bool = False) -> Any:
        if self.error:
            raise self.error
        if self.blocked:
            await asyncio.Event().wait()
        return list(windows)


class Published:
    """Stands for a supervisor's handle: publishes the pool's own members, with `status` if given."""

    def __init__(self, pool: VerifierPool, status: VerifierStatus | None = None) -> None:
        self.membership, self._pool, self._status, self.asked = self, pool, status, 0

    async def remote(self) -> Membership:
        self.asked += 1
        members = [MemberInfo(m.name, m.actor_id, self._status or m.status) for m in self._pool.members]
        return Membership(tuple(members), "a")


async def test_a_dead_verifier_is_not_chosen_again_before_it_has_been_heard_from() -> None:
    pool = pool_of(("ready", "a"), ("ready", "a"))
    preferred = pool._choose(window(1))
    assert preferred is not None
    preferred.handle = Handle(RayActorError())
    with pytest.raises(VerifierUnavailable):
        await pool.verify([window(1)])
    assert await pool.verify([window(1)]) == [window(1)], "the retry goes to the other one"
    assert all(m.in_flight == 0 for m in pool.members)


async def test_a_verifier_that_keeps_failing_is_a_last_resort_although_it_says_it_is_ready() -> None:
    pool = pool_of(("ready", "a"), ("ready", "a"))
    preferred = pool._choose(window(1))
    assert preferred is not None
    preferred.handle = Handle(VerifierUnavailable("a verifier step failed"))
    with pytest.raises(VerifierUnavailable):
        await pool.verify([window(1)])
    assert await pool.verify([window(1)]) == [window(1)], "the retry goes to the other one"
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


async def test_the_watch_survives_a_failing_metrics_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(NullMetrics):
        def set(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("no sink")

    monkeypatch.setattr(verifier_pool, "WATCH_S", 0.01)
    pool = VerifierPool(Settings(), Broken())
    pool._supervisor = supervisor = Published(pool)
    pool.start()
    await asyncio.sleep(0.2)
    pool.close()
    assert supervisor.asked > 2


async def test_after_a_death_the_handle_is_resolved_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle belongs to one actor; the next actor of that name needs another."""
    pool = pool_of(("ready", "a"))
    dead = pool.members[0].handle
    resolved: list[str] = []

    def get_actor(name: str) -> Any:
        resolved.append(name)
        fresh: Any = Handle(None)
        fresh._actor_id = SimpleNamespace(hex=lambda: "new")
        return fresh

    monkeypatch.setattr(verifier_pool, "get_actor", get_actor)
    pool._supervisor = supervisor = Published(pool)
    await pool.refresh()
    assert (resolved, pool.members[0].handle) == ([], dead), "the same actor: nothing to resolve"
    renamed = MemberInfo("verifier-0", "new", VerifierStatus("ready", "a"))
    monkeypatch.setattr(supervisor, "remote", _returns(Membership((renamed,), "a")))
    await pool.refresh()
    await pool.refresh()
    assert resolved == ["verifier-0"]
    assert pool.members[0].handle is not dead


def _returns(value: Any) -> Any:
    async def call() -> Any:
        return value

    return call


async def test_a_supervisor_that_died_is_created_anew_and_its_verifiers_stay_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pool_of(("ready", "a"))
    created: list[int] = []

    def create(*_: Any) -> Any:
        created.append(1)
        return Published(pool)

    monkeypatch.setattr(verifier_pool, "get_or_create_supervisor", create)
    pool._supervisor = gone = Published(pool)
    monkeypatch.setattr(gone, "remote", _raises(ActorDiedError()))
    await pool.refresh()
    assert pool.ready, "what was known stays in use"
    assert await pool.verify([window(1)]) == [window(1)]
    await pool.refresh()
    assert created == [1]
    assert pool.ready


def _raises(error: Exception) -> Any:
    async def call() -> Any:
        raise error

    return call


async def test_an_actor_tries_again_after_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def build(_: VerifierActor) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("the volume is not mounted yet")
        return SimpleNamespace(fingerprint="a", alive=True, stats=VerifierStats, forget_idle=lambda _: None)

    monkeypatch.setattr(verifier_actor, "RETRY_S", 0.05)
    monkeypatch.setattr(VerifierActor, "_build", build)
    actor = VerifierActor(Settings().model_dump(mode="json"))
    states = set()
    for _ in range(100):
        status = await actor.status()
        states.add((status.state, "not mounted" in status.detail))
        if status.state == "ready":
            break
        await asyncio.sleep(0.02)
    assert ("failed", True) in states
    assert (await actor.status()).fingerprint == "a"
    for task in actor._tasks:
        task.cancel()


async def test_an_actor_refuses_model_files_that_its_replicas_did_not_start_with() -> None:
    actor = VerifierActor(Settings().model_dump(mode="json"), model_identity="another")
    while (status := await actor.status()).state == "starting":
        await asyncio.sleep(0.02)
    assert "has changed" in status.detail
    for task in actor._tasks:
        task.cancel()


async def test_a_replica_may_join_only_once_a_verifier_is_ready_or_has_failed() -> None:
    pool = pool_of(("starting", None), ("failed", None))
    waiting = asyncio.create_task(pool.settled())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    pool.members[0].status = VerifierStatus("ready", "a")
    assert await asyncio.wait_for(waiting, 2)
    assert not await asyncio.wait_for(pool_of(("failed", None)).settled(), 2), "best-effort all the same"
    assert not await asyncio.wait_for(pool_of().settled(), 2), "no verifier is wanted"


async def test_a_window_waits_for_a_verifier_that_is_coming_but_not_for_one_that_has_failed() -> None:
    pool = pool_of(("starting", None))
    waiting = asyncio.create_task(pool.verify([window(1)]))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    pool.members[0].status = VerifierStatus("ready", "a")
    assert await asyncio.wait_for(waiting, 2) == [window(1)]
    began = time.monotonic()
    with pytest.raises(VerifierUnavailable, match="because"):
        await pool_of(("failed", None)).verify([window(1)])
    assert time.monotonic() - began < 1
