"""The verifier's actor as a plain object: its start, its state and its end."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from llm42.config import Settings
from llm42.step_times import Costs, VerifierLoad
from llm42.verifier.jobs import VerifierStats
from llm42_serve.verifiers import actor as verifier_actor
from llm42_serve.verifiers.actor import VerifierActor
from tests.support import PATIENCE_S, Clock, until

LOAD = VerifierLoad(Costs(((4.0, 0.1),)), Costs(((16.0, 0.2),)), waited_s=0.25)


def built(**parts: Any) -> Any:
    """Stands for a verifier in an actor."""
    usual = {"alive": True, "stalled_s": 0.0, "stats": VerifierStats, "forget_idle": lambda _: None}
    usual |= {"kv_tokens": 4096, "kv_used_tokens": 96, "places": 128, "load": lambda: LOAD}
    return SimpleNamespace(fingerprint="a", manifest={}, **{**usual, **parts})


@pytest.mark.parametrize("lost", [{"alive": False}, {"stalled_s": verifier_actor.STALLED_S + 1}])
async def test_an_actor_whose_verifier_will_never_answer_again_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, lost: dict[str, Any]
) -> None:
    ended: list[int] = []
    verifier = built()
    monkeypatch.setattr(verifier_actor, "os", SimpleNamespace(getpid=lambda: 1, _exit=ended.append))
    monkeypatch.setattr(verifier_actor, "time", Clock())
    monkeypatch.setattr(VerifierActor, "_build", lambda _: verifier)
    actor = VerifierActor(Settings().model_dump(mode="json"), lease_s=1.0)
    while (await actor.status()).state != "ready":
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    assert ended == []
    vars(verifier).update(lost)
    assert (await actor.status()).state == "failed"
    await until(lambda: bool(ended))
    for task in actor._tasks:
        task.cancel()


async def test_it_says_how_much_it_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = VerifierStats(direct=7, active=2, waiting=1, steps=99, step_s=99.0)
    counted.decode_steps, counted.decode_s = 10, 1.0
    counted.yielding, counted.yielding_kv = 3, 48
    verifier = built(stats=lambda: counted, stalled_s=3.0)
    monkeypatch.setattr(VerifierActor, "_build", lambda _: verifier)
    actor = VerifierActor(Settings().model_dump(mode="json"))
    while (status := await actor.status()).state != "ready":
        await asyncio.sleep(0.02)
    assert (status.direct, status.active, status.waiting, status.step_s) == (7, 2, 1, 0.1)
    assert (status.decode_steps, status.window_steps) == (LOAD.decode_steps, LOAD.window_steps)
    assert status.waited_s == 0.25
    assert (status.yielding, status.yielding_kv) == (3, 48)
    counted.decode_steps, counted.decode_s = 12, 2.0
    assert (await actor.status()).step_s == 0.5, "of the last steps"
    assert (await actor.status()).step_s == 3.0, "of the present one"
    for task in actor._tasks:
        task.cancel()


class Leased:
    """An actor whose lease is 10 seconds, of a time that goes on only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **work: int) -> None:
        self.now, self.looks, self.killed = 0.0, 0, list[Any]()
        self.stats = VerifierStats(**work)
        context = SimpleNamespace(current_actor="me")
        monkeypatch.setattr(verifier_actor, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(verifier_actor, "LOOK_S", 0.01)
        monkeypatch.setattr("ray.kill", lambda actor, no_restart: self.killed.append(actor))
        monkeypatch.setattr("ray.get_runtime_context", lambda: context)
        monkeypatch.setattr(VerifierActor, "_build", lambda _: built(stats=self._looked))
        self.actor = VerifierActor(Settings().model_dump(mode="json"), lease_s=10.0)

    def _looked(self) -> VerifierStats:
        self.looks += 1
        return self.stats

    async def ready(self) -> None:
        while (await self.actor.status()).state != "ready":
            await asyncio.sleep(0.02)
        await self.lives()

    async def lives(self) -> None:
        """It has looked whether it is over, and is not."""
        looks = self.looks
        await until(lambda: self.looks > looks + 3)
        assert self.killed == []

    async def ends(self) -> None:
        await until(lambda: self.killed == ["me"])
        for task in self.actor._tasks:
            task.cancel()


@pytest.mark.parametrize("work", ["direct", "active", "waiting"])
async def test_an_actor_that_is_no_longer_wanted_ends_its_work_first(
    monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    it = Leased(monkeypatch, **{work: 1})
    await it.ready()
    it.now += 300.0
    await it.lives()
    setattr(it.stats, work, 0)
    await it.lives()  # its last answers are to be fetched still
    it.now += 3.0
    await it.ends()


async def test_a_loop_that_was_held_up_gives_the_last_answers_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It saw work, then for a long time nothing, then none. The first look that sees none is not the end."""
    it = Leased(monkeypatch, direct=1)
    await it.ready()
    it.now += 300.0
    await it.lives()
    looks, over = it.looks, list[bool]()
    judged = it.actor._over

    def judge(taken_s: float) -> bool:
        over.append(judged(taken_s))
        return over[-1]

    monkeypatch.setattr(it.actor, "_over", judge)
    it.stats.direct = 0
    it.now += 3.0
    await it.ends()
    assert it.looks > looks
    assert over[-2:] == [False, True]


async def test_the_work_of_an_actor_that_is_no_longer_wanted_keeps_it_for_a_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Leased(monkeypatch, direct=1)
    await it.ready()
    it.now += 10.0 + verifier_actor.DRAIN_S - 1.0
    await it.lives()
    it.now += 1.0
    await it.ends()


async def test_asking_an_actor_renews_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Leased(monkeypatch)
    await it.ready()
    for _ in range(5):
        it.now += 9.0
        await it.lives()
        await it.actor.status()
    it.now += 10.0
    await it.ends()


async def test_an_actor_tries_again_after_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    seen = threading.Event()

    def build(_: VerifierActor) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("the volume is not mounted yet")
        seen.wait(PATIENCE_S)
        return built()

    monkeypatch.setattr(verifier_actor, "RETRY_S", 0.05)
    monkeypatch.setattr(VerifierActor, "_build", build)
    actor = VerifierActor(Settings().model_dump(mode="json"))
    await until(lambda: "not mounted" in actor._failure)
    assert (await actor.status()).state == "failed"
    seen.set()
    await until(lambda: actor._verifier is not None)
    status = await actor.status()
    assert (status.state, len(tries)) == ("ready", 3)
    assert (status.fingerprint, status.kv_tokens, status.kv_used, status.places) == ("a", 4096, 96, 128)
    for task in actor._tasks:
        task.cancel()


async def test_an_actor_refuses_model_files_that_its_replicas_did_not_start_with() -> None:
    actor = VerifierActor(Settings().model_dump(mode="json"), model_identity="another")
    while (status := await actor.status()).state == "starting":
        await asyncio.sleep(0.02)
    assert "has changed" in status.detail
    for task in actor._tasks:
        task.cancel()
