"""The verifier's actor as a plain object: its start, its state and its end."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from llm42.config import Settings
from llm42.verifier.jobs import VerifierStats
from llm42_serve.verifiers import actor as verifier_actor
from llm42_serve.verifiers.actor import VerifierActor
from tests.support import PATIENCE_S, Clock, until


def built(**parts: Any) -> Any:
    """Stands for a verifier in an actor."""
    usual = {"alive": True, "stalled_s": 0.0, "stats": VerifierStats, "forget_idle": lambda _: None}
    return SimpleNamespace(fingerprint="a", manifest={}, kv_tokens=4096, **{**usual, **parts})


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
    assert (status.fingerprint, status.kv_tokens) == ("a", 4096)
    for task in actor._tasks:
        task.cancel()


async def test_an_actor_refuses_model_files_that_its_replicas_did_not_start_with() -> None:
    actor = VerifierActor(Settings().model_dump(mode="json"), model_identity="another")
    while (status := await actor.status()).state == "starting":
        await asyncio.sleep(0.02)
    assert "has changed" in status.detail
    for task in actor._tasks:
        task.cancel()
