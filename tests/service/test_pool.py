"""The pool's choices, without Ray processes: who is ready, who is chosen, what a failing call becomes."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm42.config import Settings
from llm42.errors import VerifierUnavailable
from llm42.fingerprint.source import folder_of
from llm42.telemetry.metrics import Metrics
from llm42_serve.placement import PREFIX_TOKENS
from llm42_serve.replica import verifier_pool
from llm42_serve.replica.verifier_pool import VerifierPool
from llm42_serve.verifiers import names
from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.membership import MemberInfo, Membership
from llm42_serve.verifiers.names import verifier_names
from tests.service.pools import Handle, Published, hangs, pool_of, returns, window
from tests.service.stand_ins import answer
from tests.support import PATIENCE_S, until


@pytest.mark.usefixtures("shipped_defaults")
def test_names_follow_the_settings_that_matter() -> None:
    def names(tree: dict[str, Any], identity: str = "a") -> list[str]:
        return verifier_names(Settings.load(tree), identity, 3)

    assert names({}) == names({"engine": {"max_batch": 3}})
    assert not {*names({})} & {*names({"verifier": {"threads": 2}})}
    assert not {*names({})} & {*names({}, "b")}, "other model files"
    assert len({*names({})}) == 3


@pytest.mark.parametrize(
    "file", ["llm42/fingerprint/request.py", "llm42_serve/verifiers/watch.py", "llm42_kernels/cpu.py"]
)
def test_names_follow_all_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str) -> None:
    """Also that which makes no output: an old actor must not speak for a new release."""
    package, _, inside = file.partition("/")
    other = tmp_path / package
    shutil.copytree(folder_of(package), other, ignore=shutil.ignore_patterns("__pycache__"))
    before = _names(monkeypatch, lambda name: other if name == package else folder_of(name))
    with (other / inside).open("a") as changed:
        changed.write("ANOTHER = 1\n")
    assert not before & _names(monkeypatch, lambda name: other if name == package else folder_of(name))


def _names(monkeypatch: pytest.MonkeyPatch, folder: Callable[[str], Path]) -> set[str]:
    monkeypatch.setattr(names, "folder_of", folder)
    names._code.cache_clear()
    found = {*verifier_names(Settings(), "a", 1)}
    names._code.cache_clear()
    return found


@pytest.mark.parametrize("states", [(), (("starting", None),), (("failed", None),)])
async def test_without_a_ready_member_requests_are_refused_with_the_reason(states: Any) -> None:
    pool = pool_of(*states)
    pool._supervisor.handle = Published(pool)
    with pytest.raises(VerifierUnavailable) as refused:
        await pool.require_ready()
    reason = {0: "switched off", 1: "because" if ("failed", None) in states else "starting"}[len(states)]
    assert reason in str(refused.value)
    await pool_of(("ready", "a")).require_ready()


async def test_a_refusal_looks_again_first() -> None:
    """A verifier that has become ready since the last look is used, not refused."""
    pool = pool_of(("starting", None))
    pool._supervisor.handle = supervisor = Published(pool, VerifierStatus("ready", "a"))
    await asyncio.gather(*(pool.require_ready() for _ in range(5)))
    assert supervisor.asked == 1


@pytest.mark.parametrize("waits", [True, False])
async def test_a_new_replica_gives_the_first_look_its_time(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifiers may have been there for hours. Else, the control, it refuses what comes before a look."""
    monkeypatch.setattr(verifier_pool, "FIRST_LOOK_S", PATIENCE_S if waits else 0.0)
    monkeypatch.setattr(verifier_pool, "LOOK_S", 0.0)
    pool = pool_of(("ready", "a"))
    known, pool.members = pool.members, []
    supervisor, asked = Published(pool), 0

    async def late() -> Membership | None:
        nonlocal asked
        asked += 1
        if asked < 4:
            return None
        pool.members = known
        return await supervisor.remote()

    monkeypatch.setattr(pool._supervisor, "membership", late)
    if waits:
        await asyncio.gather(*(pool.require_ready() for _ in range(5)))
        assert asked >= 4 and pool.ready
    else:
        with pytest.raises(VerifierUnavailable, match="nothing is known of them yet"):
            await pool.require_ready()


