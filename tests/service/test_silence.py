"""What the supervisor makes of verifiers that do not answer, over stand-ins for actors."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, RuntimeEnvSetupError

from llm42.config import WatchSettings
from llm42_serve.verifiers import supervisor as module
from llm42_serve.verifiers import watch
from llm42_serve.verifiers.supervisor import Supervisor
from tests.service.stand_ins import Cluster, started, states
from tests.support import PATIENCE_S, Clock, until


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


async def test_one_that_hangs_delays_nobodys_news_of_the_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STATUS_TIMEOUT_S", 1000.0)
    made = await started(cluster, verifiers=2)
    made._watched[1].handle.answering.clear()
    made._watched[0].handle.dead = True
    await until(lambda: cluster.created == 3)
    await until(lambda: made._watched[0].status is not None)
    before = (await made.membership()).members
    looked = made._watched[0].asked
    await until(lambda: made._watched[0].asked > looked)
    after = (await made.membership()).members
    assert before[1].age_s < after[1].age_s > after[0].age_s, (
        "nothing new of the one that hangs, and it shows"
    )
    made._task.cancel()


async def test_one_that_was_ready_and_hangs_is_killed_and_created_anew(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STATUS_TIMEOUT_S", 0.01)
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    made = await started(cluster, verifiers=2)
    made._watched[1].watch = WatchSettings(verifier_s=20.0)
    before = made._watched[1].actor_id
    made._watched[1].handle.answering.clear()
    await until(lambda: made._watched[1].status is None)
    clock.now += 19.0
    missed = made._watched[1].missed
    await until(lambda: made._watched[1].missed > missed + 1)
    assert cluster.killed == 0, "it may only be busy"
    clock.now += 2.0
    await until(lambda: cluster.created == 3)
    await until(lambda: made._watched[1].status is not None)
    assert (cluster.killed, made._watched[1].actor_id == before) == (1, False)
    made._task.cancel()


@pytest.mark.parametrize("restarting", [False, True])
async def test_one_that_loads_may_be_silent_for_longer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, restarting: bool
) -> None:
    monkeypatch.setattr(module, "STATUS_TIMEOUT_S", 0.01)
    made = await started(cluster, verifiers=1)
    made._watched[0].watch = WatchSettings(verifier_s=1e-9)
    actor = made._watched[0].handle
    if restarting:  # by Ray, after its process had died
        actor.broken = ActorUnavailableError("restarting", None)
        await until(lambda: made._watched[0].status is None)
    else:
        actor.state = "starting"
        await until(lambda: not made._watched[0].certified)
    actor.answering.clear()
    missed = made._watched[0].missed
    await until(lambda: made._watched[0].missed > missed + 5)
    assert cluster.killed == 0
    made._watched[0].watch = WatchSettings(verifier_start_s=1e-9)
    await until(lambda: cluster.killed > 0)
    made._task.cancel()


@pytest.mark.parametrize("error", [RuntimeEnvSetupError("no such image"), ActorUnschedulableError("no node")])
async def test_a_start_that_failed_is_repeated_after_a_pause(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    made = await started(cluster, verifiers=1)
    actor = made._watched[0].handle
    actor.broken = error
    await until(lambda: made._watched[0].handle is None)
    del cluster.actors[made._watched[0].name]  # it never came to be
    status = (await made.membership()).members[0].status
    assert status is not None
    assert (status.state, type(error).__name__ in status.detail) == ("failed", True)
    await asyncio.sleep(0.05)
    assert cluster.created == 1
    clock.now += module.START_PAUSE_S
    await until(lambda: cluster.created == 2)
    await until(
        lambda: made._pool.published(made._watched[0]) == cluster.actors[made._watched[0].name].said()
    )
    made._task.cancel()


async def test_an_answer_under_way_does_not_bring_a_condemned_one_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await started(cluster, verifiers=1)
    actor = made._watched[0].handle
    actor.answering.clear()
    asked = actor.asked
    await until(lambda: actor.asked > asked)
    info = (await made.membership()).members[0]
    monkeypatch.setattr("ray.kill", lambda *_, **__: None)  # the answer has left before the kill
    await made.condemn(info.name, info.actor_id, "wrong")
    actor.answering.set()
    await asyncio.sleep(0.05)
    assert await states(made) == ["gone"]
    made._task.cancel()


async def test_a_new_supervisor_publishes_nothing_before_its_first_look(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_LOOK_S", PATIENCE_S)
    first = await started(cluster, verifiers=2)
    first._task.cancel()
    second = Supervisor(first._settings.model_dump(mode="json"), "model", lease_s=30.0)
    assert await states(second) == ["ready", "ready"], "replicas would refuse what they have served"
    second._task.cancel()


async def test_a_new_supervisor_hears_all_before_it_settles_on_a_fingerprint(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(module, "STATUS_TIMEOUT_S", 1000.0)
    first = await started(cluster, verifiers=3)
    first._task.cancel()
    odd, *others = (w.handle for w in first._watched[:3])
    odd.fingerprint = "b"
    for actor in others:
        actor.answering.clear()
    second = Supervisor(first._settings.model_dump(mode="json"), "model", lease_s=30.0)
    await until(lambda: second._watched[0].status is not None)
    await asyncio.sleep(0.05)
    assert ((await second.membership()).fingerprint, (await states(second))[0]) == (None, "starting")
    for actor in others:
        actor.answering.set()
    await until(lambda: second._pool.fingerprint is not None)
    assert second._pool.fingerprint == "a"
    assert await states(second) == ["mixed", "ready", "ready"]
    second._task.cancel()