async def test_an_old_replica_refuses_at_once_what_no_verifier_was_ever_there_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is kept waiting for a GPU that is missing."""
    monkeypatch.setattr(verifier_pool, "LOOK_S", 0.0)
    pool = pool_of(("ready", "a"))
    pool.members = []
    pool._serves_since -= verifier_pool.FIRST_LOOK_S
    monkeypatch.setattr(pool._supervisor, "membership", hangs())
    async with asyncio.timeout(verifier_pool.FIRST_LOOK_S / 2):
        with pytest.raises(VerifierUnavailable, match="nothing is known of them yet"):
            await pool.require_ready()


async def test_a_new_replica_serves_only_once_it_knows_of_a_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its state is; not for ever, and not where none is wanted."""
    pool = pool_of(("starting", None))
    introduced = asyncio.create_task(pool.introduced())
    await asyncio.sleep(3 * verifier_pool.RETRY_PAUSE_S)
    assert not introduced.done()
    monkeypatch.setattr(pool._supervisor, "membership", Published(pool).remote)
    await pool.refresh()
    await asyncio.wait_for(introduced, PATIENCE_S)
    monkeypatch.setattr(verifier_pool, "FIRST_LOOK_S", 0.0)
    alone = pool_of(("starting", None))
    monkeypatch.setattr(alone._supervisor, "membership", returns(Membership()))
    serves = asyncio.create_task(alone.introduced())
    await asyncio.sleep(3 * verifier_pool.RETRY_PAUSE_S)
    assert not serves.done(), "the supervisor has not answered"
    await alone.refresh()
    await asyncio.wait_for(serves, PATIENCE_S)
    monkeypatch.setattr(verifier_pool, "FIRST_ANSWER_S", 0.0)
    alone = pool_of(("starting", None))
    alone._serves_since, began = 0.0, time.monotonic()
    await asyncio.wait_for(alone.introduced(), PATIENCE_S)
    assert alone._serves_since >= began, "who comes first waits from now on"
    await asyncio.wait_for(pool_of().introduced(), PATIENCE_S)


def test_requests_with_a_common_prefix_share_a_verifier_until_it_is_busy() -> None:
    pool = pool_of(*[("ready", "a")] * 4)
    prefix = tuple(range(PREFIX_TOKENS))
    chosen = {pool._choose(window(*prefix, extra)).name for extra in range(50)}  # type: ignore[union-attr]
    assert len(chosen) == 1
    spread = {pool._choose(window(first)).name for first in range(50)}  # type: ignore[union-attr]
    assert spread == {m.name for m in pool.members}
    busy = next(m for m in pool.members if m.name in chosen)
    busy.in_flight = 5
    other = pool._choose(window(*prefix))
    assert other is not None
    assert other is not busy


async def test_the_watch_survives_a_failing_metrics_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Metrics):
        def set(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("no sink")

    monkeypatch.setattr(verifier_pool, "WATCH_S", 0.01)
    pool = VerifierPool(Settings(), Broken())
    pool._supervisor.handle = supervisor = Published(pool)
    pool.start()
    await until(lambda: supervisor.asked > 2)
    pool.close()


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
    pool._supervisor.handle = supervisor = Published(pool)
    await pool.refresh()
    assert (resolved, pool.members[0].handle) == ([], dead), "the same actor: nothing to resolve"
    renamed = MemberInfo("verifier-0", "new", VerifierStatus("ready", "a"))
    monkeypatch.setattr(supervisor, "remote", returns(Membership((renamed,), "a")))
    await pool.refresh()
    await pool.refresh()
    assert resolved == ["verifier-0"]
    assert pool.members[0].handle is not dead


async def test_a_replica_may_join_only_once_a_verifier_is_ready_or_has_failed() -> None:
    pool = pool_of(("starting", None), ("failed", None))
    waiting = asyncio.create_task(pool.settled())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    pool.members[0].status = VerifierStatus("ready", "a")
    assert await asyncio.wait_for(waiting, PATIENCE_S)
    failed = pool_of(("failed", None))
    assert not await asyncio.wait_for(failed.settled(), PATIENCE_S), "best-effort all the same"
    assert not await asyncio.wait_for(pool_of().settled(), PATIENCE_S), "no verifier is wanted"


async def test_a_window_waits_for_a_verifier_that_is_coming_but_not_for_one_that_has_failed() -> None:
    pool = pool_of(("starting", None))
    waiting = asyncio.create_task(pool.verify([window(1)]))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    pool.members[0].status = VerifierStatus("ready", "a")
    assert await asyncio.wait_for(waiting, PATIENCE_S) == [answer(window(1))]
    with pytest.raises(VerifierUnavailable, match="because"):
        await asyncio.wait_for(pool_of(("failed", None)).verify([window(1)]), PATIENCE_S)
